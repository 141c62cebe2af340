"""Prometheus metrics of both halves: the values after events, and the series that are left."""

from __future__ import annotations

import math
import re
import socket
import threading
import urllib.request
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from tests.helpers.metrics import Series, series
from tests.helpers.watching import A, B, ended, report, row, started, targets, tell_session, trainer_events
from weightcast.errors import ConfigError
from weightcast.watch import PrometheusMetrics
from weightcast.watch.engine_metrics import EngineMetrics
from weightcast.watch.listeners import Events


@pytest.fixture
def trainer():
    registry = CollectorRegistry()
    metrics = Events([PrometheusMetrics(registry)])

    def tell(*events: Any) -> Series:
        for event in events:
            metrics.emit(event)
        return series(generate_latest(registry).decode())

    return tell


def test_series_of_outcomes_and_states_exist_before_their_first_event(trainer):
    found = trainer()
    for outcome in ("succeeded", "partial", "failed"):
        assert found["weightcast_updates_finished_total", outcome] == 0
    for state in ("gone", "joining", "updating", "serving", "quarantined"):
        assert found["weightcast_targets", state] == 0
    assert found["weightcast_updates_started_total",] == 0
    assert found["weightcast_last_success_timestamp_seconds",] == 0
    assert math.isnan(found["weightcast_changed_ratio",])


def test_the_share_that_changed_is_that_of_the_last_update(trainer):
    for ratio in (0.25, 0.75):
        done = ended("succeeded", msgspec.structs.replace(report(row(A)), changed_ratio=ratio))
        assert trainer(started(), done)["weightcast_changed_ratio",] == ratio
    assert math.isnan(trainer(ended("succeeded", report(row(A))))["weightcast_changed_ratio",])


def test_an_update_is_counted_with_its_phases_bytes_and_stall(trainer):
    done = ended("succeeded", report(row(A), row(B, ranks=1, stall_s=0.5)))
    found = trainer(started(), targets(a="serving", b="serving"), done)
    assert found["weightcast_updates_started_total",] == 1
    assert found["weightcast_updates_finished_total", "succeeded"] == 1
    assert found["weightcast_update_seconds_count", "gather", "ipc"] == 1
    assert found["weightcast_update_seconds_sum", "gather", "ipc"] == 0.5
    assert found["weightcast_update_seconds_sum", "total", "ipc"] == 2.0
    assert ("weightcast_update_seconds_sum", "stall", "ipc") not in found
    assert found["weightcast_stall_seconds_sum", A] == 0.25
    assert found["weightcast_stall_seconds_sum", B] == 0.5
    assert found["weightcast_bytes_total", "ipc"] == 3000  # two ranks and one
    assert found["weightcast_version", A] == 7
    assert found["weightcast_targets", "serving"] == 2
    assert found["weightcast_last_success_timestamp_seconds",] > 1e9


def test_an_update_that_runs_is_started_and_not_finished(trainer):
    found = trainer(started())
    finished = sum(value for name, value in found.items() if name[0] == "weightcast_updates_finished_total")
    assert found["weightcast_updates_started_total",] - finished == 1


def test_a_target_that_was_quarantined_has_no_version_and_no_bytes(trainer):
    found = trainer(*trainer_events())
    assert found["weightcast_updates_finished_total", "partial"] == 1
    assert (found["weightcast_targets", "serving"], found["weightcast_targets", "quarantined"]) == (1, 1)
    assert math.isnan(found["weightcast_version", B])
    assert found["weightcast_bytes_total", "ipc"] == 2000
    assert found["weightcast_stall_seconds_count", B] == 0
    assert found["weightcast_last_success_timestamp_seconds",] == 0


def test_a_failed_update_without_a_report_counts_as_failed(trainer):
    found = trainer(started(), ended("failed", error="no target is active"))
    assert found["weightcast_updates_finished_total", "failed"] == 1


def test_a_function_of_the_callers_that_reads_metrics_reads_them_with_its_event():
    registry = CollectorRegistry()
    read: list[float | None] = []
    name = "weightcast_updates_finished_total"
    push = lambda _: read.append(registry.get_sample_value(name, {"outcome": "succeeded"}))  # noqa: E731
    Events([push, PrometheusMetrics(registry)]).emit(ended())
    assert read == [1]


def test_series_of_a_target_that_left_are_gone(trainer):
    trainer(targets(a="serving", b="serving"), ended("succeeded", report(row(A), row(B))))
    found = trainer(targets(b="serving"))
    assert not [name for name in found if A in name]
    assert found["weightcast_version", B] == 7
    assert found["weightcast_stall_seconds_sum", B] == 0.25


