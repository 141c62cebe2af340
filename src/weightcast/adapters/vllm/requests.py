"""Requests beside vLLM's weight transfer: pause, resume, score, checksums, and helpers for routes that may be missing.

The checksums are vLLM's own SHA-256 of every parameter as it is stored: fused, sharded, one for each rank.  They tell
whether parameters changed and whether two engines that were alike still are.  They cannot prove that the engine holds
what was sent, because checkpoint tensors are hashed differently.  They do not cover layers that keep packed weights
elsewhere: vLLM hashes those as empty.  vLLM copies all weights to the host for them, so we ask only with
``digest="sha256"``.
"""

from __future__ import annotations

import hashlib
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
_EMPTY = hashlib.sha256(b"").hexdigest()


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


class _Answer(msgspec.Struct):
    checksums: dict[str, str]


def checksums() -> Generator[EngineRequest, bytes, dict[str, str]]:
    """Checksums by rank and parameter; empty if this vLLM has none."""
    try:
        return msgspec.json.decode((yield post("/weight_checker", {"action": "checksum"})), type=_Answer).checksums
    except (TargetRejected, msgspec.MsgspecError):
        return {}


def as_one(found: Mapping[str, str]) -> str:
    """One digest for the engine; empty without checksums."""
    lines = "\n".join(f"{name} {value}" for name, value in sorted(found.items()))
    return hashlib.sha256(lines.encode()).hexdigest()[:32] if found else ""


def compared(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """A sentence on how many parameters changed; empty without checksums."""
    if not before or not after:
        return ""
    changed = sum(before.get(name) != value for name, value in after.items())
    empty = sum(value == _EMPTY for value in after.values())
    words = f"by vLLM's own checksums {changed} of {len(after)} parameters changed"
    return f"{words}, and {empty} are packed and not covered" if empty else words
