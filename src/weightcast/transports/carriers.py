"""All carriers of one update, which each have targets of their own and get every bucket.

The update has one session for each target and one commit, so no target switches before all of them, by whichever
carrier, have proven what they received.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from weightcast.comm.rendezvous import Invited
from weightcast.comm.shared_buckets import Shared
from weightcast.comm.update_group import GroupFailed, UpdateGroup
from weightcast.errors import WeightcastError
from weightcast.protocols import Carrier, Cell
from weightcast.transports.blame import raise_together
from weightcast.transports.plan import label_of
from weightcast.wire.bucket import Bucket
from weightcast.wire.layout import BucketLayout


class Carriers(Carrier):
    """Hands every bucket to several carriers.

    All calls stay on the caller's thread, because a carrier may record an event on that thread's CUDA stream.  Every
    carrier is called even if one before it fails, and the error names every engine that failed.

    Attributes:
        failed: True if the attempt failed because a target could not be connected or given a bucket.
        num_buckets, sent_bytes: What was sent in this attempt.
    """

    def __init__(self, parts: Iterable[Carrier] = (), signature: object = None) -> None:
        """``signature`` says for which targets and plans they were built."""
        self._parts = tuple(parts)
        self.name = label_of(part.name for part in self._parts)
        self.signature = signature
        self.failed = False
        self.num_buckets = self.sent_bytes = 0

    def begin(self) -> None:
        """Starts an attempt, in which nothing has failed and nothing was sent yet."""
        self.failed = False
        self.num_buckets = self.sent_bytes = 0
        for cell in self.cells:
            cell.failure = None

    def connect(self) -> None:
        """As ``Carrier.connect``."""
        self._move(lambda part: part.connect())

    def send(self, bucket: Bucket, shared: Sequence[Shared]) -> None:
        """As ``Carrier.send``."""
        self._move(lambda part: part.send(bucket, shared))
        self._count((bucket.layout,))

    def announce(self, layouts: Sequence[BucketLayout]) -> None:
        """As ``Carrier.announce``."""
        self._move(lambda part: part.announce(layouts))
        self._count(layouts)

    def _count(self, layouts: Sequence[BucketLayout]) -> None:
        self.num_buckets += len(layouts)
        self.sent_bytes += sum(layout.size_bytes for layout in layouts)

    def drain(self) -> None:
        """As ``Carrier.drain``."""
        self._move(lambda part: part.drain())

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
        self._move(lambda part: part.invite())

    @property
    def invited(self) -> Sequence[Invited]:
        """As ``Carrier.invited``."""
        return [one for part in self._parts for one in part.invited]

    @property
    def members(self) -> Mapping[str, UpdateGroup]:
        """As ``Carrier.members``."""
        return {name: group for part in self._parts for name, group in part.members.items()}

    def join(self) -> dict[Invited, UpdateGroup]:
        """Makes the groups to which the other trainer ranks are ``invited``; returns those that came about."""
        invited = self.invited
        self.connect()
        members = self.members
        return {one: members[one.group] for one in invited if one.group in members}

    def lose(self, failures: Mapping[str, str]) -> None:
        """Ends the transfers in groups, by name, in which a trainer rank's messages failed, and raises the causes."""
        errors: list[WeightcastError] = []
        for name, text in failures.items():
            try:
                self.lost(name, GroupFailed(text))
            except WeightcastError as error:
                errors.append(error)
        raise_together(errors)

    def lost(self, name: str, error: WeightcastError) -> None:
        """As ``Carrier.lost``."""
        self._move(lambda part: part.lost(name, error))

    def _move(self, do: Callable[[Carrier], None]) -> None:
        """As ``_each``, and notes a failure to reach a target, as opposed to a failure of its session."""
        try:
            self._each(do)
        except WeightcastError:
            self.failed = True
            raise

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
