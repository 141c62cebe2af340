"""The events that a real session handler emits, for every way in which a session can end."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from tests.helpers.clock import PATIENCE_S
from tests.helpers.models import weights_of
from tests.helpers.session_bench import Bench
from tests.helpers.sessions import Sender
from weightcast.errors import EngineFailure
from weightcast.watch.sessions import Answered, SessionRecord, SessionWatcher
from weightcast.wire.messages import Revert

TRACEPARENT = "00-" + "0123456789abcdef" * 2 + "-" + "89abcdef" * 2 + "-01"


class Heard(SessionWatcher):
    """Remembers what it is told, and can be waited for."""

    def __init__(self) -> None:
        self.calls: list[str] = []  # sessions and states in short, in order
        self.answers: list[Answered] = []
        self.sessions: list[SessionRecord] = []  # that were opened
        self.ends: list[SessionRecord] = []
        self.reasons: list[str] = []  # of states
        self.more = threading.Condition()

    def opened(self, session: SessionRecord) -> None:
        self.sessions.append(session)
        self.calls.append(f"opened {session.version}")

    def answered(self, session: SessionRecord | None, answered: Answered) -> None:
        self.answers.append(answered)

    def ended(self, session: SessionRecord) -> None:
        self.calls.append(f"{session.outcome} {session.version}, serves {session.serves}")
        with self.more:
            self.ends.append(replace(session))
            self.more.notify_all()

    def state_changed(self, session: SessionRecord | None, state: str, version: int | None, reason: str) -> None:
        self.reasons.append(reason)
        self.calls.append(f"{state} {version}")

    def end(self) -> SessionRecord:
        with self.more:
            assert self.more.wait_for(lambda: self.ends, PATIENCE_S)
            return self.ends[0]


@pytest.fixture
def heard():
    return Heard()


@pytest.fixture
def bench(heard):
    made: list[Bench] = []

    def make(**options: Any) -> Bench:
        made.append(Bench(watchers=[heard], **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_committed_session_has_the_steps_of_every_rank(bench, heard, tp_size):
    engine = bench(tp_size=tp_size)
    sender = Sender(weights_of(1), version=1, traceparent=TRACEPARENT)
    engine.transfer(sender)
    ack = engine.tell(sender.commit(sender.digests()[1]))

    assert heard.calls == ["opened 1", "updating 0", "committed 1, serves 1", "serving 1"]
    [opened], [ended] = heard.sessions, heard.ends
    assert (opened.session, opened.traceparent) == (sender.session[:8], TRACEPARENT)
    assert ended.stall_s == ack.stall_s > 0
    answered = heard.answers
    buckets = len(sender.layouts)
    assert [event.message for event in answered] == ["open", *["bucket"] * buckets, "close", "commit"]
    assert all(event.ok and event.session == sender.session[:8] for event in answered)
    for index, event in enumerate(answered[1 : 1 + buckets]):
        assert (event.bucket, event.transport, event.bytes) == (index, "ipc", sender.layouts[index].size_bytes)
        phases = {(step.rank, step.phase) for step in event.steps}
        assert phases == {(rank, phase) for rank in range(tp_size) for phase in ("wire", "load")}
        for step in event.steps:
            assert step.bucket == index
            assert event.began <= step.began <= step.ended <= event.ended
    assert {step.phase for step in answered[-1].steps} == {"switch", "verify", "pause", "resume"}
    assert {step.rank for step in answered[-1].steps if step.phase == "pause"} == {None}
    assert ended.last == answered[-1]
    assert ended.bytes == sum(event.bytes for event in answered)


def test_an_answer_tells_the_trainer_the_same_steps_and_when_it_was_made(bench, heard):
    engine = bench()
    sender = Sender(weights_of(1), version=1)
    acks = [engine.tell(message) for message in sender.transfer()]
    acks.append(engine.tell(sender.commit(sender.digests()[1])))
    for ack, event in zip(acks, heard.answers, strict=True):
        assert ack.steps == event.steps
        assert (ack.heard, ack.answered) == (event.began, event.ended)
    assert [ack.answered for ack in acks] == sorted(ack.answered for ack in acks)


def test_a_refused_message_of_a_stranger_is_an_answer_and_no_more(bench, heard):
    engine = bench()
    engine.refuse(Sender(weights_of(1), version=1).commit())
    [answered] = heard.answers
    assert heard.calls == []
    assert (answered.message, answered.ok) == ("commit", False)
    assert "no such session" in answered.error


def test_an_aborted_session_leaves_the_old_version(bench, heard):
    engine = bench()
    sender = Sender(weights_of(1), version=1)
    engine.transfer(sender)
    engine.tell(sender.abort("the trainer\ngave up"))
    assert heard.calls == ["opened 1", "updating 0", "aborted 1, serves 0", "serving 0"]
    [ended] = heard.ends
    assert ended.reason == "the trainer gave up"  # one line, whatever the trainer sends


def test_a_lost_lease_ends_a_session_once(bench, heard):
    engine = bench()
    sender = Sender(weights_of(1), version=1)
    engine.tell(sender.open)
    engine.engine.lease_lost(sender.session)
    engine.engine.lease_lost(sender.session)
    [ended] = heard.ends
    assert (ended.outcome, ended.reason) == ("aborted", "the trainer's connection was lost")


def test_a_lease_that_runs_out_ends_the_session(bench, heard):
    engine = bench()
    engine.tell(Sender(weights_of(1), version=1, lease_s=0.05).open)
    assert heard.end().reason == "nothing was heard for 0.05 s"


def test_weights_that_differ_at_the_commit_end_the_session(bench, heard):
    engine = bench()
    sender = Sender(weights_of(1), version=1)
    engine.transfer(sender)
    names = sender.digests()[1]
    ack = engine.engine.apply(sender.commit(dict.fromkeys(names, "0" * 16)))
    assert not ack.ok
    assert heard.calls == ["opened 1", "updating 0", "aborted 1, serves 0", "serving 0"]
    [ended] = heard.ends
    assert "differs from what was sent" in ended.reason


def test_an_update_that_breaks_off_without_staging_quarantines_and_the_next_one_heals(bench, heard):
    engine = bench(staging="none")
    sender = Sender(weights_of(1), version=1)
    engine.tell(sender.open)
    engine.tell(sender.announce(0))
    engine.tell(sender.abort("gone"))
    assert heard.calls == ["opened 1", "updating 0", "quarantined 1, serves 0", "quarantined 0"]
    [ended] = heard.ends
    assert "half way" in ended.reason
    assert ended.stall_s > 0
    heard.calls.clear()
    heard.ends.clear()
    engine.update(2)
    assert heard.calls == ["opened 2", "committed 2, serves 2", "serving 2"]


def test_a_rank_that_is_lost_quarantines_in_the_middle_of_a_session(bench, heard, monkeypatch):
    engine = bench()
    sender = Sender(weights_of(1), version=1)
    engine.tell(sender.open)

    def lost(*_: Any, **__: Any) -> Any:
        raise EngineFailure("rank 0 is gone", ranks=[0])

    monkeypatch.setattr(engine.ranks, "apply", lost)
    assert not engine.engine.apply(sender.announce(0)).ok
    assert heard.calls == ["opened 1", "updating 0", "quarantined 0"]
    assert heard.reasons[-1] == "rank 0 is gone"


@pytest.mark.parametrize("hook", ["drop_caches", "set_version", "resume"])
def test_a_hook_that_fails_after_the_switch_is_a_quarantine(bench, heard, hook):
    engine = bench()
    engine.hooks.failing[hook] = RuntimeError("mine")
    sender = Sender(weights_of(1), version=1)
    engine.transfer(sender)
    assert not engine.engine.apply(sender.commit(sender.digests()[1])).ok
    assert heard.calls == ["opened 1", "updating 0", "quarantined 1, serves 1", "quarantined 1"]


def test_a_revert_is_told_once(bench, heard):
    engine = bench()
    engine.update(1)
    sender = Sender(weights_of(2), version=2)
    engine.transfer(sender)
    engine.tell(sender.commit(sender.digests()[1]))
    heard.calls.clear()
    heard.ends.clear()
    revert = Revert(session=sender.session, reason="another engine failed")
    engine.tell(revert)
    engine.tell(revert)
    assert heard.calls == ["reverted 2, serves 1", "serving 1"]
    [ended] = heard.ends
    assert ended.reason == "another engine failed"


def test_a_commit_that_is_said_again_is_no_second_end(bench, heard):
    engine = bench()
    sender = Sender(weights_of(1), version=1)
    engine.transfer(sender)
    for _ in range(2):
        engine.tell(sender.commit(sender.digests()[1]))
    assert len(heard.ends) == 1


def test_weights_that_were_dropped_on_purpose_are_told(bench, heard):
    engine = bench()
    with engine.engine.between_updates():
        engine.engine.discarded("asleep at level 2")
    assert heard.calls == ["quarantined None"]


def test_a_new_trainer_ends_the_old_session_before_its_own_begins(bench, heard):
    engine = bench()
    old, new = (Sender(weights_of(version), version=version) for version in (1, 2))
    engine.tell(old.open)
    engine.engine._interrupt_if_current(old.session, "the trainer left")
    engine.tell(new.open)
    assert heard.calls == ["opened 1", "updating 0", "aborted 1, serves 0", "opened 2"]


def test_a_watcher_that_fails_does_not_fail_the_update():
    class Fails(SessionWatcher):
        def opened(self, session: SessionRecord) -> None:
            raise RuntimeError(session.session)

        def ended(self, session: SessionRecord) -> None:
            raise RuntimeError(session.session)

    engine = Bench(watchers=[Fails()])
    try:
        assert engine.update(1).ok
        assert engine.serves(1)
    finally:
        engine.close()


def test_status_tells_of_the_last_update_and_how_long_the_version_serves(bench):
    engine = bench()
    before = engine.engine.status()
    assert (before.update, before.version) == (None, 0)
    sender = Sender(weights_of(1), version=1)
    engine.transfer(sender)
    running = engine.engine.status()
    assert running.update is not None
    assert (running.update.outcome, running.update.ago_s) == ("running", None)
    assert running.update.buckets == len(sender.layouts)
    assert running.since_s >= before.since_s  # the old version still serves
    began = time.monotonic()
    engine.tell(sender.commit(sender.digests()[1]))
    done = engine.engine.status()
    assert done.since_s <= time.monotonic() - began
    assert done.update is not None
    assert (done.update.outcome, done.update.version) == ("committed", 1)
    assert done.update.ago_s is not None
    assert {"wire", "load", "switch", "pause"} <= set(done.update.phases)
    engine.tell(Revert(session=sender.session, reason="another\x1b[31m"))
    back = engine.engine.status()
    assert back.update is not None
    assert (back.update.outcome, back.update.reason, back.version) == ("reverted", "another\\x1b[31m", 0)
