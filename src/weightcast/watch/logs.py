"""Log lines of updates.

All loggers of weightcast are children of ``weightcast``.  These lines come from ``weightcast.update`` in the trainer
and ``weightcast.receiver`` in the engine.  Each record has the extra fields ``session``, ``version`` and ``target``; a
field that does not apply is None.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from weightcast.errors import UpdateFailed
from weightcast.watch.events import Asked, TargetNow, TargetsChanged, UpdateEnded, UpdateStarted
from weightcast.watch.recording import Recording
from weightcast.watch.sessions import Answered, SessionRecord, SessionWatcher

# A formatter of the caller's may ask for these fields in every line.
NO_FIELDS: Mapping[str, object] = {"session": None, "version": None, "target": None}
trainer_log = logging.getLogger("weightcast.update")
engine_log = logging.getLogger("weightcast.receiver")


class UpdateLog:
    """Writes the lines of the head: where an update begins, ends or fails, and where a target changes its state.

    Every message to a target is a line at level ``DEBUG``.
    """

    def __init__(self) -> None:
        self._states: dict[str, str] = {}

    def began(self, update: Recording, event: UpdateStarted) -> None:
        """Tells of the beginning."""
        if trainer_log.isEnabledFor(logging.DEBUG):
            names = ", ".join(event.targets)
            _line(update, logging.DEBUG, "update to version %s over %s: %s", event.version, event.transport, names)

    def asked(self, update: Recording, event: Asked) -> None:
        """Tells of a message to a target."""
        if trainer_log.isEnabledFor(logging.DEBUG):
            text, values = "%s answered %s after %.6f s%s", _message(event)
            _line(update, logging.DEBUG, text, event.target, *values, target=event.target)

    def targets(self, update: Recording, event: TargetsChanged) -> None:
        """Tells which targets are in another state than before."""
        for target in event.targets:
            self._target(update, target)
        self._states = {target.url: target.state for target in event.targets}

    def ended(self, update: Recording, event: UpdateEnded) -> None:
        """Tells of the end."""
        report = event.report
        if event.outcome == "failed":
            if event.error_kind == UpdateFailed.__name__:  # its text begins with these words
                _line(update, logging.ERROR, "%s", event.error)
            else:
                _line(update, logging.ERROR, "update to version %s failed: %s", event.version, event.error)
            return
        assert report is not None
        serving = sum(row.status == "serving" for row in report.targets)
        level = logging.INFO if event.outcome == "succeeded" else logging.WARNING
        text = "%d of %d targets serve version %s after %.3f s over %s"
        _line(update, level, text, serving, len(report.targets), event.version, report.seconds, event.transport)

    def _target(self, update: Recording, target: TargetNow) -> None:
        before = self._states.get(target.url)
        if target.state == before or target.state not in ("quarantined", "gone", "serving"):
            return
        level = logging.INFO if target.state == "serving" else logging.WARNING
        if before in (None, "joining", "updating") and target.state == "serving":
            level = logging.DEBUG
        words = f": {target.reason}" if target.reason else ""
        _line(update, level, "%s is %s%s", target.url, target.state, words, target=target.url)


class SessionLog(SessionWatcher):
    """Writes the lines of an engine: where a session ends, and where the engine is quarantined.

    Every message is a line at level ``DEBUG``.
    """

    def opened(self, session: SessionRecord) -> None:
        """As ``SessionWatcher.opened``."""
        self._line(session, logging.DEBUG, "update opened by %s", session.owner)

    def answered(self, session: SessionRecord | None, answered: Answered) -> None:
        """As ``SessionWatcher.answered``."""
        if engine_log.isEnabledFor(logging.DEBUG):
            self._line(session, logging.DEBUG, "%s took %.6f s%s", *_message(answered))

    def ended(self, session: SessionRecord) -> None:
        """As ``SessionWatcher.ended``."""
        match session.outcome:
            case "committed":
                text, stall_s = "version %s serves; stall %.6f s", session.stall_s
                self._line(session, logging.INFO, text, session.version, stall_s)
            case "aborted":
                text = "update to version %s ended: %s; version %s stays"
                self._line(session, logging.WARNING, text, session.version, session.reason, session.serves)
            case "reverted":
                text = "went back from version %s to %s: %s"
                self._line(session, logging.WARNING, text, session.version, session.serves, session.reason)
            case _:  # ``state_changed`` tells of a quarantine
                pass

    def state_changed(self, session: SessionRecord | None, state: str, version: int | None, reason: str) -> None:
        """As ``SessionWatcher.state_changed``."""
        if state == "quarantined":
            # Without a version, the engine was told to drop its weights (sleep level 2).
            self._line(session, logging.ERROR if version is not None else logging.WARNING, "quarantined: %s", reason)

    def _line(self, session: SessionRecord | None, level: int, text: str, *values: object) -> None:
        known = {} if session is None else {"session": session.session, "version": session.version}
        engine_log.log(level, text, *values, extra={**NO_FIELDS, **known})


def _message(event: Asked | Answered) -> tuple[str, float, str]:
    """The message, its seconds, and its error if it has one."""
    what = event.message if event.bucket is None else f"{event.message} {event.bucket}"
    return what, event.ended - event.began, f": {event.error}" if event.error else ""


def _line(update: Recording, level: int, text: str, *values: object, target: str | None = None) -> None:
    session = update.attempts[-1].session if update.attempts else None
    extra = {"session": session, "version": update.version, "target": target}
    trainer_log.log(level, text, *values, extra=extra)
