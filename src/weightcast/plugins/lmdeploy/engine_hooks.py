"""The receiver's engine hooks in LMDeploy's API server.

The engine process holds requests back (``requests_at_switch``).  The pause modes ``in_place`` and ``retract`` are part
of the switch itself (``executor``).
"""

from __future__ import annotations

import logging
from typing import Any

from weightcast.config import PauseMode
from weightcast.errors import Refused, WeightcastError
from weightcast.plugins.lmdeploy.engine_calls import EngineCalls

log = logging.getLogger("weightcast.plugins.lmdeploy")

_SHORT_S = 30.0


class LmdeployHooks:
    """``EngineHooks`` over LMDeploy's engine process."""

    def __init__(self, async_engine: Any, calls: EngineCalls) -> None:
        """Makes the hooks.

        Args:
            async_engine: LMDeploy's ``AsyncEngine``, which knows whether it sleeps.
            calls: Reaches the engine process.
        """
        self._async_engine = async_engine
        self._calls = calls
        self._held = False
        self._stopped = False

    @property
    def paused(self) -> bool:
        """True while requests are held back, by an update or the quarantine, and while LMDeploy sleeps."""
        return self._held or bool(self._async_engine.is_sleeping)

    def pause(self, mode: PauseMode, timeout_s: float) -> None:
        """Returns when no request runs, for ``abort`` and ``wait``; at once for the modes that keep requests.

        An engine that sleeps runs none, and holds new ones back already.
        """
        if mode in ("in_place", "retract") or self.asleep:
            return
        self._held, self._stopped = True, False
        try:
            self._calls.call("weightcast_pause", mode, timeout_s, timeout_s=timeout_s)
        except Refused:
            if self._stopped:
                raise Refused("pause cancelled: the update that asked for it was aborted") from None
            raise

    def stop_waiting(self) -> None:
        """Cancels a pause that waits for running requests; ``resume`` must follow."""
        if self._held and not self._stopped:
            self._stopped = True
            try:
                self._calls.call("weightcast_stop_waiting", timeout_s=_SHORT_S)
            except WeightcastError as error:
                log.warning("could not cancel the pause: %s", error)

    def resume(self) -> None:
        """Lets requests go on, unless some memory sleeps."""
        if self._held and not self.asleep:
            self._calls.call("weightcast_resume", timeout_s=_SHORT_S)
            self._held = False

    @property
    def asleep(self) -> frozenset[str]:
        """Tags of the memory that sleeps, as LMDeploy tells them."""
        return frozenset(self._async_engine.sleeping_tags) if self._async_engine.is_sleeping else frozenset()

    def hold_for_sleep(self) -> None:
        """Drops the requests that run, as LMDeploy's sleep does, and holds new ones back.

        LMDeploy itself would move weights while a forward that it sent ahead may still run.

        Raises:
            Refused: The forward that runs did not end; nothing is held.
        """
        try:
            self.pause("abort", _SHORT_S)
        except WeightcastError:
            self.resume()
            raise

    def end_hold_of_sleep(self, *, serves: bool) -> None:
        """Lets requests go on if all memory is back.

        Args:
            serves: False if the weights are not known; then the next update ends the hold.
        """
        if serves:
            self.resume()

    def drop_caches(self) -> None:
        """Does nothing: the pause, or the switch, has dropped them."""

    def set_version(self, version: int) -> None:
        """Does nothing: LMDeploy reports no version of its weights."""
