"""Every error that weightcast raises, and the state that each leaves behind.

    WeightcastError
    ├── ConfigError              the request cannot work as asked; nothing has moved
    ├── WireError                bytes that are not a valid message; the receiver changed nothing
    ├── TargetError              one engine, named by ``url``
    │   ├── TargetUnreachable    no answer; the engine was not asked to change anything
    │   ├── TargetRejected       the engine refused; ``half_updated`` tells whether it holds a mixture
    │   ├── TargetLost           the engine stopped answering in the middle of an update
    │   └── TargetsFailed        several engines failed in one step; ``failures`` has one error for each
    ├── DeadlineExceeded         a wait ended; ``who`` and ``waiting_for`` name the culprit
    ├── VerificationFailed       an engine's weights differ from the sent ones; ``names`` lists tensors
    ├── NotFinite                weights are NaN or infinite; ``names`` lists tensors; no engine has switched
    ├── TrainerMismatch          trainer ranks disagree, or the gather changed bytes; ``names``, ``ranks``
    ├── TrainerRankFailed        another rank of the training job failed or fell silent during a collective step
    ├── EngineFailure            inside an engine: a rank died or could not do its work
    ├── Refused                  inside an engine: a message does not fit its state; nothing changed
    └── UpdateFailed             the update as a whole; ``report`` has one row for each target

A caller can decide by class and attributes and need not parse a message.  Every error that an update raises on the head
trainer rank has its ``report``, whatever the class.  The remedy is a note (``hint: ...``), which
Python prints under the traceback and the command line prints by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from weightcast.report import UpdateReport


class WeightcastError(Exception):
    """Base class of all errors that weightcast raises on purpose.

    Attributes:
        hint: Remedy, or None.
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(visible(message))
        self.hint = hint = hint and visible(hint)
        self._report: UpdateReport | None = None
        if hint:
            self.add_note(f"hint: {hint}")

    @property
    def report(self) -> UpdateReport | None:
        """The report of the update that failed, with one row for each target.

        None if the error is not that of an update, and on a trainer rank that has not heard the head's report.
        """
        return self._report

    def reported(self, report: UpdateReport | None) -> Self:
        """Adds the report of the update that failed, and returns the error."""
        self._report = report
        return self

    def __reduce__(self) -> tuple[object, ...]:
        """Pickles the message and all attributes, for any signature of ``__init__``."""
        return _restore, (type(self), self.args, dict(self.__dict__))


def _restore(kind: type[WeightcastError], args: tuple[object, ...], state: dict[str, object]) -> WeightcastError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


def error_words(error: Exception) -> str:
    """The text of an error with its hint; with its type where the error is not one of ours."""
    if not isinstance(error, WeightcastError):
        return f"{type(error).__name__}: {error}"
    return f"{error} ({error.hint})" if error.hint else str(error)


def visible(text: str) -> str:
    """Replaces control characters, except line ends and tabs, by escapes such as ``\\x1b``.

    Text of other processes has them where somebody wants a terminal to do something.
    """
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() or letter in "\n\t" else letter.encode("unicode_escape").decode()
        for letter in text
    )


def some(words: Sequence[str], limit: int = 4, *, joint: str = ", ") -> str:
    """Joins the first words and counts the rest."""
    more = f"{joint.rstrip(', ')} and {len(words) - limit} more" if len(words) > limit else ""
    return joint.join(words[:limit]) + more


class ConfigError(WeightcastError):
    """The request cannot work as asked.  Nothing was sent; every engine serves its old weights."""


class WireError(WeightcastError):
    """Bytes that do not decode to a valid message.  The receiver changed nothing."""


