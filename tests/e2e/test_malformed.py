"""Ten thousand messages that nobody of ours would send change nothing and kill nothing."""

from __future__ import annotations

import http.client
import random
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
import torch

from tests.helpers.harness import Engine, connect, next_version, push, serves_whole, trainer_of
from tests.helpers.sessions import announce
from weightcast.comm.ipc import SharedBuffer
from weightcast.lab.conformance.messages import with_names, with_tables
from weightcast.wire.bucket_sources import BroadcastSource, IpcSource, MemoryHandle
from weightcast.wire.codec import encode
from weightcast.wire.layout import BucketLayout, TensorSlot, TensorSpec
from weightcast.wire.messages import Abort, Announce, Close, Commit, Join, Leave, Open, Owner, Prepare, Readback
from weightcast.wire.plans import UpdateTables

COUNT = 10_000
THREADS = 4
PATHS = ("/weightcast/apply", "/weightcast/open", "/weightcast/score")
# Open first.  Its specs are not the model's, so that no mutation of it can start an update.
SPEC = TensorSpec(name="layers.0.up.weight", dtype="float32", shape=(256, 64))
LAYOUT = BucketLayout(index=0, slots=(TensorSlot(spec=SPEC, offset_bytes=0, num_rows=4),), size_bytes=1024)
SESSION = "0123456789abcdef" * 2
HANDLE = MemoryHandle(kind="shm", device="cpu", size_bytes=1024, token="ab" * 16, pid=1, fd=3)
MESSAGES = [
    Open(
        session=SESSION,
        owner=Owner(host="nowhere", pid=1),
        version=1 << 40,
        timeout_s=1.0,
        lease_s=1.0,
        pause="abort",
        verify="resident",
        plan=UpdateTables((SPEC,), (LAYOUT,)),
    ),
    announce(SESSION, LAYOUT, IpcSource(handles=(HANDLE,))),
    announce(SESSION, LAYOUT, BroadcastSource(group="g")),
    Close(session=SESSION, buckets=1),
    Commit(session=SESSION, digest="0" * 16),
    Abort(session=SESSION, reason="no"),
    Leave(group="g"),
    Leave(),
    Readback(),
    Prepare(plan=UpdateTables((SPEC,), (LAYOUT,)), verify="resident"),
]
VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1, 1.5, "", "x", [], {}, [[]], {"type": "open"}, "\x00", "\ud800", "é" * 300),
    *(2**31, 2**53 + 1, 2**64, -(2**63) - 1, 10**400, 1e308, -0.0, "9" * 5000, "0" * 32, list(range(300))),
]


def reference(random_: random.Random) -> bytes:
    return encode(random_.choice(MESSAGES))


def noise(random_: random.Random) -> bytes:
    return random_.randbytes(random_.choice([0, 1, 2, 16, 300, 5000]))


def truncated(random_: random.Random) -> bytes:
    data = reference(random_)
    return data[: random_.randrange(len(data))]


def flipped(random_: random.Random) -> bytes:
    data = bytearray(reference(random_))
    for _ in range(random_.choice([1, 1, 2, 8])):
        data[random_.randrange(len(data))] = random_.randrange(256)
    return bytes(data)


def mutated(random_: random.Random) -> bytes:
    """A value at a random place replaced, removed or added.  Tables have the names of what they became."""
    whole = with_tables(reference(random_))
    place = whole
    for _ in range(random_.randrange(4)):
        inner = [value for value in (place.values() if isinstance(place, dict) else place) if value]
        inner = [value for value in inner if isinstance(value, dict | list)]
        if not inner:
            break
        place = random_.choice(inner)
    value = random_.choice(VALUES)
    if isinstance(place, dict):
        key = random_.choice([*place, "surprise"])
        if random_.random() < 0.2:
            place.pop(key, None)
        else:
            place[key] = value
    else:
        place.append(value)
    return with_names(whole)


def nested(random_: random.Random) -> bytes:
    depth = random_.choice([50, 1000, 100_000])
    return random_.choice(
        [b"[" * depth, b"[" * depth + b"]" * depth, b'{"a":' * depth, b'{"type":' * depth + b"1" + b"}" * depth]
    )


