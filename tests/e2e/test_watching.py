"""Operators see updates between processes: ``/metrics`` of both sides, and one trace over both."""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.engines import ENVIRONMENT, Engine, engines
from tests.helpers.harness import wait_for
from tests.helpers.metrics import Series, series
from tests.helpers.tiny import tiny_model, tiny_tokenizer
from tests.helpers.tracing import plain, spans_in_memory, tree
from weightcast import WeightcastError, WeightUpdater
from weightcast.lab.connect import connect
from weightcast.watch import Event, PrometheusMetrics
from weightcast.watch.events import Asked, UpdateEnded

OPTIONS: dict[str, Any] = {"bucket_bytes": 96 << 10, "timeout_s": 60.0}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, list[Engine], Path]]:
    """The model of version 1 and two engines on other weights: one with a second set of weights, one without."""
    root = tmp_path_factory.mktemp("watching")
    tiny_model(root / "a", seed=1)
    tiny_tokenizer(root / "a")
    model = tiny_model(root / "b", seed=2)
    ENVIRONMENT["SPANS_FOLDER"] = str(root)
    program = "tests.e2e.traced_command"
    try:
        settings = [{"program": program, "staging": place, "name": "tiny"} for place in ("device", "none")]
        with engines(root / "a", root, *settings) as found:
            yield model, found, root
    finally:
        del ENVIRONMENT["SPANS_FOLDER"]


def read(url: str) -> Series:
    with urllib.request.urlopen(f"{url}/metrics", timeout=300) as answer:
        return series(answer.read().decode())


class Fails(Exception):
    """The trainer's own code failed in the middle of an update."""


def test_metrics_after_an_update_a_failed_update_and_a_quarantine(world):
    model, (safe, bare), _ = world
    metrics = PrometheusMetrics(port=0)
    told: list[Event] = []
    urls = [safe.url, bare.url]
    ranks = 2
    before = [read(url) for url in urls]
    served = before[0]["weightcast_engine_version", "tiny"]
    assert served != 1
    breaks_off = False

    def progress(done: int, total: int) -> None:
        if breaks_off and total / 2 < done < total:  # the first bucket has been answered by then
            raise Fails

    listeners = [metrics, told.append]
    with connect(model, urls, progress=progress, transport="ipc", on_event=listeners, **OPTIONS) as updater:
        exporter = f"http://127.0.0.1:{metrics.port}"
        assert read(exporter)["weightcast_targets", "joining"] == 2

        # -- an update
        report = updater.update(version=1)
        assert report.ok
        trainer = read(exporter)
        assert trainer["weightcast_updates_started_total",] == 1
        assert trainer["weightcast_updates_finished_total", "succeeded"] == 1
        assert trainer["weightcast_targets", "serving"] == 2
        assert trainer["weightcast_bytes_total", "ipc"] == report.bytes * ranks
        assert trainer["weightcast_update_seconds_sum", "total", "ipc"] == pytest.approx(report.seconds)
        assert trainer["weightcast_update_seconds_sum", "gather", "ipc"] == pytest.approx(report.phases["gather"])
        for row in report.targets:
            assert trainer["weightcast_version", row.url] == 1
            assert trainer["weightcast_stall_seconds_sum", row.url] == pytest.approx(row.stall_s)
        for url, first, row in zip(urls, before, report.targets, strict=True):
            engine = read(url)
            assert engine["weightcast_engine_version", "tiny"] == 1
            assert engine["weightcast_engine_state", "tiny", "serving"] == 1
            assert engine["weightcast_engine_updates_finished_total", "tiny", "committed"] == 1
            received = "weightcast_engine_received_bytes_total", "tiny", "ipc"
            assert received not in first
            assert engine[received] >= report.bytes  # buckets have some bytes between tensors
            assert engine["weightcast_engine_stall_seconds_sum", "tiny"] == pytest.approx(row.stall_s)
            for phase in ("wire", "load", "verify", "pause", "switch", "resume", "total"):
                assert engine["weightcast_engine_update_seconds_count", "tiny", phase, "ipc"] == 1

        # -- an update that the trainer breaks off half way: one engine keeps its version, the other one has none
        breaks_off = True
        with pytest.raises(Fails):
            updater.update(version=2)
        trainer, kept, lost = read(exporter), *map(read, urls)
        assert trainer["weightcast_updates_started_total",] == 2
        assert trainer["weightcast_updates_finished_total", "failed"] == 1
        assert (trainer["weightcast_targets", "serving"], trainer["weightcast_targets", "quarantined"]) == (1, 1)
        assert trainer["weightcast_version", safe.url] == 1
        assert trainer["weightcast_update_seconds_count", "total", "ipc"] == 1
        assert kept["weightcast_engine_updates_finished_total", "tiny", "aborted"] == 1
        assert kept["weightcast_engine_state", "tiny", "serving"] == 1
        assert kept["weightcast_engine_version", "tiny"] == 1
        assert lost["weightcast_engine_updates_finished_total", "tiny", "quarantined"] == 1
        assert lost["weightcast_engine_state", "tiny", "quarantined"] == 1
        assert lost["weightcast_engine_state", "tiny", "serving"] == 0

        # -- an update that is refused before anything moves
        breaks_off = False
        with pytest.raises(WeightcastError, match="older"):
            updater.update(version=0)
        assert read(exporter)["weightcast_updates_finished_total", "failed"] == 2

        # -- and one that heals
        assert updater.update(version=3).ok
        trainer = read(exporter)
        assert trainer["weightcast_targets", "serving"] == 2
        assert trainer["weightcast_targets", "quarantined"] == 0
        assert read(bare.url)["weightcast_engine_state", "tiny", "quarantined"] == 0

        # -- a target that leaves
        updater.retarget([safe.url])
        trainer = read(exporter)
        assert trainer["weightcast_targets", "serving"] == 1
        assert not [name for name in trainer if bare.url in name]
    ends = [event for event in told if isinstance(event, UpdateEnded)]
    assert [event.outcome for event in ends] == ["succeeded", "failed", "failed", "succeeded"]
    assert ends[1].error_kind == "Fails"


