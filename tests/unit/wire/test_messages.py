"""Messages go round unchanged, every bound holds, and nothing but WireError comes out of bytes that are not one."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from weightcast.errors import WireError
from weightcast.runtime.lru import Lru
from weightcast.watch.events import Step
from weightcast.wire import codec, messages
from weightcast.wire.answers import Ack, RankAck
from weightcast.wire.bucket_sources import (
    BroadcastSource,
    ByRankSource,
    IpcSource,
    MemoryHandle,
    Part,
    RanksMemory,
)
from weightcast.wire.codec import decode, decode_ack, decode_info, decode_rank_ack, encode
from weightcast.wire.engine_info import EngineInfo, RankInfo
from weightcast.wire.held import HeldPart, HeldSums, HeldTable
from weightcast.wire.layout import MAX_BYTES, BucketLayout, TensorSlot, TensorSpec
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
    Resume,
    Revert,
    TellBoxes,
)
from weightcast.wire.plans import UpdatePlan

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
    digest="sha256",
    specs=(SPEC, SCALAR),
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
    "announce ipc": Announce(session=SESSION, layout=LAYOUT, source=IpcSource(handles=(SHM, CUDA))),
    "announce broadcast": Announce(session=SESSION, layout=LAYOUT, source=BroadcastSource(group="g")),
    "announce by rank": Announce(
        session=SESSION,
        layout=LAYOUT,
        source=ByRankSource(near=(RanksMemory(ranks=(0, 2), handles=(SHM,)),), group="g"),
    ),
    "announce by rank without a group": Announce(
        session=SESSION, layout=LAYOUT, source=ByRankSource(near=(RanksMemory(ranks=(0,), handles=(SHM, CUDA)),))
    ),
    "join for some ranks": msgspec.structs.replace(JOIN, members=(1, 3)),
    "resume": Resume(session=SESSION, buckets=3),
    "close": Close(session=SESSION, buckets=0, by_name=True),
    "commit": Commit(session=SESSION, digest="f" * 16),
    "revert": Revert(session=SESSION, reason="another engine failed"),
    "abort": Abort(session=SESSION, reason='why "not" \n ☃'),
    "readback": Readback(),
    "prepare": Prepare(plan=UpdatePlan((SPEC, SCALAR), (PLANNED,), ((260,),)), verify="resident"),
    "prepare with parts": Prepare(
        plan=UpdatePlan((SPEC, SCALAR), (PLANNED,)),
        verify="none",
        way="messages",
        parts=(((Part(slot=0, offset=(2, 0), shape=(3, 4)),), (Part(slot=1, offset=(), shape=()),)),),
        known_tables=("0" * 32,),
    ),
    "prepare with sources": Prepare(
        plan=UpdatePlan((SPEC, SCALAR), (PLANNED,)),
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


@pytest.mark.parametrize("name", EXAMPLES)
def test_decoded_message_equals_the_encoded_one(name):
    message = EXAMPLES[name]
    again = decode(encode(message))
    assert again == message
    assert type(again) is type(message)
    assert decode(bytearray(encode(message))) == decode(memoryview(encode(message))) == message


def test_every_message_has_an_example():
    assert {type(message) for message in EXAMPLES.values()} == set(messages.Message.__args__)


ANSWERS = [
    Ack(ok=False, error="no", failed_ranks=(1,), cause="group", state="quarantined", version=None, ranks=2),
    Ack(
        ok=True,
        received_all="2",
        received={"a": "0"},
        received_ranks=1,
        resident={"a": "1"},
        mismatched=("b",),
        stall_s=0.25,
        heard=1.0,
        answered=3.0,
        steps=STEPS,
    ),
    RankAck(
        rank=1,
        held=HeldSums(HeldTable((HeldPart(spec=SPEC, box_offset=(0, 2), box_shape=(6, 2)),)), torch.tensor([-(2**63)])),
        received_all="c",
        received={"a": "b"},
        missing=("x",),
        unproven=("y",),
        steps=STEPS,
    ),
    EngineInfo(
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
    ),
    EngineInfo(
        protocol=1,
        engine="weightcast 0",
        model="m",
        state="serving",
        version=None,
        digest=None,
        tp_size=2,
        host_id="",
        ranks=(
            RankInfo(rank=0, pid=1, device="cpu", host_id="a", host="alpha"),
            RankInfo(rank=1, pid=1, device="cpu", host_id="b"),
        ),
        staging="host",
        transports=("ipc",),
        specs=(SPEC,),
    ),
]


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: type(answer).__name__)
def test_decoded_answer_equals_the_encoded_one(answer):
    decode_as = {Ack: decode_ack, RankAck: decode_rank_ack, EngineInfo: decode_info}[type(answer)]
    assert decode_as(encode(answer)) == answer


def changed(message: Any, **changes: Any) -> bytes:
    """The message's JSON with other values; a dotted name goes into it, ``None`` as value takes a field out."""
    whole = json.loads(encode(message))
    for path, value in changes.items():
        *way, last = path.split("__")
        place = whole
        for step in way:
            place = place[int(step) if step.isdigit() else step]
        if value is ...:
            del place[last]
        else:
            place[int(last) if last.isdigit() else last] = value
    return json.dumps(whole).encode()


