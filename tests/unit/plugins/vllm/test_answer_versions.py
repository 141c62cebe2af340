"""The versions in vLLM's answers, as an ASGI app like vLLM's sends them; tests/engines has the real server."""

from __future__ import annotations

import asyncio
import enum
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from weightcast.plugins.vllm.answer_versions import AddsVersions, watch


class Kind(enum.Enum):
    """As vLLM's ``RequestOutputKind``."""

    DELTA = 1
    FINAL_ONLY = 2


def output(index: int, tokens: int, *starts: tuple[int, int]) -> Any:
    completion = SimpleNamespace(index=index, token_ids=[0] * tokens, weightcast_starts=list(starts))
    return SimpleNamespace(outputs=[completion])


def answered(
    outputs: list[list[Any]],
    parts: list[bytes],
    kind: str,
    path: str = "/v1/completions",
    status: int = 200,
    n: int = 1,
) -> httpx.Response:
    """Sends these parts as vLLM does, each after the next output of every prompt; returns what a client gets."""
    closed: list[int] = []

    async def generate(prompt: int, parameters: Any, request_id: str) -> AsyncIterator[Any]:
        try:
            for found in outputs[prompt]:
                yield found
        finally:
            closed.append(prompt)

    client: Any = SimpleNamespace(generate=generate)
    watch(client)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        parameters = SimpleNamespace(n=n, output_kind=Kind.DELTA if "event" in kind else Kind.FINAL_ONLY)
        reading = [client.generate(prompt, parameters, "id") for prompt in range(len(outputs))]
        headers = [(b"content-type", kind.encode())]
        if "json" in kind:
            headers.append((b"content-length", str(sum(map(len, parts))).encode()))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        for part in parts:
            for one in reading:
                await anext(one, None)
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        for one in reading:
            await one.aclose()

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app=AddsVersions(app))
        async with httpx.AsyncClient(transport=transport, base_url="http://vllm") as http:
            return await http.post(path, json={})

    found = asyncio.run(ask())
    assert sorted(closed) == list(range(len(outputs))), "a request that nobody reads any more goes on"
    return found


def span(version: int, tokens: int) -> dict[str, int]:
    return {"version": version, "tokens": tokens}


BOTH = b'{"id":"a","choices":[{"index":1,"text":"\\u00e9"},{"index":0,"text":"b"}],"usage":null}'


def test_each_choice_and_the_whole_answer_have_their_versions() -> None:
    found = answered(
        [[output(0, 5, (6, 0), (7, 2))], [output(0, 4, (7, 0))]], [BOTH[:20], BOTH[20:]], "application/json"
    )
    assert int(found.headers["content-length"]) == len(found.content)
    said = found.json()
    second, first = said["choices"]
    assert first == {"index": 0, "text": "b", "weight_version": 7, "weight_versions": [span(6, 2), span(7, 3)]}
    assert second == {"index": 1, "text": "é", "weight_version": 7, "weight_versions": [span(7, 4)]}
    assert (said["weight_version"], said["weight_versions"]) == (7, [span(6, 2), span(7, 7)])
    assert (said["id"], said["usage"]) == ("a", None)


def test_choices_that_are_not_the_engines_have_the_versions_of_all() -> None:
    steps = [[output(0, 1, (6, 0))], [output(0, 1, (6, 0))], [output(0, 1, (7, 0))]]  # a beam search's
    said = answered(steps, [BOTH], "application/json").json()
    assert "weight_version" not in said["choices"][0]
    assert (said["weight_version"], said["weight_versions"]) == (7, [span(6, 2), span(7, 1)])


