"""Messages go round unchanged, every bound holds, and nothing but WireError comes out of bytes that are not one."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.helpers.messages import (
    ANNOUNCE,
    ANSWERS,
    EXAMPLES,
    JOIN,
    OPEN,
    SESSION,
    TRACEPARENT,
    changed,
)
from weightcast.errors import WireError
from weightcast.wire import codec, messages
from weightcast.wire.answers import Ack, RankAck
from weightcast.wire.blobs import Blobs, UnknownBlob
from weightcast.wire.codec import decode, decode_ack, decode_info, decode_rank_ack, encode
from weightcast.wire.engine_info import EngineInfo
from weightcast.wire.layout import MAX_BYTES, TensorSpec


@pytest.mark.parametrize("name", EXAMPLES)
def test_decoded_message_equals_the_encoded_one(name):
    message = EXAMPLES[name]
    again = decode(encode(message))
    assert again == message
    assert type(again) is type(message)
    assert decode(bytearray(encode(message))) == decode(memoryview(encode(message))) == message


def test_every_message_has_an_example():
    assert {type(message) for message in EXAMPLES.values()} == set(messages.Message.__args__)


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: type(answer).__name__)
def test_decoded_answer_equals_the_encoded_one(answer):
    decode_as = {Ack: decode_ack, RankAck: decode_rank_ack, EngineInfo: decode_info}[type(answer)]
    assert decode_as(encode(answer)) == answer


BOUNDS = [
    *((OPEN, {"session": value}) for value in ("", "0" * 31, "0" * 33, "G" * 32, "A" * 32, "0" * 31 + "\n", 5, None)),
    *((OPEN, {"version": value}) for value in (-1, 2**53 + 1, 1.5, "1", True, None)),
    *((OPEN, {"timeout_s": value}) for value in (0, -1, 86401, "1", None, True)),
    *((OPEN, {"lease_s": value}) for value in (0, 1e9)),
    *((OPEN, {"pause": value}) for value in ("", "stop", None, 1)),
    *((OPEN, {"verify": value}) for value in ("all", None)),
    *((OPEN, {"digest": value}) for value in ("md5", None)),
    *((OPEN, {"plan__specs": value}) for value in ([], None, {}, "x")),
    *((OPEN, {"allow_older": value}) for value in (1, "yes", None)),
    *((OPEN, {"owner__pid": value}) for value in (-1, 2**32 + 1)),
    (OPEN, {"owner__host": "x" * 4097}),
    (OPEN, {"owner": ...}),
    *(
        (OPEN, {"traceparent": value})
        for value in ("x", TRACEPARENT.upper(), TRACEPARENT + "-1", TRACEPARENT[:-1], None)
    ),
    (OPEN, {"plan__specs": ...}),
    (OPEN, {"plan": ...}),
    *((OPEN, {"plan__specs__0__name": value}) for value in ("", "a b", "a\n", "é", "x" * 513, None)),
    *((OPEN, {"plan__specs__0__dtype": value}) for value in ("float13", "", None, "Float32")),
    *((OPEN, {"plan__specs__0__shape": value}) for value in ([-1], [1.5], [1] * 9, [MAX_BYTES + 1], None, ["1"])),
    (OPEN, {"plan__specs__0__shape": [MAX_BYTES, MAX_BYTES, MAX_BYTES, MAX_BYTES, MAX_BYTES, MAX_BYTES, MAX_BYTES]}),
    *((JOIN, {"session": value}) for value in ("0" * 31, "G" * 32, None)),
    *((JOIN, {"port": value}) for value in (0, -1, 65536, "80")),
    *((JOIN, {"group": value}) for value in ("", "a b", "x" * 65, "a/b", "g\n")),
    *((JOIN, {"host": value}) for value in ("", "a b", "x" * 256, "a;b", "h\n")),
    *((JOIN, {"backend": value}) for value in ("mpi", None)),
    *((JOIN, {"world_size": value}) for value in (0, 1, 2**14 + 1)),
    *((JOIN, {"first_rank": value}) for value in (-1, 0, 2**14)),
    (JOIN, {"token": "short"}),
    (ANNOUNCE, {"plan__buckets__0__1": []}),
    *((ANNOUNCE, {"bucket": value}) for value in (-1, 1, 2**20, None, "0")),
    *((ANNOUNCE, {"following": value}) for value in (-1, 1, 64)),
    (ANNOUNCE, {"plan__buckets__0__0": 259}),
    (ANNOUNCE, {"plan__buckets__0__0": MAX_BYTES + 1}),
    (ANNOUNCE, {"plan__buckets__0__1__0__0": 2}),
    (ANNOUNCE, {"plan__buckets__0__1__0__1": 1}),
    (ANNOUNCE, {"plan__buckets__0__1__0__1": -2}),
    (ANNOUNCE, {"plan__buckets__0__1__0__3": 5}),
    (ANNOUNCE, {"plan__buckets__0__1__0__2": 4}),
    (ANNOUNCE, {"plan__buckets__0__1__1__1": 20}),
    (ANNOUNCE, {"plan__buckets__0__1__1__1": 300}),
    (ANNOUNCE, {"plan__buckets__0__1__0__3": 2**60}),
    *((ANNOUNCE, {"plan": value}) for value in (..., "", "0" * 31, "G" * 32, 7, [])),
    (ANNOUNCE, {"tables": [[]]}),
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
        for path in ("plan__surprise", "plan__specs__0__surprise", "source__surprise"):
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
        decode(changed(ANNOUNCE, plan__buckets__0__1__0__1=1))


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


@FUZZ
@given(st.binary(max_size=200))
@example(b"[" * 100_000)
@example(b'{"ok":"yes"}')
def test_malformed_answer_is_refused(data):
    for read in (decode_ack, decode_info, decode_rank_ack):
        with pytest.raises(WireError):
            read(data)


def test_an_older_engine_would_refuse_what_open_says_now_so_the_protocol_tells_them_apart():
    assert decode(changed(OPEN, traceparent=...)) == OPEN  # what an older trainer sends is understood
    assert messages.PROTOCOL == 10


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
    short = encode(info, (codec.specs_name(first),))
    assert first == info
    assert b'"name"' in whole
    assert b'"name"' not in short
    again = decode_info(short)
    assert again == info
    assert again.specs is first.specs
    assert encode(info, ("0" * 32,)) == whole


def test_a_description_without_specs_that_this_process_has_is_refused(monkeypatch):
    info = decode_info(encode(description()))
    short = encode(info, (codec.specs_name(info),))
    monkeypatch.setattr(codec, "KEPT", Blobs())
    with pytest.raises(UnknownBlob, match="table of specs"):
        decode_info(short)