ANNOUNCE = EXAMPLES["announce ipc"]
BOUNDS = [
    *((OPEN, {"session": value}) for value in ("", "0" * 31, "0" * 33, "G" * 32, "A" * 32, "0" * 31 + "\n", 5, None)),
    *((OPEN, {"version": value}) for value in (-1, 2**53 + 1, 1.5, "1", True, None)),
    *((OPEN, {"timeout_s": value}) for value in (0, -1, 86401, "1", None, True)),
    *((OPEN, {"lease_s": value}) for value in (0, 1e9)),
    *((OPEN, {"pause": value}) for value in ("", "stop", None, 1)),
    *((OPEN, {"verify": value}) for value in ("all", None)),
    *((OPEN, {"digest": value}) for value in ("md5", None)),
    *((OPEN, {"specs": value}) for value in ([], None, {}, "x")),
    *((OPEN, {"allow_older": value}) for value in (1, "yes", None)),
    *((OPEN, {"owner__pid": value}) for value in (-1, 2**32 + 1)),
    (OPEN, {"owner__host": "x" * 4097}),
    (OPEN, {"owner": ...}),
    *(
        (OPEN, {"traceparent": value})
        for value in ("x", TRACEPARENT.upper(), TRACEPARENT + "-1", TRACEPARENT[:-1], None)
    ),
    (OPEN, {"specs": ...}),
    *((OPEN, {"specs__0__name": value}) for value in ("", "a b", "a\n", "é", "x" * 513, None)),
    *((OPEN, {"specs__0__dtype": value}) for value in ("float13", "", None, "Float32")),
    *((OPEN, {"specs__0__shape": value}) for value in ([-1], [1.5], [1] * 9, [MAX_BYTES + 1], None, ["1"])),
    (OPEN, {"specs__0__shape": [MAX_BYTES, MAX_BYTES, MAX_BYTES, MAX_BYTES, MAX_BYTES, MAX_BYTES, MAX_BYTES]}),
    *((JOIN, {"session": value}) for value in ("0" * 31, "G" * 32, None)),
    *((JOIN, {"port": value}) for value in (0, -1, 65536, "80")),
    *((JOIN, {"group": value}) for value in ("", "a b", "x" * 65, "a/b", "g\n")),
    *((JOIN, {"host": value}) for value in ("", "a b", "x" * 256, "a;b", "h\n")),
    *((JOIN, {"backend": value}) for value in ("mpi", None)),
    *((JOIN, {"world_size": value}) for value in (0, 1, 2**14 + 1)),
    *((JOIN, {"first_rank": value}) for value in (-1, 0, 2**14)),
    (JOIN, {"token": "short"}),
    (ANNOUNCE, {"layout__slots": []}),
    (ANNOUNCE, {"layout__index": -1}),
    (ANNOUNCE, {"layout__size_bytes": 259}),
    (ANNOUNCE, {"layout__size_bytes": MAX_BYTES + 1}),
    (ANNOUNCE, {"layout__slots__0__offset_bytes": 1}),
    (ANNOUNCE, {"layout__slots__0__offset_bytes": -2}),
    (ANNOUNCE, {"layout__slots__0__num_rows": 5}),
    (ANNOUNCE, {"layout__slots__0__first_row": 4}),
    (ANNOUNCE, {"layout__slots__1__offset_bytes": 20}),
    (ANNOUNCE, {"layout__slots__1__offset_bytes": 300}),
    (ANNOUNCE, {"layout__slots__0__num_rows": 2**60}),
    *((ANNOUNCE, {"source": value}) for value in ({"type": "carrier"}, {}, None, "ipc", {"type": "broadcast"})),
    (ANNOUNCE, {"source__handles": []}),
    (ANNOUNCE, {"source__handles__0__kind": "rdma"}),
    (ANNOUNCE, {"source__handles__0__pid": -1}),
    (ANNOUNCE, {"source__handles__0__fd": 2**20 + 1}),
    (ANNOUNCE, {"source__handles__0__token": "x" * 65}),
    (ANNOUNCE, {"source__handles__1__handle": "not base64!"}),
    (ANNOUNCE, {"source__handles__1__handle": "AAAA" * 200}),
    (EXAMPLES["close"], {"buckets": -1}),
    (EXAMPLES["close"], {"buckets": 2**32 + 1}),
    (EXAMPLES["commit"], {"expected": {"a": "x" * 65}}),
    (EXAMPLES["commit"], {"expected": {"a": 1}}),
    (EXAMPLES["commit"], {"expected": []}),
    (EXAMPLES["abort"], {"reason": "x" * 4097}),
]


