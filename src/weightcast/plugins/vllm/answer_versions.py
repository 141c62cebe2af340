"""``weight_version`` and ``weight_versions`` in the answers of vLLM's OpenAI routes, as the reference engine has them.

``weight_version`` is the newest version that computed a token of the answer, or of the event of a stream.
``weight_versions`` counts the tokens of each version, in order for one choice; a stream has it in a choice's last
event.  Clients of OpenAI's routes ignore fields that they do not know.

An answer of another shape than OpenAI's is sent as it is.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterable
from contextvars import ContextVar
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weightcast.plugins.vllm.token_versions import spans

log = logging.getLogger("weightcast.plugins.vllm")

_ROUTES = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
_DATA = b"data: {"
_END = b"\n\n"  # of an event
_GOES_ON = b'"finish_reason":null'  # as it cannot stand in a text, whose quotes are escaped
_Spans = list[tuple[int, int]]


class AnswerChoices:
    """The choices of one answer, as vLLM's engine client hands them out."""

    def __init__(self) -> None:
        self._choices = 0
        self._known: dict[int, tuple[Any, int]] = {}  # of a choice: its last output, and its number of tokens

    def read(self, produced: AsyncIterator[Any], parameters: Any) -> AsyncIterator[Any]:
        """Returns what ``produced`` yields, one prompt's outputs, and notes it; prompts come in their order."""
        first, self._choices = self._choices, self._choices + int(getattr(parameters, "n", 1))
        adds_up = getattr(getattr(parameters, "output_kind", None), "name", "") == "DELTA"
        return self._read(produced, first, adds_up)

    async def _read(self, produced: Any, first: int, adds_up: bool) -> AsyncIterator[Any]:
        try:
            async for output in produced:
                for completion in output.outputs:
                    choice, tokens = first + completion.index, len(completion.token_ids)
                    before = self._known[choice][1] if adds_up and choice in self._known else 0
                    self._known[choice] = completion, before + tokens
                yield output
        finally:
            await produced.aclose()

    def whole(self, body: bytes) -> bytes:
        """Returns a whole answer with the versions in it; ``DecodeError`` if it has another shape."""
        said = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        if "choices" in said:
            choices = msgspec.json.decode(said["choices"], type=list[dict[str, msgspec.Raw]])
            if len(choices) == self._choices:  # a beam search asks the engine for other requests than its choices
                said["choices"] = _raw([choice | _fields([self._spans(_index(choice))]) for choice in choices])
        return msgspec.json.encode(said | _fields(map(self._spans, self._known)))

    def event(self, event: bytes) -> bytes:
        """Returns one event of a stream with the versions in it; ``DecodeError`` if it has another shape."""
        return b"\n".join(self._line(line) if line.startswith(_DATA) else line for line in event.split(b"\n"))

    def _line(self, line: bytes) -> bytes:
        if self._choices == 1 and _GOES_ON in line and line.endswith(b"}") and (known := self._spans(0)):
            return line[:-1] + b',"weight_version":%d}' % known[-1][0]  # almost all events are such
        said = msgspec.json.decode(line[len(_DATA) - 1 :], type=dict[str, msgspec.Raw])
        choices = msgspec.json.decode(said.get("choices", _raw([])), type=list[dict[str, msgspec.Raw]])
        found = [self._spans(_index(choice)) for choice in choices]
        if "choices" in said:
            said["choices"] = _raw(
                [
                    choice | (_fields([those]) if bytes(choice.get("finish_reason", b"null")) != b"null" else {})
                    for choice, those in zip(choices, found, strict=True)
                ]
            )
        newest = [those[-1:] for those in found] or map(self._spans, self._known)
        fields = _fields(newest)
        fields.pop("weight_versions", None)
        return b"data: " + msgspec.json.encode(said | fields)

    def _spans(self, choice: int) -> _Spans:
        return spans(*self._known[choice]) if choice in self._known else []


