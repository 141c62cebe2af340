"""One whole case of the benchmark of updates, with real processes."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.helpers.forking import InsteadOfSpawn
from tests.helpers.pages import check_alone
from weightcast.lab.bench import rig
from weightcast.lab.bench.case import Contender, TurnLimits, run_case
from weightcast.lab.bench.contenders import ours
from weightcast.lab.bench.methods import EngineSide, Layout, Method, TrainerSide
from weightcast.lab.bench.raw import Pipe


class Nothing:
    """A method that moves nothing: its engines keep the poison."""

    def __init__(self, side: object) -> None:
        pass

    def prepare(self) -> None:
        pass

    def update(self, version: int) -> None:
        pass

    def close(self) -> None:
        pass


class Later(Nothing):
    """A method whose engine works on after it said that it is done, until the trainer is told."""

    def __init__(self, side: EngineSide | TrainerSide) -> None:
        self._side = side

    def update(self, version: int) -> None:
        (pipe,) = self._side.pipes
        if isinstance(self._side, TrainerSide):
            pipe.receive()
        else:
            threading.Thread(target=self._work, args=(pipe,)).start()

    def _work(self, pipe: Pipe) -> None:
        until = time.thread_time() + 0.2
        while time.thread_time() < until:
            pass
        pipe.send("done")


def test_processor_time_has_what_an_engine_does_before_the_trainer_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rig, "multiprocessing", InsteadOfSpawn("forkserver"))
    layout = Layout(model="tiny", placement="colocated", trainers=1, engines=1, device="cpu")
    half = f"{__name__}:Later"
    method = Method(name="later", trainer=half, engine=half, writes=False)
    with rig.Rig(layout) as processes:
        processes.prepare(method, timeout_s=60)
        turn, _ = processes.turn(method, timeout_s=60)
    assert turn.extra["engine_cpu_s"] >= 0.2
    assert turn.extra["trainer_cpu_s"] < 0.2


def test_a_case_compares_every_bit_and_says_who_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rig, "multiprocessing", InsteadOfSpawn("forkserver"))
    layout = Layout(model="tiny", placement="disaggregated", trainers=1, engines=1, device="cpu")
    half = f"{__name__}:Nothing"
    liar = Contender(name="nothing", settings=(Method(name="nothing", trainer=half, engine=half),))
    honest = ours(layout, bucket_bytes=(64 << 10,), levels=("resident",))
    result = run_case(layout, [liar, *honest], TurnLimits(warm=1, tries=1, turns=2))
    json.dumps(result)
    assert not result["ok"]
    assert "wrong tensors: model.embed_tokens.weight" in result["failed"]["nothing"]
    (row,) = result["methods"]
    assert row["name"] == "weightcast broadcast"
    assert row["turns"] == 2
    assert row["times_limit"] > 1
    assert row["phases"]["buckets"] > 1
    assert row["processor_s"]["median"] > 0
    assert row["watched"]["trainer_messages"] > 4


def test_the_command_prints_one_document(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from weightcast.cli import bench_updates
    from weightcast.cli.app import app

    monkeypatch.setattr(rig, "multiprocessing", InsteadOfSpawn("forkserver"))
    asked = ["bench", "updates", "--model", "tiny-moe", "--turns", "1", "--device", "cpu", "--placement", "colocated"]
    found = CliRunner().invoke(app, [*asked, "--json", "--html", str(tmp_path / "bench.html")])
    assert found.exit_code == 0, found.output
    html = (tmp_path / "bench.html").read_text()
    check_alone(html)
    assert "limit: shared memory" in html
    assert "weightcast ipc, verify none" in html
    refused = CliRunner().invoke(app, [*asked, "--html", str(tmp_path / "absent" / "bench.html")])
    assert refused.exit_code == 2
    assert "cannot write" in refused.stderr
    assert "{" not in found.stderr, "options are words"
    assert "weightcast ipc: measured with" in found.stderr
    assert "1 trainer, 1 engine" in found.stderr
    (result,) = json.loads(found.stdout)
    shown = bench_updates._shown(result)
    header = shown.splitlines()[1].split("   ")
    explained = bench_updates._COLUMNS
    assert all(f"{name.strip()}  " in explained for name in header if name.strip())
    assert result["ok"]
    assert [row["name"] for row in result["methods"]] == ["weightcast ipc", "weightcast ipc, verify none"]
    assert result["floor_s"] == result["limits"]["shared memory"]["usable_s"]["median"] > 0
