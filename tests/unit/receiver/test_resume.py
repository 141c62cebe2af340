"""Buckets that come again after their group failed: they replace what came before, and are proven like any other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import torch

from tests.helpers.models import FusedModel, ScalingModel, differing, specs_of, state, weights_of
from tests.helpers.session_bench import Bench
from tests.helpers.sessions import Sender
from tests.unit.receiver.test_given_up_broadcasts import Broadcaster, model, receiver, receiver_of, wanted
from weightcast.receiver import WeightReceiver
from weightcast.receiver.rank_answers import ResidentFold
from weightcast.wire.answers import RankAck
from weightcast.wire.bucket_sources import Part, PartialBuffer, ScatteredSource
from weightcast.wire.layout import BucketLayout, TensorSlot
from weightcast.wire.messages import Announce, Resume

__all__ = ["model", "receiver"]  # fixtures

NEW = weights_of(3)


def told(receiver: WeightReceiver, message: Any) -> RankAck:
    ack = receiver.apply(message)
    assert ack.ok, ack.error
    return ack


class WrongOnce(Sender):
    """A session in which one bit of these buckets is wrong, the first time or each time from the second on."""

    def __init__(self, *args: Any, wrong: Sequence[int] = (), times: slice = slice(0, 1), **options: Any) -> None:
        super().__init__(*args, **options)
        self.wrong, self.times = wrong, times
        self.announced: dict[int, int] = {}

    def announce(self, index: int, **options: Any) -> Announce:
        message = super().announce(index, **options)
        count = self.announced[index] = self.announced.get(index, 0) + 1
        if index in self.wrong and count - 1 in range(8)[self.times]:
            self.buffer.data[message.layout.slots[-1].end_bytes - 1] ^= 0x40
        return message


@pytest.mark.parametrize("back_to", [0, 2, 3, 4])
@pytest.mark.parametrize("staging", ["device", "host", "none"])
def test_what_comes_again_replaces_what_came_before(staging, back_to):
    model = FusedModel()
    receiver = receiver_of(model, staging=staging)
    for weights in (NEW, weights_of(4)):  # the second update repeats what the first has worked out
        sender = WrongOnce(weights, wrong=range(back_to, 4))
        expected = Sender(weights).sent().received
        told(receiver, sender.open)
        for index in range(4):
            told(receiver, sender.announce(index))
        told(receiver, Resume(session=sender.session, buckets=back_to))
        told(receiver, Resume(session=sender.session, buckets=back_to))  # its answer may have been lost
        if back_to < 4:
            assert receiver.apply(sender.close()).missing
        for index in range(back_to, len(sender.layouts)):
            told(receiver, sender.announce(index))
        ack = told(receiver, sender.close())
        assert ack.received == expected
        kept = ResidentFold().fold([told(receiver, sender.commit())]).digests
        assert kept == Sender(weights).digests({"norm.weight": "bfloat16"})[1]
        assert differing(model, wanted(weights)) == []
    receiver.close()


@pytest.mark.parametrize("back_to", [0, 3])
def test_a_wrong_bit_in_what_comes_again_shows_in_the_digests(back_to):
    receiver = receiver_of(FusedModel())
    sender = WrongOnce(NEW, wrong=[3], times=slice(1, None))
    expected = Sender(NEW).sent()
    told(receiver, sender.open)
    for index in range(5):
        told(receiver, sender.announce(index))
    told(receiver, Resume(session=sender.session, buckets=back_to))
    for index in range(back_to, len(sender.layouts)):
        told(receiver, sender.announce(index))
    ack = told(receiver, sender.close())
    wrong = {slot.spec.name for slot in sender.layouts[3].slots[-1:]}
    assert {name for name, digest in ack.received.items() if expected.received[name] != digest} == wrong
    assert told(receiver, sender.close(by_name=False)).received_all != expected.of_all
    receiver.close()


@pytest.mark.parametrize("breaks_at", [1, 2, 4])
def test_a_broadcast_that_was_given_up_may_write_while_its_bucket_comes_again(model, receiver, breaks_at):
    before = state(model)
    broken = Broadcaster(NEW, receiver)
    broken.group.breaks_at = breaks_at
    told(receiver, broken.open)
    arrived = 0
    while (ack := receiver.apply(broken.announce(arrived))).ok:
        arrived += 1
    assert ack.cause == "group"
    given_up = broken.group.entered[-1]
    assert not broken.group.alive

    again = Broadcaster(NEW, receiver)
    again.session, again.layouts = broken.session, broken.layouts
    del again.group.queue[:arrived]
    told(receiver, Resume(session=broken.session, buckets=arrived))
    for index in range(arrived, len(again.layouts)):
        given_up.fill_(0xA5)
        told(receiver, again.announce(index))
    given_up.fill_(0xA5)
    assert differing(model, before) == []
    assert told(receiver, again.close()).received == Sender(NEW).sent().received
    told(receiver, again.commit())
    given_up.fill_(0xA5)
    assert differing(model, wanted(NEW)) == []


def test_rows_that_the_models_own_loader_has_taken_come_again_from_the_first_bucket_only():
    """Its norm is cut into rows of two buckets, and is computed from when the second one is here."""
    model, weights = ScalingModel(), weights_of(3)
    with torch.no_grad():
        model.load_weights(weights_of(1).items())
    receiver = WeightReceiver(
        model, load_weights=model.load_weights, expected=specs_of(weights), keep_storage=True, hold_computed=True
    )
    sender = Sender(weights, bucket_bytes=1000)
    rows = [(spec, 0, spec.num_rows) for spec in sender.open.specs]
    at = next(number for number, (spec, _, _) in enumerate(rows) if spec.name == "norm.weight")
    norm = rows[at][0]
    rows[at : at + 1] = [(norm, 0, 1), (norm, 1, norm.num_rows - 1)]
    sender.layouts = []
    for spec, first, count in rows:  # a bucket for each
        slot = TensorSlot(spec=spec, offset_bytes=0, first_row=first, num_rows=count)
        sender.layouts.append(BucketLayout(index=len(sender.layouts), slots=(slot,), size_bytes=slot.size_bytes))
    halves = [layout.index for layout in sender.layouts if any(s.spec.name == "norm.weight" for s in layout.slots)]
    assert len(halves) > 1
    told(receiver, sender.open)
    for index in range(halves[-1] + 1):
        told(receiver, sender.announce(index))
    refused = receiver.apply(Resume(session=sender.session, buckets=halves[-1]))
    assert refused.refused
    assert "norm.weight" in refused.error
    told(receiver, Resume(session=sender.session, buckets=0))
    for index in range(len(sender.layouts)):
        told(receiver, sender.announce(index))
    assert told(receiver, sender.close()).received == sender.sent().received
    told(receiver, sender.commit())
    same = ScalingModel()
    with torch.no_grad():
        same.load_weights(weights.items())
    assert differing(model, state(same)) == []
    receiver.close()


@pytest.mark.parametrize("wrong", [False, True])
def test_shares_that_come_again_are_summed_where_they_lie(wrong):
    """As by ``direct``: each rank reads its own share and answers with the sums of it."""
    model = FusedModel()
    receiver = receiver_of(model)
    sender = WrongOnce(NEW, wrong=[3], times=slice(1, None) if wrong else slice(0, 1))
    told(receiver, sender.open)

    def announce(index: int) -> Announce:
        message = sender.announce(index)
        parts = tuple(
            Part(
                slot=number,
                offset=(slot.first_row, *(0 for _ in slot.spec.shape[1:])) if slot.spec.shape else (),
                shape=(slot.num_rows, *slot.spec.shape[1:]) if slot.spec.shape else (),
            )
            for number, slot in enumerate(message.layout.slots)
        )
        handle = message.source.handles[0]  # type: ignore[union-attr]
        source = ScatteredSource(buffers=(PartialBuffer(handle=handle, parts=parts),))
        return msgspec.structs.replace(message, source=source)

    for index in range(4):
        told(receiver, announce(index))
    told(receiver, Resume(session=sender.session, buckets=3))
    for index in range(3, len(sender.layouts)):
        told(receiver, announce(index))
    written = ResidentFold().fold([told(receiver, sender.close())]).digests
    kept = Sender(NEW).digests({"norm.weight": "bfloat16"})[1]
    differs = {name for name in kept if written.get(name) != kept[name]}
    assert differs == ({sender.layouts[3].slots[-1].spec.name} if wrong else set())
    receiver.close()


# -- the engine


@pytest.fixture
def made(bench) -> Bench:
    return bench(tp_size=2)


def fail(made: Bench, sender: Sender, cause: str, index: int) -> None:
    """The engine's first rank fails in a bucket, for this reason; the second one takes it."""
    first = made.ranks.receivers[0]
    apply = first.apply

    def broken(message: Any) -> RankAck:
        first.apply = apply  # type: ignore[method-assign]
        return msgspec.structs.replace(apply(Resume(session=sender.session, buckets=index)), ok=False, cause=cause)

    first.apply = broken  # type: ignore[method-assign]
    ack = made.engine.apply(sender.announce(index))
    assert not ack.ok
    assert ack.cause == cause


