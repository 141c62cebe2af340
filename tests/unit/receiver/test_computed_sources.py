"""Computed tensors are proven by computing them once more: every byte of them, then and later, and going back."""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Callable, Iterable

import msgspec
import pytest
import torch
from torch import nn

from tests.helpers.models import Weights, differing, specs_of, state
from tests.helpers.session_bench import Hooks, Ranks
from tests.helpers.sessions import Sender
from weightcast.digest.definition import model_digest, tensor_digest
from weightcast.errors import Refused
from weightcast.receiver import WeightReceiver, computed_sources
from weightcast.receiver.engine_state import EngineFacts
from weightcast.receiver.layout_check import changed_since_load
from weightcast.receiver.peer_copies import PeerCopies
from weightcast.receiver.rank_answers import ResidentFold
from weightcast.receiver.redirect import Redirected
from weightcast.receiver.session import SessionHandler
from weightcast.receiver.sources.peer import PeerSource
from weightcast.wire.answers import Ack
from weightcast.wire.engine_info import RankInfo
from weightcast.wire.messages import Commit, Fetch, PeerEngine, Readback, ReadChunk, Revert

PLACES = ("device", "host", "none")
COMPUTED = ("a_log", "bias.k", "bias.q", "dt", "gain", "half.left", "half.right", "wide.0", "wide.1")


def weights_of(seed: int) -> Weights:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "a_log": random(8),
        "bias.k": random(4),
        "bias.q": random(6),
        "copied": random(8, 6),
        "dt": random(8).bfloat16(),
        "gain": random(4, 8),
        "half.left": random(4, 6),
        "half.right": random(4, 6),
        "wide.0": random(6, 4),
        "wide.1": random(6, 4),
    }


