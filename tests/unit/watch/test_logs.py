"""Log lines of updates have their session, version and target as fields."""

from __future__ import annotations

import logging

import pytest

from tests.helpers.watching import SESSION, A, B, ended, report, row, started, targets, tell_session, trainer_events
from weightcast.watch.listeners import Events
from weightcast.watch.logs import SessionLog


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.DEBUG, "weightcast")
    log = Events()

    def tell(*events, level: int = logging.INFO, events_of: Events = log) -> list[tuple[str, str, str]]:
        caplog.clear()
        for event in events:
            event() if callable(event) else events_of.emit(event)
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


def test_other_ranks_say_nothing(lines):
    told = [started(rank=1), ended("succeeded", report(row(A)), rank=1)]
    assert lines(*told, level=logging.DEBUG, events_of=Events(rank=1)) == []


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
    told = lines(lambda: tell_session(SessionLog(), outcome))
    assert told == [(level, "weightcast.receiver", text)]
    assert "update opened by process 1 on t" in [record.getMessage() for record in lines.records()]
    assert {record.session for record in lines.records()} == {SESSION}


def test_a_quarantine_is_an_error_and_a_planned_loss_of_weights_a_warning(lines):
    log = SessionLog()
    told = lines(lambda: log.state_changed(None, "quarantined", 3, "half way"))
    assert told == [("ERROR", "weightcast.receiver", "quarantined: half way")]
    [(level, _, _)] = lines(lambda: log.state_changed(None, "quarantined", None, "asleep"))
    assert level == "WARNING"
