"""Checks of updates that break off: the trainer raises, or dies."""

from __future__ import annotations

import re
import subprocess
import sys

import msgspec

from weightcast.exporters.checkpoint import CheckpointExporter
from weightcast.lab.conformance.doomed import Doom
from weightcast.lab.conformance.engine import EngineUnderTest
from weightcast.lab.conformance.result import Failed, need
from weightcast.report import UpdateReport


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
    report = engine.push("B")
    woken = _wake(engine, report)
    engine.says("B")
    return f"the next update made it whole{woken}"


def _wake(engine: EngineUnderTest, report: UpdateReport) -> str:
    """Wakes an engine that the update found asleep, and left so, with the request that the report names."""
    asked = re.search(r"POST (/wakeup\S*?)[\s,;)]", f"{report.targets[0].message} ")
    if asked is None:
        return ""
    engine.client.post_json(asked[1], b"{}", timeout_s=engine.settings.timeout_s)
    return f", and POST {asked[1]} woke it, as the report asked"
