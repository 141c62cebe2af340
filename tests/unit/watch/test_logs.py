"""Log lines of updates have their session, version and target as fields."""

from __future__ import annotations

import logging
import time

import pytest

from tests.helpers.watching import SESSION, A, B, ended, report, row, session_events, started, targets, trainer_events
from weightcast.watch.events import SessionEnded, StateChanged
from weightcast.watch.listeners import Events
from weightcast.watch.logs import UpdateLog


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.DEBUG, "weightcast")
    log = Events([UpdateLog()])

    def tell(*events, level: int = logging.INFO) -> list[tuple[str, str, str]]:
        caplog.clear()
        for event in events:
            log.emit(event)
        log.settle()
        for record in caplog.records:
            assert record.name.startswith("weightcast.")
            assert all(hasattr(record, field) for field in ("session", "version", "target"))
        return [
            (record.levelname, record.name, record.getMessage()) for record in caplog.records if record.levelno >= level
        ]

    tell.records = lambda: caplog.records
    return tell


def test_an_update_is_one_line(lines):
    [(level, name, text)] = lines(started(), ended("succeeded", report(row(A), row(B))))
    assert (level, name) == ("INFO", "weightcast.update")
    assert text == "2 of 2 targets serve version 7 after 2.000 s over ipc"
    assert [record.version for record in lines.records()] == [7, 7]


def test_a_target_that_falls_out_is_a_line_with_its_name(lines):
    told = lines(*trainer_events())
    assert ("WARNING", "weightcast.update", f"{B} is quarantined: a reason") in told
    [record] = [record for record in lines.records() if "is quarantined" in record.getMessage()]
    assert (record.target, record.session, record.version) == (B, SESSION, 7)
    assert told[-1][0] == "WARNING"  # one of two


def test_a_state_is_told_when_it_changes_and_not_with_every_update(lines):
    lines(targets(a="serving", b="quarantined"))
    assert lines(targets(a="serving", b="quarantined")) == []
    assert [text for _, _, text in lines(targets(a="serving", b="serving"))] == [f"{B} is serving"]


def test_a_failed_update_is_an_error(lines):
    [(level, _, text)] = lines(started(), ended("failed", error="a did not answer"))
    assert (level, text) == ("ERROR", "update to version 7 failed: a did not answer")


def test_an_error_that_begins_with_the_version_is_the_whole_line(lines):
    said = "update to version 7 failed: a did not answer"
    [(level, _, text)] = lines(started(), ended("failed", error=said, error_kind="UpdateFailed"))
    assert (level, text) == ("ERROR", said)


def test_the_line_of_a_commit_has_the_time_of_the_commit_however_late_it_is_written(lines):
    now, ago_s = time.time(), 4000.0
    event = SessionEnded(
        session=SESSION, version=7, serves=7, outcome="committed", stall_s=0.1, at=time.monotonic() - ago_s
    )
    lines(event)
    [record] = lines.records()
    assert record.created == pytest.approx(now - ago_s, abs=60)
    assert record.funcName == "_committed"
    told = logging.Formatter("%(asctime)s").format(record)
    first, last = (logging.Formatter().formatTime(at_time(record, now - ago_s + more)) for more in (-60, 60))
    assert first < told < last
    assert record.msecs == pytest.approx(record.created % 1 * 1000)


def at_time(record: logging.LogRecord, created: float) -> logging.LogRecord:
    """A copy of a record with another time."""
    other = logging.makeLogRecord(vars(record))
    other.created = created
    return other


def test_other_ranks_say_nothing(lines):
    assert lines(started(rank=1), ended("succeeded", report(row(A)), rank=1), level=logging.DEBUG) == []


def test_every_message_is_told_at_debug_alone(lines):
    told = lines(*trainer_events(), level=logging.DEBUG)
    assert sum("answered" in text for _, _, text in told) == 5
    assert any(text.startswith(f"{B} answered commit") and "out of memory" in text for _, _, text in told)


@pytest.mark.parametrize(
    ("outcome", "level", "text"),
    [
        ("committed", "INFO", "version 7 serves; stall 0.400000 s"),
        ("aborted", "WARNING", "update to version 7 ended: the trainer gave up; version 6 stays"),
        ("reverted", "WARNING", "went back from version 7 to 6: the trainer gave up"),
    ],
)
def test_the_end_of_a_session_is_one_line(lines, outcome, level, text):
    told = lines(*session_events(outcome))
    assert told == [(level, "weightcast.receiver", text)]
    assert "update opened by process 1 on t" in [record.getMessage() for record in lines.records()]
    assert {record.session for record in lines.records()} == {SESSION}


def test_a_success_is_told_before_what_comes_after_it(lines):
    told = lines(*session_events("committed"), StateChanged(state="quarantined", version=7, reason="lost", at=9.0))
    assert [text for _, _, text in told] == ["version 7 serves; stall 0.400000 s", "quarantined: lost"]


def test_a_quarantine_is_an_error_and_a_planned_loss_of_weights_a_warning(lines):
    state = StateChanged(state="quarantined", version=3, reason="half way", at=1.0)
    assert lines(state) == [("ERROR", "weightcast.receiver", "quarantined: half way")]
    [(level, _, _)] = lines(StateChanged(state="quarantined", version=None, reason="asleep", at=1.0))
    assert level == "WARNING"
