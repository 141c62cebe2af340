"""Copies from a peer, rank by rank: which bytes travel, and which messages an engine refuses."""

from __future__ import annotations

import secrets
import socket
import sys
import types
from collections.abc import Callable

import msgspec
import pytest
import torch

from tests.helpers.clock import PATIENCE_S
from tests.helpers.models import FusedModel, specs_of, weights_of
from tests.helpers.session_bench import Bench
from tests.helpers.sessions import Sender
from weightcast.errors import EngineFailure, Refused
from weightcast.receiver import WeightReceiver
from weightcast.receiver.resident_chunks import ResidentChunks
from weightcast.receiver.sources.peer import PeerSource
from weightcast.wire.answers import Ack
from weightcast.wire.messages import Abort, Close, Commit, Fetch, PeerEngine, ReadChunk
from weightcast.wire.plans import UpdateTables

CHUNK_BYTES = 72  # cuts through rows
URL = "http://peer:1"
Change = Callable[[int, bytes], bytes]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setitem(ResidentChunks.__init__.__kwdefaults__, "chunk_bytes", CHUNK_BYTES)


class Copying:
    """A session of one engine that fetches from another in this process."""

    def __init__(self, late: Bench, peer: Bench, monkeypatch, change: Change = lambda _, data: data) -> None:
        def read(self, message: Fetch, *, rank: int, layout: str, timeout_s: float) -> bytes:
            asked = ReadChunk(
                rank=rank, index=message.index, layout=layout, version=message.version, digest=message.digest
            )
            return change(message.index, peer.engine.read_chunk(asked))

        monkeypatch.setattr(PeerSource, "read", read)
        info = peer.engine.info()
        assert info.version is not None
        assert info.digest
        self.late = late
        self.digest = info.digest
        self.open = msgspec.structs.replace(
            Sender(weights_of(9), version=info.version).open,
            session=secrets.token_hex(16),
            plan=UpdateTables(info.specs, ()),
        )

    def fetch(self, index: int, **changes) -> Fetch:
        message = Fetch(
            session=self.open.session,
            index=index,
            peer=PeerEngine(url=URL),
            version=self.open.version,
            digest=self.digest,
        )
        return msgspec.structs.replace(message, **changes)

    def transfer(self) -> Ack:
        self.late.tell(self.open)
        index = 0
        while not (ack := self.late.tell(self.fetch(index))).closed:
            index += 1
        assert index > 5
        return ack

    def commit(self) -> Commit:
        return Commit(session=self.open.session, digest=self.digest)


def flipped(index: int, data: bytes) -> bytes:
    return bytes([data[0] ^ 1]) + data[1:] if index == 3 else data


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("staging", ["device", "host", "none"])
def test_copy_brings_every_rank_to_the_peers_weights(bench, monkeypatch, staging, tp_size):
    peer, late = bench(tp_size=tp_size), bench(tp_size=tp_size, staging=staging)
    peer.update(3)
    copying = Copying(late, peer, monkeypatch)
    copying.transfer()
    assert late.serves(0) == (staging != "none")
    answer = late.tell(copying.commit())
    assert late.serves(3)
    assert (answer.version, answer.digest, answer.state) == (3, peer.engine.info().digest, "serving")
    assert not late.hooks.paused
    assert peer.hooks.calls.count("pause abort") == 1  # for its own update


def test_rows_that_no_tensor_proves_are_not_copied(bench, monkeypatch):
    peer, late = bench(), bench()
    peer.update(3)
    with torch.no_grad():
        peer.models[0].embed[10:].fill_(666.0)
    copying = Copying(late, peer, monkeypatch)
    copying.transfer()
    late.tell(copying.commit())
    assert late.serves(3)  # with its own padding


@pytest.mark.parametrize("staging", ["device", "none"])
def test_flipped_bit_is_not_switched_to(bench, monkeypatch, staging):
    peer, late = bench(), bench(staging=staging)
    peer.update(3)
    copying = Copying(late, peer, monkeypatch, flipped)
    copying.transfer()
    assert f"what was copied from {URL} has the digest" in late.engine.apply(copying.commit()).error
    ended = late.tell(Abort(session=copying.open.session, reason="it differs"))
    assert ended.version == 0
    if staging == "none":
        assert ended.state == "quarantined"
        assert late.hooks.paused
    else:
        assert ended.state == "serving"
        assert late.serves(0)


def test_peer_gives_only_the_version_and_layout_that_were_asked_for(bench, monkeypatch):
    peer, late, other = bench(), bench(), bench(tp_size=2)
    peer.update(3)
    copying = Copying(late, peer, monkeypatch)
    late.tell(copying.open)
    late.tell(copying.fetch(0))
    peer.update(4)
    assert "serves version 4 " in late.refuse(copying.fetch(1))
    assert late.serves(0)
    wrong_size = Copying(other, peer, monkeypatch)
    other.tell(wrong_size.open)
    words = other.refuse(wrong_size.fetch(0))
    assert "rank 0 keeps its parameters in another layout" in words
    assert "there is no rank 1" in words


def test_peer_whose_live_weights_are_being_written_gives_nothing(bench, monkeypatch):
    peer, late = bench(staging="none"), bench()
    peer.update(3)
    copying = Copying(late, peer, monkeypatch)
    late.tell(copying.open)
    peer.tell(Sender(weights_of(4), version=4).open)
    assert "an update writes into the live weights" in late.refuse(copying.fetch(0))


