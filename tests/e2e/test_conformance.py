"""The conformance run against the reference engine: every check passes, and an engine that is wrong does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.commands import run
from tests.e2e.engines import ENVIRONMENT, Engine, engines
from tests.tiny import tiny_model, tiny_tokenizer

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
    assert not with_outcome(rows, "failed"), rows
    assert with_outcome(rows, "not applicable") == {"takes updates over disk", "takes updates over checkpoint-engine"}
    assert len(rows) == 29
    assert code == 0


def test_an_engine_whose_answers_never_change_fails(folders: list[Path], tmp_path: Path) -> None:
    # Two checkpoints with the same weights look like an engine that answers 200 and takes nothing.
    with engines(folders[0], tmp_path, {}) as (engine,):
        code, rows = conform(engine, folders[0], folders[0])
    assert code == 1
    assert with_outcome(rows, "failed") == {"gives other answers with other weights"}
    assert "no answer has changed" in rows["gives other answers with other weights"]["words"]
    assert "not run" in rows["refuses malformed messages"]["words"]


@pytest.mark.wide
def test_a_refusal_of_a_stock_engine_is_shown_in_its_own_words(folders: list[Path], tmp_path: Path) -> None:
    faults = "refuse@/update_weights_from_distributed#4"
    with engines(folders[0], tmp_path, {"dialect": "sglang", "staging": "none", "faults": faults}) as (engine,):
        code, rows = conform(engine, *folders, kind="sglang")
    assert code == 1
    assert with_outcome(rows, "failed") == {"takes updates over broadcast"}
    assert "refused because a fault was asked for here" in rows["takes updates over broadcast"]["words"]
    assert with_outcome(rows, "not applicable") >= STOCK
