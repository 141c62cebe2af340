"""Everything that a trainer and two engines can do to each other, with crashes, leaves every invariant standing; and a
rule broken on purpose is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.helpers.session_model import Broken, Crash, EngineModel, Rules, World, explore

KINDS = [(True, True), (True, False), (False, False)]


@pytest.mark.parametrize("staged", KINDS, ids=["staged", "mixed", "unstaged"])
def test_no_way_leads_to_a_state_that_must_not_be(staged):
    assert explore(Rules(updates=2), staged=staged) > 1000


class LeaseForgotten(Rules):
    """An engine does not notice that its trainer is gone."""

    def lease_lost(self, engine: EngineModel, update: int) -> EngineModel:
        return engine


class Impatient(Rules):
    """The trainer commits as soon as one engine has everything."""

    def may_commit(self, world: World) -> bool:
        return any(answer is True for answer in world.answers)


class ResumesTouched(Rules):
    """An abort resumes an engine whatever was written into it."""

    def deliver(self, engine: EngineModel, message: str, update: int, crash: Crash) -> tuple[EngineModel, bool]:
        after, good = Rules.deliver(self, engine, message, update, crash)
        return (replace(after, paused=False, quarantined=False), good) if message == "abort" else (after, good)


class StampsEarly(Rules):
    """The version counts from Close on."""

    def deliver(self, engine: EngineModel, message: str, update: int, crash: Crash) -> tuple[EngineModel, bool]:
        after, good = Rules.deliver(self, engine, message, update, crash)
        return (replace(after, version=update), good) if message == "close" and good else (after, good)


class StaysPaused(Rules):
    """Nobody wakes the engine after an update that ended."""

    def deliver(self, engine: EngineModel, message: str, update: int, crash: Crash) -> tuple[EngineModel, bool]:
        after, good = Rules.deliver(self, engine, message, update, crash)
        if message == "abort" and engine.session and not after.session:
            return replace(after, paused=True), good
        return after, good


class QuarantineForever(Rules):
    """An engine in quarantine takes no update."""

    def deliver(self, engine: EngineModel, message: str, update: int, crash: Crash) -> tuple[EngineModel, bool]:
        if message == "open" and engine.quarantined:
            return engine, False
        return Rules.deliver(self, engine, message, update, crash)


class DeathIsNothing(Rules):
    """A rank dies in the middle of a commit, and the engine goes on serving."""

    def deliver(self, engine: EngineModel, message: str, update: int, crash: Crash) -> tuple[EngineModel, bool]:
        after, good = Rules.deliver(self, engine, message, update, crash)
        return (replace(after, paused=False), good) if message == "commit" and crash else (after, good)


@pytest.mark.parametrize(
    ("rules", "invariant"),
    [
        (LeaseForgotten, "free"),
        (Impatient, "together"),
        (ResumesTouched, "whole"),
        (StampsEarly, "together|whole"),
        (StaysPaused, "awake"),
        (QuarantineForever, "again"),
        (DeathIsNothing, "whole"),
    ],
)
def test_a_broken_rule_is_found(rules: Callable[[], Rules], invariant: str):
    found: list[str] = []
    for staged in KINDS:
        try:
            explore(rules(), staged=staged)
        except Broken as broken:
            found.append(str(broken))
    assert found
    assert any(part in found[0] for part in invariant.split("|")), found[0]
    assert "start" in found[0]
