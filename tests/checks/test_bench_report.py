"""Plans, the peers' sources and the report: everything of the benchmarks that needs no measuring."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.forking import InsteadOfSpawn
from weightcast.lab.bench import rig
from weightcast.lab.bench.case import Contender, TurnLimits, run_case
from weightcast.lab.bench.methods import Layout
from weightcast.lab.bench.shapes import model_shape

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module", autouse=True)
def _beside_the_scripts() -> Iterator[None]:
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))


@pytest.fixture(autouse=True)
def _quick_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rig, "multiprocessing", InsteadOfSpawn("forkserver"))


def load(name: str) -> Any:
    return importlib.import_module(name)


@pytest.mark.parametrize("name", ["smoke", "cpu", "h200-1", "h200-2", "h200-4", "h200-8"])
def test_a_plan_fits_its_machine(name: str) -> None:
    plans, runner = load("plans"), load("run")
    gpus = int(name.removeprefix("h200-")) if name.startswith("h200") else 0
    cases = plans.PLANS[name]()
    assert len({case.name for case in cases}) == len(cases)
    for case in cases:
        assert case.gpus <= gpus
        assert case.deadline_s <= 600
        assert Path(runner.script_for(case, name, Path("out"))[1]).is_file()
        if case.layout is None:
            continue
        shape = model_shape(case.layout.model)
        assert case.kind == "limits" or case.bucket_bytes
        if gpus:
            # Trainer's shard, the engine's weights, a second set and three buckets, on one GPU of 140 GB.
            sets = 1 if case.staging == "none" else 2
            apart = case.layout.placement == "disaggregated"
            shard = 0 if apart else shape.size_bytes / case.layout.trainers
            assert shard + sets * shape.size_bytes + 3 * max((*case.bucket_bytes, 0)) < 138e9


def test_plans_have_what_is_asked_of_each_machine() -> None:
    plans = load("plans")
    four = {case.name for case in plans.PLANS["h200-4"]()}
    assert {"disaggregated-1+1-8b", "disaggregated-2+2-8b", "colocated-1-8b", "colocated-4-8b"} <= four
    eight = {case.name for case in plans.PLANS["h200-8"]()}
    assert {"disaggregated-4+4-8b", "colocated-8-8b"} <= eight


def test_peers_that_are_not_here_are_listed_with_the_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sources, table = load("peers.sources"), load("peers.table")
    monkeypatch.setattr(sources, "FOLDER", tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if "site-packages" not in path])
    for cached in (sources.module, sources.classes):
        cached.cache_clear()
    layout = Layout(model="tiny", placement="disaggregated", trainers=1, engines=1, device="cpu")
    found, not_run = table.peers(layout, bucket_bytes=(1 << 20,))
    assert [contender.name for contender in found] == ["broadcast for each tensor"]
    assert "vllm is not installed" in not_run["vLLM packed broadcast"]
    assert set(not_run) == {"vLLM packed broadcast", "SGLang flattened bucket, broadcast", "checkpoint-engine"}
    assert all(method.emulated for contender in found for method in contender.settings)


def test_only_the_named_classes_of_a_file_are_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sources = load("peers.sources")
    file = tmp_path / "engine" / "utils.py"
    file.parent.mkdir()
    file.write_text("import no_such_package\n\n@dataclass\nclass Wanted:\n    value: int\n\nclass Other:\n    pass\n")
    monkeypatch.setattr(sources, "FOLDER", tmp_path)
    loaded = sources.classes("engine/utils.py", ("Wanted",))
    assert loaded.Wanted(value=3).value == 3
    assert not hasattr(loaded, "Other")
    with pytest.raises(sources.NotHere, match="has no Missing"):
        sources.classes("engine/utils.py", ("Missing",))


def figures(median: float) -> dict[str, Any]:
    spread = {"median": median, "min": median * 0.9, "p95": median * 1.1, "max": median * 1.2}
    return {"turns": 3, "phases": {}} | dict.fromkeys(("usable_s", "returned_s", "stall_s", "processor_s"), spread)


def result() -> dict[str, Any]:
    """As ``run_case`` makes it; the last test compares the two."""
    ours = {
        "name": "weightcast ipc",
        "ours": True,
        "emulated": [],
        "settings": {"bucket_bytes": 64 << 20, "verify": "resident"},
        "tried": {"weightcast ipc, 64 MiB": 0.02},
        "prepare_s": 0.5,
        "first_s": 0.1,
        **figures(0.02),
        "times_limit": 2.0,
        "best_peer": "theirs",
        "times_best_peer": 3.5,
        "watched": {"trainer_messages": 7, "trainer_metadata_bytes": 2048, "engine_peak_extra_bytes": 3_000_000},
        "equal_bit_for_bit": True,
    }
    theirs = {**ours, "name": "theirs", "ours": False, "emulated": ["a pipe"], "settings": {"bucket_bytes": 1 << 20}}
    theirs |= {**figures(0.07), "times_limit": 7.0, "watched": {}}
    theirs = {key: value for key, value in theirs.items() if "best_peer" not in key}
    machine = {"command": "python benchmarks/run.py --plan cpu", "date": "D", "revision": "R", "cpu": "C", "cores": 2}
    machine |= {"torch": "T", "python": "P", "gpus": [], "load_average": [9.0, 1.0, 1.0]}
    case = {"model": "m", "placement": "colocated", "trainers": 1, "engines": 1, "device": "cpu", "generate": False}
    return {
        "what": "updates beside limits",
        "ok": True,
        "machine": machine,
        "case": {**case, "threads": 1, "bytes": 10**9, "tensors": 5, "parameters": 4},
        "plan": {},
        "floor_s": 0.01,
        "limits": {"shared memory": figures(0.01)},
        "methods": [ours, theirs],
        "failed": {"broken": "it broke"},
        "not_run": {"absent": "not installed"},
    }


def test_a_row_of_the_laboratory_says_what_its_files_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = load("report")
    monkeypatch.setattr(report, "FOLDER", tmp_path)
    better = {"methods": [row | figures(0.05) for row in result()["methods"] if not row["ours"]]}
    for name, content in (("one", result()), ("two", result() | better)):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    row = report.laboratory("a case", "one", "two")
    assert (row.limit, row.ours, row.other, row.by) == (0.01, 0.02, 0.05, "theirs")
    assert report.shown(row.ours) == "20.0"


def test_what_the_report_expects_is_what_a_case_gives(tmp_path: Path) -> None:
    """The hand-made result above has the keys of a real one, so the tests before this one mean something."""
    layout = Layout(model="tiny", placement="colocated", trainers=1, engines=1, device="cpu")
    table = load("peers.table")
    (naive,) = (entry for entry in table.peers(layout, bucket_bytes=(64 << 10,))[0] if "each tensor" in entry.name)
    from weightcast.lab.bench.contenders import ours

    contenders: list[Contender] = [*ours(layout, bucket_bytes=(64 << 10,), levels=("resident",)), naive]
    real = run_case(layout, contenders, TurnLimits(warm=0, tries=1, turns=1), not_run={"absent": "not installed"})
    assert real["ok"], real["failed"]
    made = result()
    assert set(made) == set(real)
    assert set(made["case"]) == set(real["case"])
    assert set(made["machine"]) <= set(real["machine"])
    assert [set(row) for row in made["methods"]] == [set(row) for row in real["methods"]]
    assert real["methods"][1]["watched"]["engine_handle_opens"] == len(model_shape("tiny").places)
