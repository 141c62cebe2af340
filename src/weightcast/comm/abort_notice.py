"""The word in a group's store that a member has aborted, for members that exchange no messages with it."""

from __future__ import annotations

import time
from concurrent.futures import Future, wait
from contextlib import suppress

import torch.distributed as dist

from weightcast.comm.rendezvous import first_line
from weightcast.runtime import blocking_threads

_KEY = "aborted"
_THREAD = "weightcast-abort-notice"
_POLL_S = 0.05
_TELL_S = 1.0  # for the store to take the word


class AbortNotice:
    """Tells the other members of an abort, and hears of theirs.

    A store whose process is stopped never answers, and torch waits for it without a deadline.  So threads ask it, one
    at a time, and one without an answer is left behind.
    """

    def __init__(self, store: dist.Store) -> None:
        """``store`` is the part of the store that belongs to the group."""
        self._store = store
        self._asked: Future[str] | None = None
        self._asked_at = 0.0

    def heard(self) -> str:
        """Returns why another member has aborted, as far as the store has said; empty if it has not.  Never waits."""
        if self._asked is not None:
            if not self._asked.done():
                return ""
            why = self._asked.result()
            if why:
                return why
        now = time.monotonic()
        if now - self._asked_at >= _POLL_S:
            self._asked_at = now
            self._asked = blocking_threads.call(self._ask, name=_THREAD)
        return ""

    def tell(self, why: str) -> None:
        """Tells the other members; waits for the store, but no longer than two seconds."""
        if self._asked is not None and wait([self._asked], _TELL_S).not_done:
            return
        wait([blocking_threads.call(lambda: self._set(why), name=_THREAD)], _TELL_S)

    def _ask(self) -> str:
        try:
            return self._store.get(_KEY).decode() if self._store.check([_KEY]) else ""
        except RuntimeError as error:
            return f"the rendezvous is gone: {first_line(error)}"

    def _set(self, why: str) -> str:
        with suppress(RuntimeError):  # a store that is gone tells the others as much
            self._store.set(_KEY, why)
        return why