def test_an_engine_whose_group_failed_goes_on_from_an_earlier_bucket(made):
    sender = Sender(weights_of(3), version=3)
    made.tell(sender.open)
    for index in range(3):
        made.tell(sender.announce(index))
    fail(made, sender, "group", 3)
    assert "has failed" in made.refuse(sender.announce(3))
    assert "only 3 buckets have arrived" in made.refuse(Resume(session=sender.session, buckets=4))
    made.tell(Resume(session=sender.session, buckets=2))
    assert "bucket 3 came where bucket 2 was due" in made.refuse(sender.announce(3))
    for index in range(2, len(sender.layouts)):
        made.tell(sender.announce(index))
    made.tell(sender.close())
    made.tell(sender.commit(proven=True))
    assert made.serves(3)


def test_an_engine_that_has_everything_may_be_taken_back(made):
    sender = Sender(weights_of(3), version=3)
    sender.open = msgspec.structs.replace(sender.open, bucket_sizes=(8,) * len(sender.layouts))
    made.tell(sender.open)
    acks = [made.tell(sender.announce(index)) for index in range(len(sender.layouts))]
    assert acks[-1].closed
    made.tell(Resume(session=sender.session, buckets=len(sender.layouts) - 2))
    assert "not closed" in made.refuse(sender.commit(proven=True))
    acks += [made.tell(sender.announce(index)) for index in range(len(sender.layouts) - 2, len(sender.layouts))]
    assert acks[-1].closed
    assert acks[-1].received_all == sender.sent().of_all
    made.tell(sender.commit(proven=True))
    assert made.serves(3)


