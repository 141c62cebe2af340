"""An engine that computes with some of the weights while they load proves the others, and connect and report say so."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.harness import Engine, connect, free, next_version, trainer_of
from weightcast import ConfigError

WORDS = "3 of 10 tensors cannot be proven resident"


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    made = Engine("--local", "--staging", "none", "--computed")
    yield made
    made.close()


def test_less_proof_than_strict_asks_for_is_refused_before_anything_moves(engine: Engine) -> None:
    before, digests = engine.info().version, engine.digests()
    with pytest.raises(ConfigError, match=rf"{WORDS}, and strict=True asks for it: .*layers.0.norm.weight") as caught:
        connect(trainer_of(next_version()), [engine], strict=True)
    assert "--strict" in (caught.value.hint or "")
    info = free(engine)
    assert (info.state, info.version, info.paused) == ("serving", before, False)
    assert engine.digests() == digests


def test_a_refused_connect_names_every_engine_and_leaves_no_shared_memory(engine: Engine, fresh: Any) -> None:
    def shared() -> set[str]:
        files = Path("/proc/self/fd").iterdir()
        return {words for file in files if file.exists() and "weightcast" in (words := os.readlink(file))}

    other, before = fresh("--local", "--staging", "none", "--computed"), shared()
    with pytest.raises(ConfigError) as caught:
        connect(trainer_of(next_version()), [engine, other], strict=True)
    for url in (engine.url, other.url):
        assert f"{url}: {WORDS}" in str(caught.value)
    assert shared() == before  # although the error, which a caller may keep, has the updater in its traceback


@pytest.mark.parametrize(
    ("options", "proof"),
    [
        ({}, "partial"),
        ({"verify": "received"}, "received"),
        ({"verify": "received", "strict": True}, "received"),
        ({"verify": "none"}, "none"),
    ],
)
def test_a_part_is_called_a_part(
    engine: Engine, options: dict[str, object], proof: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "weightcast")
    version = next_version()
    with connect(trainer_of(version), [engine], **options) as updater:
        said = [record.getMessage() for record in caplog.records]
        report = updater.update(version=version)
        [row] = report.targets
        assert (row.status, row.version_after, row.proof) == ("serving", version, proof)
        assert (row.proven, row.unproven) == ((7, 3) if proof == "partial" else (0, 3))
        assert f"proof {proof}" in str(report)
        assert ("(7 of 10 tensors)" in str(report)) == (proof == "partial")
        assert report.short_of("resident") == report.targets
        updater.retarget([engine.url])
    if proof == "partial":
        assert len(said) == 1
        assert f"{engine.url}: {WORDS}: the engine's loader computes with layers.0.norm.weight" in said[0]
    else:
        assert said == []
    assert [record.getMessage() for record in caplog.records] == said  # once, however often it is updated
