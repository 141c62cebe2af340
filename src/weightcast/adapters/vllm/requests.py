"""Requests beside vLLM's weight transfer: pause, resume and score."""

from __future__ import annotations

from collections.abc import Generator, Sequence

from weightcast.adapters.requests import json_object, post
from weightcast.comm.run_steps import EngineRequest
from weightcast.config import PauseMode
from weightcast.errors import WireError

# in_place keeps running requests and the KV cache; retract keeps requests and drops the cache; wait lets requests end;
# abort drops them.  The mode goes into the query: vLLM ignores a body here and would take the default, abort.
_PAUSES: dict[PauseMode, str] = {
    "in_place": "mode=keep&clear_cache=false",
    "retract": "mode=keep&clear_cache=true",
    "wait": "mode=wait&clear_cache=true",
    "abort": "mode=abort&clear_cache=true",
}


def pause(mode: PauseMode) -> Generator[EngineRequest, bytes, bytes]:
    """Pauses the engine; every mode but ``in_place`` drops the caches."""
    return (yield post(f"/pause?{_PAUSES[mode]}"))


def resume() -> Generator[EngineRequest, bytes, bytes]:
    """Resumes the engine."""
    return (yield post("/resume"))


def score(model: str, token_ids: Sequence[int]) -> Generator[EngineRequest, bytes, list[float]]:
    """Asks for the log-probability of each token but the first, given the tokens before it."""
    tokens = list(token_ids)
    body = {"model": model, "prompt": tokens, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
    answer = json_object((yield post("/v1/completions", body))) or {}
    try:
        found = answer["choices"][0]["prompt_logprobs"]
        return [float(at[str(token)]["logprob"]) for token, at in zip(tokens[1:], found[1:], strict=True)]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise WireError(
            f"vLLM's answer has no log-probabilities of the prompt: {type(error).__name__}: {error}"
        ) from None