class Computing(nn.Module):
    """One tensor-parallel rank whose loader computes most of what it keeps, in the ways of real engines."""

    def __init__(self, *, tp_rank: int = 0, tp_size: int = 1) -> None:
        super().__init__()
        self.tp_rank, self.tp_size = tp_rank, tp_size
        self.fault: Callable[[torch.Tensor], torch.Tensor] = lambda values: values

        def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
            return nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)

        self.a = parameter(8 // tp_size)
        self.bias = parameter(10)
        self.copied = parameter(8 // tp_size, 6)
        self.dt = parameter(8)
        self.gain = parameter(8, 4, dtype=torch.bfloat16)
        self.fused = parameter(6, 8)
        self.wide = parameter(2, 4, 6)

    def part(self, tensor: torch.Tensor) -> torch.Tensor:
        size = len(tensor) // self.tp_size
        return tensor.narrow(0, self.tp_rank * size, size)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        halves: Weights = {}
        for name, tensor in weights:
            match name.split("."):
                case ["copied"]:
                    self.copied.data.copy_(self.part(tensor))
                case ["a_log"]:  # as vLLM's composed loaders: copied, then computed from what is in the parameter
                    self.a.data.copy_(self.part(tensor))
                    self.a.data.copy_(self.fault(-torch.exp(self.a)))
                case ["bias", which]:  # two parts of one parameter, scaled by the sizes of the two
                    rows = slice(0, 6) if which == "q" else slice(6, 10)
                    self.bias.data[rows] = tensor * len(tensor)
                case ["dt"]:
                    self.dt.data.copy_(nn.functional.softplus(tensor.float()))
                case ["gain"]:  # transposed, scaled and cast
                    self.gain.data.copy_((tensor * 0.5).t())
                case ["half", _]:  # one parameter out of two sources, once both are here
                    halves[name] = tensor
                    if len(halves) == 2:
                        both = torch.cat([halves["half.left"], halves["half.right"]])
                        self.fused.data.copy_(both.t() + 1)
                case ["wide", number]:  # it changes what it gets, and writes a part of a stacked parameter
                    self.wide.data[int(number)].copy_(tensor.mul_(3).t())
                case _:
                    raise KeyError(name)


class Engine:
    """An engine with the weights of ``weights_of(0)``."""

    def __init__(self, *, staging: str = "device", tp_size: int = 1, keep_storage: bool = False) -> None:
        self.models = [Computing(tp_rank=rank, tp_size=tp_size) for rank in range(tp_size)]
        specs = specs_of(weights_of(0))
        for model in self.models:
            model.load_weights((name, tensor.clone()) for name, tensor in weights_of(0).items())
        self.ranks = Ranks(
            [
                WeightReceiver(
                    model,
                    load_weights=model.load_weights,
                    expected=specs,
                    tp_rank=rank,
                    tp_size=tp_size,
                    staging=staging,  # type: ignore[arg-type]
                    keep_storage=keep_storage,
                )
                for rank, model in enumerate(self.models)
            ]
        )
        facts = EngineFacts(
            engine="test 1",
            model="m",
            host_id="h",
            transports=("ipc", "broadcast"),
            ranks=tuple(RankInfo(rank=rank, pid=1, device="cpu") for rank in range(tp_size)),
            staging=self.ranks.receivers[0].loader.staging.place,
            specs=tuple(specs),
        )
        self.hooks = Hooks()
        self.handler = SessionHandler(self.ranks, self.hooks, facts)

    def close(self) -> None:
        self.handler.close()
        self.ranks.close()

    def tell(self, message: object) -> Ack:
        ack = self.handler.apply(message)  # type: ignore[arg-type]
        assert ack.ok, ack.error
        return ack

    def send(self, sender: Sender) -> Ack:
        """All of an update but the commit; returns the answer to Close."""
        return [self.tell(message) for message in sender.transfer()][-1]

    def update(self, seed: int, **changes: object) -> Ack:
        return self.switched(seed, **changes)[1]

    def switched(self, seed: int, **changes: object) -> tuple[Sender, Ack]:
        """The sender of an update, and the answer to its commit."""
        sender = Sender(weights_of(seed), version=seed, **changes)
        self.send(sender)
        return sender, self.tell(sender.commit(proven=changes.get("verify", "resident") == "resident"))

    def digests(self) -> dict[str, str]:
        return self.tell(Readback()).resident

    def keeps(self, seed: int) -> bool:
        """Is the model what its own loader makes of these weights?"""
        for model in self.models:
            wanted = Computing(tp_rank=model.tp_rank, tp_size=model.tp_size)
            wanted.load_weights((name, tensor.clone()) for name, tensor in weights_of(seed).items())
            if differing(model, state(wanted)):
                return False
        return True


def digests_of(seed: int) -> dict[str, str]:
    return {name: tensor_digest(tensor) for name, tensor in weights_of(seed).items()}


@pytest.fixture
def engine():
    made: list[Engine] = []

    def make(**settings) -> Engine:
        made.append(Engine(**settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("bucket_bytes", "batch_bytes"), [(64, 0), (4000, 64), (4000, 1 << 20)])
def test_every_tensor_of_an_update_is_proven(engine, monkeypatch, place, tp_size, bucket_bytes, batch_bytes):
    monkeypatch.setattr(computed_sources, "_BATCH_BYTES", batch_bytes)
    made = engine(staging=place, tp_size=tp_size)
    assert set(COMPUTED) == made.ranks.receivers[0].loader.computed
    assert set(made.digests()) == {"copied"}  # the others came before anybody could sum them
    for seed in (1, 2):
        assert not made.keeps(seed)
        ack = made.update(seed, bucket_bytes=bucket_bytes)
        assert ack.digest == model_digest(digests_of(seed))
        assert made.keeps(seed)
        assert made.digests() == digests_of(seed)


def test_memory_that_is_computed_into_is_bounded_and_freed(engine, monkeypatch):
    monkeypatch.setattr(computed_sources, "_BATCH_BYTES", 0)
    made = engine()
    alive: list[weakref.ref[Redirected]] = []
    sizes: list[int] = []

    class Watched(Redirected):
        def __init__(self, places, residents):
            assert not any(one() for one in alive)  # one group at a time
            super().__init__(places, residents)
            alive.append(weakref.ref(self))
            sizes.append(sum(place.nbytes for place in self.places))

    monkeypatch.setattr(computed_sources, "Redirected", Watched)
    made.update(1)
    assert len(sizes) == len(COMPUTED) - 1  # the two halves are computed with together
    assert max(sizes) == made.models[0].fused.nbytes
    assert not any(one() for one in alive)


@pytest.mark.parametrize("name", ["a", "bias", "dt", "gain", "fused", "wide"])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_flipped_bit_is_found_and_only_what_it_was_computed_from_is_named(engine, name, tp_size):
    made = engine(tp_size=tp_size)
    made.update(1)
    model = made.models[-1]
    values = getattr(model, name).data.view(-1)
    values[-1:].view(torch.int16)[:1].bitwise_xor_(1)
    sources = {
        "a": {"a_log"},
        "bias": {"bias.k"},
        "dt": {"dt"},
        "gain": {"gain"},
        "fused": {"half.left", "half.right"},
        "wide": {"wide.1"},
    }[name]
    ack = made.tell(Readback())
    found, wanted = ack.resident, digests_of(1)
    assert {other for other in wanted if found.get(other) != wanted[other]} == sources
    assert set(ack.mismatched) == (sources if tp_size > 1 and name != "a" else set())  # the other rank disagrees
    made.update(2)
    assert made.digests() == digests_of(2)


@pytest.mark.parametrize("name", ["a", "fused", "copied"])
def test_what_is_damaged_at_the_switch_is_named_and_switched_back(engine, name):
    made = engine()
    made.update(1)
    receiver, model = made.ranks.receivers[0], made.models[0]
    finish = receiver.loader.live.finish

    def damage() -> None:
        receiver.loader.live.finish = finish
        getattr(model, name).data.view(-1)[0] += 1

    sender = Sender(weights_of(2), version=2)
    made.send(sender)
    receiver.loader.live.finish = damage
    ack = made.handler.apply(sender.commit(proven=True))
    assert not ack.ok
    assert {"a": "a_log", "fused": "half.left, half.right", "copied": "copied"}[name] in ack.error
    assert (ack.version, ack.state) == (1, "serving")
    assert made.keeps(1)
    assert made.digests() == digests_of(1)
    made.update(3)
    assert made.keeps(3)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (lambda values: values + torch.rand(len(values)), "but other values each time"),
        (lambda values: values.normal_(), "but other values each time"),
    ],
)
def test_a_loader_that_never_computes_the_same_is_refused_by_name(engine, place, fault, words):
    made = engine(staging=place)
    made.update(1)
    made.models[0].fault = fault
    sender = Sender(weights_of(2), version=2)
    answers = []
    for message in sender.transfer():
        answers.append(made.handler.apply(message))
        if not answers[-1].ok:
            break
    if answers[-1].ok:
        answers.append(made.handler.apply(sender.commit(proven=True)))
    assert not answers[-1].ok
    assert f"a_log cannot be proven: load_weights computes a from what came, {words}" in answers[-1].error
    if place == "none":
        assert made.handler.apply(sender.abort()).state == "quarantined"
    else:
        assert made.keeps(1)
        assert made.digests() == digests_of(1)


def test_a_loader_that_adds_to_what_is_there_is_refused_by_name():
    class Adding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(4), requires_grad=False)

        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            for _, tensor in weights:
                self.w.data.add_(tensor)

    model, weights = Adding(), {"w": torch.randn(4)}
    receiver = WeightReceiver(model, load_weights=model.load_weights, expected=specs_of(weights))
    sender = Sender(weights)
    for message in sender.transfer():
        assert receiver.apply(message).ok
    ack = receiver.apply(sender.commit())
    assert "w cannot be proven: load_weights computes w from what came, and something else in" in ack.error
    assert receiver.apply(sender.abort()).ok
    assert torch.equal(model.w, torch.zeros(4))
    receiver.close()