def test_events_of_a_stream_have_the_version_so_far_wherever_they_are_cut() -> None:
    starts = [(6, 0), (7, 3)]  # known at once: the stream is behind the engine
    events = [
        b'data: {"choices":[{"index":0,"text":"\\"finish_reason\\":null","finish_reason":null}]}\n\n',
        b'data: {"choices":[{"index":0,"text":"b","finish_reason":null}]}\n\n',
        b'data: {"choices":[{"index":0,"text":"","finish_reason":"length"}]}\n\n',
        b'data: {"choices":[],"usage":{}}\n\ndata: [DONE]\n\n',
    ]
    outputs = [[output(0, 3, *starts), output(0, 1, *starts), output(0, 1, *starts)]]
    found = answered(outputs, events, "text/event-stream; charset=utf-8").text.split("\n\n")
    assert found[4:] == ["data: [DONE]", ""]
    first, second, end, usage = (json.loads(event.removeprefix("data: ")) for event in found[:4])
    assert (first["weight_version"], second["weight_version"], usage["weight_version"]) == (6, 7, 7)
    assert first["choices"][0]["text"] == '"finish_reason":null'
    assert "weight_versions" not in second["choices"][0]
    assert end["choices"][0]["weight_versions"] == [span(6, 3), span(7, 2)]
    cut = b"".join(events)
    pieces = [cut[:90], cut[90:130], cut[130:]]
    again = answered(outputs, pieces, "text/event-stream").text.split("\n\n")
    assert [event[:20] for event in again] == [event[:20] for event in found]
    assert json.loads(again[2].removeprefix("data: "))["choices"][0]["weight_versions"] == [span(6, 3), span(7, 2)]


@pytest.mark.parametrize(
    ("path", "kind", "status"),
    [
        ("/v1/embeddings", "application/json", 200),
        ("/v1/completions", "application/json", 404),
        ("/v1/completions", "text/plain", 200),
    ],
)
def test_other_answers_are_as_they_were(path: str, kind: str, status: int) -> None:
    found = answered([[output(0, 1, (6, 0))]], [BOTH], kind, path, status)
    assert (found.status_code, found.content) == (status, BOTH)


def test_an_engine_that_says_no_versions_adds_none() -> None:
    assert answered([[output(0, 5)], [output(0, 4)]], [BOTH], "application/json").json() == json.loads(BOTH)


LINES = b'data: {"choices":[{"index":0,"text":"a","finish_reason":null}]}'


@pytest.mark.parametrize(
    "body",
    [
        b'{"id":"a","choices":null}',
        b'{"id":"a","choices":[{"text":"a"}]}',
        b'{"id":"a","choices":[{"index":"0","text":"a"}]}',
        b'{"id":"a","choices":["a"]}',
        b"[1, 2]",
        b"not json",
        b'{"\xff":1}',
        b"",
    ],
)
def test_an_answer_of_another_shape_is_sent_as_it_was(body: bytes, caplog: pytest.LogCaptureFixture) -> None:
    found = answered([[output(0, 5, (6, 0))]], [body], "application/json")
    assert (found.status_code, found.content) == (200, body)
    assert int(found.headers["content-length"]) == len(body)
    (record,) = caplog.records
    assert (record.levelname, record.name) == ("WARNING", "weightcast.plugins.vllm")
    assert "so it is sent as it is, without weight_version" in record.message


@pytest.mark.parametrize(
    "line",
    [
        b'data: {"id":"a","choices":null}',
        b'data: {"id":"a","choices":[{"text":"a","finish_reason":"length"}]}',
        b'data: {"id":"a","choices":[1]}',
        b"data: {not json}",
    ],
)
def test_an_event_of_another_shape_is_sent_as_it_was_and_said_once(
    line: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    events = [line + b"\n\n", LINES + b"\n\n", line + b"\n\n", b"data: [DONE]\n\n"]
    found = answered([[output(0, 3, (6, 0)), *[output(0, 1, (6, 0))] * 3]], events, "text/event-stream")
    first, second, third, end = found.content.removesuffix(b"\n\n").split(b"\n\n")
    assert (first, third, end) == (line, line, b"data: [DONE]")
    assert json.loads(second.removeprefix(b"data: "))["weight_version"] == 6
    assert len(caplog.records) == 1


@pytest.mark.parametrize("end", [b"\r\n\r\n", b"\r\r"])
def test_events_with_other_ends_of_lines_are_sent_at_once(end: bytes) -> None:
    events = [LINES + end, b"data: [DONE]" + end]
    sent: list[bytes] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for count, event in enumerate(events, 1):
            await send({"type": "http.response.body", "body": event, "more_body": True})
            assert len(sent) == count, "an event is held back"
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def send(message: Any) -> None:
        if message.get("body"):
            sent.append(message["body"])

    scope = {"type": "http", "path": "/v1/completions"}
    asyncio.run(AddsVersions(app)(scope, None, send))  # type: ignore[arg-type]
    assert b"".join(sent) == b"".join(events)
