"""Tensors that come straight to where they belong: never into what is served, not even by a broadcast given up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest
import torch

from tests.helpers.models import FusedModel, Weights, differing, fill, specs_of, state, weights_of
from tests.helpers.sessions import Sender
from weightcast.comm.update_group import GroupFailed
from weightcast.receiver import WeightReceiver
from weightcast.receiver.rank_answers import ResidentFold
from weightcast.wire.answers import RankAck
from weightcast.wire.bucket import Bucket, run_sizes
from weightcast.wire.bucket_sources import BroadcastSource
from weightcast.wire.layout import BucketLayout
from weightcast.wire.messages import Announce

OLD, NEW = weights_of(1), weights_of(2)
LENT = ("embed.weight", "q.weight", "v.weight", "experts.1.gate.weight", "experts.0.down.weight")
WHOLE = (*LENT, "k.weight")  # which lies between two of them, so it is a run of its own as well


class Group:
    """A member's end: runs arrive as they were queued, and what was entered can be written to later."""

    def __init__(self) -> None:
        self.name = "g"
        self.alive = True
        self.queue: list[torch.Tensor] = []
        self.entered: list[torch.Tensor] = []
        self.breaks_at: int | None = None

    def start_broadcast(self, data: torch.Tensor, **_: object) -> tuple[torch.Tensor, torch.Tensor]:
        self.entered.append(data)
        return data, self.queue[len(self.entered) - 1]

    def finish(self, work: tuple[torch.Tensor, torch.Tensor], **_: Any) -> None:
        data, comes = work
        assert len(data) == len(comes)
        if self.breaks_at is not None and len(self.entered) >= self.breaks_at:
            self.alive = False
            raise GroupFailed("the trainer is gone")
        data.copy_(comes)

    def abort(self, why: str) -> None:
        self.alive = False

    def close(self) -> None:
        self.alive = False


class Broadcaster(Sender):
    """A session by broadcast, some tensors in runs of their own."""

    def __init__(self, weights: Weights, receiver: WeightReceiver, lent: Sequence[str] = LENT, **changes: Any) -> None:
        super().__init__(weights, **{"bucket_bytes": 700} | changes)
        self.group = Group()
        receiver._broadcast._groups["g"] = self.group  # type: ignore[assignment]
        self.runs = tuple(run_sizes(layout, lent) for layout in self.layouts)
        self.open = msgspec.structs.replace(self.open, bucket_runs=self.runs)
        for layout, runs in zip(self.layouts, self.runs, strict=True):
            data = fill(Bucket(layout, torch.zeros(layout.size_bytes, dtype=torch.uint8)), weights).data
            self.group.queue += [run for run in data.split(runs) if run.numel()]

    def announce(self, index: int, *, layout: BucketLayout | None = None) -> Announce:
        source = BroadcastSource(group="g")
        return Announce(session=self.session, layout=layout or self.layouts[index], source=source)


def receiver_of(model: FusedModel, **kwargs: Any) -> WeightReceiver:
    with torch.no_grad():
        model.load_weights(OLD.items())
    return WeightReceiver(model, load_weights=model.load_weights, expected=specs_of(OLD), **kwargs)


@pytest.fixture
def model() -> FusedModel:
    return FusedModel()


@pytest.fixture
def receiver(model: FusedModel) -> Iterator[WeightReceiver]:
    made = receiver_of(model)
    yield made
    made.close()


def wanted(weights: Weights = NEW, **kwargs: Any) -> dict[str, torch.Tensor]:
    model = FusedModel(**kwargs)
    with torch.no_grad():
        model.load_weights(weights.items())
    return state(model)


def bytes_in(receiver: WeightReceiver, group: Group) -> int:
    """How many of the bytes that were received went straight into the set that is not live."""
    spans = [
        (target.untyped_storage().data_ptr(), target.untyped_storage().nbytes())
        for target in map(receiver.loader.staging.target, receiver.loader._routed)
    ]
    return sum(
        data.numel() for data in group.entered if any(start <= data.data_ptr() < start + size for start, size in spans)
    )


def carry_out(receiver: WeightReceiver, sender: Sender) -> RankAck:
    for message in sender.transfer():
        ack = receiver.apply(message)
        assert ack.ok, ack.error
    return receiver.apply(sender.commit())


def size_of(names: Sequence[str]) -> int:
    return sum(NEW[name].nbytes for name in names)


