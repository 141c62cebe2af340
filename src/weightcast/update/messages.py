"""The messages by which the head tells the other trainer ranks what it decided."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from weightcast import errors
from weightcast.comm.rendezvous import Invited
from weightcast.errors import ConfigError, TargetError, TargetsFailed, UpdateFailed, WeightcastError
from weightcast.report import UpdateReport
from weightcast.wire.layout import Packing, TensorSpec
from weightcast.wire.nccl_settings import NcclSettings


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """An error of the head that every rank raises, of the class with this name.

    It has one entry in ``failures`` for each engine, if it is about several, and that of an
    ``UpdateFailed`` its cause; ``url`` is empty if it names none.
    """

    error: str
    text: str
    hint: str | None = None
    url: str = ""
    failures: tuple[Failure, ...] = ()

    @staticmethod
    def of(error: WeightcastError) -> Failure:
        """Describes an error."""
        kind = next(kind for kind in type(error).__mro__ if getattr(errors, kind.__name__, None) is kind)
        failures = error.failures if isinstance(error, TargetsFailed) else ()
        return Failure(
            error=kind.__name__,
            text=str(error),
            hint=error.hint,
            url=str(getattr(error, "url", "")),
            failures=tuple(map(Failure.of, failures)),
        )

    def rebuild(self, report: UpdateReport | None = None) -> WeightcastError:
        """Returns the error again, with the report of the update that failed; None if it was no update."""
        if self.error == UpdateFailed.__name__:
            assert report is not None
            failed = UpdateFailed(self.text, report=report, hint=self.hint)
            failed.__cause__ = self.failures[0].rebuild() if self.failures else None
            return failed
        return self._without_report().reported(report)

    def _without_report(self) -> WeightcastError:
        if self.failures:
            return TargetsFailed([failure.rebuild() for failure in self.failures])
        kind = getattr(errors, self.error, WeightcastError)
        if issubclass(kind, TargetError):
            return kind(self.text, url=self.url, hint=self.hint)
        if issubclass(kind, ConfigError):
            return kind(self.text, hint=self.hint)
        return WeightcastError(self.text, hint=self.hint)


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """The head's choices at connect.  Fields of ``TransportSpec`` and ``TrainerGroup`` are as there.

    Attributes:
        transport: Name of the transport; several names joined by ``+`` if targets are reached in different ways.
        receivers: The trainer ranks that fill a bucket.
        ways: The kinds of handles to the buffers, for a transport that shares memory.
        opens: Number of engine processes that open a buffer in torch's way.
        ring_opens: Number of engine processes that open the storage of all buffers.
        served: Highest version that a target serves; None if no target knows its own.
        cells: URLs of the targets in each cell of a transport that has cells.
        cast: Numbers of the exporter's tensors that are cast before they are sent, by the dtype that engines keep.
    """

    failure: Failure | None = None
    transport: str = ""
    receivers: tuple[int, ...] = (0,)
    reading_hosts: tuple[str, ...] = ()
    leg_hosts: tuple[str, ...] = ()
    scattered: bool = False
    exchanges: bool = False
    relays: bool = False
    mapped: bool = False
    packing: Packing = Packing()
    ways: tuple[str, ...] = ()
    opens: int = 0
    ring_opens: int = 0
    bucket_bytes: int = 0
    served: int | None = None
    cells: tuple[tuple[str, ...], ...] = ()
    cast: dict[str, tuple[int, ...]] = {}

    def travelling(self, specs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
        """The exporter's tensors in the dtypes in which they travel."""
        found = list(specs)
        for dtype, numbers in self.cast.items():
            for number in numbers:
                found[number] = msgspec.structs.replace(found[number], dtype=dtype)
        return tuple(found)


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Where a trainer rank keeps its weights: the UUID of its GPU or ``"cpu"``, and the bytes of it that are free.

    ``nccl`` has its settings of NCCL, if it is on a GPU.
    """

    device: str
    free_bytes: int = 0
    nccl: NcclSettings | None = None


def least_free_bytes(places: Sequence[Place]) -> int:
    """GPU memory that each of these trainer ranks may still take, where it is smallest; 0 if one is not on a GPU.

    Ranks that share a GPU share what is free of it.
    """
    sharing = Counter(place.device for place in places)
    if any(place.device == "cpu" for place in places):
        return 0
    return min((place.free_bytes // sharing[place.device] for place in places), default=0)


class AttemptResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an attempt, or of one of its steps.

    Attributes:
        again: True if an attempt follows, with the targets that are left.
        choice: The choices for that attempt; None if they stay as they are.
        score: True if the head needs the trainer's forward pass next.
        sums_buckets: True if every rank with a bucket sums it, because an engine cannot say what it received.
        invited: The groups that every trainer rank joins next; empty if there are none to join.
        boxes: The boxes that engine ranks want, which trainer ranks pack for them; None if they are as before.
    """

    report: UpdateReport | None = None
    failure: Failure | None = None
    again: bool = False
    choice: Choice | None = None
    score: bool = False
    sums_buckets: bool = False
    invited: tuple[Invited, ...] = ()
    boxes: tuple[bytes, ...] | None = None
