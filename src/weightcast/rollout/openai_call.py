"""One HTTP request to generate, and the generations that it asks for."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

import msgspec
from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from starlette.exceptions import HTTPException

from weightcast.errors import ConfigError, WeightcastError
from weightcast.rollout.engine import RolloutEngine
from weightcast.rollout.openai_answers import Piece, Shape, usage
from weightcast.rollout.openai_requests import Sampled
from weightcast.rollout.requests import Answer, Generation, GenerationRequest
from weightcast.rollout.responses import error_body, json_response
from weightcast.rollout.text import TextStream

_Result = TypeVar("_Result")


def check_model(engine: RolloutEngine, name: str) -> None:
    """Refuses another model's name with 404."""
    if name != engine.model:
        raise HTTPException(404, f"this engine does not serve the model {name!r}; it serves {engine.model!r}")


class Call:
    """All generations of one HTTP request; they end when the client disconnects."""

    def __init__(
        self,
        engine: RolloutEngine,
        body: Sampled,
        prompts: Sequence[list[int]],
        *,
        top_logprobs: int,
        max_tokens: int | None,
        cut_to_fit: bool = False,
    ) -> None:
        if body.model is not None:
            check_model(engine, body.model)
        if body.stops and engine.text is None:
            raise ConfigError("stop strings need a tokenizer, and this model has none", hint="use stop_token_ids")
        self._engine = engine
        self._body = body
        self.prompt_tokens = sum(map(len, prompts))
        self.id = uuid.uuid4().hex
        self._generations: list[Generation] = []
        allowed = None if body.allowed_token_ids is None else frozenset(body.allowed_token_ids)
        try:
            for index in range(len(prompts) * body.n):
                prompt = prompts[index // body.n]
                room = engine.scheduler.limits.max_len - len(prompt)
                request = GenerationRequest(
                    request_id=f"{self.id}-{index}",
                    prompt=tuple(prompt),
                    max_tokens=max(1, min(max_tokens, room)) if max_tokens and cut_to_fit else max_tokens,
                    temperature=body.temperature,
                    top_p=body.top_p,
                    top_k=max(body.top_k, 0),
                    min_p=body.min_p,
                    frequency_penalty=body.frequency_penalty,
                    presence_penalty=body.presence_penalty,
                    repetition_penalty=body.repetition_penalty,
                    logit_bias=body.logit_bias or {},
                    allowed_token_ids=allowed,
                    seed=None if body.seed is None else body.seed + index % body.n,
                    stop_token_ids=frozenset(body.stop_token_ids or ()),
                    ignore_eos=body.ignore_eos,
                    top_logprobs=top_logprobs,
                )
                self._generations.append(engine.scheduler.submit(request, stops_text=self._stops_text()))
        except WeightcastError:
            self._abort()  # one was refused, so the whole call fails
            raise

    def _stops_text(self) -> Callable[[int], bool]:
        """Tells the scheduler where stop strings end one answer, so that it generates nothing beyond them."""
        if not self._body.stops or self._engine.text is None:
            return lambda _: False
        stream = TextStream(self._engine.text, self._body.stops)

        def stops(token: int) -> bool:
            stream.feed([token])
            return stream.stopped

        return stops

    async def answer(self, request: Request, shape: Shape) -> Response:
        """The response, whole or as a stream."""
        if self._body.stream:
            return StreamingResponse(self._events(shape), media_type="text/event-stream")
        try:
            choices = await _unless_gone(request, self._choices())
        finally:
            self._abort()
        if choices is None:
            return Response(status_code=499)  # the client has disconnected
        body = shape.whole(self.id, choices, usage(self.prompt_tokens, [choice.answer for choice in choices]))
        return json_response(body)

    async def _choices(self) -> list[Piece]:
        return list(await asyncio.gather(*map(self._choice, range(len(self._generations)))))

    async def _choice(self, index: int) -> Piece:
        generation, text = self._generations[index], self._engine.text
        if not self._body.stops or text is None:
            answer = await generation.finished()
            plain = text.decode(answer.tokens) if text is not None else ""
            return Piece(index=index, text=plain, answer=answer, finish_reason=answer.finish_reason)
        stream, written = TextStream(text, self._body.stops), ""
        async for gained in generation.progress():
            written += stream.feed(gained.tokens)
            if stream.stopped:
                break
        else:
            written += stream.end()
        if not stream.stopped:
            answer = await generation.finished()
            return Piece(index=index, text=written, answer=answer, finish_reason=answer.finish_reason)
        self._engine.scheduler.abort(generation.request.request_id)
        answer = _first(generation.answer, stream.num_tokens)
        return Piece(index=index, text=written, answer=answer, finish_reason="stop")

    async def _events(self, shape: Shape) -> AsyncIterator[bytes]:
        queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        readers = [asyncio.create_task(self._read(index, shape, queue)) for index in range(len(self._generations))]
        try:
            left = len(readers)
            while left:
                event = await queue.get()
                if event is None:
                    left -= 1
                else:
                    yield _event(event)
            if self._body.include_usage:
                answers = [generation.answer for generation in self._generations]
                yield _event(shape.last(self.id, usage(self.prompt_tokens, answers)))
            yield b"data: [DONE]\n\n"
        finally:
            self._abort()
            for reader in readers:
                reader.cancel()

    async def _read(self, index: int, shape: Shape, queue: asyncio.Queue[dict[str, Any] | None]) -> None:
        """Turns one generation into events; always puts None at its end."""
        generation, text = self._generations[index], self._engine.text
        stream = TextStream(text, self._body.stops) if text is not None else None
        offset = start = 0
        try:
            async for gained in generation.progress():
                if gained.finish_reason == "error":
                    queue.put_nowait(error_body(gained.error or "the engine failed", kind="engine_error"))
                    return
                written = stream.feed(gained.tokens) if stream is not None else ""
                used = stream.num_tokens - start if stream is not None else len(gained.tokens)
                stopped = stream is not None and stream.stopped
                finish = "stop" if stopped else gained.finish_reason
                if finish is not None and stream is not None:
                    written += stream.end()
                piece = Piece(
                    index=index,
                    text=written,
                    answer=_first(generation.answer, start + used),
                    finish_reason=finish,
                    start=start,
                    offset=offset,
                )
                start += used
                offset += len(written)
                queue.put_nowait(shape.piece(self.id, piece))
                if stopped:
                    self._engine.scheduler.abort(generation.request.request_id)
                    return
        finally:
            queue.put_nowait(None)

    def _abort(self) -> None:
        for generation in self._generations:
            if generation.answer.finish_reason is None:
                self._engine.scheduler.abort(generation.request.request_id)


def _first(answer: Answer, count: int) -> Answer:
    spans: list[tuple[int, int]] = []
    left = count
    for version, tokens in list(answer.spans):
        if left > 0:
            spans.append((version, min(tokens, left)))
        left -= tokens
    return Answer(
        tokens=answer.tokens[:count],
        logprobs=answer.logprobs[:count],
        top=answer.top[:count],
        spans=spans,
        version=spans[-1][0] if spans else answer.version,
        finish_reason=answer.finish_reason,
    )


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


async def _unless_gone(request: Request, work: Awaitable[_Result]) -> _Result | None:
    """The result, or None if the client closes the connection first."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, watching):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, WeightcastError):
                await task
