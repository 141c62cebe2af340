"""Plans on the wire: sent once, named afterwards, and refused by name where they are not known."""

from __future__ import annotations

import json
import secrets

import msgspec
import pytest

from weightcast.errors import WireError
from weightcast.runtime.lru import Lru
from weightcast.wire import plans
from weightcast.wire.bucket_sources import BroadcastSource, BucketPart, ExchangeSource, IpcSource, MemoryHandle
from weightcast.wire.codec import decode, encode
from weightcast.wire.layout import Packing, TensorSpec, plan_buckets
from weightcast.wire.messages import Announce, Open, Owner
from weightcast.wire.plans import UnknownPlan, UpdateTables, encode_parts

SPECS = tuple(TensorSpec(name=f"t{number}", dtype="float32", shape=(number + 1, 4)) for number in range(40))


def plan_of(specs=SPECS, bucket_bytes=512, sizes=()) -> UpdateTables:
    return UpdateTables(specs, plan_buckets(specs, bucket_bytes=bucket_bytes, packing=Packing()), sizes)


def open_of(plan: UpdateTables | None) -> Open:
    return Open(
        session=secrets.token_hex(16),
        owner=Owner(host="h", pid=1),
        version=1,
        timeout_s=1.0,
        lease_s=4.0,
        pause="abort",
        verify="resident",
        specs=SPECS,
        bucket_sizes=plan.bucket_sizes if plan is not None else (),
        plan=plan,
    )


def announce_of(opened: Open, plan: UpdateTables, index: int) -> Announce:
    source = BroadcastSource(group="g")
    return Announce(session=opened.session, layout=plan.layouts[index], source=source, plan=plan.hash)


def run_of(opened: Open, plan: UpdateTables, *indices: int) -> Announce:
    first, *following = (plan.layouts[index] for index in indices)
    source = ExchangeSource(group="g")
    return Announce(session=opened.session, layout=first, following=tuple(following), source=source, plan=plan.hash)


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
    monkeypatch.setattr(plans, "_kept", Lru(1 << 20))


def test_messages_of_a_known_plan_carry_nothing_of_its_tensors():
    plan = plan_of(sizes=(16,))
    opened = open_of(plan)
    assert decode(encode(opened)) == opened
    named = encode(opened, named=True)
    assert decode(named) == opened
    assert b"t1" not in named
    assert len(named) < 600
    for index in range(len(plan.layouts)):
        announce = announce_of(opened, plan, index)
        body = encode(announce)
        assert len(body) < 250
        assert decode(body) == announce


def test_layouts_of_a_known_plan_are_the_same_objects_in_every_update():
    plan = plan_of()
    decode(encode(open_of(plan)))
    first, second = (decode(encode(announce_of(open_of(plan), plan, 1))) for _ in range(2))
    assert isinstance(first, Announce)
    assert isinstance(second, Announce)
    assert first.layout is second.layout


def test_one_message_announces_a_run_of_buckets():
    plan = plan_of()
    opened = open_of(plan)
    decode(encode(opened))
    for run in ((0,), (1, 2), tuple(range(len(plan.layouts)))):
        body = encode(run_of(opened, plan, *run))
        assert len(body) < 250
        told = decode(body)
        assert isinstance(told, Announce)
        assert told.layouts == tuple(plan.layouts[index] for index in run)


def test_a_run_that_no_sender_makes_is_refused():
    plan = plan_of()
    opened = open_of(plan)
    decode(encode(opened))
    body = json.loads(encode(run_of(opened, plan, 0, 1)))
    for change in (
        {"following": len(plan.layouts)},
        {"following": 0},
        {"following": 64},
        {"source": {"type": "ipc", "handles": []}},
        {"layout": json.loads(encode(msgspec.structs.replace(run_of(opened, plan, 0), plan="")))["layout"]},
    ):
        with pytest.raises(WireError):
            decode(json.dumps(body | change).encode())
    memory = IpcSource(handles=(MemoryHandle(kind="shm", device="cpu", size_bytes=1, token="t", pid=1, fd=3),))
    with pytest.raises(WireError, match="several buckets at once come in a group"):
        decode(encode(msgspec.structs.replace(run_of(opened, plan, 0, 1), source=memory)))


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
    with pytest.raises(UnknownPlan, match=plan.hash):
        decode(encode(open_of(plan), named=True))
    with pytest.raises(UnknownPlan, match=plan.hash):
        decode(encode(announce_of(open_of(plan), plan, 0)))
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


def damaged(change) -> bytes:
    body = json.loads(encode(open_of(plan_of())))
    change(body)
    return json.dumps(body).encode()


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body["tables"]["buckets"][0].__setitem__(0, 1 << 20),
        lambda body: body.__setitem__("plan", "0" * 32),
        lambda body: body.__setitem__("plan", "x"),
        lambda body: body.__setitem__("specs", []),
        lambda body: body.__setitem__("bucket_sizes", [1]),
        lambda body: body.pop("plan"),
    ],
)
def test_a_plan_that_is_not_what_its_hash_says_is_refused(change):
    with pytest.raises(WireError):
        decode(damaged(change))


@pytest.mark.parametrize("slot", [[40, 0, 0, 1], [0, 1, 0, 1], [0, 0, 0, 2], [-1, 0, 0, 1], [0, 0, 0]])
def test_a_plan_with_a_slot_that_no_sender_makes_is_refused(slot):
    plan = plan_of()
    tables = json.loads(plan.encoded)
    tables["buckets"][0][1][0] = slot
    encoded = json.dumps(tables).encode()
    plan.__dict__["encoded"] = encoded
    with pytest.raises(WireError):
        decode(encode(open_of(plan)))


@pytest.mark.parametrize("index", [-1, 10_000, None])
def test_a_bucket_that_the_plan_does_not_have_is_refused(index):
    plan = plan_of()
    opened = open_of(plan)
    decode(encode(opened))
    body = json.loads(encode(announce_of(opened, plan, 0))) | {"bucket": index}
    with pytest.raises(WireError):
        decode(json.dumps(body).encode())