@pytest.mark.parametrize("digest", ["fast", "sha256"])
@pytest.mark.parametrize("keep_storage", [False, True])
def test_what_is_kept_whole_is_received_where_it_belongs(model, keep_storage, digest):
    receiver = receiver_of(model, keep_storage=keep_storage)
    for weights in (NEW, weights_of(3), weights_of(4)):
        sender = Broadcaster(weights, receiver, digest=digest)
        kept = Sender(weights).digests({"norm.weight": "bfloat16"})[1]
        before = state(model)
        for message in sender.transfer():
            ack = receiver.apply(message)
            assert ack.ok, ack.error
            assert differing(model, before) == []
        assert bytes_in(receiver, sender.group) == size_of(WHOLE)
        ack = receiver.apply(sender.commit())
        assert ack.ok
        assert ResidentFold().fold([ack]).digests == kept
        assert differing(model, wanted(weights)) == []
    receiver.close()


@pytest.mark.parametrize(
    ("tp_size", "dtype", "staging", "straight"),
    [
        (2, torch.float32, "auto", ("embed.weight",)),
        (1, torch.bfloat16, "auto", ()),
        (1, torch.float32, "host", WHOLE),
        (1, torch.float32, "none", ()),
    ],
)
def test_what_is_sliced_or_cast_or_has_no_second_set_is_copied(tp_size, dtype, staging, straight):
    model = FusedModel(tp_rank=tp_size - 1, tp_size=tp_size, dtype=dtype)
    receiver = receiver_of(model, tp_rank=tp_size - 1, tp_size=tp_size, staging=staging)
    for weights in (NEW, weights_of(3)):
        sender = Broadcaster(weights, receiver)
        for message in sender.transfer():
            assert receiver.apply(message).ok
        straight_bytes = bytes_in(receiver, sender.group) if staging != "none" else 0
        assert receiver.apply(sender.commit()).ok
        assert straight_bytes == size_of(straight)
        assert differing(model, wanted(weights, tp_rank=tp_size - 1, tp_size=tp_size, dtype=dtype)) == []
    receiver.close()


@pytest.mark.parametrize("breaks_at", [1, 4, 9])
def test_a_broadcast_that_was_given_up_may_go_on_writing(model, receiver, breaks_at):
    assert carry_out(receiver, Broadcaster(NEW, receiver)).ok
    served = state(model)
    broken = Broadcaster(weights_of(3), receiver)
    broken.group.breaks_at = breaks_at
    acks = [receiver.apply(message) for message in broken.transfer()]
    failed = next(ack for ack in acks if not ack.ok)
    assert failed.cause == "group"
    assert not failed.touched
    assert receiver.apply(broken.abort()).ok

    def write_late() -> None:
        for data in broken.group.entered:
            data.fill_(0xA5)

    write_late()
    assert differing(model, served) == []
    again = Broadcaster(weights_of(4), receiver)
    for message in again.transfer():
        assert receiver.apply(message).ok
        write_late()
    assert receiver.apply(again.commit()).ok
    write_late()
    assert differing(model, wanted(weights_of(4))) == []
    assert receiver.apply(again.abort()).ok  # the version before comes back as it was
    write_late()
    assert differing(model, served) == []


def test_a_session_whose_bucket_was_given_up_takes_no_other(model, receiver):
    served = state(model)
    sender = Broadcaster(NEW, receiver)
    assert receiver.apply(sender.open).ok
    sender.group.breaks_at = 1
    assert receiver.apply(sender.announce(0)).cause == "group"
    again = Broadcaster(NEW, receiver)
    again.session, again.layouts = sender.session, sender.layouts
    for index in range(len(again.layouts)):
        assert "given up half way" in receiver.apply(again.announce(index)).error
    assert not receiver.apply(sender.commit()).ok
    assert differing(model, served) == []
    assert carry_out(receiver, Broadcaster(NEW, receiver)).ok
    assert differing(model, wanted()) == []


def test_a_bucket_that_comes_twice_is_refused_before_it_overwrites_anything(model, receiver):
    sender = Broadcaster(NEW, receiver)
    for message in sender.transfer():
        assert receiver.apply(message).ok
    entered = len(sender.group.entered)
    ack = receiver.apply(sender.announce(0))
    assert ack.refused
    assert "arrived after" in ack.error
    assert len(sender.group.entered) == entered
    assert receiver.apply(sender.commit()).ok
    assert differing(model, wanted()) == []


def test_an_engine_may_sleep_after_a_broadcast_was_given_up(model, receiver):
    broken = Broadcaster(NEW, receiver)
    broken.group.breaks_at = 1
    assert receiver.apply(broken.open).ok
    assert not receiver.apply(broken.announce(0)).ok
    assert receiver.apply(broken.abort()).ok
    receiver.sleep()
    receiver.wake()
    assert carry_out(receiver, Broadcaster(NEW, receiver)).ok
    assert differing(model, wanted()) == []
