"""A session's proof: what is kept is compared with what was received and with what was sent."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.models import weights_of
from tests.helpers.sessions import Sender
from weightcast.digest.definition import model_digest, unequal


def test_what_is_kept_otherwise_than_expected_is_undone(bench):
    for staging in ("device", "host", "none"):
        made = bench(staging=staging)
        made.update(1)
        sender = Sender(weights_of(2), version=2)
        made.transfer(sender)
        expected = sender.digests()[1] | {"o.weight": "0" * 16}
        ack = made.engine.apply(sender.commit(expected))
        assert not ack.ok
        assert "what is kept differs from what was sent: its digest is not that of what the trainer sent" in ack.error
        assert ack.state == ("quarantined" if staging == "none" else "serving")
        assert made.hooks.paused == (staging == "none")
        assert made.engine.info().version == 1
        assert made.serves(1) == (staging != "none")
        assert "no such session" in made.engine.apply(sender.commit(expected)).error
        made.update(3)
        assert made.serves(3)


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("staging", ["device", "none"])
def test_what_is_kept_is_compared_with_what_was_received(bench, staging, tp_size):
    made = bench(staging=staging, tp_size=tp_size)
    sender = Sender(weights_of(1), version=1)
    made.transfer(sender)
    ack = made.tell(sender.commit(proven=True))
    assert made.engine.info().digest == ack.digest == model_digest(sender.digests()[1])
    assert made.serves(1)

    sender = Sender(weights_of(2), version=2)
    made.transfer(sender)
    for receiver in made.ranks.receivers:
        with torch.no_grad():
            receiver.loader.staging.target("norm").mul_(2)  # something between Close and Commit that should not happen
    ack = made.engine.apply(sender.commit(proven=True))
    assert not ack.ok
    assert "what is kept differs from what was sent: norm.weight" in ack.error
    assert made.serves(1) == (staging != "none")


def test_a_digest_of_other_tensors_than_are_kept_is_refused(bench):
    made = bench()
    sender = Sender(weights_of(1), version=1)
    made.transfer(sender)
    kept = sender.digests()[1]
    ack = made.engine.apply(sender.commit({name: kept[name] for name in list(kept)[1:]}))
    assert not ack.ok
    assert made.serves(0)


def test_what_was_not_digested_has_no_proof(bench):
    made = bench()
    sender = Sender(weights_of(1), version=1, verify="none")
    made.transfer(sender)
    ack = made.engine.apply(sender.commit(proven=True))
    assert not ack.ok
    assert "what is kept differs from what was sent" in ack.error
    assert made.serves(0)


def test_without_proof_there_is_no_digest(bench):
    made = bench()
    made.update(1)
    for level in ("none", "received"):
        sender = Sender(weights_of(2), version=2, verify=level)
        made.transfer(sender)
        ack = made.tell(sender.commit())
        assert ack.digest == ""
        assert made.engine.info().digest is None
        assert made.serves(2)


@pytest.mark.parametrize(("name", "mismatched"), [("norm.weight", True), ("k.weight", False)])
def test_a_tensor_that_one_rank_received_otherwise_is_told(bench, name, mismatched):
    """Ranks that keep the same tensor disagree; parts that each keep alone add up to something else."""
    made = bench(tp_size=2)
    sender = Sender(weights_of(1), version=1)
    received = sender.digests()[0]
    made.tell(sender.open)
    for index, layout in enumerate(sender.layouts):
        announce = sender.announce(index)
        acks = [made.ranks.receivers[0].apply(announce)]
        for slot in layout.slots:
            if slot.spec.name == name:
                sender.buffer.data[slot.end_bytes - 1] ^= 1
        acks.append(made.ranks.receivers[1].apply(announce))
        assert all(ack.ok for ack in acks)
    made.engine._steps.session.buckets = len(sender.layouts)  # handed round by hand, one rank after the other
    ack = made.tell(sender.close())
    assert unequal(received, ack.received) == [name]
    assert ack.mismatched == ((name,) if mismatched else ())
    assert name not in ack.suspects  # both ranks may be at fault
    again = made.tell(sender.close(by_name=False))
    assert again.digest == ("" if mismatched else model_digest(ack.received)) != model_digest(received)
    assert (again.received, again.mismatched) == ({}, ack.mismatched)
