"""The conformance run against the reference engine: every check passes, and an engine that is wrong does not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.commands import run
from tests.helpers.engines import ENVIRONMENT, Engine, engines
from tests.helpers.tiny import tiny_model, tiny_tokenizer
from weightcast.config import Target
from weightcast.lab.conformance import direct, updates
from weightcast.lab.conformance.engine import ConformanceSettings, EngineUnderTest
from weightcast.lab.conformance.result import Failed

PROGRAM = "weightcast.lab.conformance.__main__"
KEY = "conformance-key"
STOCK = {  # what an engine without our receiver cannot do
    "refuses malformed messages",
    "refuses messages of strangers while it is updated",
    "refuses tensors that do not fit",
    "refuses messages in the wrong order",
    "keeps the old version after an abort",
    "takes back weights that differ from the sent ones",
    "repeats its answer to a commit, and reverts it",
    "ends sessions that nobody feeds",
    "refuses requests of web pages",
    "asks for its key",
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("models")
    found = [root / name for name in "AB"]
    for seed, folder in enumerate(found):
        tiny_model(folder, seed=seed)
        tiny_tokenizer(folder)
    return found


def conform(
    engine: Engine, *checkpoints: Path, key: str | None = None, kind: str = "auto"
) -> tuple[int, dict[str, Any]]:
    """The run as a command: its exit code, and its rows by check."""
    environment = ENVIRONMENT | ({"WEIGHTCAST_API_KEY": key} if key else {})
    options = ["--json", "--timeout=60", f"--engine={kind}", "--checkpoints", *map(str, checkpoints)]
    done = run(PROGRAM, engine.url, *options, env=environment, timeout_s=400.0)
    assert done.stdout, done.stderr
    result = json.loads(done.stdout)
    assert result["ok"] == (done.returncode == 0)
    return done.returncode, {row["check"]: row for row in result["rows"]}


def with_outcome(rows: dict[str, Any], outcome: str) -> set[str]:
    return {name for name, row in rows.items() if row["outcome"] == outcome}


def test_the_reference_engine_passes_every_check(folders: list[Path], tmp_path: Path) -> None:
    with engines(folders[0], tmp_path, {"api_key": KEY}) as (engine,):
        code, rows = conform(engine, *folders, key=KEY)
    assert not with_outcome(rows, "failed"), str(rows)
    assert with_outcome(rows, "not applicable") == {"takes updates over disk", "takes updates over checkpoint-engine"}
    assert len(rows) == 32
    assert code == 0


def test_an_engine_whose_answers_never_change_fails(folders: list[Path], tmp_path: Path) -> None:
    # Two checkpoints with the same weights look like an engine that answers 200 and takes nothing.
    with engines(folders[0], tmp_path, {}) as (engine,):
        code, rows = conform(engine, folders[0], folders[0])
    assert code == 1
    assert with_outcome(rows, "failed") == {"gives other answers with other weights"}
    assert "no answer has changed" in rows["gives other answers with other weights"]["words"]
    assert "not run" in rows["refuses malformed messages"]["words"]


@pytest.fixture(scope="module")
def served(folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineUnderTest]:
    with engines(folders[0], tmp_path_factory.mktemp("engine"), {"tp": 2}) as (engine,):
        tested = EngineUnderTest(Target(engine.url), folders, ConformanceSettings(timeout_s=60.0))
        updates.takes_an_update(tested)
        updates.answers_with_other_weights(tested)
        yield tested
        tested.close()


class TestDirect:
    """Each check of ``direct`` fails where the engine, or the trainer, does not do what it is about."""

    def test_bits_that_nobody_compares_are_not_refused(
        self, served: EngineUnderTest, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(direct, "WAYS", {"memory": {"direct_by": "memory", "verify": "none"}})
        with pytest.raises(Failed, match=r"by memory, one bit of model\.\S+ differs, and trainer rank 0 is done"):
            direct.refuses_an_altered_part(served)
        with pytest.raises(Failed, match="by memory the proof is none"):
            direct.takes_shards(served)

    def test_other_weights_than_those_of_the_shards_are_seen(
        self, served: EngineUnderTest, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Trainer ranks that read the other checkpoint look like an engine that keeps what it had.
        served.to("A")
        served.digests_of("B")
        monkeypatch.setattr(served, "folders", dict.fromkeys("AB", served.folders["A"]))
        with pytest.raises(Failed, match=r"\d+ of 21 live tensors are not those of B"):
            direct.takes_shards(served)

    def test_a_trainer_that_is_not_killed_in_the_middle_is_no_test(
        self, served: EngineUnderTest, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # All is one bucket, and no rank comes to a second one.
        monkeypatch.setattr(direct, "WAYS", {"memory": {"direct_by": "memory", "bucket_bytes": 1 << 30}})
        with pytest.raises(Failed, match="trainer rank 0 was not killed in the middle: done"):
            direct.survives_a_lost_trainer_rank(served)

    def test_an_engine_that_refuses_every_way_it_offers_fails(
        self, served: EngineUnderTest, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(direct, "WAYS", {"memory": {"direct_by": "memory", "wire_dtype": "float16"}})
        with pytest.raises(Failed, match="offers direct, and no way of it"):
            direct.takes_shards(served)


@pytest.mark.wide
def test_a_refusal_of_a_stock_engine_is_shown_in_its_own_words(folders: list[Path], tmp_path: Path) -> None:
    faults = "refuse@/update_weights_from_distributed#4"
    with engines(folders[0], tmp_path, {"dialect": "sglang", "staging": "none", "faults": faults}) as (engine,):
        code, rows = conform(engine, *folders, kind="sglang")
    assert code == 1
    failed = {name: rows[name]["words"] for name in with_outcome(rows, "failed")}
    assert failed.keys() == {"takes updates over broadcast"}, str(failed)
    assert "refused because a fault was asked for here" in failed["takes updates over broadcast"]
    assert with_outcome(rows, "not applicable") >= STOCK
