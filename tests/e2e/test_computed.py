"""An engine whose loader computes some of the weights proves all of them, by every transport and with ``strict``."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.harness import connect, next_version, trainer_of
from weightcast.digest.definition import model_digest

SETTINGS = (("--local",), ("--tp", "2"), ("--local", "--staging", "none"))


@pytest.mark.parametrize("settings", SETTINGS, ids=" ".join)
@pytest.mark.parametrize("transport", ["ipc", "broadcast", "direct"])
def test_what_the_loader_computes_is_proven_as_well(fresh: Any, settings: tuple[str, ...], transport: str) -> None:
    engine = fresh(*settings, "--computed")
    assert len(engine.digests()) == 7  # of 10: nobody knows what the other three were computed from
    for _ in range(2):
        version = next_version()
        with connect(trainer_of(version), [engine], transport=transport, strict=True) as updater:
            report = updater.update(version=version)
        [row] = report.targets
        assert (row.status, row.version_after, row.proof) == ("serving", version, "resident")
        found = engine.digests()
        assert len(found) == 10
        assert row.digest == report.digest == engine.info().digest == model_digest(found)
        assert report.short_of("resident") == ()