_ANSWER: ContextVar[AnswerChoices | None] = ContextVar("weightcast_answer", default=None)


def watch(client: Any) -> None:
    """Has vLLM's engine client note what it hands out to requests of these routes."""
    generate = client.generate

    def watched(*arguments: Any, **named: Any) -> Any:
        produced, answer = generate(*arguments, **named), _ANSWER.get()
        if answer is None:
            return produced
        return answer.read(produced, named.get("sampling_params", arguments[1] if len(arguments) > 1 else None))

    client.generate = watched


class AddsVersions:
    """Middleware that adds the fields."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._warned = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Has a request answered, with the versions in the answer if it is one of these routes'."""
        path = scope["path"].removeprefix(scope.get("root_path", "")) if scope["type"] == "http" else ""
        if path not in _ROUTES:
            await self._app(scope, receive, send)
            return
        answer = AnswerChoices()
        token = _ANSWER.set(answer)
        try:
            await self._app(scope, receive, _Edited(answer, send, self._warn))
        finally:
            _ANSWER.reset(token)

    def _warn(self, why: object) -> None:
        if not self._warned:
            self._warned = True
            words = "weightcast: an answer is not as OpenAI's (%s), so it is sent as it is, without weight_version"
            log.warning(f"{words}; later ones are not logged", why)


class _Edited:
    """An ASGI ``send`` that adds the fields to what passes, and gives reasons why it could not to ``warn``."""

    def __init__(self, answer: AnswerChoices, send: Send, warn: Callable[[object], None]) -> None:
        self._answer = answer
        self._send = send
        self._warn = warn
        self._start: Message | None = None  # of a whole answer, whose length is not known yet
        self._kind = b""
        self._left = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = {name.lower(): value for name, value in message.get("headers", ())}
            plain = message["status"] == 200 and b"content-encoding" not in headers
            self._kind = headers.get(b"content-type", b"").partition(b";")[0].strip() if plain else b""
            if self._kind == b"application/json":
                self._start = message
                return
        elif message["type"] == "http.response.body" and self._kind in (b"application/json", b"text/event-stream"):
            more = message.get("more_body", False)
            self._left += message.get("body", b"")
            if self._start is not None:
                if more:
                    return
                body = self._changed(self._answer.whole, self._left)
                await self._send(_with_length(self._start, len(body)))
            elif b"\r" in self._left:  # no text has it, since JSON escapes it
                self._warn("the lines of its stream do not end with a line feed alone")
                body, self._kind = self._left, b""
            else:
                *events, left = self._left.split(_END)
                self._left = left if more else b""
                whole = b"".join(self._changed(self._answer.event, event) + _END for event in events)
                body = whole if more else whole + left
            message = {**message, "body": body}
        await self._send(message)

    def _changed(self, change: Callable[[bytes], bytes], said: bytes) -> bytes:
        try:
            return change(said)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self._warn(error)
            return said


def _with_length(start: Message, length: int) -> Message:
    headers = [(name, value) for name, value in start.get("headers", ()) if name.lower() != b"content-length"]
    return {**start, "headers": [*headers, (b"content-length", str(length).encode())]}


def _fields(answers: Iterable[_Spans]) -> dict[str, msgspec.Raw]:
    """The two fields of one choice, or of several: then the tokens of each version are summed up."""
    listed = [answer for answer in answers if answer]
    if not listed:
        return {}
    if len(listed) == 1:
        counts = listed[0]
    else:
        totals: dict[int, int] = {}
        for version, tokens in (pair for answer in listed for pair in answer):
            totals[version] = totals.get(version, 0) + tokens
        counts = sorted(totals.items())
    return {
        "weight_version": _raw(max(version for version, _ in counts)),
        "weight_versions": _raw([{"version": version, "tokens": tokens} for version, tokens in counts]),
    }


def _index(choice: dict[str, msgspec.Raw]) -> int:
    return msgspec.json.decode(choice.get("index", b"null"), type=int)


def _raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))