class TargetError(WeightcastError):
    """An error of one engine.

    Attributes:
        half_updated: True if the engine may hold a mixture of two versions.
    """

    def __init__(self, message: str, *, url: str, half_updated: bool = False, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.url = url
        self.half_updated = half_updated


class TargetUnreachable(TargetError):
    """The engine did not answer.  It was not asked to change anything and serves its old weights."""


class TargetRejected(TargetError):
    """The engine refused; the message has the engine's own words.

    Attributes:
        status: HTTP status of its answer, or None.
    """

    def __init__(
        self, message: str, *, url: str, half_updated: bool = False, hint: str | None = None, status: int | None = None
    ) -> None:
        super().__init__(message, url=url, half_updated=half_updated, hint=hint)
        self.status = status


class TargetLost(TargetError):
    """The engine stopped answering in the middle of an update; its weights are unknown."""


class TargetsFailed(TargetError):
    """Several engines failed in one step.

    Attributes:
        url: The first of them.
        failures: One error for each engine, in the order of the targets.
    """

    def __init__(self, failures: Sequence[WeightcastError]) -> None:
        hints = list(dict.fromkeys(error.hint for error in failures if error.hint))
        super().__init__(
            f"{len(failures)} engines failed: {'; '.join(map(str, failures))}",
            url=str(getattr(failures[0], "url", "")),
            half_updated=any(getattr(error, "half_updated", False) for error in failures),
            hint="; ".join(hints) or None,
        )
        self.failures = tuple(failures)

    @property
    def urls(self) -> tuple[str, ...]:
        """Every engine that failed, in order."""
        return tuple(str(getattr(error, "url", "") or getattr(error, "who", "")) for error in self.failures)


class DeadlineExceeded(WeightcastError):
    """A wait passed its deadline.

    Attributes:
        who: Process that did not answer: an engine's URL, an engine rank or a trainer rank.
        waiting_for: Awaited event, e.g. ``"bucket 3 in group wc-1"``.
        timeout_s: Deadline, in seconds.
    """

    def __init__(self, *, who: str, waiting_for: str, timeout_s: float, hint: str | None = None) -> None:
        super().__init__(f"{who}: waited {timeout_s:g} s for {waiting_for}", hint=hint)
        self.who = who
        self.waiting_for = waiting_for
        self.timeout_s = timeout_s


class VerificationFailed(WeightcastError):
    """An engine received or holds other weights than were sent.

    Attributes:
        names: The tensors that differ, in order.
    """

    def __init__(self, message: str, *, url: str, names: Sequence[str], hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.url = url
        self.names = tuple(names)


class NotFinite(WeightcastError):
    """Weights to be sent are NaN or infinite.

    Attributes:
        names: Tensors of the first bucket with such values, in order.
    """

    def __init__(self, message: str, *, names: Sequence[str], hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.names = tuple(names)


class TrainerMismatch(WeightcastError):
    """Replicas of a tensor differ among trainer ranks, or the gathered bytes differ from the ranks' shards.

    Attributes:
        names: The tensors, in order.
        ranks: Trainer ranks that disagree; empty if the rank at fault is unknown.
    """

    def __init__(self, message: str, *, names: Sequence[str], ranks: Sequence[int], hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.names = tuple(names)
        self.ranks = tuple(ranks)


class TrainerRankFailed(WeightcastError):
    """Another rank of the training job failed, or did not take part in a collective step in time."""


class EngineFailure(WeightcastError):
    """Inside an engine: a rank died or could not do its work."""

    def __init__(self, message: str, *, ranks: Sequence[int] = (), hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.ranks = tuple(ranks)


class Refused(WeightcastError):
    """Inside an engine: the message is valid but does not fit the state it is in.  Nothing changed."""


class UpdateFailed(WeightcastError):
    """One update failed."""

    def __init__(self, message: str, *, report: UpdateReport, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self._report = report

    @property
    def report(self) -> UpdateReport:
        """The report with one row for each target, which has the version that it serves now."""
        assert self._report is not None
        return self._report

    @property
    def half_updated(self) -> tuple[str, ...]:
        """URLs of the targets that are quarantined or unknown; no request may go there."""
        return tuple(row.url for row in self.report.targets if row.status in ("quarantined", "unknown"))
