"""Checks of the receiver's wire: messages that are malformed, out of order or of another trainer."""

from __future__ import annotations

import http.client
import json
import ssl
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import msgspec

from weightcast.comm.http import Client
from weightcast.comm.tls import client_context
from weightcast.config import Target
from weightcast.errors import TargetRejected, WeightcastError
from weightcast.lab.conformance.engine import EngineUnderTest
from weightcast.lab.conformance.result import Failed, NotApplicable, need
from weightcast.lab.conformance.session import RawSession
from weightcast.wire.blobs import hash_of
from weightcast.wire.codec import encode
from weightcast.wire.layout import TensorSpec
from weightcast.wire.messages import Abort, Close, Commit, Revert
from weightcast.wire.plans import UpdateTables

_FIELDS = {"parts", "plan", "source", "sources", "specs"}  # with tables
_CLIENT_ERRORS = range(400, 500)
_SHORT_LEASE_S = 1.0
_MOST_BYTES = 8 << 20  # what the receiver accepts of a message, beside four times its table of tensors


def refuses_malformed_messages(engine: EngineUnderTest) -> str:
    """Every malformed message is answered by a refusal with words, and changes nothing."""
    _need_receiver(engine)
    count = 0
    with engine.kept("A"):
        for what, path, body in _malformed(engine):
            _refused(f"{what} to {path}", lambda path=path, body=body: engine.client.post_json(path, body))
            count += 1
    return f"{count} messages, each with the engine's words; it still serves A"


def refuses_strangers(engine: EngineUnderTest) -> str:
    """Messages about a session that is not open are refused, also while another session is open."""
    _need_receiver(engine)
    stranger = "0" * 32
    messages = (Close(session=stranger, buckets=1), Commit(session=stranger), Revert(session=stranger))
    with engine.kept("A"), RawSession(engine, "B") as session, RawSession(engine, "B") as other:
        for message in messages:
            _refused(type(message).__name__, lambda message=message: session.send(message))
        session.open()
        for message in messages:
            _refused(type(message).__name__, lambda message=message: session.send(message))
        words = _refused("a second Open", other.open)
        session.send(Abort(session=stranger))
        need(engine.info().state == "updating", "an Abort of another session ended this one")
        if engine.first.staging != "none":
            engine.says("A")  # it generates meanwhile
        session.abort()
    return f"a second trainer is told: {_quoted(words)}"


def refuses_tensors_that_do_not_fit(engine: EngineUnderTest) -> str:
    """An update with a tensor missing, unknown, or of another shape is refused before anything moves."""
    _need_receiver(engine)
    first, *rest = engine.specs
    wrong = {
        "a tensor missing": tuple(rest),
        "an unknown tensor": (*engine.specs, TensorSpec(name="no.such.weight", dtype="float32", shape=(2, 2))),
        "another shape": (msgspec.structs.replace(first, shape=(*first.shape[:-1], first.shape[-1] + 1)), *rest),
        "a tensor twice": (*engine.specs, first),
    }
    said: list[str] = []
    with engine.kept("A"):
        for what, specs in wrong.items():
            with RawSession(engine, "B", plan=UpdateTables(specs, ())) as session:
                said.append(_refused(f"an Open with {what}", session.open))
    return f"{len(wrong)} kinds; {_quoted(said[0])}"


def refuses_a_wrong_order(engine: EngineUnderTest) -> str:
    """Buckets out of order, a Close before the last bucket and a Commit before Close are refused.

    An engine may wait for the buckets before a bucket, but not beyond the deadline of the session.
    """
    _need_receiver(engine)
    with engine.kept("A"), RawSession(engine, "B", timeout_s=engine.settings.timeout_s / 4) as session:
        session.open()
        _refused("a Commit before any bucket", session.commit)
        _refused("a Close before the last bucket", session.close)
        if session.num_buckets > 2:
            _refused("the third bucket first", lambda: session.send(session.announcement(2)))
        if engine.first.staging != "none":  # else the bucket would be in live weights
            session.transfer(buckets=1)
            _refused("the first bucket again", lambda: session.send(session.announcement(0)))
        session.abort()
    return f"with {session.num_buckets} buckets"


def keeps_the_old_version_after_an_abort(engine: EngineUnderTest) -> str:
    """An Abort after every bucket has arrived leaves the old version."""
    _need_staging(engine)
    with engine.kept("A"), RawSession(engine, "B") as session:
        session.open()
        session.transfer()
        engine.says("A")
        session.close()
        engine.says("A")
        need(session.abort().state == "serving", "after an Abort it does not serve")
        _refused("a Commit after the Abort", session.commit)
    return "also a Commit after it is refused"


