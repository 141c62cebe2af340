"""Keeps the pauses of an engine, and applies each pause mode to the batch.

It has no thread: the scheduler's lock guards it, and the scheduler's loop settles requested pauses between two steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from weightcast.config import PauseMode
from weightcast.errors import Refused
from weightcast.rollout.batch import ContinuousBatch

SLEEP = "sleep"
UPDATE = "update"


@dataclass(slots=True, eq=False)
class Pause:
    """One holder's request to pause; ``refusal`` is None if the engine is paused once the loop has settled it."""

    mode: PauseMode
    holder: str
    done: bool = False
    refusal: str | None = None


class Pauses:
    """All pauses of one engine, which runs only while no holder pauses it."""

    def __init__(self) -> None:
        self._holders: set[str] = set()
        self._asked: list[Pause] = []

    @property
    def held(self) -> bool:
        return bool(self._holders)

    @property
    def pending(self) -> bool:
        """True while a pause waits for running requests to finish."""
        return bool(self._asked)

    def held_by(self, holder: str) -> bool:
        """True while this holder has paused the engine."""
        return holder in self._holders

    def ask(self, mode: PauseMode, holder: str) -> Pause:
        """Asks for a pause; ``settle`` decides it.  Raises ``Refused`` if the engine is asleep."""
        if SLEEP in self._holders and holder != SLEEP:
            raise Refused("the engine is asleep", hint="POST /wake first")
        pause = Pause(mode, holder)
        self._asked.append(pause)
        return pause

    def withdraw(self, pause: Pause) -> None:
        """Removes a requested pause that was not settled in time."""
        self._asked.remove(pause)

    def call_off(self, holder: str) -> None:
        """Refuses this holder's pauses in mode ``wait`` that are not settled yet."""
        for pause in self._asked:
            if pause.holder == holder and pause.mode == "wait":
                pause.refusal = "pause cancelled: the update that asked for it was aborted"
                pause.done = True
        self._asked = [pause for pause in self._asked if not pause.done]

    def release(self, holder: str) -> None:
        """Ends a holder's pause, if it has one."""
        self._holders.discard(holder)

    def settle(self, batch: ContinuousBatch, *, version: int) -> bool:
        """Carries out the pauses that are possible between two steps; True if waiting threads must be notified."""
        settled = False
        for pause in list(self._asked):
            if pause.mode == "abort":
                batch.end_all("abort", version=version)
            elif pause.mode == "retract":
                batch.retract()
            elif pause.mode == "wait" and batch.running:
                if not self._holders:
                    continue
                pause.refusal = f"{len(batch.running)} requests are paused in place and cannot finish"
            if not pause.refusal:
                self._holders.add(pause.holder)
            pause.done = settled = True
            self._asked.remove(pause)
        return settled
