"""Listeners put work off; it is done in order, at the latest when the process ends."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from tests.unit.test_watch_metrics import series
from tests.unit.watching import A, session_events, started, targets, trainer_events
from weightcast.watch import PrometheusMetrics, later
from weightcast.watch.engine_metrics import EngineMetrics
from weightcast.watch.later import Later
from weightcast.watch.listeners import Events

PATIENCE_S = 60.0


class Owner:
    def __repr__(self) -> str:
        return "the owner"


@pytest.fixture
def looked(monkeypatch):
    """The work that the thread is asked to look at; it does none."""
    found: list[Later] = []
    monkeypatch.setattr(later, "_THREAD", SimpleNamespace(look_at=found.append))
    return found


def test_work_is_done_in_order_on_the_thread_that_settles(looked):
    put_off, done = Later(Owner()), []
    for number in range(5):
        put_off.keep(lambda value: done.append((value, threading.current_thread())), number)
    assert not done
    put_off.settle()
    assert done == [(number, threading.current_thread()) for number in range(5)]
    put_off.settle()
    assert len(done) == 5


def test_the_thread_does_what_is_due():
    put_off, done = Later(Owner()), threading.Event()
    threads: list[str] = []
    put_off.keep(threads.append, "first")
    put_off.keep(lambda _: threads.append(threading.current_thread().name), None)
    put_off.keep(lambda _: done.set(), None)
    put_off.due()
    assert done.wait(PATIENCE_S)
    assert threads == ["first", "weightcast-watch"]


def test_the_thread_is_asked_once_for_each_time_that_work_was_done(looked):
    put_off = Later(Owner())
    put_off.due()
    put_off.due()
    assert looked == [put_off]
    put_off.settle()
    put_off.due()
    assert looked == [put_off, put_off]


def test_an_error_names_the_listener_and_does_not_stop_the_rest(caplog):
    put_off, done = Later(Owner()), []

    def fail(_: object) -> None:
        raise ValueError("mine")

    put_off.keep(fail, "a value")
    put_off.keep(done.append, "after")
    with caplog.at_level(logging.ERROR, "weightcast"):
        put_off.settle()
    assert done == ["after"]
    [record] = caplog.records
    assert record.getMessage() == "the owner failed at str: ValueError: mine"
    assert logging.Formatter("%(session)s %(version)s %(target)s").format(record).startswith("None None None")


def test_an_update_with_more_events_than_are_kept_does_the_work_itself_and_loses_none(looked, monkeypatch):
    monkeypatch.setattr(later, "MAX_KEPT", 3)
    put_off, done = Later(Owner()), []
    for number in range(7):
        put_off.keep(done.append, number)
    assert done == [0, 1, 2, 3, 4, 5]
    put_off.settle()
    assert done == [0, 1, 2, 3, 4, 5, 6]


def test_who_settles_waits_for_work_that_another_thread_does():
    put_off, done = Later(Owner()), []
    inside, go_on = threading.Event(), threading.Event()

    def work(_: object) -> None:
        inside.set()
        assert go_on.wait(PATIENCE_S)
        done.append("work")

    put_off.keep(work, None)
    first = threading.Thread(target=put_off.settle)
    first.start()
    assert inside.wait(PATIENCE_S)
    second = threading.Thread(target=lambda: (put_off.settle(), done.append("settled")))
    second.start()
    assert done == []
    go_on.set()
    first.join(PATIENCE_S)
    second.join(PATIENCE_S)
    assert done == ["work", "settled"]


def test_metrics_are_counted_when_they_are_read_and_not_before(looked):
    registry = CollectorRegistry()
    metrics = PrometheusMetrics(registry)
    events = Events([metrics])
    assert metrics._made is not None
    for event in [started(), targets(a="serving")]:
        events.emit(event)
    assert metrics._made.started._value.get() == 0
    assert registry.get_sample_value("weightcast_updates_started_total") == 1
    assert looked == [metrics.later]


def test_reading_some_metrics_by_name_counts_first(looked):
    """As ``/metrics?name[]=...`` does."""
    registry = CollectorRegistry()
    metrics = EngineMetrics(registry, model_name="m", version=6)
    for event in session_events():
        metrics(event)
    name = "weightcast_engine_updates_finished_total"
    found = series(generate_latest(registry.restricted_registry([name])).decode())
    assert found[name, "m", "committed"] == 1
    assert {key[0] for key in found} == {name}


def test_closing_counts_what_was_kept(looked):
    registry = CollectorRegistry()
    metrics = PrometheusMetrics(registry)
    events = Events([metrics])
    for event in trainer_events():
        events.emit(event)
    events.close()
    assert metrics._made is not None
    assert metrics._made.started._value.get() == 1
    assert metrics._made.version.labels(A)._value.get() == 7


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S * 4)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


TRACED = """
import sys
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter
from opentelemetry.trace import set_tracer_provider
from tests.unit.watching import trainer_events
from weightcast.watch.spans import TrainerSpans

listen = TrainerSpans()
provider = TracerProvider()  # after the listener was made, as in a trainer that connects first
provider.add_span_processor(BatchSpanProcessor(ConsoleSpanExporter(formatter=lambda span: span.name + "\\n")))
set_tracer_provider(provider)
for event in trainer_events():
    listen(event)
"""


def test_spans_of_an_update_just_before_the_end_of_the_process_are_exported():
    assert sorted(run(TRACED).split())[-3:] == ["weightcast.target", "weightcast.target", "weightcast.update"]


FORKED = """
import os
from weightcast.watch.later import Later

mine, its_own = Later("mine"), Later("its own")
mine.keep(lambda text: print(text, flush=True), "of the parent")
mine.due()
child = os.fork()
if child == 0:
    mine.settle()
    its_own.keep(lambda text: print(text, flush=True), "of the child")
    its_own.due()  # starts a thread of the child's own
    raise SystemExit
assert os.waitpid(child, 0)[1] == 0
mine.settle()
"""


def test_a_forked_child_leaves_the_parents_work_alone_and_does_its_own():
    assert sorted(run(FORKED).splitlines()) == ["of the child", "of the parent"]
