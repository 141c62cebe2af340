"""Checks of updates that break off: the trainer raises, or dies."""

from __future__ import annotations

import subprocess
import sys

import msgspec

from weightcast.exporters.checkpoint import CheckpointExporter
from weightcast.lab.conformance.doomed import Doom
from weightcast.lab.conformance.engine import EngineUnderTest
from weightcast.lab.conformance.result import Failed, need


class _Planned(Exception):
    """The failure that the check itself makes."""


def survives_a_trainer_that_raises(engine: EngineUnderTest) -> str:
    """An update that the trainer breaks off after a bucket leaves the old version, or an engine that is quarantined."""
    engine.push("A")
    version = engine.info().version
    engine.serves = None

    def fail(done: int, _: int) -> None:
        if done:
            raise _Planned

    with (
        CheckpointExporter(engine.folders["B"]) as exporter,
        engine.connect(exporter, progress=fail) as updater,
    ):
        try:
            updater.update(version=engine.next_version())
            raise Failed("the update succeeded although the trainer broke it off")
        except _Planned:
            pass
        health = updater.health()[0]
    if _keeps_the_old_version(engine):
        engine.serves = "A"
        engine.unchanged("A", version)
        return "it serves the old version; " + _heals(engine)
    need(not health.active, "half written, it still counts as active")
    return f"it is {health.state} and not active; " + _heals(engine)


def survives_a_trainer_that_dies(engine: EngineUnderTest) -> str:
    """A trainer that is killed after a bucket leaves no engine stuck."""
    engine.push("A")
    version = engine.info().version
    engine.serves = None
    doom = Doom(
        target=engine.target,
        checkpoint=str(engine.folders["B"]),
        transport=engine.settings.transport,
        bucket_bytes=engine.bucket_bytes,
        timeout_s=engine.settings.timeout_s,
        version=engine.next_version(),
    )
    done = subprocess.run(
        [sys.executable, "-m", "weightcast.lab.conformance.doomed"],
        input=msgspec.json.encode(doom),
        capture_output=True,
        timeout=4 * engine.settings.timeout_s,
        check=False,
    )
    need(done.returncode < 0, f"the doomed trainer ended by itself: {done.stderr.decode(errors='replace')[-300:]}")
    if _keeps_the_old_version(engine):
        engine.unchanged("A", version)
        engine.serves = "A"
        return "it went on with the old version; " + _heals(engine)
    return _heals(engine)


def _keeps_the_old_version(engine: EngineUnderTest) -> bool:
    return engine.has_receiver and engine.first.staging != "none"


def _heals(engine: EngineUnderTest) -> str:
    engine.push("B")
    engine.says("B")
    return "the next update made it whole"
