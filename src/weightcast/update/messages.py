"""The messages by which the head tells the other trainer ranks what it decided."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from weightcast import errors
from weightcast.comm.rendezvous import Invited
from weightcast.errors import ConfigError, TargetError, TargetsFailed, UpdateFailed, WeightcastError
from weightcast.report import UpdateReport
from weightcast.transports.plan import UpdatePlan
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


class RankDevice(msgspec.Struct, frozen=True, array_like=True):
    """Where a trainer rank keeps its weights: the UUID of its GPU or ``"cpu"``, and the bytes of it that are free.

    ``nccl`` has its settings of NCCL, if it is on a GPU.
    """

    device: str
    free_bytes: int = 0
    nccl: NcclSettings | None = None


def least_free_bytes(places: Sequence[RankDevice]) -> int:
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
        plan: The plan of the updates from then on; None if it stays as it is.
        served: With a plan, the highest version that a target serves; None if no target knows its own.
        score: True if the head needs the trainer's forward pass next.
        differ: True if sums of the trainer ranks differ, so that they find the tensors next.
        sums_buckets: True if every rank with a bucket sums it, because an engine cannot say what it received.
        invited: The groups that every trainer rank joins next; empty if there are none to join.
        boxes: The boxes that engine ranks want, which trainer ranks pack for them; None if they are as before.
    """

    report: UpdateReport | None = None
    failure: Failure | None = None
    again: bool = False
    plan: UpdatePlan | None = None
    served: int | None = None
    score: bool = False
    differ: bool = False
    sums_buckets: bool = False
    invited: tuple[Invited, ...] = ()
    boxes: tuple[bytes, ...] | None = None
