"""A broadcast that was given up may go on writing: never into what is served, nor into a bucket that comes later."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch

from tests.helpers.models import FusedModel, Weights, differing, fill, specs_of, state, weights_of
from tests.helpers.sessions import Sender, announce
from weightcast.comm.update_group import GroupFailed
from weightcast.receiver import WeightReceiver
from weightcast.wire.answers import RankAck
from weightcast.wire.bucket import Bucket
from weightcast.wire.bucket_sources import BroadcastSource
from weightcast.wire.layout import BucketLayout
from weightcast.wire.messages import Announce
from weightcast.wire.plans import UpdateTables

OLD, NEW = weights_of(1), weights_of(2)


class Group:
    """A member's end: buckets arrive as they were queued, and what was entered can be written to later."""

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
    """A session by broadcast."""

    def __init__(self, weights: Weights, receiver: WeightReceiver, **changes: Any) -> None:
        super().__init__(weights, **{"bucket_bytes": 700} | changes)
        self.group = Group()
        receiver._steps._broadcast._groups["g"] = self.group  # type: ignore[assignment]
        plan = UpdateTables(self.open.specs, self.layouts, tuple(one.size_bytes for one in self.layouts))
        self.open = msgspec.structs.replace(self.open, plan=plan)
        for layout in self.layouts:
            bucket = fill(Bucket(layout, torch.zeros(layout.size_bytes, dtype=torch.uint8)), weights)
            self.group.queue.append(bucket.data)

    def announce(self, index: int, *, layout: BucketLayout | None = None) -> Announce:
        return announce(self.session, layout or self.layouts[index], BroadcastSource(group="g"))


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


def carry_out(receiver: WeightReceiver, sender: Sender) -> RankAck:
    for message in sender.transfer():
        ack = receiver.apply(message)
        assert ack.ok, ack.error
    return receiver.apply(sender.commit())


@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize("breaks_at", [1, 2, 4])
def test_a_broadcast_that_was_given_up_may_go_on_writing(model, receiver, breaks_at, ended):
    """Whether the trainer ends that session, or opens another one at once."""
    assert carry_out(receiver, Broadcaster(NEW, receiver)).ok
    served = state(model)
    broken = Broadcaster(weights_of(3), receiver)
    broken.group.breaks_at = breaks_at
    acks = [receiver.apply(message) for message in broken.transfer()]
    failed = next(ack for ack in acks if not ack.ok)
    assert failed.cause == "group"
    assert not failed.touched
    if ended:
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
