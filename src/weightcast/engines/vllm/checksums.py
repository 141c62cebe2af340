"""vLLM's own SHA-256 of every parameter, as it keeps them: fused, sharded, one for each rank.

What that proves: something changed or did not, and two engines that were alike are still alike.  What it does not: that
what is kept is what was sent, since the checkpoint's tensors are not hashed that way; and nothing of a layer whose
weights are packed elsewhere, which is hashed as empty.  It costs a copy of all weights to the host, so it is asked for
with ``digest="sha256"`` only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Mapping

import msgspec

from weightcast.engines.vllm.steps import post
from weightcast.errors import TargetRejected
from weightcast.protocols import EngineRequest

_OF_NOTHING = hashlib.sha256(b"").hexdigest()


class _Answer(msgspec.Struct):
    checksums: dict[str, str]


def checksums() -> Generator[EngineRequest, bytes, dict[str, str]]:
    """By rank and parameter; empty from a vLLM that has no such thing."""
    try:
        return msgspec.json.decode((yield post("/weight_checker", {"action": "checksum"})), type=_Answer).checksums
    except (TargetRejected, msgspec.MsgspecError):
        return {}


def as_one(found: Mapping[str, str]) -> str:
    """One digest for the engine; empty for none."""
    lines = "\n".join(f"{name} {value}" for name, value in sorted(found.items()))
    return hashlib.sha256(lines.encode()).hexdigest()[:32] if found else ""


def compared(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """What the two say, in words; empty if there is nothing to say."""
    if not before or not after:
        return ""
    changed = sum(before.get(name) != value for name, value in after.items())
    empty = sum(value == _OF_NOTHING for value in after.values())
    words = f"by vLLM's own checksums {changed} of {len(after)} parameters changed"
    return f"{words}, and {empty} are packed and not covered" if empty else words
