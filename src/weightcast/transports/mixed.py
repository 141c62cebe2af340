"""Several transports in one update: engines on this host by one, engines elsewhere by another.

Each transport has its own targets and gets every bucket.  The update has one session for each target and one commit,
so no target switches before all of them, over every transport, have proven what they received.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from weightcast.comm.shared_buckets import Shared
from weightcast.protocols import Transport
from weightcast.transports.blame import raise_together
from weightcast.transports.cells import InCells
from weightcast.transports.channel import Channel
from weightcast.wire.bucket import Bucket


class MixedTransport:
    """Hands every bucket to several transports.

    All calls stay on the caller's thread, because a transport may record an event on that thread's CUDA stream.  Every
    transport is called even if one before it fails, and the error names every engine that failed.
    """

    def __init__(self, parts: Sequence[Transport]) -> None:
        self.name = join_names(part.name for part in parts)
        self._parts = tuple(parts)

    @property
    def cells(self) -> Sequence[Channel]:
        """As ``InCells.cells``, of all parts that have cells."""
        return [cell for part in self._parts if isinstance(part, InCells) for cell in part.cells]

    def connect(self) -> None:
        """As ``Transport.connect``."""
        self._each(lambda part: part.connect())

    def send(self, bucket: Bucket, shared: Sequence[Shared]) -> None:
        """As ``Transport.send``."""
        self._each(lambda part: part.send(bucket, shared))

    def drain(self) -> None:
        """As ``Transport.drain``."""
        self._each(lambda part: part.drain())

    def settle(self) -> None:
        """As ``Transport.settle``."""
        self._each(lambda part: part.settle())

    def abort(self, reason: str) -> None:
        """As ``Transport.abort``."""
        self._each(lambda part: part.abort(reason))

    def close(self) -> None:
        """As ``Transport.close``."""
        self._each(lambda part: part.close())

    def _each(self, do: Callable[[Transport], None]) -> None:
        errors = list[BaseException | None]()
        for part in self._parts:
            try:
                do(part)
            except Exception as error:  # noqa: BLE001  raised below, when every transport has been called
                errors.append(error)
        raise_together(errors)


def join_names(names: Iterable[str]) -> str:
    """Returns the label of several transports: each name once, in order, joined by ``+``."""
    return "+".join(dict.fromkeys(names))
