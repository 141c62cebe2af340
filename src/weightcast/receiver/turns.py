"""Lets one update of an engine happen at a time, where the engine has several things to update.

The model and each of its adapters have sessions of their own, but they share the engine's pause.
"""

from __future__ import annotations

import threading
import time

from weightcast.receiver.session import SessionHandler
from weightcast.wire.answers import Ack
from weightcast.wire.messages import Commit, Message, Open, Revert

_LOOK_S = 0.01


class Turns:
    """The turn of one session after another.  Thread-safe."""

    def __init__(self) -> None:
        self._opening = threading.Lock()
        self._switching = threading.Lock()
        self._last: SessionHandler | None = None

    def apply(self, handler: SessionHandler, message: Message) -> Ack:
        """Carries out a message; an Open waits until the session of another handler is over."""
        if isinstance(message, Open):
            return self._open(handler, message)
        if isinstance(message, Commit | Revert):
            with self._switching:  # both pause the engine and resume it
                return handler.apply(message)
        return handler.apply(message)

    def _open(self, handler: SessionHandler, message: Open) -> Ack:
        deadline = time.monotonic() + message.timeout_s / 2
        while True:
            with self._opening:
                other = self._last if self._last is not None and self._last is not handler else None
                owner = other.info().session_owner if other is not None else None
                if owner is None:
                    self._last = handler
                    return handler.apply(message)
            if time.monotonic() > deadline:
                assert other is not None
                now = handler.info()
                why = f"{other.info().model} is being updated by {owner} (wait for it to finish, or end it)"
                return Ack(ok=False, error=why, state=now.state, version=now.version, ranks=now.tp_size)
            time.sleep(_LOOK_S)