@pytest.mark.parametrize("refused", [True, False])
def test_an_engine_with_a_rank_that_cannot_go_back_may_go_back_further(made, refused):
    sender = Sender(weights_of(3), version=3)
    made.tell(sender.open)
    for index in range(3):
        made.tell(sender.announce(index))
    last = made.ranks.receivers[-1]
    apply = last.apply

    def refuse(message: Any) -> RankAck:
        last.apply = apply  # type: ignore[method-assign]
        return RankAck(rank=1, ok=False, refused=refused, error="its first rows would not come again")

    last.apply = refuse  # type: ignore[method-assign]
    ack = made.engine.apply(Resume(session=sender.session, buckets=2))
    assert not ack.ok
    assert "first rows" in ack.error
    assert "has failed" in made.refuse(sender.announce(3))
    if not refused:
        assert "not because of its group" in made.refuse(Resume(session=sender.session, buckets=0))
        return
    made.tell(Resume(session=sender.session, buckets=0))
    for index in range(len(sender.layouts)):
        made.tell(sender.announce(index))
    made.tell(sender.close())
    made.tell(sender.commit(proven=True))
    assert made.serves(3)


def test_an_engine_that_failed_by_itself_does_not_go_on(made):
    sender = Sender(weights_of(3), version=3)
    made.tell(sender.open)
    made.tell(sender.announce(0))
    fail(made, sender, "engine", 1)
    assert "not because of its group" in made.refuse(Resume(session=sender.session, buckets=1))
    made.tell(sender.abort())
    assert made.serves(0)


def test_only_the_open_session_is_taken_back(made):
    sender, stranger = Sender(weights_of(3), version=3), Sender(weights_of(4), version=4)
    assert "no such session" in made.refuse(Resume(session=sender.session, buckets=0))
    made.transfer(sender)
    assert "no such session" in made.refuse(Resume(session=stranger.session, buckets=0))
    made.tell(sender.commit(proven=True))
    assert "no such session" in made.refuse(Resume(session=sender.session, buckets=0))
    assert made.serves(3)
