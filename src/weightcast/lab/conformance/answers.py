"""Greedy answers of an engine as token ids, over the route that its kind of server has for them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from weightcast.comm.tls import client_context
from weightcast.config import Target
from weightcast.errors import WeightcastError, WireError
from weightcast.lab.conformance.result import Failed
from weightcast.runtime.deadline import Deadline

StreamEvent = tuple[list[int], str]  # tokens since the last event, and the finish reason, empty until the end
_Body = Callable[[str, Sequence[int], int], dict[str, Any]]
_ReadEvent = Callable[[dict[str, Any], int], StreamEvent]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRoute:
    """The streamed generation route of one kind of server.

    Attributes:
        path: Route.
        body: Returns the body, from the model's name, a prompt and the number of tokens.
        read: Returns what an event says, given the number of tokens that came before it.
    """

    path: str
    body: _Body
    read: _ReadEvent


class Stream:
    """One greedy answer past end-of-sequence tokens, which arrives while the caller does something else.

    Attributes:
        prompt: Token ids of the prompt.
        count: Number of tokens that were asked for.
        tokens: Token ids that have come so far.
        finish: The engine's finish reason, such as ``length`` or ``abort``; empty until the answer is over.
        failure: What broke the answer off; empty if nothing did.
    """

    def __init__(
        self, target: Target, dialect: GenerateRoute, model: str, prompt: Sequence[int], count: int, *, timeout_s: float
    ) -> None:
        """Sends the request."""
        self.prompt = list(prompt)
        self.count = count
        self.tokens: list[int] = []
        self.finish = self.failure = ""
        self._target = target
        self._dialect = dialect
        self._model = model
        self._timeout_s = timeout_s
        self._news = threading.Condition()
        self._over = False
        self._thread = threading.Thread(target=self._run, name="conformance-stream", daemon=True)
        self._thread.start()

    @property
    def over(self) -> bool:
        """True after the last token."""
        return self._over

    def wait_for(self, count: int) -> None:
        """Waits until this many tokens have come, or the answer is over.

        Raises:
            Failed: The deadline passed.
        """
        with self._news:
            came = self._news.wait_for(lambda: len(self.tokens) >= count or self._over, self._timeout_s)
        if not came:
            raise Failed(f"after {self._timeout_s:g} s only {len(self.tokens)} of {self.count} tokens had come")

    def ended(self) -> Stream:
        """Waits for the end of the answer.

        Raises:
            Failed: The deadline passed.
        """
        self._thread.join(self._timeout_s)
        if self._thread.is_alive():
            raise Failed(
                f"a request had no end after {self._timeout_s:g} s; {len(self.tokens)} of {self.count} tokens came"
            )
        return self

    def whole(self) -> list[int]:
        """Waits for the end and returns the tokens.

        Raises:
            Failed: The answer is not whole.
        """
        self.ended()
        if self.failure or len(self.tokens) != self.count:
            why = self.failure or self.finish or "no reason"
            raise Failed(f"a request got {len(self.tokens)} of {self.count} tokens: {why}")
        return self.tokens

    def _run(self) -> None:
        body = json.dumps(self._dialect.body(self._model, self.prompt, self.count)).encode()
        try:
            for event in _events(self._target, self._dialect.path, body, Deadline(self._timeout_s)):
                self._hear(event)
        except (OSError, HTTPException, WeightcastError) as error:
            self.failure = f"{type(error).__name__}: {error}"
        finally:
            with self._news:
                self._over = True
                self._news.notify_all()

    def _hear(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.failure = str(event["error"])
            return
        tokens, finish = self._dialect.read(event, len(self.tokens))
        with self._news:
            self.tokens = [*self.tokens, *tokens]
            self.finish = finish or self.finish
            self._news.notify_all()


def dialect_of(target: Target, engine: str, model: str, *, timeout_s: float) -> GenerateRoute:
    """Returns the dialect in which the engine answers a short request.

    Args:
        target: The engine.
        engine: Its name for itself (``EngineInfo.engine``); the dialect of that kind is tried first.
        model: Its name for its model.
        timeout_s: Deadline of one answer, in seconds.

    Raises:
        Failed: The engine answers in no known dialect.
    """
    words: list[str] = []
    first = {"sglang": _SGLANG, "lmdeploy": _LMDEPLOY}.get(engine.partition(" ")[0], _OPENAI)
    for dialect in (first, *(other for other in (_OPENAI, _SGLANG, _LMDEPLOY) if other is not first)):
        stream = Stream(target, dialect, model, [5, 6, 7], 1, timeout_s=timeout_s).ended()
        if len(stream.tokens) == 1:
            return dialect
        words.append(stream.failure or f"POST {dialect.path} answered with {len(stream.tokens)} token ids instead of 1")
    raise Failed(f"it does not generate with token ids: {'; '.join(words)}")


def _events(target: Target, path: str, body: bytes, deadline: Deadline) -> Iterator[dict[str, Any]]:
    """Posts a body and yields the JSON of each server-sent event.

    Raises:
        WireError: The engine refused, or sent something else.
    """
    headers = {"content-type": "application/json"}
    if target.api_key is not None:
        headers["authorization"] = f"Bearer {target.api_key}"
    parts = urlsplit(target.url)
    assert parts.hostname is not None
    if parts.scheme == "https":
        trust = client_context(ca_file=target.ca_file, cert_file=target.cert_file, key_file=target.key_file)
        connection = HTTPSConnection(parts.hostname, parts.port, timeout=deadline.left_s(), context=trust)
    else:
        connection = HTTPConnection(parts.hostname, parts.port, timeout=deadline.left_s())
    with closing(connection):
        connection.request("POST", parts.path.rstrip("/") + path, body, headers)
        answer = connection.getresponse()
        if answer.status != 200:
            raise WireError(f"POST {path} was refused with status {answer.status}: {answer.read()[:300]!r}")
        for line in answer:
            if line.startswith(b"data: {"):
                yield json.loads(line.removeprefix(b"data: "))


def _openai_body(model: str, prompt: Sequence[int], count: int) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": count,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
    }


def _openai_read(event: dict[str, Any], _: int) -> StreamEvent:
    tokens: list[int] = []
    finish = ""
    for choice in event.get("choices") or ():
        tokens += choice.get("token_ids") or ()
        finish = choice.get("finish_reason") or finish
    return tokens, finish


def _sglang_body(_: str, prompt: Sequence[int], count: int) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
    return {"input_ids": list(prompt), "sampling_params": sampling, "stream": True}


def _sglang_read(event: dict[str, Any], before: int) -> StreamEvent:
    came: list[int] = list(event.get("output_ids") or ())
    meta = event.get("meta_info") or {}
    # By default every event has the whole answer so far; with an option of SGLang's, the new tokens.
    if len(came) == meta.get("completion_tokens"):
        came = came[before:]
    return came, str((meta.get("finish_reason") or {}).get("type") or "")


def _lmdeploy_body(_: str, prompt: Sequence[int], count: int) -> dict[str, Any]:
    greedy = {"temperature": 0.0, "top_k": 1, "ignore_eos": True}
    return {"input_ids": list(prompt), "max_tokens": count, "stream": True, **greedy}


_OPENAI = GenerateRoute(path="/v1/completions", body=_openai_body, read=_openai_read)
_SGLANG = GenerateRoute(path="/generate", body=_sglang_body, read=_sglang_read)
_LMDEPLOY = GenerateRoute(path="/generate", body=_lmdeploy_body, read=_sglang_read)
