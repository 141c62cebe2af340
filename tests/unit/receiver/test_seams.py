"""The receiver's services to engines that others wrote: weights beside the model, padding, checks, its own lane."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from multiprocessing import Pipe

import pytest
import torch
from torch import nn

from tests.helpers.clock import PATIENCE_S
from weightcast.errors import EngineFailure
from weightcast.receiver import WeightReceiver
from weightcast.receiver.coverage import uncovered
from weightcast.receiver.rank_connections import serve_messages
from weightcast.receiver.recorder import record_routes
from weightcast.receiver.staging import StagingSet
from weightcast.wire.answers import RankAck
from weightcast.wire.codec import decode_rank_ack, encode
from weightcast.wire.layout import TensorSpec
from weightcast.wire.messages import Leave, Message, Readback

ROWS, PADDED, WIDTH = 5, 8, 3


class Padded(nn.Module):
    """An embedding with rows that no vocabulary entry has, loaded as vLLM and SGLang load theirs."""

    def __init__(self, *, first: str = "copy") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(PADDED, WIDTH), requires_grad=False)
        self.first = first

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in weights:
            self.weight[: len(tensor)].data.copy_(tensor)
            if self.first == "copy":
                self.weight[len(tensor) :].data.fill_(0)
            if self.first == "scale":
                self.weight[1:].data.fill_(0)


def test_padding_that_is_there_already_is_no_computed_weight() -> None:
    model = Padded()
    residents = dict(model.named_parameters())
    specs = [TensorSpec(name="w", dtype="float32", shape=(ROWS, WIDTH))]
    seen = record_routes(model.load_weights, specs, residents)
    assert not seen.why
    assert seen.filled == {"weight": (PADDED - ROWS) * WIDTH}
    assert uncovered(seen.routes["w"], residents, seen.filled) == []
    assert uncovered(seen.routes["w"], residents) == ["weight"]
    model.weight[-1, -1] = 1
    assert "a constant that it does not have" in record_routes(model.load_weights, specs, residents).why["w"]


def test_a_constant_hides_what_was_copied_before_it() -> None:
    model = Padded(first="scale")
    residents = dict(model.named_parameters())
    specs = [TensorSpec(name="w", dtype="float32", shape=(ROWS, WIDTH))]
    seen = record_routes(model.load_weights, specs, residents)
    assert [route.box_shape for route in seen.routes["w"]] == [(1, WIDTH)]
    assert seen.filled == {"weight": (PADDED - 1) * WIDTH}
    assert uncovered(seen.routes["w"], residents, seen.filled) == []
    model.weight[2, 0] = 1  # the loader would put a zero there
    assert "a constant that it does not have" in record_routes(model.load_weights, specs, residents).why["w"]


@pytest.mark.parametrize("keep_storage", [True, False])
def test_a_flip_keeps_storage_if_asked(keep_storage: bool) -> None:
    live = torch.arange(6.0).reshape(2, 3)
    view = live.view(-1)  # what a captured graph remembers
    staging = StagingSet({"w": live}, "device", keep_storage=keep_storage)
    staging.target("w").fill_(7)
    staging.flip()
    assert torch.equal(live, torch.full((2, 3), 7.0))
    assert torch.equal(view, live.view(-1)) is keep_storage
    staging.undo()
    assert torch.equal(live, torch.arange(6.0).reshape(2, 3))


class Packs(nn.Module):
    """Computes with a copy; what the loader writes is kept beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0), requires_grad=False)
        self.loaded = {"weight": nn.Parameter(torch.ones(ROWS, WIDTH), requires_grad=False)}
        self.packed = self.loaded["weight"].t().clone()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.loaded[name].data.copy_(tensor)

    def check(self) -> None:
        if not torch.equal(self.packed, self.loaded["weight"].t()):
            raise EngineFailure("computes with other weights than it keeps in weight")


def test_weights_beside_the_model_are_what_is_kept_and_checked() -> None:
    model = Packs()
    spec = TensorSpec(name="weight", dtype="float32", shape=(ROWS, WIDTH))
    receiver = WeightReceiver(
        model,
        load_weights=model.load_weights,
        expected=[spec],
        residents=model.loaded,
        checks=(model.check,),
    )
    kept = receiver.apply(Readback())
    assert kept.ok
    assert [part.spec for part in kept.held.table] == [spec]
    model.packed[0, 0] = 2
    broken = receiver.apply(Readback())
    assert not broken.ok
    assert "computes with other weights" in broken.error
    receiver.close()


class Remembers:
    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.interrupted = threading.Event()

    def apply(self, message: Message) -> RankAck:
        if isinstance(message, Readback):
            assert self.interrupted.wait(PATIENCE_S)
        return RankAck(rank=3)

    def interrupt(self, reason: str) -> None:
        self.reasons.append(reason)
        self.interrupted.set()


@pytest.mark.parametrize("asked", [True, False])
def test_interrupts_overtake_messages(asked: bool) -> None:
    ours, theirs = Pipe()
    worker = Remembers()
    ended: list[bool] = []
    thread = threading.Thread(target=lambda: ended.append(serve_messages(theirs, worker, rank=3)))
    thread.start()
    ours.send_bytes(b"A" + encode(Readback()))
    ours.send_bytes(b"A" + encode(Leave()))
    ours.send_bytes(b"I" + b"enough")
    for _ in range(2):
        assert ours.poll(PATIENCE_S)
        assert decode_rank_ack(ours.recv_bytes()) == RankAck(rank=3)
    assert worker.reasons == ["enough"]
    if asked:
        ours.send_bytes(b"C")
    ours.close()
    thread.join(PATIENCE_S)
    assert ended == [asked]
    theirs.close()
