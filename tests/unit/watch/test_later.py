"""Listeners put work off; it is done in order, at the latest when the process ends."""

from __future__ import annotations

import logging
import threading
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from tests.helpers.metrics import series
from tests.helpers.watching import A, ended, session_events, started, targets, trainer_events
from weightcast.watch import PrometheusMetrics, later
from weightcast.watch.engine_metrics import EngineMetrics
from weightcast.watch.events import UpdateEnded
from weightcast.watch.later import Later
from weightcast.watch.listeners import ByKind, Events

PATIENCE_S = 60.0


@pytest.fixture
def looked(monkeypatch):
    """The work that the thread is asked to look at; it does none."""
    found: list[Later] = []
    monkeypatch.setattr(later, "_THREAD", SimpleNamespace(look_at=found.append))
    return found


def test_work_is_done_in_order_on_the_thread_that_settles(looked):
    done: list[tuple[int, threading.Thread]] = []
    put_off = Later(lambda value: done.append((value, threading.current_thread())))
    for number in range(5):
        put_off.keep(number)
    assert not done
    put_off.settle()
    assert done == [(number, threading.current_thread()) for number in range(5)]
    put_off.settle()
    assert len(done) == 5


def test_the_thread_does_what_is_due_also_if_its_owner_has_gone():
    done = threading.Event()
    worked: list[tuple[str, str]] = []

    def work(value: str) -> None:
        worked.append((value, threading.current_thread().name))
        if value == "last":
            done.set()

    put_off = Later(work)
    put_off.keep("first")
    put_off.keep("last")
    put_off.due()
    del put_off
    assert done.wait(PATIENCE_S)
    assert worked == [("first", "weightcast-watch"), ("last", "weightcast-watch")]


class Fails(ByKind):
    """Raises when it does what it put off."""

    def __init__(self) -> None:
        super().__init__({}, later={UpdateEnded: self._end})

    def __repr__(self) -> str:
        return "the listener"

    def _end(self, event: object) -> None:
        raise ValueError("mine")


def test_an_error_names_the_listener_and_does_not_stop_the_rest(caplog):
    done: list[object] = []
    events = Events([Fails(), ByKind({}, later={UpdateEnded: done.append})])
    end = ended()
    with caplog.at_level(logging.ERROR, "weightcast"):
        events.emit(end)
        assert not done
        events.settle()
    assert done == [end]
    [record] = caplog.records
    assert record.getMessage() == "the listener failed at UpdateEnded: ValueError: mine"
    assert logging.Formatter("%(session)s %(version)s %(target)s").format(record).startswith("None None None")


def test_an_update_with_more_events_than_are_kept_does_the_work_itself_and_loses_none(looked, monkeypatch):
    monkeypatch.setattr(later, "MAX_KEPT", 3)
    done: list[int] = []
    put_off = Later(done.append)
    for number in range(7):
        put_off.keep(number)
    assert done == [0, 1, 2, 3, 4, 5]
    put_off.settle()
    assert done == [0, 1, 2, 3, 4, 5, 6]


def test_who_settles_waits_for_work_that_another_thread_does():
    done: list[str] = []
    inside, go_on = threading.Event(), threading.Event()

    def work(_: object) -> None:
        inside.set()
        assert go_on.wait(PATIENCE_S)
        done.append("work")

    put_off = Later(work)
    put_off.keep(None)
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
    assert looked == [events._later]


def test_a_function_of_the_callers_that_reads_metrics_reads_them_with_its_event(looked):
    registry = CollectorRegistry()
    read: list[float | None] = []
    name = "weightcast_updates_finished_total"
    push = lambda _: read.append(registry.get_sample_value(name, {"outcome": "succeeded"}))  # noqa: E731
    Events([push, PrometheusMetrics(registry)]).emit(ended())
    assert read == [1]


def test_reading_some_metrics_by_name_counts_first(looked):
    """As ``/metrics?name[]=...`` does."""
    registry = CollectorRegistry()
    events = Events([EngineMetrics(registry, model_name="m", version=6)])
    for event in session_events():
        events.emit(event)
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
