"""Large sources are encoded and decoded once for many updates, and small or wrong ones as always."""

from __future__ import annotations

import msgspec
import pytest

from tests.unit.test_messages import OPEN
from weightcast.adapters.receiver_messages import announce_of
from weightcast.comm.shared_buckets import Shared
from weightcast.errors import WireError
from weightcast.wire import source_tables
from weightcast.wire.bucket_sources import BroadcastSource, MappedPart, MappedSource, MemoryHandle
from weightcast.wire.codec import decode, encode
from weightcast.wire.layout import BucketLayout, Packing, TensorSpec, plan_buckets
from weightcast.wire.messages import Announce


def shared(parts: int, *, fd: int = 3) -> Shared:
    handle = MemoryHandle(kind="shm", device="cpu", size_bytes=1 << 30, token="a" * 32, pid=7, fd=fd)
    found = tuple(
        MappedPart(slot=number, offset=(0,), shape=(8,), memory=0, first_byte=64 * number, stride=(1,))
        for number in range(parts)
    )
    return Shared(memories=(handle,), mapped=found)


@pytest.fixture
def layout() -> BucketLayout:
    specs = [TensorSpec(name=f"t.{number}", dtype="float32", shape=(8,)) for number in range(600)]
    [found] = plan_buckets(specs, bucket_bytes=1 << 20, packing=Packing())
    return found


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
