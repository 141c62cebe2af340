"""Large sources are encoded and decoded once for many updates, and small or wrong ones as always."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

import msgspec
import pytest

from tests.helpers.messages import ANSWERS, OPEN
from weightcast.adapters.native.adapter import NativeAdapter
from weightcast.adapters.receiver_messages import announce_of
from weightcast.comm.run_steps import EngineRequest
from weightcast.comm.shared_buckets import Shared
from weightcast.errors import TargetRejected, WireError
from weightcast.runtime.lru import Lru
from weightcast.wire import source_tables
from weightcast.wire.answers import UNKNOWN_PLAN, Ack
from weightcast.wire.bucket_sources import BroadcastSource, BucketPart, MappedPart, MappedSource, MemoryHandle
from weightcast.wire.codec import decode, encode
from weightcast.wire.engine_info import EngineInfo
from weightcast.wire.layout import BucketLayout, Packing, TensorSpec, plan_buckets
from weightcast.wire.messages import Announce
from weightcast.wire.plans import UnknownPlan
from weightcast.wire.source_tables import name_of_source

INFO = next(answer for answer in ANSWERS if isinstance(answer, EngineInfo))
ACK = next(answer for answer in ANSWERS if isinstance(answer, Ack))


def shared(parts: int, *, fd: int = 3) -> Shared:
    handle = MemoryHandle(kind="shm", device="cpu", size_bytes=1 << 30, token="a" * 32, pid=7, fd=fd)
    found = tuple(
        MappedPart(slot=number, offset=(0,), shape=(8,), memory=0, first_byte=64 * number, stride=(1,), dtype="float32")
        for number in range(parts)
    )
    return Shared(memories=(handle,), mapped=found)


@pytest.fixture
def layout() -> BucketLayout:
    specs = [TensorSpec(name=f"t.{number}", dtype="float32", shape=(8,)) for number in range(600)]
    [found] = plan_buckets(specs, bucket_bytes=1 << 20, packing=Packing())
    return found


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch):
    for name in ("_encoded", "_decoded"):
        monkeypatch.setattr(source_tables, name, Lru(1 << 20))


def sent(message: Announce) -> Announce:
    found = decode(encode(message))
    assert isinstance(found, Announce)
    return found


def test_a_source_of_many_parts_is_one_object_in_every_update(layout, monkeypatch):
    mine = [shared(600), shared(600, fd=4)]
    first = announce_of(OPEN.session, layout, group=None, shared=mine, plan="")
    again = announce_of(OPEN.session, layout, group=None, shared=mine, plan="")
    assert first.source is again.source
    assert isinstance(first.source, MappedSource)
    assert [part.memory for part in first.source.parts] == [0] * 600 + [1] * 600
    received = sent(first)
    assert received.source == first.source
    assert received.source is not first.source
    assert sent(received).source is received.source  # an API server passes it on to its ranks
    monkeypatch.setattr(source_tables, "_encoder", None)  # nothing is encoded or decoded anew
    monkeypatch.setattr(source_tables, "_decoder", None)
    assert sent(again).source is received.source
    assert sent(received).source is received.source


def test_another_place_of_one_part_is_another_source(layout):
    first = announce_of(OPEN.session, layout, group=None, shared=[shared(600)], plan="")
    moved = announce_of(OPEN.session, layout, group=None, shared=[shared(600, fd=4)], plan="")
    assert sent(first).source == first.source
    assert sent(moved).source == moved.source != first.source


def test_small_sources_are_not_kept(layout):
    message = Announce(session=OPEN.session, layout=layout, source=BroadcastSource(group="g" * 8))
    assert sent(message) == message
    assert sent(message).source is not sent(message).source


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda form: form.pop("source"), "needs a source"),
        (lambda form: form["source"].update(parts=[[0, [0], [8], -1, 0, [1]]]), "parts"),
        (lambda form: form["source"].update(type="pickle"), "pickle"),
    ],
)
def test_a_wrong_source_is_refused_however_large(layout, change, words):
    form = msgspec.json.decode(encode(announce_of(OPEN.session, layout, group=None, shared=[shared(600)], plan="")))
    change(form)
    for _ in range(2):
        with pytest.raises(WireError, match=words):
            decode(msgspec.json.encode(form))


def test_a_source_that_the_other_end_has_is_named(layout):
    message = announce_of(OPEN.session, layout, group=None, shared=[shared(600)], plan="")
    with pytest.raises(UnknownPlan, match=name_of_source(message.source)):
        decode(encode(message, named=True))
    assert sent(message) == message
    named = encode(message, named=True)
    assert len(named) < len(encode(message)) - 10_000
    assert decode(named) == message
    moved = announce_of(OPEN.session, layout, group=None, shared=[shared(600, fd=9)], plan="")
    with pytest.raises(UnknownPlan):
        decode(encode(moved, named=True))


def test_a_small_source_is_sent_and_never_named(layout):
    message = Announce(session=OPEN.session, layout=layout, source=BroadcastSource(group="g" * 8))
    assert name_of_source(message.source) == ""
    assert encode(message, named=True) == encode(message)


def test_a_source_and_the_hash_of_one_are_too_much(layout):
    message = announce_of(OPEN.session, layout, group=None, shared=[shared(600)], plan="")
    form = msgspec.json.decode(encode(message))
    form["known_source"] = name_of_source(message.source)
    with pytest.raises(WireError, match="needs a source, or the hash of one"):
        decode(msgspec.json.encode(form))


def parted(parts: int) -> Shared:
    found = tuple(BucketPart(slot=number, offset=(0,), shape=(8,)) for number in range(parts))
    handle = MemoryHandle(kind="shm", device="cpu", size_bytes=1 << 30, token="a" * 32, pid=7, fd=3)
    return Shared(memory=handle, parts=found)


def answered(steps: Generator[EngineRequest, bytes, Ack], *answers: Ack | TargetRejected) -> list[int]:
    """The sizes of the requests that an adapter makes, given the answers to them."""
    sizes: list[int] = []
    request = next(steps)
    with contextlib.suppress(StopIteration):
        for answer in answers:
            sizes.append(len(request.body))
            request = steps.throw(answer) if isinstance(answer, TargetRejected) else steps.send(encode(answer))
    return sizes


def test_an_adapter_names_a_source_once_the_engine_has_it(layout):
    adapter, mine = NativeAdapter(INFO), [parted(600)]

    def announced(*answers: Ack | TargetRejected) -> list[int]:
        return answered(adapter.bucket("0" * 32, layout, group=None, shared=mine), *answers)

    forgot = TargetRejected("forgotten", url="u", status=UNKNOWN_PLAN)
    refused = TargetRejected("asleep", url="u", status=409)
    [full] = announced(ACK)
    [named] = announced(ACK)
    assert named < full - 5_000
    assert announced(forgot, ACK) == [named, full]
    assert announced(ACK) == [named]
    with pytest.raises(TargetRejected, match="asleep"):
        announced(refused)
    assert announced(ACK) == [full]


def test_a_bucket_in_a_group_always_brings_its_source(layout):
    adapter = NativeAdapter(INFO)
    sizes = [answered(adapter.bucket("0" * 32, layout, group="g" * 32, shared=[parted(600)]), ACK) for _ in range(2)]
    assert sizes[0] == sizes[1]
