"""Plans on the wire: sent once, named afterwards, and refused by name where they are not known."""

from __future__ import annotations

import json
import secrets

import msgspec
import pytest

from weightcast.errors import WireError
from weightcast.lab.conformance.messages import with_names, with_tables
from weightcast.wire import codec
from weightcast.wire.blobs import Blobs, UnknownBlob
from weightcast.wire.bucket_sources import BroadcastSource, BucketPart, ExchangeSource, IpcSource, MemoryHandle
from weightcast.wire.codec import decode, encode
from weightcast.wire.layout import Packing, TensorSpec, plan_buckets
from weightcast.wire.messages import Announce, Open, Owner
from weightcast.wire.plans import UpdateTables, encode_parts

SPECS = tuple(TensorSpec(name=f"t{number}", dtype="float32", shape=(number + 1, 4)) for number in range(40))


def plan_of(specs=SPECS, bucket_bytes=512, sizes=()) -> UpdateTables:
    return UpdateTables(specs, plan_buckets(specs, bucket_bytes=bucket_bytes, packing=Packing()), sizes)


def open_of(plan: UpdateTables) -> Open:
    return Open(
        session=secrets.token_hex(16),
        owner=Owner(host="h", pid=1),
        version=1,
        timeout_s=1.0,
        lease_s=4.0,
        pause="abort",
        verify="resident",
        plan=plan,
    )


def announce_of(opened: Open, index: int) -> Announce:
    return Announce(session=opened.session, plan=opened.plan, bucket=index, source=BroadcastSource(group="g"))


def run_of(opened: Open, first: int, *following: int) -> Announce:
    source = ExchangeSource(group="g")
    return Announce(session=opened.session, plan=opened.plan, bucket=first, following=len(following), source=source)