@pytest.mark.parametrize(("message", "changes"), BOUNDS, ids=lambda value: str(value)[:60])
def test_values_outside_the_bounds_are_refused(message, changes):
    with pytest.raises(WireError):
        decode(changed(message, **changes))


@pytest.mark.parametrize("name", EXAMPLES)
def test_unknown_fields_and_tags_are_refused(name):
    message = EXAMPLES[name]
    for extra in ({"surprise": 1}, {"type": "pickle"}, {"type": 5}, {"type": ...}):
        with pytest.raises(WireError):
            decode(changed(message, **extra))
    if name.startswith("announce"):
        for path in ("layout__surprise", "layout__slots__0__surprise", "source__surprise"):
            with pytest.raises(WireError):
                decode(changed(message, **{path: 1}))


@pytest.mark.parametrize("name", EXAMPLES)
def test_truncated_message_is_refused(name):
    data = encode(EXAMPLES[name])
    for end in range(len(data)):
        with pytest.raises(WireError):
            decode(data[:end])
    with pytest.raises(WireError):
        decode(data + b"}")


def test_message_over_the_size_limit_is_refused(monkeypatch):
    data = encode(OPEN)
    monkeypatch.setattr(codec, "MAX_MESSAGE_BYTES", len(data))
    assert decode(data) == OPEN
    monkeypatch.setattr(codec, "MAX_MESSAGE_BYTES", len(data) - 1)
    with pytest.raises(WireError, match="limit"):
        decode(data)


def test_the_error_names_the_field():
    with pytest.raises(WireError, match="port"):
        decode(changed(JOIN, port=0))
    with pytest.raises(WireError, match=r"up\.weight"):
        decode(changed(ANNOUNCE, layout__slots__0__offset_bytes=1))


FUZZ = settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def _decodes_or_refuses(data: bytes) -> None:
    try:
        message = decode(data)
    except WireError:
        return
    assert decode(encode(message)) == message


@FUZZ
@given(st.binary(max_size=400))
@example(b"[" * 100_000)
@example(b'{"a":' * 100_000)
@example(b'{"type":"abort","session":' + b"[" * 100_000)
@example(b"1" * 100_000)
@example(b'"\\ud800"')
@example(b'{"type":"abort","session":"' + SESSION.encode() + b'","reason":"\\ud800"}')
@example(b"\xff\xfe{")
def test_noise_is_refused(data):
    _decodes_or_refuses(data)