def takes_back_what_differs(engine: EngineUnderTest) -> str:
    """A Commit whose digests are not those of the live weights is refused, and the old version is restored."""
    _need_staging(engine)
    with engine.kept("A"), RawSession(engine, "B") as session:
        session.open()
        session.transfer()
        session.close()
        words = _refused("a Commit with a wrong digest", lambda: session.commit("0" * 16))
        need("differs from what was sent" in words, f"the refusal does not say why: {words}")
    return _quoted(words)


def repeats_an_answer_and_reverts(engine: EngineUnderTest) -> str:
    """A repeated Commit gets the same answer, and Revert restores the version before."""
    _need_staging(engine)
    with engine.kept("A"), RawSession(engine, "B") as session:
        session.open()
        session.transfer()
        session.close()
        first, again = session.commit(), session.commit()
        need(first.version == again.version and first.digest == again.digest != "", "the second answer is another")
        engine.unchanged("B", session.open_message.version)
        session.revert()
    return "digests, version and answers are those before"


def ends_abandoned_sessions(engine: EngineUnderTest) -> str:
    """A session ends when its connection closes, and when no message comes for the time of its lease."""
    _need_receiver(engine)
    engine.to("A")
    version = engine.info().version
    with RawSession(engine, "B") as session:
        session.open()
        if engine.first.staging != "none":
            session.transfer(buckets=1)
        began = time.monotonic()
        session.hang_up()
        engine.unchanged("A", version)
        closed_s = time.monotonic() - began
    with RawSession(engine, "B", lease_s=_SHORT_LEASE_S) as session:
        session.open()
        engine.unchanged("A", version)
        _refused("a bucket after the lease", lambda: session.send(session.announcement(0)))
    return f"{closed_s:.1f} s after the connection closed, and after a lease of {_SHORT_LEASE_S:g} s"


def refuses_web_pages(engine: EngineUnderTest) -> str:
    """A request that a browser sends for a web page is refused."""
    _need_receiver(engine)
    parts = urlsplit(engine.target.url)
    target = engine.target
    trust: ssl.SSLContext | None = None
    if parts.scheme == "https":
        trust = client_context(ca_file=target.ca_file, cert_file=target.cert_file, key_file=target.key_file)
    timeout_s = engine.settings.timeout_s
    host = parts.hostname or ""
    connection = (
        http.client.HTTPSConnection(host, parts.port, timeout=timeout_s, context=trust)
        if trust is not None
        else http.client.HTTPConnection(host, parts.port, timeout=timeout_s)
    )
    headers = {"Origin": "https://example.org"}
    if target.api_key is not None:
        headers["Authorization"] = f"Bearer {target.api_key}"
    try:
        connection.request("POST", f"{parts.path.rstrip('/')}/weightcast/apply", b"{}", headers)
        status = connection.getresponse().status
    finally:
        connection.close()
    need(status == 403, f"it answered {status}")
    return "403"


def asks_for_its_key(engine: EngineUnderTest) -> str:
    """Without the key, or with another one, no weight route answers."""
    _need_receiver(engine)
    if engine.target.api_key is None:
        raise NotApplicable("the engine was started without a key")
    for key in (None, "x" + engine.target.api_key):
        target = Target(
            engine.target.url,
            api_key=key,
            ca_file=engine.target.ca_file,
            cert_file=engine.target.cert_file,
            key_file=engine.target.key_file,
        )
        client = Client(target, timeout_s=engine.settings.timeout_s)
        try:
            for path in ("/weightcast/info", "/weightcast/digests"):
                _refused(f"GET {path} with a wrong key", lambda client=client, path=path: client.get_json(path))
        finally:
            client.close()
    return "none and a wrong one"