def literal(random_: random.Random) -> bytes:
    return random_.choice(
        [
            *(b"", b"null", b"[]", b"{}", b'""', b"0", b"1e999", b"-1e999", b"NaN", b"Infinity", b"\xff\xfe\x00"),
            *(b'{"type":"open"}', b'{"type":"pickle"}', b'{"type":1}', b'{"token_ids":[1e3]}', b'{"token_ids":{}}'),
            b'{"type":"close","session":"' + b"0" * 32 + b'","buckets":1' + b"0" * 400 + b"}",
            b'{"type":"abort","session":"' + b"0" * 32 + b'","session":"' + b"1" * 32 + b'"}',
            b'{"type":"abort","session":"' + b"0" * 32 + b'","reason":"' + b"x" * 5000 + b'"}',
            b'{"token_ids":[' + b"1," * 100_000 + b"1]}",
            b'{"token_ids":[-1,99999999999999999999]}',
            b" " * 100_000,
        ]
    )


def in_vain(random_: random.Random) -> bytes:
    """A message that is fine, for a session or a group that is not there."""
    return encode(random_.choice(MESSAGES))


BODIES: list[Callable[[random.Random], bytes]] = [noise, truncated, flipped, mutated, mutated, nested, literal, in_vain]


def raw_requests(random_: random.Random) -> Iterator[bytes]:
    """Requests that are wrong as HTTP, each for a connection of its own."""
    body = encode(MESSAGES[5])
    start = b"POST /weightcast/apply HTTP/1.1\r\nHost: x\r\n"
    while True:
        yield random_.choice(
            [
                start + b"Content-Length: 100000\r\n\r\n" + body,
                start + b"Content-Length: 3\r\n\r\n" + body,
                start + b"Content-Length: -1\r\n\r\n" + body,
                start + b"Content-Length: 99999999999999999999\r\n\r\n" + body,
                start + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n" + body,
                start + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n" + body,
                start + b"Transfer-Encoding: chunked\r\n\r\n10\r\nshort\r\n0\r\n\r\n",
                start + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\n{\r\n" * 50,
                start + b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n4\r\nnull\r\n0\r\n\r\n",
                start + b"Expect: 100-continue\r\nContent-Length: 10\r\n\r\n",
                start[: random_.randrange(len(start))],
                b"POST " + b"/" * 70_000 + b" HTTP/1.1\r\n\r\n",
                b"GET /weightcast/open HTTP/1.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nHost: x\r\n\r\n",
                b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
                b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + random_.randbytes(64),
                random_.randbytes(200),
                b"",
            ]
        )


def throw(engine: Engine, count: int, seed: int) -> Counter[int]:
    """Throw messages; how often each status came back."""
    random_ = random.Random(seed)
    answers: Counter[int] = Counter()
    connection = http.client.HTTPConnection("127.0.0.1", engine.port, timeout=300)
    raw = raw_requests(random_)
    try:
        for _ in range(count):
            kind = random_.random()
            if kind < 0.03:
                end = socket.create_connection(("127.0.0.1", engine.port), timeout=300)
                with end, suppress(ConnectionError):
                    end.sendall(next(raw))
                    if random_.random() < 0.5:
                        end.shutdown(socket.SHUT_WR)
                        end.recv(1000)
                answers[0] += 1
                continue
            method = (
                "POST" if kind > 0.06 else random_.choice(["GET", "PUT", "DELETE", "HEAD", "PATCH", "OPTIONS", "X"])
            )
            path = random_.choice(PATHS) if kind > 0.08 else random_.choice(["/weightcast", "/weightcast/apply/", "/x"])
            connection.request(method, path, random_.choice(BODIES)(random_))
            answer = connection.getresponse()
            answer.read()
            answers[answer.status] += 1
    finally:
        connection.close()
    return answers


def flood(engine: Engine, count: int, seed: int) -> Counter[int]:
    with ThreadPoolExecutor(THREADS) as pool:
        parts = [pool.submit(throw, engine, count // THREADS, seed + number) for number in range(THREADS)]
        return sum((part.result() for part in parts), Counter())


def test_ten_thousand_malformed_messages_change_nothing_and_kill_nothing(engines):
    for engine, count in ((engines.one, COUNT * 7 // 10), (engines.two, COUNT * 3 // 10)):
        version = next_version()
        push([engine], version)
        pids = engine.pids()
        info, digests = engine.info(), engine.digests()

        answers = flood(engine, count, seed=count)

        assert answers.total() == count
        assert not [status for status in answers if status >= 500], answers
        assert answers[400] > count // 2
        assert answers[409] > count // 50
        assert engine.info() == info
        assert engine.digests() == digests
        assert engine.pids() == pids
        version = next_version()
        assert push([engine], version, transport="broadcast").ok
        assert serves_whole(engine) == version


@pytest.mark.parametrize("transport", ["ipc", "broadcast"])
def test_an_update_goes_through_while_strangers_shout(engines, transport):
    model = trainer_of(0)
    with ThreadPoolExecutor(1) as pool, connect(model, [engines.one, engines.two], transport=transport) as updater:
        shouting = pool.submit(flood, engines.one, 400, 7)
        versions = 0
        while not shouting.done() or not versions:
            version = next_version()
            model.set_version(version)
            assert updater.update(version=version).ok
            versions += 1
        assert shouting.result().total() == 400
    assert serves_whole(engines.one) == serves_whole(engines.two) == version


@pytest.mark.parametrize("transport", ["ipc", "broadcast"])
def test_whoever_does_not_know_the_session_cannot_touch_it(engines, transport):
    version = next_version()
    statuses: list[int] = []

    def shout(sent: int, total: int) -> None:
        for message in MESSAGES:
            path = "/weightcast/open" if isinstance(message, Open) else "/weightcast/apply"
            statuses.append(engines.one.ask("POST", path, encode(message))[0])

    with connect(trainer_of(version), [engines.one], transport=transport, progress=shout) as updater:
        assert updater.update(version=version).ok
    assert serves_whole(engines.one) == version
    assert statuses.count(409) >= 4 * (len(statuses) // len(MESSAGES))


def test_messages_in_the_wrong_order_are_refused(engines):
    engine = engines.one
    before, version = serves_whole(engine), next_version()
    info = engine.info()
    buffer = SharedBuffer(1024, torch.device("cpu"))
    session = "ab" * 16
    open_ = Open(
        session=session,
        owner=Owner(host="here", pid=1),
        version=version,
        timeout_s=5.0,  # a bucket that comes early waits so long for the one before it
        lease_s=60.0,
        pause="abort",
        verify="resident",
        plan=UpdateTables(info.specs, ()),
    )
    spec = info.specs[0]
    layout = BucketLayout(index=0, slots=(TensorSlot(spec=spec, offset_bytes=0, num_rows=4),), size_bytes=1024)
    bucket = announce(session, layout, IpcSource(handles=(buffer.handle(),)))

    def tell(message: Any) -> tuple[int, str]:
        status, body = engine.ask("POST", "/weightcast/apply", encode(message))
        return status, body.decode()

    for early in (bucket, Close(session=session, buckets=0), Commit(session=session)):
        status, words = tell(early)
        assert (status, "no such session" in words) == (409, True)
    status, words = tell(open_)
    assert status == 400
    assert "/weightcast/open" in words

    connection = http.client.HTTPConnection("127.0.0.1", engine.port, timeout=300)
    connection.request("POST", "/weightcast/open", encode(open_))
    answer = connection.getresponse()
    assert answer.status == 200
    answer.read(4)
    try:
        for message, words_wanted in (
            (Commit(session=session), "was not closed"),
            (Close(session=session, buckets=1), "0 buckets arrived"),
            (_with_index(bucket, 1), "where bucket 0 was due"),
            (_of_another(bucket), "not what was announced"),
        ):
            status, words = tell(message)
            assert status == 409
            assert words_wanted in words
        assert tell(bucket)[0] == 200
        status, words = tell(bucket)
        assert status == 409
        assert "where bucket 1 was due" in words
        status, words = tell(Close(session=session, buckets=1))
        assert status == 409
        assert "did not arrive whole" in words
        status, words = tell(Commit(session=session))
        assert "has failed" in words
        assert tell(Abort(session=session))[0] == 200
    finally:
        connection.close()
        buffer.close()
    assert serves_whole(engine) == before
    push([engine], version)


def _with_index(bucket: Announce, index: int) -> Announce:
    layout = BucketLayout(index=index, slots=bucket.layout.slots, size_bytes=bucket.layout.size_bytes)
    return announce(bucket.session, layout, bucket.source)


def _of_another(bucket: Announce) -> Announce:
    other = TensorSpec(name=SPEC.name, dtype="float32", shape=(512, 32))
    slot = TensorSlot(spec=other, offset_bytes=0, num_rows=4)
    return announce(bucket.session, BucketLayout(index=0, slots=(slot,), size_bytes=1024), bucket.source)


def test_a_meeting_that_nobody_holds_ends_and_does_not_stop_an_update(engines):
    join = Join(
        group="nowhere",
        host="127.0.0.1",
        port=9,
        token="ab" * 16,
        first_rank=1,
        world_size=2,
        backend="gloo",
        timeout_s=60.0,
    )
    status, words = engines.one.ask("POST", "/weightcast/apply", encode(join))
    assert status == 424
    assert b"127.0.0.1:9" in words or b"meet" in words
    push([engines.one], next_version(), transport="broadcast")