@FUZZ
@given(st.data())
def test_messages_with_flipped_bytes_are_refused_or_fine(data):
    raw = bytearray(encode(EXAMPLES[data.draw(st.sampled_from(sorted(EXAMPLES)))]))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    _decodes_or_refuses(bytes(raw))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.just(10**30),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@FUZZ
@given(st.data())
def test_messages_with_other_values_are_refused_or_fine(data):
    whole = json.loads(encode(EXAMPLES[data.draw(st.sampled_from(sorted(EXAMPLES)))]))
    place: Any = whole
    while True:
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        if isinstance(place[key], dict | list) and place[key] and data.draw(st.booleans()):
            place = place[key]
            continue
        place[key] = data.draw(json_values)
        break
    _decodes_or_refuses(json.dumps(whole).encode())


def test_decoders_inspect_all_classes_at_import():
    # msgspec crashes the process when two threads do so at once, and many engines are asked at once.
    code = """
import msgspec._utils as inside
from weightcast.wire.answers import Ack, RankAck
from weightcast.wire.codec import decode, decode_ack, decode_info, decode_rank_ack, encode
from weightcast.wire.engine_info import EngineInfo, RankInfo
from weightcast.wire.messages import Readback
inside.__dict__["_eval_type"] = None
decode(encode(Readback()))
decode_ack(encode(Ack(ok=True)))
decode_rank_ack(encode(RankAck(rank=0)))
info = EngineInfo(protocol=1, engine="e", model="m", state="serving", version=None, digest=None, tp_size=1, host_id="h",
                  ranks=(RankInfo(rank=0, pid=1, device="cpu"),), staging="host", transports=(), specs=())
assert decode_info(encode(info)) == info
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr


@FUZZ
@given(st.binary(max_size=200))
@example(b"[" * 100_000)
@example(b'{"ok":"yes"}')
def test_malformed_answer_is_refused(data):
    for read in (decode_ack, decode_info, decode_rank_ack):
        with pytest.raises(WireError):
            read(data)


def test_an_older_engine_would_refuse_what_open_says_now_so_the_protocol_tells_them_apart():
    told = {name: value for name, value in json.loads(encode(OPEN)).items() if name != "traceparent"}
    assert decode(json.dumps(told).encode()) == OPEN  # what an older trainer sends is understood
    assert messages.PROTOCOL == 7


@pytest.mark.parametrize("steps", [[["wire"]], [["wire", -1, 0, 1]], [["w" * 65, 0, 0, 1]], [["wire", 0, "x", 1]], "x"])
def test_steps_of_another_form_are_refused(steps):
    body = json.loads(encode(Ack(ok=True))) | {"steps": steps}
    with pytest.raises(WireError):
        decode_ack(json.dumps(body).encode())


def description() -> EngineInfo:
    """The description of an engine with specs that no other test has."""
    specs = tuple(TensorSpec(name=f"layers.{number}.w", dtype="bfloat16", shape=(number, 7)) for number in range(9))
    return EngineInfo(
        protocol=messages.PROTOCOL,
        engine="e",
        model="m",
        state="serving",
        version=None,
        digest=None,
        tp_size=1,
        host_id="h",
        ranks=(),
        staging="none",
        transports=(),
        specs=specs,
    )


def test_specs_that_the_other_end_has_are_left_out_of_a_description():
    info = description()
    whole = encode(info)
    first = decode_info(whole)
    short = encode(info, known_specs=codec.specs_hash(first))
    assert first == info
    assert b'"name"' in whole
    assert b'"name"' not in short
    again = decode_info(short)
    assert again == info
    assert again.specs is first.specs
    assert encode(info, known_specs="0" * 32) == whole
    assert codec.specs_hash(description()) == ""  # it was not decoded here


def test_a_description_without_specs_that_this_process_has_is_refused(monkeypatch):
    info = decode_info(encode(description()))
    short = encode(info, known_specs=codec.specs_hash(info))
    monkeypatch.setattr(codec, "_known_specs", Lru(1 << 20))
    assert codec.specs_hash(info) == ""
    with pytest.raises(WireError, match="specs are missing"):
        decode_info(short)