@pytest.mark.parametrize("place", ["device", "host"])
@pytest.mark.parametrize("keep_storage", [False, True])
@pytest.mark.parametrize("first", [0, 1])
def test_the_way_back_is_proven_too(engine, place, keep_storage, first):
    made = engine(staging=place, keep_storage=keep_storage, tp_size=2)
    if first:
        made.update(first)
    before = made.digests()
    sender, _ = made.switched(2)
    assert made.keeps(2)
    ack = made.tell(Revert(session=sender.session, reason="test"))
    assert (ack.version, made.keeps(first)) == (first, True)
    assert made.digests() == before == (digests_of(1) if first else {"copied": digests_of(0)["copied"]})
    assert ack.digest == (model_digest(digests_of(1)) if first else "")
    made.update(3)
    assert made.digests() == digests_of(3)


def test_the_way_back_finds_a_computed_tensor_that_was_damaged_meanwhile(engine):
    made = engine()
    made.update(1)
    sender, _ = made.switched(2)
    staging = made.ranks.receivers[0].loader.staging
    staging.target("dt")[3] += 1  # the old version, which waits
    ack = made.handler.apply(Revert(session=sender.session, reason="test"))
    assert not ack.ok
    assert "dt" in ack.error


def test_an_update_without_proof_leaves_none(engine):
    made = engine()
    made.update(1)
    made.update(2, verify="received")
    assert made.keeps(2)
    assert set(made.digests()) == {"copied"}
    made.update(3)
    assert made.digests() == digests_of(3)