def _malformed(engine: EngineUnderTest) -> Iterator[tuple[str, str, bytes]]:
    """Yields what is wrong, the route and the body."""
    with RawSession(engine, "B") as session:
        good = with_tables(encode(session.open_message))
        announce = with_tables(encode(session.announcement(0)))
    apply, open_ = "/weightcast/apply", "/weightcast/open"
    for path in (apply, open_):
        yield "an empty body", path, b""
        yield "no JSON", path, b"\x00\xff\xfe weights"
        yield "half of a message", path, with_names(good)[:-7]
        yield "a list", path, b"[]"
        yield "a number", path, b"7"
        yield "very deep JSON", path, b"[" * 100_000
        yield "an unknown type", path, b'{"type": "steal", "session": "' + b"0" * 32 + b'"}'
        yield "too many bytes", path, b" " * (_MOST_BYTES + 5 * len(encode(session.open_message)) + 1)
    yield "an Open", apply, with_names(good)
    yield "an Abort", open_, encode(Abort(session="0" * 32))
    changes: dict[str, dict[str, Any]] = {
        "an unknown field": {"surprise": 1},
        "a negative version": {"version": -1},
        "a huge version": {"version": 2**64},
        "a fraction as version": {"version": 1.5},
        "a session that is no hex": {"session": "z" * 32},
        "a short session": {"session": "0" * 8},
        "no deadline": {"timeout_s": 0},
        "an unknown pause mode": {"pause": "freeze"},
        "an unknown proof": {"verify": "promised"},
        "a negative bucket": {"bucket": -1},
        "a plan by another name": {"plan": "0" * 32},
        "a table that it does not name": {"tables": [[]]},
    }
    plan: dict[str, Any] = good["plan"]
    spec, (size_bytes, slots) = plan["specs"][0], plan["buckets"][0]
    plans: dict[str, dict[str, Any]] = {
        "no tensors": {"specs": []},
        "a tensor of an unknown dtype": {"specs": [{**spec, "dtype": "complex64"}]},
        "a tensor of negative size": {"specs": [{**spec, "shape": [-1]}]},
        "control characters in a name": {"specs": [{**spec, "name": "a\nb"}]},
        "a bucket smaller than its tensors": {"buckets": [[1, slots]]},
        "overlapping tensors": {"buckets": [[size_bytes, [slots[0], slots[0]]]]},
    }
    for what, change in plans.items():
        yield what, open_, with_names(good | {"plan": plan | change})
    for what, change in changes.items():
        yield what, open_, with_names(good | change)
    for missing in ("session", "version", "plan", "owner"):
        body = {name: value for name, value in good.items() if name != missing}
        yield f"an Open without {missing}", open_, with_names(body)
    yield "a bucket that the plan does not have", apply, with_names(announce | {"bucket": len(plan["buckets"])})
    yield "a bucket without a source", apply, with_names(announce | {"source": {"type": "ipc", "handles": []}})


class _RawTables(msgspec.Struct):
    tables: list[msgspec.Raw] = []


def with_tables(data: bytes) -> dict[str, Any]:
    """Returns a message in JSON with its tables in the place of their names; ``with_names`` is the reverse."""
    raws = map(bytes, msgspec.json.decode(data, type=_RawTables).tables)
    tables = {hash_of(raw): json.loads(raw) for raw in raws}
    message: dict[str, Any] = json.loads(data)
    message.pop("tables", None)
    for field in sorted(_FIELDS & message.keys()):
        value = message[field]
        message[field] = [tables[name] for name in value] if isinstance(value, list) else tables[value]
    return message


def with_names(message: dict[str, Any]) -> bytes:
    """Encodes a message whose tables may be damaged.  A table that is a string already stays in its place."""
    message, tables = dict(message), list(message.get("tables", ()))
    for field in sorted(_FIELDS & message.keys()):
        many = field == "sources" and isinstance(message[field], list)
        names: list[Any] = []
        for value in message[field] if many else [message[field]]:
            if not isinstance(value, str):
                tables.append(value)
                value = hash_of(json.dumps(value).encode())
            names.append(value)
        message[field] = names if many else names[0]
    return json.dumps(message | {"tables": tables} if tables else message).encode()


def _refused(what: str, send: Callable[[], object]) -> str:
    """Sends something that must be refused, and returns the engine's words.

    Raises:
        Failed: It was accepted, broke the connection, or got an answer that is no refusal.
    """
    try:
        send()
    except TargetRejected as error:
        need(error.status in _CLIENT_ERRORS, f"{what} was answered with status {error.status}: {error}")
        return str(error).partition(": ")[2]
    except WeightcastError as error:
        raise Failed(f"{what} got no refusal: {error}") from None
    raise Failed(f"{what} was accepted")


def _need_receiver(engine: EngineUnderTest) -> None:
    if not engine.has_receiver:
        raise NotApplicable("the engine does not have our receiver, so it does not speak its wire")


def _need_staging(engine: EngineUnderTest) -> None:
    _need_receiver(engine)
    if engine.first.staging == "none":
        raise NotApplicable("without staging, buckets go straight into live weights")


def _quoted(words: str) -> str:
    return f'"{words}"'