def test_ranks_other_than_the_head_register_nothing():
    registry = CollectorRegistry()
    metrics = PrometheusMetrics(registry, port=1)  # which the head could not listen on
    events = Events([metrics], rank=3)
    events.emit(started(rank=3))
    events.close()
    assert generate_latest(registry) == b""
    assert metrics.port is None


def test_the_exporter_serves_until_the_updater_closes():
    metrics = PrometheusMetrics(port=0)
    events = Events([metrics])
    events.emit(started())
    assert metrics.port is not None
    with urllib.request.urlopen(f"http://127.0.0.1:{metrics.port}/metrics", timeout=300) as answer:
        found = series(answer.read().decode())
    assert found["weightcast_updates_started_total",] == 1
    port = metrics.port
    events.close()
    events.close()
    assert metrics.port is None
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0
    assert "prometheus" not in " ".join(thread.name for thread in threading.enumerate())
    again = Events([metrics])  # of the next updater
    assert metrics.port
    again.close()


def test_a_taken_port_is_refused_by_name():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
            Events([PrometheusMetrics(port=port)])


def test_one_object_cannot_serve_two_updaters_nor_one_registry_two_objects():
    registry = CollectorRegistry()
    metrics = PrometheusMetrics(registry)
    events = Events([metrics])
    with pytest.raises(ConfigError, match="another updater"):
        Events([metrics])
    with pytest.raises(ConfigError, match="cannot be registered"):
        Events([PrometheusMetrics(registry)])
    events.close()


@pytest.fixture
def engine():
    registry = CollectorRegistry()
    metrics = EngineMetrics(registry, model_name="m", version=6)

    def tell(outcome: str | None = None, state: str = "serving", version: int | None = 6) -> Series:
        if outcome is not None:
            session = tell_session(metrics, outcome)
            metrics.state_changed(session, state, version, "")
        return series(generate_latest(registry).decode())

    return tell


def test_an_engine_that_has_had_no_update_says_what_it_serves(engine):
    found = engine()
    assert found["weightcast_engine_version", "m"] == 6
    assert found["weightcast_engine_state", "m", "serving"] == 1
    assert found["weightcast_engine_state", "m", "quarantined"] == 0
    assert found["weightcast_engine_updates_finished_total", "m", "committed"] == 0


def test_a_committed_session_is_counted_with_the_phases_of_its_slowest_rank(engine):
    found = engine("committed", version=7)
    assert found["weightcast_engine_updates_started_total", "m"] == 1
    assert found["weightcast_engine_updates_finished_total", "m", "committed"] == 1
    assert found["weightcast_engine_received_bytes_total", "m", "ipc"] == 1000
    assert found["weightcast_engine_update_seconds_sum", "m", "wire", "ipc"] == pytest.approx(0.2)
    assert found["weightcast_engine_update_seconds_sum", "m", "load", "ipc"] == pytest.approx(0.3)
    assert found["weightcast_engine_update_seconds_sum", "m", "pause", "ipc"] == pytest.approx(0.1)
    assert found["weightcast_engine_update_seconds_sum", "m", "total", "ipc"] == pytest.approx(1.5)
    assert found["weightcast_engine_stall_seconds_sum", "m"] == pytest.approx(0.4)
    assert found["weightcast_engine_version", "m"] == 7
    assert found["weightcast_engine_last_update_timestamp_seconds", "m"] > 1e9


@pytest.mark.parametrize("outcome", ["aborted", "quarantined"])
def test_a_session_without_a_commit_has_an_outcome_and_no_duration(engine, outcome):
    found = engine(outcome, "quarantined", None)
    assert found["weightcast_engine_updates_finished_total", "m", outcome] == 1
    assert not [name for name in found if name[0].startswith("weightcast_engine_update_seconds")]
    assert found["weightcast_engine_state", "m", "quarantined"] == 1
    assert found["weightcast_engine_state", "m", "serving"] == 0
    assert math.isnan(found["weightcast_engine_version", "m"])


def test_names_follow_prometheus(trainer, engine):
    """Base units as suffix, ``_total`` for counters alone, no unit in the middle."""
    names = {name[0] for name in (*trainer(*trainer_events()), *engine("committed"))}
    for name in names:
        assert re.fullmatch(r"weightcast_[a-z_]+", name), name
        assert not re.search(r"_(ms|milliseconds|minutes|mb|gb|count_total)(_|$)", name), name