def test_chunks_that_do_not_belong_to_the_session_are_refused(bench, monkeypatch):
    peer, late = bench(), bench()
    peer.update(3)
    copying = Copying(late, peer, monkeypatch)
    late.tell(copying.open)
    assert "chunk 1 came where chunk 0 was due" in late.refuse(copying.fetch(1))
    assert "copies version 3" in late.refuse(copying.fetch(0, version=2))
    late.tell(copying.fetch(0))
    for changes in ({"digest": "f" * 16}, {"peer": PeerEngine(url="http://other:1")}):
        assert f"from {URL} only" in late.refuse(copying.fetch(1, **changes))
    sender = Sender(weights_of(3), version=3)
    sender.session = copying.open.session
    assert f"this session copies from {URL}" in late.refuse(sender.announce(1))
    assert "did not arrive whole" in late.engine.apply(Close(session=copying.open.session, buckets=1)).error


def test_session_of_a_trainer_takes_no_chunks(bench, monkeypatch):
    peer, late = bench(), bench()
    peer.update(3)
    copying = Copying(late, peer, monkeypatch)
    sender = Sender(weights_of(3), version=3)
    late.tell(sender.open)
    late.tell(sender.announce(0))
    assert "from a trainer, not from a peer" in late.refuse(copying.fetch(1, session=sender.session))


def test_unproven_session_takes_no_chunks(bench, monkeypatch):
    peer, late = bench(), bench()
    peer.update(3)
    copying = Copying(late, peer, monkeypatch)
    copying.open = msgspec.structs.replace(copying.open, verify="received")
    late.tell(copying.open)
    assert "must be proven" in late.refuse(copying.fetch(0))


def test_engine_without_the_http_client_says_what_to_install(monkeypatch):
    monkeypatch.delitem(sys.modules, "weightcast.comm.http", raising=False)
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    source = PeerSource()
    with socket.create_server(("127.0.0.1", 0)) as peer:
        url = f"http://127.0.0.1:{peer.getsockname()[1]}"
        message = Fetch(session="0" * 32, index=0, peer=PeerEngine(url=url), version=1, digest="f" * 16)
        with pytest.raises(EngineFailure, match=rf"{url} for a chunk: .*aiohttp") as caught:
            source.read(message, rank=0, layout="0" * 32, timeout_s=PATIENCE_S)
    assert caught.value.hint == "pip install aiohttp in the engine's environment"
    source.close()


def test_engine_with_an_unfit_http_client_says_what_to_install(monkeypatch):
    unfit = types.ModuleType("aiohttp")  # an old one lacks names that we import
    for name in [name for name in sys.modules if name.startswith(("weightcast.comm.http", "aiohttp."))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "aiohttp", unfit)
    monkeypatch.setitem(sys.modules, "aiohttp.abc", types.ModuleType("aiohttp.abc"))
    source = PeerSource()
    message = Fetch(session="0" * 32, index=0, peer=PeerEngine(url=URL), version=1, digest="f" * 16)
    with pytest.raises(EngineFailure, match=rf"{URL} for a chunk: cannot import name") as caught:
        source.read(message, rank=0, layout="0" * 32, timeout_s=PATIENCE_S)
    assert caught.value.hint == "pip install aiohttp in the engine's environment"


def test_key_of_a_peer_is_in_no_text():
    message = Fetch(session="0" * 32, index=0, peer=PeerEngine(url=URL, api_key="sesame"), version=1, digest="f" * 16)
    assert "sesame" not in repr(message) + str(message)


@pytest.mark.parametrize("chunk_bytes", [16, 72, 1 << 20])
def test_chunks_are_bounded_and_carry_strided_regions_exactly(chunk_bytes):
    weights = weights_of(5)
    full, empty = FusedModel(tp_rank=1, tp_size=2), FusedModel(tp_rank=1, tp_size=2)
    with torch.no_grad():
        full.load_weights(weights.items())
    receivers = [
        WeightReceiver(m, load_weights=m.load_weights, expected=specs_of(weights), tp_rank=1, tp_size=2)
        for m in (full, empty)
    ]
    found = []
    for receiver in receivers:
        loader = receiver.loader
        routes = [route for several in loader.routes.values() for route in several]
        residents = {name: tensor.detach() for name, tensor in loader.residents.items()}
        found.append((ResidentChunks(routes, residents.__getitem__, tp_size=2, chunk_bytes=chunk_bytes), residents))
    (giving, source), (taking, target) = found
    assert giving.layout == taking.layout
    for index in range(len(giving)):
        data = giving.read(index, source.__getitem__)
        assert len(data) <= chunk_bytes
        taking.write(index, data, target.__getitem__)
    assert torch.equal(empty.qkv, full.qkv)
    assert torch.equal(empty.w2, full.w2)
    assert torch.equal(empty.steps, full.steps)
    with pytest.raises(Refused, match="no chunk"):
        giving.read(len(giving), source.__getitem__)
    with pytest.raises(Refused, match="1 bytes instead of"):
        taking.write(0, b"x", target.__getitem__)
    for receiver in receivers:
        receiver.close()
