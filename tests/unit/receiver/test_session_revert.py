"""A commit that comes again, and a commit that is taken back."""

from __future__ import annotations

import msgspec
import pytest
import torch

from tests.helpers.models import weights_of
from tests.helpers.session_bench import Bench
from tests.helpers.sessions import Sender
from weightcast.wire.answers import Ack
from weightcast.wire.layout import Packing, plan_buckets
from weightcast.wire.messages import Prepare, Revert
from weightcast.wire.plans import UpdateTables


@pytest.fixture(params=["device", "host"])
def staged(request):
    made = Bench(staging=request.param, tp_size=2)
    yield made
    made.close()


def committed(bench: Bench, version: int, **changes) -> tuple[Sender, Ack]:
    sender = Sender(weights_of(version), version=version, **changes)
    bench.transfer(sender)
    return sender, bench.tell(sender.commit(sender.digests()[1]))


def timeless(ack: Ack) -> Ack:
    """The answer without the moments at which it was asked for and given."""
    return msgspec.structs.replace(ack, heard=None, answered=None)


def test_a_commit_that_is_said_again_gets_the_same_answer_and_switches_once(staged):
    sender, first = committed(staged, 1)
    again = staged.tell(sender.commit(sender.digests()[1]))
    assert timeless(again) == timeless(first)
    assert staged.serves(1)
    other, _ = committed(staged, 2)
    assert "no such session" in staged.refuse(sender.commit())
    assert staged.tell(other.commit()).version == 2
    assert staged.serves(2)


def test_a_revert_brings_back_weights_version_and_digest_and_may_be_said_again(staged):
    committed(staged, 1)
    before = staged.engine.info()
    sender, _ = committed(staged, 2)
    staged.hooks.calls.clear()
    ack = staged.tell(Revert(session=sender.session))
    assert staged.serves(1)
    assert staged.engine.info() == before
    assert (ack.version, ack.digest) == (1, before.digest)
    assert staged.hooks.calls == ["pause abort", "drop_caches", "set_version 1", "resume"]
    assert timeless(staged.tell(Revert(session=sender.session))) == timeless(ack)
    assert staged.serves(1)
    assert "switched back to version 1" in staged.refuse(sender.commit())
    staged.update(3)
    assert staged.serves(3)


def test_after_a_revert_the_engine_may_sleep_and_prepare(staged):
    committed(staged, 1)
    sender, _ = committed(staged, 2)
    staged.tell(Revert(session=sender.session))
    specs = sender.open.specs
    plan = UpdateTables(specs, plan_buckets(specs, bucket_bytes=4096, packing=Packing()))
    staged.tell(Prepare(plan=plan, verify="resident"))
    for receiver in staged.ranks.receivers:
        receiver.sleep()
        receiver.wake()
    assert staged.serves(1)
    staged.update(3)
    assert staged.serves(3)


def test_only_the_last_commit_can_be_taken_back_and_only_until_the_next_open(staged):
    first, _ = committed(staged, 1)
    second, _ = committed(staged, 2)
    assert "no such session" in staged.refuse(Revert(session=first.session))
    third = Sender(weights_of(3), version=3)
    staged.tell(third.open)
    assert "no such session" in staged.engine.apply(Revert(session=second.session)).error
    staged.tell(third.abort())
    assert "no such session" in staged.refuse(Revert(session=second.session))
    assert staged.serves(2)


def test_without_a_second_set_of_weights_a_revert_is_refused_and_the_new_version_goes_on():
    bench = Bench(staging="none")
    try:
        sender, _ = committed(bench, 1)
        assert "no second set" in bench.refuse(Revert(session=sender.session))
        assert bench.serves(1)
        assert not bench.hooks.paused
    finally:
        bench.close()


def test_a_revert_to_other_weights_than_were_served_quarantines(staged):
    committed(staged, 1)
    sender, _ = committed(staged, 2)
    staging = staged.ranks.receivers[1].loader.staging
    with torch.no_grad():
        staging.target("qkv").view(-1)[0] += 1  # a bit that flipped while the old set waited
    ack = staged.engine.apply(Revert(session=sender.session))
    assert not ack.ok
    assert (staged.engine.state, staged.hooks.paused) == ("quarantined", True)
    assert "going back from version 2 to 1 failed" in staged.engine.info().message
    staged.update(3)
    assert staged.serves(3)
    assert not staged.hooks.paused


@pytest.mark.parametrize("what", ["Revert", "drop_caches", "pause"])
def test_a_revert_that_fails_never_leaves_the_engine_paused_for_nobody(staged, what):
    committed(staged, 1)
    sender, _ = committed(staged, 2)
    if what == "Revert":
        staged.ranks.broken = "Revert"
    else:
        staged.hooks.failing[what] = RuntimeError("in the way")
    assert not staged.engine.apply(Revert(session=sender.session)).ok
    staged.ranks.broken = ""
    staged.hooks.failing.clear()
    if what == "pause":
        assert (staged.engine.state, staged.hooks.paused, staged.serves(2)) == ("serving", False, True)
    else:
        assert (staged.engine.state, staged.hooks.paused) == ("quarantined", True)


def test_an_engine_that_slept_since_cannot_go_back_and_serves_on(staged):
    sender, _ = committed(staged, 1)
    with staged.engine.between_updates():
        for receiver in staged.ranks.receivers:
            receiver.sleep()
            receiver.wake()
    assert not staged.engine.apply(Revert(session=sender.session)).ok
    assert (staged.engine.state, staged.hooks.paused, staged.serves(1)) == ("serving", False, True)
