"""Checks of updates that break off: the trainer raises, or dies."""

from __future__ import annotations

import re

from weightcast.exporters.checkpoint import CheckpointExporter
from weightcast.lab.conformance.engine import EngineUnderTest
from weightcast.lab.conformance.result import Failed, need
from weightcast.lab.conformance.trainer import run
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
    if keeps_the_old_version(engine):
        engine.serves = "A"
        engine.unchanged("A", version)
        return "it serves the old version; " + heals(engine)
    need(not health.active, "half written, it still counts as active")
    return f"it is {health.state} and not active; " + heals(engine)


def survives_a_trainer_that_dies(engine: EngineUnderTest) -> str:
    """A trainer that is killed after a bucket leaves no engine stuck."""
    engine.push("A")
    version = engine.info().version
    engine.serves = None
    options = {"transport": engine.settings.transport}
    job = engine.job("B", fate="dies", num_ranks=1, options=options)
    (ended,) = run(job, timeout_s=4 * engine.settings.timeout_s)
    need(ended.how == "killed", f"the trainer that should have died ended by itself: {ended.words}")
    if keeps_the_old_version(engine):
        engine.unchanged("A", version)
        engine.serves = "A"
        return "it went on with the old version; " + heals(engine)
    return heals(engine)


def keeps_the_old_version(engine: EngineUnderTest) -> bool:
    """True if an update that fails must leave the old version serving."""
    return engine.has_receiver and engine.first.staging != "none"


def heals(engine: EngineUnderTest) -> str:
    """The next update makes the engine serve B whole; returns that in words."""
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
