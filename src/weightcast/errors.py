"""Every error weightcast raises, and what each says about the state left behind.

    WeightcastError
    ├── ConfigError              the request cannot work as asked; nothing has moved
    ├── WireError                bytes that are not a valid message; the receiver changed nothing
    ├── TargetError              one engine, named by ``url``
    │   ├── TargetUnreachable    no answer; it was not told to change anything
    │   ├── TargetRejected       it answered and refused; ``half_updated`` says whether it holds a mixture
    │   └── TargetLost           it stopped answering in the middle of an update
    ├── DeadlineExceeded         a wait ended; ``who`` and ``waiting_for`` name the culprit
    ├── VerificationFailed       what arrived or what is kept differs from what was sent; ``names`` says where
    ├── TrainerRankFailed        another rank of the training job failed or fell silent during a collective step
    ├── EngineFailure            inside an engine: a rank died or could not do its work
    ├── Refused                  inside an engine: a message does not fit its state; nothing changed
    └── UpdateFailed             the update as a whole; ``report`` has one row for each target

A caller can decide from the class and its attributes; no text needs parsing.  The remedy travels
as a note (``hint: ...``), which Python prints under the traceback and the command line prints by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weightcast.report import UpdateReport


class WeightcastError(Exception):
    """Base of all errors raised on purpose by weightcast.

    Attributes:
        hint: What the reader can do about it, or None.
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint
        if hint:
            self.add_note(f"hint: {hint}")

    def __reduce__(self) -> tuple[object, ...]:
        """Whole across a process boundary, whatever its class was built from."""
        return _restore, (type(self), self.args, dict(self.__dict__))


def _restore(kind: type[WeightcastError], args: tuple[object, ...], state: dict[str, object]) -> WeightcastError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


class ConfigError(WeightcastError):
    """The request cannot work as asked.  Nothing has moved; every engine serves what it served."""


class WireError(WeightcastError):
    """Bytes that do not decode to a valid message.  The receiver changed nothing."""


class TargetError(WeightcastError):
    """Something about one engine.

    Attributes:
        url: The engine.
        also: Other engines that failed in the same step and in the same way.
        half_updated: True if the engine may hold a mixture of two versions.
    """

    def __init__(
        self,
        message: str,
        *,
        url: str,
        also: Sequence[str] = (),
        half_updated: bool = False,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.url = url
        self.also = tuple(also)
        self.half_updated = half_updated


class TargetUnreachable(TargetError):
    """The engine did not answer.  It was not told to change anything and serves its old weights."""


class TargetRejected(TargetError):
    """The engine answered and refused; the message has its own words.

    Attributes:
        status: The HTTP status of its answer, if it was one.
    """

    def __init__(
        self,
        message: str,
        *,
        url: str,
        half_updated: bool = False,
        hint: str | None = None,
        status: int | None = None,
    ) -> None:
        super().__init__(message, url=url, half_updated=half_updated, hint=hint)
        self.status = status


class TargetLost(TargetError):
    """The engine stopped answering in the middle of an update; what it serves is unknown."""


class DeadlineExceeded(WeightcastError):
    """A wait passed its deadline.

    Attributes:
        who: The process that was waited for: an engine's URL, an engine rank, a trainer rank.
        waiting_for: What was being waited for, e.g. ``"bucket 3 in group wc-1"``.
        timeout_s: The limit that passed, in seconds.
    """

    def __init__(self, *, who: str, waiting_for: str, timeout_s: float, hint: str | None = None) -> None:
        super().__init__(f"{who}: waited {timeout_s:g} s for {waiting_for}", hint=hint)
        self.who = who
        self.waiting_for = waiting_for
        self.timeout_s = timeout_s


class VerificationFailed(WeightcastError):
    """What arrived, or what the engine keeps, is not what was sent.

    Attributes:
        url: The engine.
        names: The tensors that differ, in order.
    """

    def __init__(self, message: str, *, url: str, names: Sequence[str], hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.url = url
        self.names = tuple(names)


class TrainerRankFailed(WeightcastError):
    """Another rank of the training job failed, or did not take part in a collective step in time."""


class EngineFailure(WeightcastError):
    """Inside an engine: a rank died or could not do its work.

    Attributes:
        ranks: The engine ranks that failed.
    """

    def __init__(self, message: str, *, ranks: Sequence[int] = (), hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.ranks = tuple(ranks)


class Refused(WeightcastError):
    """Inside an engine: the message is valid but does not fit the state it is in.  Nothing changed."""


class UpdateFailed(WeightcastError):
    """One update failed.

    Attributes:
        report: One row for each target, saying what it serves now.
        half_updated: URLs of the targets that may hold a mixture (they are quarantined and kept paused).
    """

    def __init__(self, message: str, *, report: UpdateReport, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.report = report

    @property
    def half_updated(self) -> tuple[str, ...]:
        """URLs of the targets that may hold a mixture of two versions."""
        return tuple(row.url for row in self.report.targets if row.status == "quarantined")
