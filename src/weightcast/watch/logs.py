"""Log lines of updates, as a listener.

All loggers of weightcast are children of ``weightcast``.  These lines come from ``weightcast.update`` in the trainer
and ``weightcast.receiver`` in the engine.  Each record has the extra fields ``session``, ``version`` and ``target``; a
field that does not apply is None.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from weightcast.errors import UpdateFailed
from weightcast.watch.events import (
    Answered,
    Asked,
    AttemptStarted,
    SessionEnded,
    SessionOpened,
    StateChanged,
    TargetNow,
    TargetsChanged,
    UpdateEnded,
    UpdateStarted,
)
from weightcast.watch.listeners import ByKind

trainer_log = logging.getLogger("weightcast.update")
engine_log = logging.getLogger("weightcast.receiver")


class UpdateLog(ByKind):
    """Writes one line where an update begins, ends or fails, and where an engine changes its state.

    Every message to a target is a line at level ``DEBUG``.  The line of an engine that an update succeeded comes a
    moment later, but before any other line of this object: the trainer waits for the answer, and a line takes 0.1 ms.
    """

    def __init__(self) -> None:
        super().__init__(
            {
                UpdateStarted: self._began,
                AttemptStarted: self._attempt,
                Asked: self._asked,
                TargetsChanged: self._changed,
                UpdateEnded: self._ended,
                SessionOpened: self._session_opened,
                Answered: self._answered,
                SessionEnded: self._session_ended,
                StateChanged: self._state_changed,
            },
            later={SessionEnded: self._committed},
        )
        self._session: str | None = None
        self._version: int | None = None
        self._states: dict[str, str] = {}

    # -- trainer

    def _began(self, event: UpdateStarted) -> None:
        self._session, self._version = None, event.version
        if event.rank == 0 and trainer_log.isEnabledFor(logging.DEBUG):
            names = ", ".join(event.targets)
            self._trainer(logging.DEBUG, "update to version %s over %s: %s", event.version, event.transport, names)

    def _attempt(self, event: AttemptStarted) -> None:
        self._session = event.session

    def _changed(self, event: TargetsChanged) -> None:
        for target in event.targets:
            self._target(target)
        self._states = {target.url: target.state for target in event.targets}

    def _asked(self, event: Asked) -> None:
        if not trainer_log.isEnabledFor(logging.DEBUG):
            return
        what = event.message if event.bucket is None else f"{event.message} {event.bucket}"
        took_s = event.ended - event.began
        words = f": {event.error}" if event.error else ""
        self._trainer(
            logging.DEBUG, "%s answered %s after %.6f s%s", event.target, what, took_s, words, target=event.target
        )

    def _target(self, target: TargetNow) -> None:
        before = self._states.get(target.url)
        if target.state == before or target.state not in ("quarantined", "gone", "serving"):
            return
        level = logging.INFO if target.state == "serving" else logging.WARNING
        if before in (None, "joining", "updating") and target.state == "serving":
            level = logging.DEBUG
        words = f": {target.reason}" if target.reason else ""
        self._trainer(level, "%s is %s%s", target.url, target.state, words, target=target.url)

    def _ended(self, event: UpdateEnded) -> None:
        if event.rank:
            return
        report = event.report
        if event.outcome == "failed":
            if event.error_kind == UpdateFailed.__name__:  # its text begins with these words
                self._trainer(logging.ERROR, "%s", event.error)
            else:
                self._trainer(logging.ERROR, "update to version %s failed: %s", event.version, event.error)
            return
        assert report is not None
        serving = sum(row.status == "serving" for row in report.targets)
        level = logging.INFO if event.outcome == "succeeded" else logging.WARNING
        self._trainer(
            level,
            "%d of %d targets serve version %s after %.3f s over %s",
            serving,
            len(report.targets),
            event.version,
            report.seconds,
            event.transport,
        )

    def _trainer(self, level: int, text: str, *values: object, target: str | None = None) -> None:
        trainer_log.log(level, text, *values, extra=self._extra(target))

    # -- engine

    def _session_opened(self, event: SessionOpened) -> None:
        self._session, self._version = event.session, event.version
        if engine_log.isEnabledFor(logging.DEBUG):
            self._engine(logging.DEBUG, "update opened by %s", event.owner)

    def _answered(self, event: Answered) -> None:
        if not engine_log.isEnabledFor(logging.DEBUG):
            return
        what = event.message if event.bucket is None else f"{event.message} {event.bucket}"
        words = f": {event.error}" if event.error else ""
        took_s = event.ended - event.began
        self._engine(logging.DEBUG, "%s took %.6f s%s", what, took_s, words, session=event.session or None)

    def _session_ended(self, event: SessionEnded) -> None:
        match event.outcome:
            case "committed" | "quarantined":  # the first is told later, the second by StateChanged
                pass
            case "aborted":
                text = "update to version %s ended: %s; version %s stays"
                self._engine(logging.WARNING, text, event.version, event.reason, event.serves)
            case "reverted":
                text = "went back from version %s to %s: %s"
                self._engine(logging.WARNING, text, event.version, event.serves, event.reason)

    def _committed(self, event: SessionEnded) -> None:
        if event.outcome == "committed":
            extra = {"session": event.session, "version": event.version, "target": None}
            text = "version %s serves; stall %.6f s"
            _log_at(event.at, engine_log, logging.INFO, text, event.version, event.stall_s, extra=extra)

    def _state_changed(self, event: StateChanged) -> None:
        if event.state == "quarantined":
            # Without a version, the engine was told to drop its weights (sleep level 2).
            level = logging.ERROR if event.version is not None else logging.WARNING
            self._engine(level, "quarantined: %s", event.reason)

    def _engine(self, level: int, text: str, *values: object, session: str | None = None) -> None:
        self._settle()
        extra = self._extra(None)
        engine_log.log(level, text, *values, extra=extra if session is None else {**extra, "session": session})

    def _extra(self, target: str | None) -> dict[str, object]:
        return {"session": self._session, "version": self._version, "target": target}


def _log_at(
    at: float, logger: logging.Logger, level: int, text: str, *values: object, extra: Mapping[str, object]
) -> None:
    """Writes a line that has the time of its event, ``at`` on the monotonic clock, and not that of its writing."""
    if not logger.isEnabledFor(level):
        return
    path, line, function, _ = logger.findCaller(stacklevel=2)  # the caller of this function
    record = logger.makeRecord(logger.name, level, path, line, text, values, None, function, extra)
    ago_s = time.monotonic() - at
    record.created -= ago_s
    record.msecs = record.created % 1 * 1000
    record.relativeCreated -= ago_s * 1000
    logger.handle(record)
