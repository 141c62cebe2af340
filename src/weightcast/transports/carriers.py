"""All carriers of one update, which each have targets of their own and get every bucket.

The update has one session for each target and one commit, so no target switches before all of them, by whichever
carrier, have proven what they received.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from weightcast.comm.rendezvous import Invited
from weightcast.comm.shared_buckets import Shared
from weightcast.comm.update_group import UpdateGroup
from weightcast.errors import WeightcastError
from weightcast.protocols import Carrier, Cell
from weightcast.transports.blame import raise_together
from weightcast.transports.plan import label_of
from weightcast.wire.bucket import Bucket


class Carriers(Carrier):
    """Hands every bucket to several carriers.

    All calls stay on the caller's thread, because a carrier may record an event on that thread's CUDA stream.  Every
    carrier is called even if one before it fails, and the error names every engine that failed.
    """

    def __init__(self, parts: Iterable[Carrier]) -> None:
        self._parts = tuple(parts)
        self.name = label_of(part.name for part in self._parts)

    def connect(self) -> None:
        """As ``Carrier.connect``."""
        self._each(lambda part: part.connect())

    def send(self, bucket: Bucket, shared: Sequence[Shared]) -> None:
        """As ``Carrier.send``."""
        self._each(lambda part: part.send(bucket, shared))

    def drain(self) -> None:
        """As ``Carrier.drain``."""
        self._each(lambda part: part.drain())

    def settle(self) -> None:
        """As ``Carrier.settle``."""
        self._each(lambda part: part.settle())

    def abort(self, reason: str) -> None:
        """As ``Carrier.abort``."""
        self._each(lambda part: part.abort(reason))

    def close(self) -> None:
        """As ``Carrier.close``."""
        self._each(lambda part: part.close())

    @property
    def cells(self) -> Sequence[Cell]:
        """As ``Carrier.cells``."""
        return [cell for part in self._parts for cell in part.cells]

    def invite(self) -> None:
        """As ``Carrier.invite``."""
        self._each(lambda part: part.invite())

    @property
    def invited(self) -> Sequence[Invited]:
        """As ``Carrier.invited``."""
        return [one for part in self._parts for one in part.invited]

    @property
    def members(self) -> Mapping[str, UpdateGroup]:
        """As ``Carrier.members``."""
        return {name: group for part in self._parts for name, group in part.members.items()}

    def lost(self, name: str, error: WeightcastError) -> None:
        """As ``Carrier.lost``."""
        self._each(lambda part: part.lost(name, error))

    def _each(self, do: Callable[[Carrier], None]) -> None:
        if len(self._parts) == 1:
            do(self._parts[0])
            return
        errors = list[BaseException | None]()
        for part in self._parts:
            try:
                do(part)
            except Exception as error:  # noqa: BLE001  raised below, when every carrier has been called
                errors.append(error)
        raise_together(errors)
