"""An engine that computes with some of the weights while they load proves the others, and the update says so."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.harness import Engine, connect, free, next_version, trainer_of
from weightcast.errors import UpdateFailed


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    made = Engine("--local", "--staging", "none", "--computed")
    yield made
    made.close()


def test_less_proof_than_was_asked_for_is_refused_before_anything_moves(engine: Engine) -> None:
    before, version, digests = engine.info().version, next_version(), engine.digests()
    with connect(trainer_of(version), [engine]) as updater:
        with pytest.raises(UpdateFailed, match=r"7 of 10 tensors.*layers.0.norm.weight"):
            updater.update(version=version)
        info = free(engine)
        assert (info.state, info.version, info.paused) == ("serving", before, False)
        assert engine.digests() == digests


@pytest.mark.parametrize(
    ("options", "proof"),
    [({"min_proven_share": 0.7}, "partial"), ({"verify": "received"}, "received"), ({"verify": "none"}, "none")],
)
def test_a_part_is_called_a_part(engine: Engine, options: dict[str, object], proof: str) -> None:
    version = next_version()
    with connect(trainer_of(version), [engine], **options) as updater:
        report = updater.update(version=version)
        [row] = report.targets
        assert (row.status, row.version_after, row.proof) == ("serving", version, proof)
        assert (row.proven, row.unproven) == ((7, 3) if proof == "partial" else (0, 3))
        assert f"proof {proof}" in str(report)
