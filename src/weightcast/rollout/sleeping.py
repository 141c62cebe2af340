"""Sleep and wake: frees an engine's cache and moves its weights off the accelerator, and back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from weightcast.config import PauseMode
from weightcast.errors import ConfigError, Refused
from weightcast.rollout import commands
from weightcast.rollout.commands import Done
from weightcast.rollout.pauses import SLEEP
from weightcast.rollout.scheduler import Scheduler


class Sleeper:
    """Puts one engine to sleep and wakes it.

    Args:
        between_updates: Context that keeps updates out; it raises ``Refused`` during one.
    """

    def __init__(
        self, scheduler: Scheduler, between_updates: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        self._scheduler = scheduler
        self._between_updates = between_updates
        self._moving = threading.Lock()  # held while weights move
        self._moved = False

    def sleep(self, mode: PauseMode = "abort", *, timeout_s: float = 60.0) -> None:
        """Pauses, frees the cache and moves the weights off the accelerator.

        Raises:
            ConfigError: The mode is ``in_place``, which keeps the cache that sleep frees.
            Refused: An update is under way, or a caller woke the engine before the weights had moved.
            DeadlineExceeded, EngineFailure: The same as for `Scheduler.pause`.
        """
        if mode == "in_place":
            raise ConfigError("mode in_place keeps the cache, which sleep frees", hint="use abort, retract or wait")
        # Sleep and a commit both move the weights, so only one may run.  This is checked now, before any request is
        # ended for it, and again when nothing runs, because messages to the receiver do not wait until then.
        with self._between_updates():
            pass
        if not self._scheduler.asleep:
            self._scheduler.pause(mode, timeout_s, holder=SLEEP)
        with self._moving:
            if not self._scheduler.asleep:
                raise Refused("sleep cancelled: the engine was woken before its weights had moved")
            if self._moved:
                return
            try:
                with self._between_updates():
                    self._moved = True  # first, because ranks carry the command out even if its answer is late
                    self._scheduler.loop.ask(commands.Sleep(), Done, timeout_s)
            finally:
                if not self._moved:
                    self._scheduler.resume(holder=SLEEP)

    def wake(self, *, timeout_s: float = 60.0) -> None:
        """Undoes `sleep`; the weights are the same, bit for bit.  Raises ``EngineFailure`` if the engine has failed."""
        # Never between the pause and the command of `sleep`: the engine would run without weights and fail.
        with self._moving:
            if self._moved:
                self._scheduler.loop.ask(commands.Wake(), Done, timeout_s)
                self._moved = False
            self._scheduler.resume(holder=SLEEP)
