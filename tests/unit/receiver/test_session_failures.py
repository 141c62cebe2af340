"""A session whose hooks raise or whose rank dies leaves one whole version, or a quarantined engine."""

from __future__ import annotations

import pytest

from tests.helpers.models import weights_of
from tests.helpers.sessions import Sender
from weightcast.errors import DeadlineExceeded, EngineFailure, Refused
from weightcast.wire.answers import RankAck
from weightcast.wire.messages import Message, Readback


def test_a_pause_that_fails_at_the_switch_leaves_the_old_version(bench):
    made = bench()
    late = DeadlineExceeded(who="engine", waiting_for="3 requests to finish", timeout_s=1)
    sender = Sender(weights_of(1), version=1, pause="wait")
    made.transfer(sender)
    made.hooks.failing["pause"] = late
    ack = made.engine.apply(sender.commit(sender.digests()[1]))
    assert "3 requests to finish" in ack.error
    made.hooks.failing.clear()
    assert "has failed" in made.refuse(sender.commit())
    assert made.tell(sender.abort()).state == "serving"
    assert made.hooks.calls[-1] == "resume"
    assert made.serves(0)
    made.update(2)
    assert made.serves(2)


@pytest.mark.parametrize(
    "error", [DeadlineExceeded(who="e", waiting_for="x", timeout_s=1), RuntimeError("out of order")]
)
def test_a_pause_that_fails_at_open_leaves_no_session(bench, error):
    made = bench(staging="none")
    made.hooks.failing["pause"] = error
    sender = Sender(weights_of(1), version=1)
    ack = made.engine.apply(sender.open)
    assert not ack.ok
    assert ack.state == made.engine.state == "serving"
    assert not made.engine.holds(sender.session)
    made.hooks.failing.clear()
    made.update(2)
    assert made.serves(2)


@pytest.mark.parametrize("hook", ["drop_caches", "set_version"])
def test_a_hook_that_fails_after_the_switch_quarantines(bench, hook):
    made = bench()
    sender = Sender(weights_of(1), version=1)
    made.transfer(sender)
    made.hooks.failing[hook] = EngineFailure("a rank is gone", ranks=[0])
    ack = made.engine.apply(sender.commit(sender.digests()[1]))
    assert (ack.ok, ack.state) == (False, "quarantined")
    assert ack.failed_ranks == (0,)
    assert made.hooks.paused
    assert "gone" in made.engine.info().message
    made.hooks.failing.clear()
    made.update(2)
    assert made.engine.state == "serving"
    assert made.serves(2)


def test_an_engine_that_would_not_hold_still_is_not_switched_while_it_runs(bench):
    made = bench()
    sender = Sender(weights_of(1), version=1)
    made.transfer(sender)
    made.hooks.failing["pause"] = Refused("not in this mode")
    assert "not in this mode" in made.refuse(sender.commit())
    made.hooks.failing.clear()
    assert "this session has failed" in made.refuse(sender.commit())
    assert made.hooks.calls == ["pause abort"]
    assert made.serves(0)
    assert made.tell(sender.abort()).state == "serving"
    made.update(2)
    assert made.serves(2)


late = DeadlineExceeded(who="e", waiting_for="x", timeout_s=1)

unforeseen = RuntimeError("out of order")


@pytest.mark.parametrize("hook", ["drop_caches", "set_version", "resume"])
def test_whatever_a_hook_raises_after_the_switch_quarantines(bench, hook):
    made = bench()
    sender = Sender(weights_of(1), version=1)
    made.transfer(sender)
    made.hooks.failing[hook] = unforeseen
    ack = made.engine.apply(sender.commit(sender.digests()[1]))
    assert (ack.ok, ack.state, ack.error) == (False, "quarantined", "RuntimeError: out of order")
    assert made.hooks.paused
    assert made.engine.info().message == ("version 1 is in, but not what depends on it: RuntimeError: out of order")
    made.hooks.failing.clear()
    made.update(2)
    assert made.engine.state == "serving"
    assert made.serves(2)


@pytest.mark.parametrize("error", [late, EngineFailure("no loop"), unforeseen])
def test_an_engine_that_does_not_go_on_after_an_abort_is_quarantined(bench, error):
    made = bench(staging="none")
    sender = Sender(weights_of(1), version=1)
    made.tell(sender.open)
    made.hooks.failing["resume"] = error
    ack = made.engine.apply(sender.abort())
    assert (ack.ok, ack.state) == (False, "quarantined")
    assert made.hooks.paused
    info = made.engine.info()
    assert info.session_owner is None
    assert str(error) in info.message
    made.hooks.failing.clear()
    made.update(2)
    assert made.engine.state == "serving"
    assert made.serves(2)