def test_an_update_given_up_leaves_the_proof_of_what_serves(engine):
    made = engine()
    made.update(1)
    sender = Sender(weights_of(2), version=2)
    made.send(sender)
    made.tell(sender.abort())
    assert made.digests() == digests_of(1)


@pytest.mark.parametrize("discard", [False, True])
def test_asleep_and_awake_again(engine, discard):
    made = engine()
    made.update(1)
    [receiver] = made.ranks.receivers
    receiver.sleep(discard=discard)
    if discard:
        for parameter in made.models[0].parameters():
            parameter.data.zero_()
    receiver.wake()
    assert set(made.digests()) == ({"copied"} if discard else set(digests_of(1)))
    made.update(2)
    assert made.digests() == digests_of(2)


def test_weights_of_someone_else_have_no_proof(engine):
    made = engine()
    made.update(1)
    made.models[0].load_weights((name, tensor.clone()) for name, tensor in weights_of(2).items())
    made.ranks.receivers[0].forget()
    assert set(made.digests()) == {"copied"}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("change", ["nothing", "a computed parameter", "the sums of sources", "the sums of places"])
def test_a_copy_from_a_peer_is_proven(engine, monkeypatch, place, change):
    peer, late = engine(tp_size=2), engine(tp_size=2, staging=place)
    peer.update(3)
    last = PeerCopies(peer.ranks.receivers[0].loader, rank=0, tp_size=2).total() - 1

    def read(self, message: Fetch, *, rank: int, layout: str, timeout_s: float) -> bytes:
        asked = ReadChunk(rank=rank, index=message.index, layout=layout, version=message.version, digest=message.digest)
        data = bytearray(peer.handler.read_chunk(asked))
        if rank == 0 and change == "a computed parameter" and message.index == 0:
            data[0] ^= 1  # of what sorts first, which is a
        if rank == 0 and message.index == last and change.startswith("the sums"):
            data[0 if change == "the sums of sources" else -1] ^= 1
        return bytes(data)

    monkeypatch.setattr(PeerSource, "read", read)
    info = peer.handler.info()
    digest = info.digest
    assert digest
    opened = msgspec.structs.replace(Sender(weights_of(9), version=3).open, session=secrets.token_hex(16))
    late.tell(opened)
    for index in range(last + 1):
        fetch = Fetch(
            session=opened.session, index=index, peer=PeerEngine(url="http://peer:1"), version=3, digest=digest
        )
        closed = late.tell(fetch)
    assert closed.closed
    ack = late.handler.apply(Commit(session=opened.session, digest=digest))
    assert ack.ok == (change == "nothing")
    if change == "nothing":
        assert late.keeps(3)
        assert late.digests() == digests_of(3)
    else:
        assert "has the digest" in ack.error


def test_a_peer_that_was_never_updated_refuses_by_name(engine):
    made = engine()
    copies = PeerCopies(made.ranks.receivers[0].loader, rank=0, tp_size=1)
    asked = ReadChunk(rank=0, index=copies.total() - 1, layout=copies.chunks().layout, version=1, digest="f" * 16)
    with pytest.raises(Refused, match=r"this model computes with a_log, .* and no proven update has brought them"):
        copies.give(asked)