def test_the_engines_steps_lie_within_the_messages_that_told_of_them(world):
    """Both processes are on one host, so they share a clock."""
    model, (safe, _), _ = world
    told: list[Event] = []
    with WeightUpdater.connect(model, [safe.url], on_event=told.append, **OPTIONS) as updater:
        updater.update(version=4)
    asked = [event for event in told if isinstance(event, Asked) and event.message in ("open", "bucket", "commit")]
    assert {event.message for event in asked} == {"open", "bucket", "commit"}
    for event in asked:
        assert event.heard is not None
        assert event.answered is not None
        assert event.began < event.heard <= event.answered < event.ended
        for step in event.steps:
            assert event.heard <= step.began <= step.ended <= event.answered


@pytest.mark.parametrize("transport", ["ipc", "broadcast"])
def test_one_trace_has_the_spans_of_both_processes(world, monkeypatch, transport):
    model, (safe, bare), root = world
    version = {"ipc": 5, "broadcast": 6}[transport]
    with spans_in_memory(monkeypatch) as exporter:
        with WeightUpdater.connect(model, [safe.url, bare.url], transport=transport, **OPTIONS) as updater:
            assert updater.update(version=version).ok
        ours = [plain(span) for span in exporter.get_finished_spans()]
    [update] = [span for span in ours if span["name"] == "weightcast.update"]

    def of_both() -> list[dict[str, Any]]:
        """The engines make their spans after they have answered, and that of the session last."""
        found = [span for span in spans_of_engines(root) if span["trace"] == update["trace"]]
        return found if [span["name"] for span in found].count("weightcast.session") == 2 else []

    theirs = wait_for(of_both, "the spans of both engines")
    pids = {span["pid"] for span in theirs}
    assert pids == {safe.process.pid, bare.process.pid}
    assert os.getpid() not in pids

    phases = ["load", "pause", "resume", "switch", "verify", "wire"]
    session = ["weightcast.session", *([f"weightcast.{phase}"] for phase in phases)]
    target = ["weightcast.target", session]
    assert tree(ours + theirs) == [
        [
            "weightcast.update",
            *([f"weightcast.{phase}"] for phase in ("commit", "gather", "open", "pack", "send")),
            target,
            target,
            ["weightcast.verify"],
            *([["weightcast.wire"]] if transport == "broadcast" else []),
        ]
    ]
    # The clocks are the same, and a child lies within its parent: the target's span ends with the last answer.
    by_id = {span["id"]: span for span in ours + theirs}
    for span in ours + theirs:
        parent = by_id.get(span["parent"])
        if parent is not None and parent["name"] in ("weightcast.target", "weightcast.session"):
            slack = 1e6  # seconds since 1970 are read a moment after the monotonic clock
            assert parent["began"] - slack <= span["began"] <= span["ended"] <= parent["ended"] + slack


def spans_of_engines(root: Path) -> list[dict[str, Any]]:
    """The spans in the engines' files, in the form of ``plain``, with their process."""
    found: list[dict[str, Any]] = []
    for path in root.glob("spans-*.jsonl"):
        for line in path.read_text().splitlines(keepends=True):
            if not line.endswith("\n"):
                continue  # it is being written
            span = json.loads(line)
            found.append(
                {
                    "name": span["name"],
                    "trace": int(span["context"]["trace_id"], 16),
                    "id": int(span["context"]["span_id"], 16),
                    "parent": int(span["parent_id"], 16) if span["parent_id"] else None,
                    "values": span["attributes"],
                    "began": nanoseconds(span["start_time"]),
                    "ended": nanoseconds(span["end_time"]),
                    "pid": int(path.stem.removeprefix("spans-")),
                }
            )
    return found


def nanoseconds(text: str) -> int:
    """A time of the SDK's JSON (``2026-01-02T03:04:05.678901Z``) since 1970; microseconds are its finest."""
    from datetime import UTC, datetime

    moment = datetime.strptime(text, "%Y-%m-%dT%H:%M:%S.%fZ").replace(tzinfo=UTC)
    return round(moment.timestamp() * 1e6) * 1000
