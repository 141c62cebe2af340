"""What every vLLM is asked in the same way, however weights reach it: to hold still, to go on, to score."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any

import msgspec

from weightcast.config import PauseMode
from weightcast.errors import TargetRejected, WireError
from weightcast.protocols import EngineRequest

Answer = Generator[EngineRequest, bytes, bytes]

# Requests, tokens, cache: kept, kept, kept; kept, kept, dropped; run to their end; dropped.  In the query: vLLM does
# not read a body here, and takes its absence for abort.
_PAUSES: dict[PauseMode, str] = {
    "in_place": "mode=keep&clear_cache=false",
    "retract": "mode=keep&clear_cache=true",
    "wait": "mode=wait&clear_cache=true",
    "abort": "mode=abort&clear_cache=true",
}
_NO_ROUTE = (404, 405)


def post(path: str, body: Mapping[str, Any] | None = None) -> EngineRequest:
    """A POST with a JSON body, or with none."""
    return EngineRequest(path=path, body=b"" if body is None else msgspec.json.encode(body))


def pause(mode: PauseMode) -> Answer:
    """Hold still; with every mode but ``in_place`` the caches are dropped with it."""
    return (yield post(f"/pause?{_PAUSES[mode]}"))


def resume() -> Answer:
    """Go on."""
    return (yield post("/resume"))


def if_there(request: EngineRequest) -> Generator[EngineRequest, bytes, bytes | None]:
    """Ask for something that not every version has; None from one that has it not."""
    try:
        return (yield request)
    except TargetRejected as error:
        if error.status in _NO_ROUTE:
            return None
        raise


def whatever(request: EngineRequest) -> Generator[EngineRequest, bytes, bool]:
    """Ask for something that may well be refused; did it do it?"""
    try:
        yield request
    except TargetRejected:
        return False
    return True


def decoded(body: bytes) -> dict[str, Any]:
    """A JSON object.

    Raises:
        WireError: It is something else.
    """
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise WireError(f"not an answer of vLLM: {error}") from None


def score(model: str, token_ids: Sequence[int]) -> Generator[EngineRequest, bytes, list[float]]:
    """Log-probability of each token but the first given those before it."""
    tokens = list(token_ids)
    body = {"model": model, "prompt": tokens, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
    answer = decoded((yield post("/v1/completions", body)))
    try:
        found = answer["choices"][0]["prompt_logprobs"]
        return [float(at[str(token)]["logprob"]) for token, at in zip(tokens[1:], found[1:], strict=True)]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise WireError(f"vLLM gave no log-probabilities of its prompt: {type(error).__name__}: {error}") from None
