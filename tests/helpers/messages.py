"""One message of each kind."""

from __future__ import annotations

from typing import Any

import msgspec

from weightcast.lab.conformance.messages import with_names, with_tables
from weightcast.watch.events import Step
from weightcast.wire.answers import Ack, RankAck
from weightcast.wire.bucket_sources import (
    BroadcastSource,
    BucketPart,
    ByRankSource,
    IpcSource,
    MemoryHandle,
    RanksMemory,
)
from weightcast.wire.codec import encode
from weightcast.wire.engine_info import EngineInfo, RankInfo
from weightcast.wire.held import HeldPart
from weightcast.wire.layout import BucketLayout, TensorSlot, TensorSpec
from weightcast.wire.messages import (
    Abort,
    Announce,
    Close,
    Commit,
    Fetch,
    Join,
    Leave,
    Open,
    Owner,
    PeerEngine,
    Prepare,
    Readback,
    ReadChunk,
    Revert,
    TellBoxes,
)
from weightcast.wire.plans import UpdateTables, encode_parts

SESSION = "0123456789abcdef" * 2


SPEC = TensorSpec(name="model.layers.0.up.weight", dtype="bfloat16", shape=(6, 4))


SCALAR = TensorSpec(name="scale", dtype="float32", shape=())


SLOTS = (
    TensorSlot(spec=SPEC, offset_bytes=0, first_row=2, num_rows=3),
    TensorSlot(spec=SCALAR, offset_bytes=256, num_rows=1),
)


LAYOUT = BucketLayout(index=3, slots=SLOTS, size_bytes=260)


PLANNED = BucketLayout(index=0, slots=SLOTS, size_bytes=260)


SHM = MemoryHandle(kind="shm", device="cpu", size_bytes=260, token="ab" * 16, pid=123, fd=7)


CUDA = MemoryHandle(kind="cuda", device="GPU-1", size_bytes=9, handle=b"\x00\xff" * 32, offset_bytes=5, event=b"\x01")


OPEN = Open(
    session=SESSION,
    owner=Owner(host="höst", pid=1),
    version=7,
    allow_older=True,
    timeout_s=120.0,
    lease_s=0.5,
    pause="in_place",
    verify="resident",
    plan=UpdateTables((SPEC, SCALAR), (LAYOUT,)),
)


TRACEPARENT = f"00-{SESSION}-{SESSION[:16]}-01"


STEPS = (Step("wire", 0, 1.5, 2.5, 3), Step("pause", None, 2.0, 2.25))


JOIN = Join(
    group="g.1-x",
    host="fe80::1%eth0",
    port=65535,
    token=SESSION,
    first_rank=1,
    world_size=2,
    backend="gloo",
    timeout_s=1.0,
)


EXAMPLES = {
    "open": OPEN,
    "open with a trace": msgspec.structs.replace(OPEN, traceparent=TRACEPARENT),
    "join": JOIN,
    "join for a session": msgspec.structs.replace(JOIN, session=SESSION),
    "leave": Leave(group="g"),
    "leave all": Leave(),
    "announce ipc": Announce(session=SESSION, plan=OPEN.plan, bucket=0, source=IpcSource(handles=(SHM, CUDA))),
    "announce broadcast": Announce(session=SESSION, plan=OPEN.plan, bucket=0, source=BroadcastSource(group="g")),
    "announce by rank": Announce(
        session=SESSION,
        plan=OPEN.plan,
        bucket=0,
        source=ByRankSource(near=(RanksMemory(ranks=(0, 2), handles=(SHM,)),), group="g"),
    ),
    "announce by rank without a group": Announce(
        session=SESSION,
        plan=OPEN.plan,
        bucket=0,
        source=ByRankSource(near=(RanksMemory(ranks=(0,), handles=(SHM, CUDA)),)),
    ),
    "join for some ranks": msgspec.structs.replace(JOIN, members=(1, 3)),
    "close": Close(session=SESSION, buckets=0, by_name=True),
    "commit": Commit(session=SESSION, digest="f" * 16),
    "revert": Revert(session=SESSION, reason="another engine failed"),
    "abort": Abort(session=SESSION, reason='why "not" \n ☃'),
    "readback": Readback(),
    "prepare": Prepare(plan=UpdateTables((SPEC, SCALAR), (PLANNED,), (260,)), verify="resident"),
    "prepare with parts": Prepare(
        plan=UpdateTables(
            (SPEC, SCALAR),
            (PLANNED,),
            told=[
                encode_parts([[BucketPart(slot=0, offset=(2, 0), shape=(3, 4))]]),
                encode_parts([[BucketPart(slot=1, offset=(), shape=())]]),
            ],
        ),
        verify="none",
        way="messages",
    ),
    "prepare with sources": Prepare(
        plan=UpdateTables((SPEC, SCALAR), (PLANNED,)),
        owner=Owner(host="h", pid=1),
        verify="none",
        way="memory",
        sources=(IpcSource(handles=(MemoryHandle(kind="shm", device="cpu", size_bytes=260, token="t", pid=1, fd=3),)),),
    ),
    "fetch": Fetch(
        session=SESSION, index=3, peer=PeerEngine(url="http://peer:1", api_key="k"), version=7, digest="f" * 16
    ),
    "chunk": ReadChunk(rank=1, index=3, layout="0" * 32, version=7, digest="f" * 16),
    "boxes": TellBoxes(),
}


INFO = EngineInfo(
    protocol=1,
    engine="weightcast 0",
    model="m",
    state="serving",
    version=None,
    digest=None,
    tp_size=1,
    host_id="h",
    ranks=(RankInfo(rank=0, pid=1, device="cpu"),),
    staging="host",
    transports=("ipc",),
    specs=(SPEC,),
)
ANSWERS = [
    Ack(ok=False, error="no", failed_ranks=(1,), cause="group", state="quarantined", version=None, ranks=2),
    Ack(
        ok=True,
        received={"a": "0"},
        suspects={"a": (0,)},
        resident={"a": "1"},
        mismatched=("b",),
        stall_s=0.25,
        heard=1.0,
        answered=3.0,
        steps=STEPS,
    ),
    RankAck(
        rank=1,
        parts=(HeldPart(spec=SPEC, box_offset=(0, 2), box_shape=(6, 2)),),
        sums=bytes(7) + b"\x80",
        missing=("x",),
        steps=STEPS,
    ),
    INFO,
    msgspec.structs.replace(
        INFO,
        tp_size=2,
        host_id="",
        ranks=(
            RankInfo(rank=0, pid=1, device="cpu", host_id="a", host="alpha"),
            RankInfo(rank=1, pid=1, device="cpu", host_id="b"),
        ),
    ),
]


def changed(message: Any, **changes: Any) -> bytes:
    """The message's JSON with other values; a dotted name goes into it, ``None`` as value takes a field out."""
    whole = with_tables(encode(message))
    for path, value in changes.items():
        *way, last = path.split("__")
        place = whole
        for step in way:
            place = place[int(step) if step.isdigit() else step]
        if value is ...:
            del place[last]
        else:
            place[int(last) if last.isdigit() else last] = value
    return with_names(whole)


ANNOUNCE = EXAMPLES["announce ipc"]
