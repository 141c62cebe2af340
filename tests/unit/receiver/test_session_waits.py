"""Messages that wait: for a group's other members, and for the bucket before."""

from __future__ import annotations

import threading
import time

import pytest

from tests.helpers.clock import PATIENCE_S
from tests.helpers.models import weights_of
from tests.helpers.session_bench import Bench, in_thread, meeting
from tests.helpers.sessions import Sender
from weightcast.receiver import session_steps
from weightcast.wire.answers import Ack, RankAck
from weightcast.wire.messages import Leave, Message


def under_way(made: Bench, message: Message) -> tuple[threading.Thread, list[Ack]]:
    answers: list[Ack] = []
    thread = threading.Thread(target=lambda: answers.append(made.engine.apply(message)))
    thread.start()
    time.sleep(0.2)
    assert not answers
    return thread, answers


def test_a_group_that_failed_is_told_from_a_rank_that_did(bench):
    made = bench()
    ack = made.engine.apply(meeting(timeout_s=0.2))
    assert (ack.ok, ack.cause, ack.state) == (False, "group", "serving")
    made.tell(Leave(group="g"))


def test_a_meeting_without_a_session_ends_soon(bench, monkeypatch):
    monkeypatch.setattr(session_steps, "_UNOWNED_JOIN_S", 0.2)
    made = bench()
    assert made.engine.apply(meeting(timeout_s=80000.0)).cause == "group"
    made.update(1)


def test_a_meeting_without_a_session_gives_way_to_an_update(bench):
    made = bench()
    waiting, answers = under_way(made, meeting())
    made.update(1)
    waiting.join(PATIENCE_S)
    assert answers[0].cause == "group"
    assert made.serves(1)


def test_a_meeting_for_a_session_that_is_over_is_refused(bench):
    # The last words of a trainer that died: its session ends before they are read.
    made = bench()
    sender = Sender(weights_of(1), version=1)
    assert "no such session" in made.refuse(meeting(session=sender.session))
    made.tell(sender.open)
    assert "no such session" in made.refuse(meeting(session="0" * 32))
    made.engine.lease_lost(sender.session)
    assert "no such session" in made.refuse(meeting(session=sender.session))


def test_the_end_of_a_session_ends_its_meeting(bench):
    made = bench()
    sender = Sender(weights_of(1), version=1)
    made.tell(sender.open)
    waiting, answers = under_way(made, meeting(session=sender.session))
    made.engine.lease_lost(sender.session)
    waiting.join(PATIENCE_S)
    assert answers[0].cause == "group"
    assert made.engine.state == "serving"
    made.update(2)


def test_a_new_trainer_need_not_wait_until_the_old_ones_end_is_over(bench):
    made = bench()
    old, new = Sender(weights_of(1), version=1), Sender(weights_of(2), version=2)
    made.tell(old.open)
    made.tell(old.announce(0))
    made.engine._steps.session.ending = "the trainer's connection was lost"  # its abort is on the way
    made.tell(new.open)
    assert made.engine.holds(new.session)
    made.engine.lease_lost(old.session)
    assert made.engine.holds(new.session)


def test_strangers_do_not_wait_for_a_message_under_way(bench):
    made = bench()
    sender, stranger = Sender(weights_of(1), version=1), Sender(weights_of(2), version=2)
    made.tell(sender.open)
    with made.engine._busy:
        answers: list[Ack] = []
        threads = [
            threading.Thread(target=lambda message=message: answers.append(made.engine.apply(message)))
            for message in (stranger.open, stranger.announce(0), stranger.close(), stranger.commit())
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert len(answers) == 4
        assert not any(ack.ok for ack in answers)


@pytest.mark.parametrize("staging", ["device", "none"])
def test_a_bucket_that_overtakes_the_one_before_it_waits_for_its_turn(bench, staging):
    made = bench(staging=staging)
    sender, quicker = Sender(weights_of(3), version=3), Sender(weights_of(3), version=3)
    quicker.session = sender.session
    made.tell(sender.open)
    thread, acks = in_thread(made.engine, quicker.announce(1))
    thread.join(0.1)
    assert thread.is_alive()
    made.tell(sender.announce(0))
    thread.join(PATIENCE_S)
    assert [ack.ok for ack in acks] == [True]
    for index in range(2, len(sender.layouts)):
        made.tell(sender.announce(index))
    made.tell(sender.close())
    assert len(sender.layouts) > 2
    made.tell(sender.commit(sender.digests()[1]))
    assert made.serves(3)


def test_who_waits_for_a_turn_hears_of_the_end(bench):
    made = bench()
    sender = Sender(weights_of(3), version=3)
    made.tell(sender.open)
    thread, acks = in_thread(made.engine, sender.announce(1))
    thread.join(0.1)
    assert thread.is_alive()
    made.tell(sender.abort("changed my mind"))
    thread.join(PATIENCE_S)
    assert [ack.ok for ack in acks] == [False]
    assert "no such session" in acks[0].error
    assert made.serves(0)
    made.update(4)


def test_who_waits_for_a_turn_that_never_comes_is_refused_in_time(bench):
    made = bench()
    sender = Sender(weights_of(3), version=3, timeout_s=0.2)
    made.tell(sender.open)
    assert "bucket 1 came where bucket 0 was due" in made.refuse(sender.announce(1))
    assert "bucket 2 came where bucket 0 was due" in made.refuse(sender.announce(2))


def test_of_two_in_flight_both_say_that_their_group_has_failed(bench, monkeypatch):
    made = bench()
    sender = Sender(weights_of(3), version=3)
    made.tell(sender.open)
    lost = RankAck(rank=0, ok=False, cause="group", error="the trainer is gone")
    monkeypatch.setattr(made.ranks, "apply", lambda message, timeout_s: [lost])
    acks = [made.engine.apply(sender.announce(index)) for index in (0, 1)]
    assert [ack.cause for ack in acks] == ["group", "group"]
    assert all("the trainer is gone" in ack.error for ack in acks)