def told_parts(plan: UpdateTables, ranks: int) -> list[bytes]:
    """The parts of trainer ranks that have whole slots in turn, as each tells them."""
    return [
        encode_parts(
            [
                [
                    BucketPart(number, (0, 0), slot.spec.shape)
                    for number, slot in enumerate(layout.slots)
                    if number % ranks == rank
                ]
                for layout in plan.layouts
            ]
        )
        for rank in range(ranks)
    ]


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch):
    forget(monkeypatch)


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drops the plans that this process was sent, as a restart does."""
    monkeypatch.setattr(codec, "KEPT", Blobs())


def test_messages_of_a_known_plan_carry_nothing_of_its_tensors():
    plan = plan_of(sizes=(16,))
    opened = open_of(plan)
    assert decode(encode(opened)) == opened
    named = encode(opened, (plan.hash,))
    assert decode(named) == opened
    assert b"t1" not in named
    assert len(named) < 600
    for index in range(len(plan.layouts)):
        announce = announce_of(opened, index)
        body = encode(announce, (plan.hash,))
        assert len(body) < 250
        assert decode(body) == announce


def test_layouts_of_a_known_plan_are_the_same_objects_in_every_update():
    plan = plan_of()
    decode(encode(open_of(plan)))
    first, second = (decode(encode(announce_of(open_of(plan), 1), (plan.hash,))) for _ in range(2))
    assert isinstance(first, Announce)
    assert isinstance(second, Announce)
    assert first.layout is second.layout


def test_one_message_announces_a_run_of_buckets():
    plan = plan_of()
    opened = open_of(plan)
    decode(encode(opened))
    for run in ((0,), (1, 2), tuple(range(len(plan.layouts)))):
        body = encode(run_of(opened, *run), (plan.hash,))
        assert len(body) < 250
        told = decode(body)
        assert isinstance(told, Announce)
        assert told.layouts == tuple(plan.layouts[index] for index in run)


def test_a_run_that_no_sender_makes_is_refused():
    opened = open_of(plan_of())
    body = with_tables(encode(run_of(opened, 0, 1)))
    handle = MemoryHandle(kind="shm", device="cpu", size_bytes=1, token="t", pid=1, fd=3)
    memory = json.loads(msgspec.json.encode(IpcSource(handles=(handle,))))
    for change, words in (
        ({"following": len(opened.plan.layouts)}, "its plan has"),
        ({"following": 64}, "following"),
        ({"source": {"type": "ipc", "handles": []}}, "handles"),
        ({"source": memory}, "several buckets at once come in a group"),
    ):
        with pytest.raises(WireError, match=words):
            decode(with_names(body | change))


def test_the_parts_of_all_trainer_ranks_come_with_the_plan():
    plan = plan_of()
    parted = UpdateTables(plan.specs, plan.layouts, told=told_parts(plan, 3))
    assert parted.hash not in (plan.hash, UpdateTables(plan.specs, plan.layouts, told=told_parts(plan, 2)).hash)
    opened = decode(encode(open_of(parted)))
    assert isinstance(opened, Open)
    assert opened.plan is not None
    assert plan.parts == ()
    for layout, ranks in zip(plan.layouts, opened.plan.parts, strict=True):
        assert len(ranks) == 3
        assert sorted(part.slot for parts in ranks for part in parts) == list(range(len(layout.slots)))


@pytest.mark.parametrize("told", [b"[]", b"[[]]", b"[[[0]]]", b'"x"', b"7"])
def test_parts_of_other_buckets_than_the_plan_has_are_refused(told):
    plan = plan_of()
    with pytest.raises(WireError):
        decode(encode(open_of(UpdateTables(plan.specs, plan.layouts, told=[*told_parts(plan, 1), told]))))


def test_a_process_that_forgot_the_plan_says_so_and_takes_it_again(monkeypatch: pytest.MonkeyPatch):
    plan = plan_of()
    decode(encode(open_of(plan)))
    forget(monkeypatch)
    with pytest.raises(UnknownBlob, match=plan.hash):
        decode(encode(open_of(plan), (plan.hash,)))
    with pytest.raises(UnknownBlob, match=plan.hash):
        decode(encode(announce_of(open_of(plan), 0), (plan.hash,)))
    again = open_of(plan)
    assert decode(encode(again)) == again


@pytest.mark.parametrize(
    "other",
    [
        plan_of(bucket_bytes=1024),
        plan_of(sizes=(16,)),
        plan_of(SPECS[:-1]),
        plan_of((TensorSpec(name="t0", dtype="bfloat16", shape=(1, 4)), *SPECS[1:])),
        plan_of((TensorSpec(name="t0", dtype="float32", shape=(4, 1)), *SPECS[1:])),
    ],
)
def test_any_other_table_has_another_hash(other):
    assert other.hash != plan_of().hash
    assert plan_of().hash == plan_of().hash


@pytest.mark.parametrize(
    "change",
    [
        {"plan": "0" * 32},  # it brings another plan than it names
        {"plan": "x"},
        {"specs": []},
        {"tables": []},
        {"tables": ["no table"]},
    ],
)
def test_a_plan_that_is_not_what_its_hash_says_is_refused(change):
    body = json.loads(encode(open_of(plan_of())))
    with pytest.raises(WireError):
        decode(json.dumps(body | change, separators=(",", ":")).encode())


@pytest.mark.parametrize("slot", [[40, 0, 0, 1], [0, 1, 0, 1], [0, 0, 0, 2], [-1, 0, 0, 1], [0, 0, 0]])
def test_a_plan_with_a_slot_that_no_sender_makes_is_refused(slot):
    body = with_tables(encode(open_of(plan_of())))
    body["plan"]["buckets"][0][1][0] = slot
    with pytest.raises(WireError):
        decode(with_names(body))


@pytest.mark.parametrize("index", [-1, 10_000, None])
def test_a_bucket_that_the_plan_does_not_have_is_refused(index):
    body = with_tables(encode(announce_of(open_of(plan_of()), 0)))
    with pytest.raises(WireError):
        decode(with_names(body | {"bucket": index}))
