"""OpenAI's routes: models, completions and chat completions."""

from __future__ import annotations

import time
from typing import Any

from fastapi import FastAPI, Request, Response

from weightcast.errors import ConfigError
from weightcast.rollout.engine import RolloutEngine
from weightcast.rollout.openai_answers import ChatShape, CompletionShape
from weightcast.rollout.openai_call import Call, check_model
from weightcast.rollout.openai_requests import ChatRequest, CompletionRequest
from weightcast.rollout.responses import REFUSALS, REFUSED, json_response

_WHOLE_OR_STREAM: dict[str, Any] = {
    "description": "The answer: one body, or events if stream is true",
    "content": {"text/event-stream": {"schema": {"title": "Events"}}},
}


def openai_routes(app: FastAPI, engine: RolloutEngine) -> None:
    """Adds the routes under /v1."""
    created = int(time.time())

    def entry() -> dict[str, Any]:
        return {
            "id": engine.model,
            "object": "model",
            "created": created,
            "owned_by": "weightcast",
            "max_model_len": engine.scheduler.limits.max_len,
            "weight_version": engine.scheduler.version,
        }

    async def models() -> Response:
        return json_response({"object": "list", "data": [entry()]})

    async def model(name: str) -> Response:
        check_model(engine, name)
        return json_response(entry())

    async def completions(body: CompletionRequest, request: Request) -> Response:
        prompts = [_prompt_ids(engine, prompt) for prompt in body.prompts]
        asked = "max_tokens" in body.model_fields_set
        call = Call(
            engine, body, prompts, top_logprobs=body.logprobs or 0, max_tokens=body.max_tokens, cut_to_fit=not asked
        )
        return await call.answer(request, CompletionShape(engine, body))

    async def chat(body: ChatRequest, request: Request) -> Response:
        if engine.text is None:
            raise ConfigError("this model has no tokenizer", hint="send token ids to /v1/completions")
        try:
            messages = [message.plain() for message in body.messages]
        except ValueError as error:
            raise ConfigError(f"messages: {error}") from None
        prompt = engine.text.chat(messages, **(body.chat_template_kwargs or {}))
        top = (body.top_logprobs or 0) if body.logprobs else 0
        call = Call(engine, body, [prompt], top_logprobs=top, max_tokens=body.max_completion_tokens or body.max_tokens)
        return await call.answer(request, ChatShape(engine, body))

    app.get("/v1/models", summary="The model that is served")(models)
    app.get("/v1/models/{name:path}", summary="The model of this name", responses={404: REFUSED})(model)
    answers: dict[int | str, dict[str, Any]] = {200: _WHOLE_OR_STREAM, 404: REFUSED, **REFUSALS}
    app.post("/v1/completions", summary="Continue prompts", responses=answers)(completions)
    app.post("/v1/chat/completions", summary="Answer a conversation", responses=answers)(chat)


def _prompt_ids(engine: RolloutEngine, prompt: str | list[int]) -> list[int]:
    if not isinstance(prompt, str):
        return prompt
    if engine.text is None:
        raise ConfigError("this model has no tokenizer", hint="send the prompt as token ids")
    return engine.text.encode(prompt)
