"""A stand-in for ``SessionHandler`` with as much of it as an engine's sleep and its own updates ask."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from weightcast.errors import Refused


class Session:
    """Its tests say whether an update is under way, and read the state."""

    def __init__(self) -> None:
        self.state, self.busy = "serving", False

    @contextmanager
    def between_updates(self) -> Iterator[None]:
        if self.busy:
            raise Refused("being updated by process 1", hint="wait for it to finish, or end it")
        yield

    def discarded(self, why: str) -> None:
        self.state = "quarantined"

    def replaced(self, why: str) -> None:
        self.state = "serving"
