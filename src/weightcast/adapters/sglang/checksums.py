"""SGLang's own checksums of its tensors, as it keeps them: fused, one table for each rank.

They tell which tensors have changed.  They cannot prove that SGLang holds what was sent, because a checkpoint's tensors
are hashed otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

# Prefixes that engines and checkpoints of one model have or lack.
_OUTER = frozenset({"model", "language_model", "transformer", "thinker"})
_SHOWN = 5


class _Rank(msgspec.Struct):
    checksums: dict[str, str] = {}


class _ChecksumAnswer(msgspec.Struct):
    per_engine_checksum: str | None = None
    ranks: list[_Rank] | None = None


class Checksums(msgspec.Struct, frozen=True):
    """Checksums of an engine.

    Attributes:
        whole: The engine's checksum over all ranks; empty if it has none.
        tensors: Checksums of each tensor, one for each rank that has it.
    """

    whole: str = ""
    tensors: dict[str, tuple[str, ...]] = {}


def parsed(reply: bytes, ranks: int) -> Checksums:
    """Reads the answer of ``/weights_checker``; empty if it is not from all ranks."""
    try:
        answer = msgspec.json.decode(reply, type=_ChecksumAnswer)
    except msgspec.MsgspecError:
        return Checksums()
    found: dict[str, tuple[str, ...]] = {}
    if len(answer.ranks or ()) != ranks:
        return Checksums()
    for rank in answer.ranks or ():
        for name, checksum in rank.checksums.items():
            found[name] = (*found.get(name, ()), checksum)
    return Checksums(whole=(answer.per_engine_checksum or "")[:64], tensors=found)


def compared(before: Checksums, after: Checksums, *, ranks: int, sent: Iterable[str]) -> str:
    """A sentence on what has changed.

    SGLang skips names that it does not know.  So the sentence names tensors that kept their values although no sent
    tensor has their name, or belongs to the same fused module.

    Args:
        sent: Names of all tensors of the update.
    """
    of = "1 rank" if ranks == 1 else f"{ranks} ranks"
    if not before.whole:
        return f"its own checksum over {of} is {after.whole[:16]}"
    if before.whole == after.whole:
        return f"its own checksum over {of} is {after.whole[:16]}, as before: the weights are the same, or it took none"
    words = f"its own checksum over {of} went from {before.whole[:16]} to {after.whole[:16]}"
    kept = [name for name, checksums in after.tensors.items() if before.tensors.get(name) == checksums]
    if not kept:
        return words
    words = f"{words}; {len(kept)} of its {len(after.tensors)} tensors are as before"
    unknown = _unsent(kept, after.tensors, sent)
    if not unknown:
        return words
    more = f" and {len(unknown) - _SHOWN} more" if len(unknown) > _SHOWN else ""
    return f"{words}, and no name that was sent fits {len(unknown)} of these: {', '.join(unknown[:_SHOWN])}{more}"


def lacks_prefix(engine: Iterable[str], sent: Iterable[str]) -> tuple[str, str] | None:
    """A sent name and the engine's longer one, if every sent name that fits lacks the beginning that the engine's have.

    Such names come from a model's backbone, exported by itself.  Most models of SGLang skip them.
    """
    known, given = set(engine), sorted(sent)
    if not known.isdisjoint(given):
        return None
    ends = {name[at + 1 :]: name for name in known for at, character in enumerate(name) if character == "."}
    return next(((name, ends[name]) for name in given if name in ends), None)


def _unsent(kept: Iterable[str], engine: Iterable[str], sent: Iterable[str]) -> list[str]:
    """Those of the engine's tensors that have no name among the sent ones, and into which none of them is fused."""
    own = {_inner(name) for name in engine}
    given = {_inner(name) for name in sent}
    others = given - own
    beside = {name.rpartition(".")[0].rpartition(".")[0] for name in others}
    above = {".".join(parts[:count]) for parts in (name.split(".") for name in others) for count in range(len(parts))}
    found: list[str] = []
    for name in kept:
        inner = _inner(name)
        module = inner.rpartition(".")[0]
        fused = module in above or (module.rpartition(".")[0] or module) in beside
        if inner not in given and not fused:
            found.append(name)
    return sorted(found)


def _inner(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _OUTER)
