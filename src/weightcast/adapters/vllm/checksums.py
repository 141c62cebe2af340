"""vLLM's own SHA-256 of every parameter as it is stored: fused, sharded, one for each rank.

The checksums tell whether parameters changed and whether two engines that were alike still are.  They cannot prove that
the engine holds what was sent, because checkpoint tensors are hashed differently.  They do not cover layers that keep
packed weights elsewhere: vLLM hashes those as empty.  vLLM copies all weights to the host for them, so we ask only with
``digest="sha256"``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Mapping

import msgspec

from weightcast.adapters.vllm.requests import post
from weightcast.comm.run_steps import EngineRequest
from weightcast.errors import TargetRejected

_EMPTY = hashlib.sha256(b"").hexdigest()


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
