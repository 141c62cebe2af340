"""Fuzz inputs: valid messages of every kind, and mutations of them."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

from tests.helpers.models import specs_of, weights_of
from weightcast.lab.conformance.messages import with_names, with_tables
from weightcast.wire.answers import Ack, RankAck
from weightcast.wire.bucket_sources import BroadcastSource, ByRankSource, IpcSource, MemoryHandle, RanksMemory
from weightcast.wire.codec import encode
from weightcast.wire.engine_info import EngineInfo, RankInfo
from weightcast.wire.held import HeldPart
from weightcast.wire.layout import BucketLayout, TensorSlot, TensorSpec
from weightcast.wire.messages import Abort, Announce, Close, Commit, Join, Leave, Open, Owner, Prepare, Readback, Revert
from weightcast.wire.plans import UpdateTables

SESSION = "0123456789abcdef" * 2
_SPECS = tuple(specs_of(weights_of(0)))  # those of the model behind the messages: an Open with them may be taken
_SLOT = TensorSlot(spec=_SPECS[0], offset_bytes=0, num_rows=4)
_LAYOUT = BucketLayout(index=0, slots=(_SLOT,), size_bytes=128)
_PLAN = UpdateTables(_SPECS, (_LAYOUT,))
_SHM = MemoryHandle(kind="shm", device="cpu", size_bytes=1024, token="ab" * 16, pid=1, fd=3)
_CUDA = MemoryHandle(kind="cuda", device="GPU-0", size_bytes=1024, handle=b"h" * 64, event=b"e" * 64)

HONEST: tuple[bytes, ...] = tuple(
    encode(message)
    for message in (
        Open(
            session=SESSION,
            owner=Owner(host="trainer-0", pid=1),
            version=3,
            timeout_s=1.0,
            lease_s=60.0,
            pause="abort",
            verify="resident",
            plan=_PLAN,
        ),
        Join(
            group="g",
            host="127.0.0.1",
            port=9,
            token="ab" * 16,
            first_rank=1,
            world_size=2,
            backend="gloo",
            timeout_s=0.1,
            session=SESSION,
        ),
        Announce(session=SESSION, plan=_PLAN, bucket=0, source=IpcSource(handles=(_SHM, _CUDA))),
        Announce(session=SESSION, plan=_PLAN, bucket=0, source=BroadcastSource(group="g")),
        Announce(
            session=SESSION,
            plan=_PLAN,
            bucket=0,
            source=ByRankSource(near=(RanksMemory(ranks=(0,), handles=(_SHM,)),), group="g"),
        ),
        Close(session=SESSION, buckets=1),
        Commit(session=SESSION, digest="0" * 16),
        Revert(session=SESSION, reason="no"),
        Abort(session=SESSION, reason="no"),
        Leave(group="g"),
        Readback(),
        Prepare(plan=_PLAN, verify="resident"),
        Prepare(
            plan=_PLAN,
            owner=Owner(host="h", pid=1),
            verify="none",
            way="memory",
            sources=(IpcSource(handles=(_SHM,)),),
        ),
        Ack(ok=True, version=3, ranks=1, received={"a": "0" * 16}, missing=("b",), load_s=0.5),
        RankAck(
            rank=0,
            parts=(HeldPart(spec=TensorSpec(name="a", dtype="int8", shape=(2,)), box_offset=(0,), box_shape=(2,)),),
            sums=bytes(8),
        ),
        EngineInfo(
            protocol=1,
            engine="e 1",
            model="m",
            state="serving",
            version=0,
            digest=None,
            tp_size=1,
            host_id="h",
            ranks=(RankInfo(rank=0, pid=1, device="cpu"),),
            staging="device",
            transports=("ipc",),
            specs=_SPECS[:2],
        ),
    )
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 1.5, "", "x", [], {}, [[]], {"type": "open"}, "\x00", "\ud800", "é" * 300),
    *(2**31, 2**46, 2**46 + 1, 2**53 + 1, 2**63, 2**64, -(2**63) - 1, 10**400, 1e308, 5e-324, -0.0),
    *("0" * 32, "f" * 32, SESSION, "embed.weight", "gloo", "cuda", "wait", list(range(300)), [0] * 9, [2**23] * 8),
)
LITERALS: tuple[bytes, ...] = (
    *(
        b"",
        b"null",
        b"[]",
        b"{}",
        b'""',
        b"0",
        b"1e999",
        b"-1e999",
        b"NaN",
        b"Infinity",
        b"\xff\xfe\x00",
        b"\xef\xbb\xbf{}",
    ),
    *(b'{"type":"open"}', b'{"type":"pickle"}', b'{"type":1}', b'{"type":["close"]}', b'{"ok":true,"ok":false}'),
    b'{"type":"close","session":"' + SESSION.encode() + b'","buckets":1' + b"0" * 400 + b"}",
    b'{"type":"leave"}{"type":"leave"}',
    *(b"[" * 3000, b'{"a":' * 3000, b'{"type":' * 1000 + b"1" + b"}" * 1000),
)


def _honest(random_: random.Random) -> bytes:
    return random_.choice(HONEST)


def _noise(random_: random.Random) -> bytes:
    return random_.randbytes(random_.choice((0, 1, 2, 16, 300)))


def _literal(random_: random.Random) -> bytes:
    return random_.choice(LITERALS)


def _truncated(random_: random.Random) -> bytes:
    data = _honest(random_)
    return data[: random_.randrange(len(data))]


def _flipped(random_: random.Random) -> bytes:
    data = bytearray(_honest(random_))
    for _ in range(random_.choice((1, 1, 2, 8))):
        data[random_.randrange(len(data))] = random_.randrange(256)
    return bytes(data)


def _spliced(random_: random.Random) -> bytes:
    first, second = _honest(random_), _honest(random_)
    return first[: random_.randrange(len(first))] + second[random_.randrange(len(second)) :]


def _changed(random_: random.Random) -> bytes:
    """Replaces, removes, adds or doubles a value at a random place, most often with the names that its tables get."""
    in_place = random_.random() < 0.8
    data = _honest(random_)
    whole = with_tables(data) if in_place else json.loads(data)
    for _ in range(random_.choice((1, 1, 1, 2, 3))):
        place = whole
        while True:
            inner = [value for value in (place.values() if isinstance(place, dict) else place)]
            inner = [value for value in inner if isinstance(value, dict | list) and value]
            if not inner or random_.random() < 0.4:
                break
            place = random_.choice(inner)
        value = copy.deepcopy(random_.choice(VALUES))
        if isinstance(place, list):
            if place and random_.random() < 0.7:
                place[random_.randrange(len(place))] = value
            else:
                place.append(copy.deepcopy(random_.choice(place)) if place and random_.random() < 0.5 else value)
        elif random_.random() < 0.15:
            place.pop(random_.choice([*place, ""]), None)
        else:
            place[random_.choice([*place, "surprise"])] = value
    return with_names(whole) if in_place else json.dumps(whole).encode()


_MAKERS: tuple[Callable[[random.Random], bytes], ...] = (
    *(_changed, _changed, _changed, _changed, _flipped, _flipped, _spliced, _truncated, _literal, _noise, _honest),
)


def make(random_: random.Random) -> bytes:
    """One input."""
    return random_.choice(_MAKERS)(random_)
