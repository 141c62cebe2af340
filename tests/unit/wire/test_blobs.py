"""Tables travel once: they are named afterwards, sent again to an end that lacks them, and never mistaken."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Generator

import msgspec
import pytest

from tests.helpers.messages import ANSWERS, OPEN, changed
from tests.helpers.sessions import announce
from weightcast.adapters.bucket_sources import source_of
from weightcast.adapters.native.adapter import NativeAdapter
from weightcast.comm.run_steps import EngineRequest
from weightcast.comm.shared_buckets import Shared
from weightcast.errors import TargetRejected, WireError
from weightcast.wire import codec
from weightcast.wire.answers import UNKNOWN_BLOB, Ack
from weightcast.wire.blobs import Blobs, UnknownBlob
from weightcast.wire.bucket_sources import BucketPart, MappedPart, MappedSource, MemoryHandle
from weightcast.wire.codec import decode, encode
from weightcast.wire.engine_info import EngineInfo
from weightcast.wire.layout import BucketLayout, Packing, TensorSpec, plan_buckets
from weightcast.wire.messages import Announce
from weightcast.wire.plans import UpdateTables

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
def kept(monkeypatch) -> Blobs:
    """The tables of this process, which is as if it had just started."""
    made = Blobs()
    monkeypatch.setattr(codec, "KEPT", made)
    return made


def announced(layout: BucketLayout, *mine: Shared) -> Announce:
    return announce(OPEN.session, layout, source_of(mine))


def sent(message: Announce) -> Announce:
    found = decode(encode(message))
    assert isinstance(found, Announce)
    return found


def names(message: Announce) -> set[str]:
    return set(codec.names_of(message))


def test_a_source_of_many_parts_is_one_object_in_every_update(layout, monkeypatch):
    mine = shared(600), shared(600, fd=4)
    first, again = announced(layout, *mine), announced(layout, *mine)
    assert first.source is again.source
    assert isinstance(first.source, MappedSource)
    assert [part.memory for part in first.source.parts] == [0] * 600 + [1] * 600
    received = sent(first)
    assert received == first
    assert received.source is not first.source
    assert sent(received).source is received.source  # an API server passes it on to its ranks
    for kind in codec._TABLES[Announce].values():  # nothing is encoded or decoded anew
        monkeypatch.setitem(kind.__dict__, "encode", None)
        monkeypatch.setitem(kind.__dict__, "decode", None)
    assert sent(first).source is received.source
    assert sent(received).source is received.source


def test_another_place_of_one_part_is_another_source(layout):
    first, moved = announced(layout, shared(600)), announced(layout, shared(600, fd=4))
    assert sent(first).source == first.source
    assert sent(moved).source == moved.source != first.source


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"source": ...}, "source"),
        ({"source__parts": [[0, [0], [8], -1, 0, [1]]]}, "parts"),
        ({"source__type": "pickle"}, "pickle"),
    ],
)
def test_a_wrong_source_is_refused_however_large(layout, change, words):
    body = changed(announced(layout, shared(600)), **change)
    for _ in range(2):
        with pytest.raises(WireError, match=words):
            decode(body)


@pytest.mark.parametrize("parts", [1, 600])
def test_a_table_that_the_other_end_has_is_named(layout, parts):
    message = announced(layout, shared(parts))
    named = encode(message, names(message))
    with pytest.raises(UnknownBlob, match="it must be sent in full"):
        decode(named)
    assert sent(message) == message
    assert len(named) < len(encode(message)) - 1_000
    assert b"layers" not in named
    assert decode(named) == message
    moved = announced(layout, shared(parts, fd=9))
    with pytest.raises(UnknownBlob):
        decode(encode(moved, names(moved)))


def test_a_table_with_another_hash_than_is_named_is_refused_and_not_kept(layout):
    first, other = announced(layout, shared(600)), announced(layout, shared(600, fd=4))
    body = json.loads(encode(first))
    taken = {**body, "tables": json.loads(encode(other))["tables"]}
    for _ in range(2):
        with pytest.raises(WireError, match=r"brings the table .* and does not name it"):
            decode(json.dumps(taken, separators=(",", ":")).encode())
    with pytest.raises(UnknownBlob):
        decode(encode(other, names(other)))


def test_a_table_of_one_kind_is_not_taken_for_another(layout):
    message = announced(layout, shared(600))
    assert sent(message) == message
    body = json.loads(encode(message, names(message)))
    with pytest.raises(UnknownBlob, match="plan"):
        decode(json.dumps(body | {"plan": body["source"]}).encode())


def test_tables_beyond_the_limit_are_forgotten_and_taken_again(layout, monkeypatch):
    first, other = announced(layout, shared(600)), announced(layout, shared(600, fd=4))
    monkeypatch.setattr(codec, "KEPT", Blobs(len(encode(first))))
    assert sent(first) == first
    assert sent(other) == other
    with pytest.raises(UnknownBlob):
        decode(encode(first, names(first)))
    assert sent(first) == first


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


def adapter_of(layout: BucketLayout) -> NativeAdapter:
    """An adapter with an open session, whose plan the engine has."""
    adapter = NativeAdapter(INFO)
    specs = tuple(slot.spec for slot in layout.slots)
    answered(adapter.open(msgspec.structs.replace(OPEN, plan=UpdateTables(specs, (layout,)))), ACK)
    return adapter


def test_an_adapter_names_a_source_once_the_engine_has_it(layout):
    adapter, mine = adapter_of(layout), [parted(600)]

    def announced(*answers: Ack | TargetRejected) -> list[int]:
        return answered(adapter.bucket("0" * 32, layout, group=None, shared=mine), *answers)

    forgot = TargetRejected("forgotten", url="u", status=UNKNOWN_BLOB)
    refused = TargetRejected("asleep", url="u", status=409)
    [full] = announced(ACK)
    [named] = announced(ACK)
    assert named < full - 5_000
    [short, whole] = announced(forgot, ACK)
    assert short == named
    assert whole > full  # the plan may be gone as well
    assert announced(ACK) == [named]
    with pytest.raises(TargetRejected, match="asleep"):
        announced(refused)
    assert announced(ACK) == [named]


def test_a_bucket_in_a_group_always_brings_its_source(layout):
    adapter = adapter_of(layout)
    sizes = [answered(adapter.bucket("0" * 32, layout, group="g" * 32, shared=[parted(600)]), ACK) for _ in range(2)]
    assert sizes[0] == sizes[1]