def test_a_checkpoint_that_is_read_at_the_start_proves_what_was_computed_from_it(engine):
    made = engine()
    loader = made.ranks.receivers[0].loader
    assert changed_since_load(loader, weights_of(0).items()) == []
    assert made.digests() == digests_of(0)
    made.models[0].gain.data[0, 0] += 1
    assert changed_since_load(loader, weights_of(0).items()) == ["gain"]


def test_proof_of_memory_that_is_not_contiguous_and_of_views():
    class Strided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            base = torch.zeros(6, 8)
            self.left = nn.Parameter(base[:, :3], requires_grad=False)
            self.right = nn.Parameter(base[:, 3:], requires_grad=False)

        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            for name, tensor in weights:
                getattr(self, name).data.copy_(tensor.sigmoid())

    weights = {"left": torch.randn(6, 3), "right": torch.randn(6, 5)}
    model = Strided()
    receiver = WeightReceiver(model, load_weights=model.load_weights, expected=specs_of(weights))
    sender = Sender(weights)
    for message in sender.transfer():
        assert receiver.apply(message).ok
    assert receiver.apply(sender.commit()).ok
    assert torch.equal(model.left, weights["left"].sigmoid())
    assert torch.equal(model.right, weights["right"].sigmoid())
    receiver.close()


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("writes another parameter", "load_weights writes another place than when it was watched"),
        ("reads all of the parameter", "load_weights computes with more of a parameter than the places that it writes"),
    ],
)
def test_a_loader_that_does_other_things_than_when_it_was_watched_is_refused(how, words):
    class Sly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(8), requires_grad=False)
            self.other = nn.Parameter(torch.zeros(4), requires_grad=False)

        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            for _, tensor in weights:
                if how == "writes another parameter" and not tensor.is_meta:
                    self.other.data.copy_(tensor)
                more = self.w.mean() if how == "reads all of the parameter" else 1
                self.w.data[:4].copy_(tensor + more)

    model, weights = Sly(), {"w": torch.randn(4)}
    receiver = WeightReceiver(model, load_weights=model.load_weights, expected=specs_of(weights))
    sender = Sender(weights)
    for message in sender.transfer():
        assert receiver.apply(message).ok
    ack = receiver.apply(sender.commit())
    assert words in ack.error
    assert receiver.apply(sender.abort()).ok
    assert not model.w.any()
    receiver.close()


def test_one_rank_may_copy_what_another_computes():
    """A vocabulary with padding on the last rank alone, which the loader sets to what is not there yet."""

    class Padded(nn.Module):
        def __init__(self, rank: int) -> None:
            super().__init__()
            self.rank = rank
            self.w = nn.Parameter(torch.full((4, 3), 7.0), requires_grad=False)

        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            for _, tensor in weights:
                rows = tensor[4 * self.rank : 4 * self.rank + 4]
                self.w.data[: len(rows)].copy_(rows)
                self.w.data[len(rows) :].fill_(0)

    weights = {"w": torch.randn(7, 3)}
    models = [Padded(rank) for rank in range(2)]
    receivers = [
        WeightReceiver(
            model, load_weights=model.load_weights, expected=specs_of(weights), tp_rank=model.rank, tp_size=2
        )
        for model in models
    ]
    assert [receiver.loader.computed for receiver in receivers] == [frozenset(), {"w"}]
    sender = Sender(weights)
    for message in sender.transfer():
        assert all(receiver.apply(message).ok for receiver in receivers)
    found = ResidentFold().fold([receiver.apply(sender.commit()) for receiver in receivers])
    assert not found.broken
    assert found.digests == {"w": tensor_digest(weights["w"])}
    models[1].w.data[0, 0] += 1
    found = ResidentFold().fold([receiver.apply(Readback()) for receiver in receivers])
    assert found.digests != {"w": tensor_digest(weights["w"])}
    for receiver in receivers:
        receiver.close()