@pytest.mark.parametrize("error", [late, unforeseen])
def test_whatever_the_executor_raises_at_an_abort_does_not_leave_the_engine_paused_for_nobody(
    bench, monkeypatch, error
):
    made = bench(staging="none")
    sender = Sender(weights_of(1), version=1)
    made.tell(sender.open)

    def fail(message: Message, *, timeout_s: float) -> list[RankAck]:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(made.ranks, "apply", fail)
        ack = made.engine.apply(sender.abort())
    assert (ack.ok, ack.state) == (False, "quarantined")
    info = made.engine.info()
    assert (info.state, info.session_owner, info.paused) == ("quarantined", None, True)
    assert str(error) in info.message
    made.update(2)
    assert made.engine.state == "serving"
    assert made.serves(2)


def test_an_engine_that_cannot_even_pause_is_quarantined_all_the_same(bench):
    made = bench(tp_size=2)
    sender = Sender(weights_of(1), version=1)
    made.tell(sender.open)
    made.ranks.broken = "Announce"
    made.hooks.failing["pause"] = unforeseen
    ack = made.engine.apply(sender.announce(0))
    assert (ack.ok, ack.failed_ranks, ack.state) == (False, (1,), "quarantined")
    message = made.engine.info().message
    assert "rank 1 was killed" in message
    assert "could not be paused and may go on generating: RuntimeError: out of order" in message


@pytest.mark.parametrize("error", [None, late, unforeseen])
def test_what_a_stranger_asks_in_vain_does_not_end_the_update(bench, monkeypatch, error):
    made = bench()
    apply = made.ranks.apply

    def fail(message: Message, *, timeout_s: float) -> list[RankAck]:
        if not isinstance(message, Readback):
            return apply(message, timeout_s=timeout_s)
        if error is not None:
            raise error
        return [RankAck(rank=0, ok=False, error="the model computes with something else")]

    monkeypatch.setattr(made.ranks, "apply", fail)
    sender = Sender(weights_of(3), version=3)
    for message in sender.transfer():
        made.tell(message)
        made.refuse(Readback())
    made.tell(sender.commit(sender.digests()[1]))
    assert made.engine.state == "serving"
    assert made.serves(3)


@pytest.mark.parametrize("what", ["Open", "Announce", "Close", "Commit", "Abort", "Readback"])
def test_a_rank_that_dies_quarantines_the_engine_and_is_named(bench, what):
    made = bench(tp_size=2)
    sender = Sender(weights_of(1), version=1)
    made.ranks.broken = what
    messages = {
        "Open": lambda: sender.open,
        "Announce": lambda: sender.announce(0),
        "Close": sender.close,
        "Commit": sender.commit,
        "Abort": sender.abort,
        "Readback": Readback,
    }
    if what in ("Announce", "Abort"):
        made.tell(sender.open)
    if what == "Close":
        made.tell(sender.open)
        for index in range(len(sender.layouts)):
            made.tell(sender.announce(index))
    if what == "Commit":
        made.transfer(sender)
    ack = made.engine.apply(messages[what]())
    assert (ack.ok, ack.failed_ranks, ack.state) == (False, (1,), "quarantined")
    assert "rank 1 was killed" in ack.error
    assert "rank 1 was killed" in made.engine.info().message
    made.ranks.broken = "all"
    made.engine.apply(sender.abort())
    assert made.engine.info().session_owner is None
    assert not made.engine.apply(Sender(weights_of(2), version=2).open).ok


def test_ranks_that_end_between_two_messages_quarantine_the_engine_until_an_update(bench):
    made = bench(tp_size=2)
    made.engine.ranks_lost(EngineFailure("rank 1 was killed", ranks=[1], hint="restart the engine"))
    info = made.engine.info()
    assert (info.state, info.paused, info.message) == ("quarantined", True, "rank 1 was killed (restart the engine)")
    made.update(1)
    assert made.serves(1)


def test_ranks_that_end_during_a_session_end_it(bench):
    made = bench(tp_size=2)
    sender = Sender(weights_of(1), version=1)
    made.tell(sender.open)
    made.engine.ranks_lost(EngineFailure("rank 1 was killed", ranks=[1]))
    assert "rank 1 was killed" in made.refuse(sender.announce(0))
    assert made.engine.info().state == "quarantined"
