"""Requests beside vLLM's weight transfer: pause, resume, score, and helpers for routes that may be missing."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any

import msgspec

from weightcast.comm.run_steps import EngineRequest
from weightcast.config import PauseMode
from weightcast.errors import TargetRejected, WireError

Answer = Generator[EngineRequest, bytes, bytes]

# in_place keeps running requests and the KV cache; retract keeps requests and drops the cache; wait lets requests end;
# abort drops them.  The mode goes into the query: vLLM ignores a body here and would take the default, abort.
_PAUSES: dict[PauseMode, str] = {
    "in_place": "mode=keep&clear_cache=false",
    "retract": "mode=keep&clear_cache=true",
    "wait": "mode=wait&clear_cache=true",
    "abort": "mode=abort&clear_cache=true",
}
_NO_ROUTE = (404, 405)


def post(path: str, body: Mapping[str, Any] | None = None) -> EngineRequest:
    """A POST with a JSON body, or without a body."""
    return EngineRequest(path=path, body=b"" if body is None else msgspec.json.encode(body))


def pause(mode: PauseMode) -> Answer:
    """Pauses the engine; every mode but ``in_place`` drops the caches."""
    return (yield post(f"/pause?{_PAUSES[mode]}"))


def resume() -> Answer:
    """Resumes the engine."""
    return (yield post("/resume"))


def if_there(request: EngineRequest) -> Generator[EngineRequest, bytes, bytes | None]:
    """Sends a request; None if this version has no such route."""
    try:
        return (yield request)
    except TargetRejected as error:
        if error.status in _NO_ROUTE:
            return None
        raise


def succeeds(request: EngineRequest) -> Generator[EngineRequest, bytes, bool]:
    """Sends a request; False if the engine refuses it."""
    try:
        yield request
    except TargetRejected:
        return False
    return True


def decoded(body: bytes) -> dict[str, Any]:
    """Decodes a JSON object; raises WireError for anything else."""
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise WireError(f"vLLM's answer is not a JSON object: {error}") from None


def score(model: str, token_ids: Sequence[int]) -> Generator[EngineRequest, bytes, list[float]]:
    """Asks for the log-probability of each token but the first, given the tokens before it."""
    tokens = list(token_ids)
    body = {"model": model, "prompt": tokens, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
    answer = decoded((yield post("/v1/completions", body)))
    try:
        found = answer["choices"][0]["prompt_logprobs"]
        return [float(at[str(token)]["logprob"]) for token, at in zip(tokens[1:], found[1:], strict=True)]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise WireError(
            f"vLLM's answer has no log-probabilities of the prompt: {type(error).__name__}: {error}"
        ) from None
