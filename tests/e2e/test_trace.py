"""Timelines of real updates: every rank is in them, on one clock, and Perfetto reads them without a complaint."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.helpers import perfetto_ui
from tests.helpers.clock import PATIENCE_S
from tests.helpers.harness import connect, next_version, trainer_of
from tests.helpers.ranks import Ranks
from tests.helpers.toy_engine import toy_weights
from weightcast import Target, UpdateFailed, WeightUpdater
from weightcast.report import UpdateReport
from weightcast.timeline.tracks import MESSAGES, Timeline

TRANSPORTS = ("ipc", "broadcast")


def rows(timeline: Timeline, process: str) -> dict[str, list[str]]:
    """Names of the spans in each row of a process, in order."""
    return {track.name: [span.name for span in track.spans] for track in timeline.tracks if track.process == process}


def check_order(timeline: Timeline) -> None:
    """Checks what no true timeline can break: times are positive, rows do not overlap, causes come before effects."""
    messages: dict[int, list[tuple[str, int, int, float]]] = {}
    for track in timeline.tracks:
        assert track.spans
        for before, after in zip(track.spans, track.spans[1:], strict=False):
            assert before.end_us <= after.start_us, track
        for span in track.spans:
            assert span.start_us >= 0
            assert span.us >= 0
            if span.flow is not None:
                messages.setdefault(span.flow, []).append(
                    (track.side, span.start_us, span.end_us, track.clock_error_us)
                )
    paired = 0
    for found in messages.values():
        if len(found) == 2:
            paired += 1
            (_, sent, done, _), (_, heard, answered, error) = sorted(found, key=lambda each: each[0] == "engine")
            assert sent - error - 2 <= heard <= answered <= done + error + 2
    assert paired > 0


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_timeline_has_every_rank_in_every_phase(engines, transport):
    version = next_version()
    with connect(trainer_of(version), [engines.one, engines.two], transport=transport) as updater:
        report = updater.update(version=version)
    timeline = report.timeline
    check_order(timeline)
    assert timeline.clock_error_us == 0  # all processes are on this host
    trainer = rows(timeline, "trainer")
    assert set(trainer["rank 0"]) == {"open", "fill", "pack", "send", "verify", "commit"}
    assert trainer["rank 0"].count("fill") == report.buckets
    if transport == "broadcast":
        wire = [name for row, names in trainer.items() if row.startswith("rank 0, wire") for name in names]
        assert wire == ["wire"] * report.buckets
    for engine, ranks in ((engines.one, 1), (engines.two, 2)):
        found = rows(timeline, engine.url)
        assert found["server"] == ["pause", "stall", "resume"]
        for rank in range(ranks):
            names = found[f"rank {rank}"]
            assert names.count("wire") == names.count("load") == report.buckets
            assert names.count("switch") == 1
            assert names.count("verify") == 2  # of what was copied, and of what is kept
        assert f"rank {ranks}" not in found
    assert timeline.end_us <= report.seconds * 1e6 + 50_000
    assert abs(timeline.began_unix_s - time.time()) < 100
    stalls = {
        track.process: sum(span.us for span in track.spans) / 1e6
        for track in timeline.tracks
        if (track.side, track.name) == ("engine", "server")
    }
    for row in report.targets:
        assert row.stall_s == pytest.approx(stalls[row.url], abs=0.02)


def update_sharded(urls: list[str], version: int, transport: str) -> str:
    model = trainer_of(version)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    with WeightUpdater.connect(model, urls, transport=transport, bucket_bytes=30_000, timeout_s=60.0) as updater:
        return updater.update(version=version).to_json()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_trainer_ranks_gather_together_and_rank_0_alone_tells(engines, transport):
    ranks = Ranks(2)
    try:
        answers = ranks.run(update_sharded, [engines.two.url], next_version(), transport)
    finally:
        ranks.close()
    head, other = map(UpdateReport.from_json, answers)
    assert other.timeline == Timeline()
    assert head == other
    check_order(head.timeline)
    trainer = rows(head.timeline, "trainer")
    assert trainer["rank 0"].count("gather") == trainer["rank 1"].count("gather") == head.buckets
    assert "fill" not in trainer["rank 0"]
    assert "wait" in trainer["rank 1"]
    spans = {
        track.name: {span.bucket: span for span in track.spans if span.name == "gather"}
        for track in head.timeline.tracks
        if track.process == "trainer" and not track.name.startswith(MESSAGES)
    }
    for bucket in range(head.buckets):  # a gather needs both ranks, so it is over on neither before both are in it
        one, two = spans["rank 0"][bucket], spans["rank 1"][bucket]
        if one.us > 2_000 and two.us > 2_000:
            assert max(one.start_us, two.start_us) <= min(one.end_us, two.end_us)


@pytest.mark.skipif(
    shutil.which("unshare") is None
    or subprocess.run(["unshare", "-T", "--monotonic", "1000", "true"], capture_output=True).returncode != 0,
    reason="no time namespaces here (unshare --time needs root and Linux 5.6)",
)
@pytest.mark.parametrize("engine_is", [pytest.param("ahead", marks=pytest.mark.wide), "behind"])
def test_engine_with_another_clock_is_aligned_within_the_stated_error(engine_is, tmp_path):
    """The engine runs in a time namespace, where the monotonic clock is another, as on another host."""
    shift_s = 100_000 if engine_is == "ahead" else -min(300, int(time.monotonic() / 2))  # no clock is below zero
    log = tmp_path / "engine.log"
    program = "import sys, tests.helpers.toy_engine as e; e.main(sys.argv[1:], lambda port: print(port, flush=True))"
    command = ["unshare", "-T", "--monotonic", str(shift_s), "--fork", "--kill-child", sys.executable, "-c", program]
    environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join(path for path in sys.path if path))
    with log.open("w") as stderr:
        engine = subprocess.Popen(
            [*command, "--seed", "0", "--port", "0", "--local"],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=environment,
        )
    try:
        assert engine.stdout is not None
        port = engine.stdout.readline().strip()
        assert port, log.read_text()
        url = f"http://127.0.0.1:{port}"
        weights = toy_weights(seed=1)
        with WeightUpdater.connect(weights, Target(url), transport="ipc", bucket_bytes=30_000) as updater:
            updater.update(version=1)
            report = updater.update(version=2)
    finally:
        engine.kill()  # unshare waits out a SIGTERM; its end kills the engine
        engine.wait(PATIENCE_S)
        engine.stdout.close()
    check_order(report.timeline)
    engine_rows = [track for track in report.timeline.tracks if track.side == "engine"]
    errors = {track.clock_error_us for track in engine_rows}
    assert 0 < max(errors) < report.seconds * 1e6
    # The true offset is known here: it must explain the rows within the error that they state.
    trainer = next(track for track in report.timeline.tracks if track.name == f"{MESSAGES} to {url}")
    sent = {span.flow: span for span in trainer.spans}
    heard = next(track for track in engine_rows if track.name == MESSAGES)
    for span in heard.spans:
        if span.flow in sent:
            assert sent[span.flow].start_us - heard.clock_error_us <= span.start_us + 1
            assert span.end_us - 1 <= sent[span.flow].end_us + heard.clock_error_us


def test_failed_update_has_a_timeline_that_says_why(fresh):
    good, bad = fresh("--local"), fresh("--local")
    version = next_version()
    with connect(trainer_of(version), [good, bad], transport="ipc") as updater:
        bad.ask("POST", "/fault/0/1000")
        with pytest.raises(UpdateFailed) as caught:
            updater.update(version=version)
    timeline = caught.value.report.timeline
    errors = {track.name: [span.error for span in track.spans if span.error] for track in timeline.tracks}
    assert any(bad.url in name and words for name, words in errors.items()), errors
    aborted = [
        span.name
        for track in timeline.tracks
        if good.url in (track.process, track.name[-len(good.url) :])
        for span in track.spans
    ]
    assert "abort" in aborted or "revert" in aborted


@pytest.mark.skipif(bool(perfetto_ui.missing()), reason=perfetto_ui.missing())
def test_perfetto_reads_every_span_without_a_complaint(engines, tmp_path):
    reports = []
    for transport in TRANSPORTS:
        version = next_version()
        with connect(trainer_of(version), [engines.one, engines.two], transport=transport) as updater:
            reports.append(updater.update(version=version))
    lines = tmp_path / "run.jsonl"
    lines.write_text("\n".join(report.to_json() for report in reports))
    from typer.testing import CliRunner

    from weightcast.cli.app import app

    done = CliRunner().invoke(app, ["trace", str(lines), "-o", str(tmp_path / "trace.json")])
    assert done.exit_code == 0, done.output
    expected: dict[str, int] = {}
    for report in reports:
        expected[f"version {report.version}"] = 1
        for track in report.timeline.tracks:
            for span in track.spans:
                numbered = track.name.startswith(MESSAGES) and span.bucket is not None
                name = f"{span.name} {span.bucket}" if numbered else span.name
                expected[name] = expected.get(name, 0) + 1
    with perfetto_ui.perfetto(tmp_path / "trace.json", tmp_path) as ui:
        assert ui.complaints() == {}
        slices = {row["name"]: row["n"] for row in ui.query("select name, count(*) as n from slice group by name")}
        assert slices == expected
        arrows = ui.query("select count(*) as n from flow")[0]["n"]
        assert (
            arrows
            == sum(
                span.flow is not None for report in reports for track in report.timeline.tracks for span in track.spans
            )
            / 2
        )
        nested = ui.query("select count(*) as n from slice where depth > 0")[0]["n"]
        assert nested == 0
        named = {row["name"] for row in ui.query("select name from process where name is not null")}
        assert named == {"updates", "trainer", f"engine {engines.one.url}", f"engine {engines.two.url}"}
        ranks = ui.query(
            "select p.name as process, t.name as row, sum(s.dur) / 1000 as us from slice s "
            "join thread_track tt on s.track_id = tt.id join thread t using (utid) join process p using (upid) "
            "where s.name = 'load' group by 1, 2"
        )
        loads: dict[tuple[str, str], int] = {}
        for report in reports:
            for track in report.timeline.tracks:
                if any(span.name == "load" for span in track.spans):
                    key = (f"engine {track.process}", track.name)
                    loads[key] = loads.get(key, 0) + sum(span.us for span in track.spans if span.name == "load")
        assert {(row["process"], row["row"]): row["us"] for row in ranks} == loads
        assert ui.picture(tmp_path / "perfetto.png").stat().st_size > 30_000
    json.loads((tmp_path / "trace.json").read_text())
