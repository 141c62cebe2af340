"""Checks of ``direct``: two trainer ranks, each with its rows of every tensor, and no gather."""

from __future__ import annotations

from typing import Any

from weightcast.lab.conformance.engine import EngineUnderTest
from weightcast.lab.conformance.failures import heals, keeps_the_old_version
from weightcast.lab.conformance.result import NotApplicable, joined, need
from weightcast.lab.conformance.trainer import Ended, Fate, altered, run
from weightcast.transports.direct import SPEC as _SPEC

WAYS: dict[str, dict[str, Any]] = {
    "memory": {"direct_by": "memory"},
    "messages": {"direct_by": "messages"},
    "relay": {"direct_by": "relay"},
    "shards": {"direct_by": "shards", "keep_mapped": True},
}
_RANKS = 2
_LAST = _RANKS - 1


def takes_shards(engine: EngineUnderTest) -> str:
    """Over each way the engine ends with exactly the weights whose rows the trainer ranks have sent."""
    _need_direct(engine)
    taken: dict[str, str] = {}
    for way in WAYS:
        name = engine.other
        ended = _run(engine, way, "whole")
        if _is_refused(ended):
            taken[way] = f"{way} refused: {ended[0].words}"
            continue
        engine.serves = None
        for rank, one in enumerate(ended):
            need(one.how == "done", f"by {way}, trainer rank {rank} is {_shown(one)}")
        report = ended[0].report
        assert report is not None
        row = report.targets[0]
        need(report.ok and row.transport == _SPEC.name, f"by {way}: {report}")
        need(row.proof == "resident", f"by {way} the proof is {row.proof}")
        engine.keeps(name)
        engine.says(name)
        engine.serves = name
        taken[way] = ""
    done = [way for way, words in taken.items() if not words]
    need(done, f"it offers direct, and no way of it: {'; '.join(taken.values())}")
    refused = "".join(f"; {words}" for words in taken.values() if words)
    return f"by {joined(done)}: the digests are those of the shards{refused}"


def survives_a_lost_trainer_rank(engine: EngineUnderTest) -> str:
    """A trainer rank that is killed is named by the other, and the engine is not stuck, whichever rank it was."""
    _need_direct(engine)
    seen: list[str] = []
    for way in [way for way in WAYS if way != "relay"]:  # for trainers it is as by messages
        for lost in range(_RANKS):
            engine.to("A")
            version = engine.info().version
            ended = _run(engine, way, "dies", lost)
            if _is_refused(ended):
                break
            engine.serves = None
            dead, left = ended[lost], ended[1 - lost]
            need(dead.how == "killed", f"by {way}, trainer rank {lost} was not killed in the middle: {_shown(dead)}")
            need(left.how == "failed", f"by {way}, trainer rank {lost} was killed, and the update is {_shown(left)}")
            need(f"trainer rank {lost}" in left.words, f"by {way}, the error does not name rank {lost}: {left.words}")
            if keeps_the_old_version(engine):
                engine.unchanged("A", version)
                engine.serves = "A"
        else:
            seen.append(way)
    need(seen, "it offers direct, and no way of it")
    kept = "it went on with the old version; " if keeps_the_old_version(engine) else ""
    return f"by {joined(seen)}, either of two ranks, which is named; {kept}{heals(engine)}"


def refuses_an_altered_part(engine: EngineUnderTest) -> str:
    """One bit that differs from what a trainer rank has summed is found, its tensor named, and nothing is switched."""
    _need_direct(engine)
    lie = altered(str(engine.folders["B"]), _RANKS)
    seen: list[str] = []
    for way in WAYS:
        engine.to("A")
        version = engine.info().version
        ended = _run(engine, way, "lies", _LAST)
        if _is_refused(ended):
            continue
        engine.serves = None
        for rank, one in enumerate(ended):
            need(one.how == "failed", f"by {way}, one bit of {lie} differs, and trainer rank {rank} is {_shown(one)}")
            need(lie in one.words, f"by {way}, the error does not name {lie}: {one.words}")
        if keeps_the_old_version(engine):
            engine.unchanged("A", version)
            engine.serves = "A"
        else:
            need(engine.settled().state == "quarantined", f"by {way}: {lie} is altered, and it is not quarantined")
        seen.append(way)
    need(seen, "it offers direct, and no way of it")
    state = "it still serves A" if keeps_the_old_version(engine) else "it is quarantined"
    return f"by {joined(seen)}: one bit of rank {_LAST}'s rows of {lie}, which is named; {state}"


def _need_direct(engine: EngineUnderTest) -> None:
    offered = engine.first.transports
    if _SPEC.name not in offered:
        raise NotApplicable(f"as it was started, it offers {joined(sorted(offered))}")


def _run(engine: EngineUnderTest, way: str, fate: Fate, culprit: int = 0) -> list[Ended]:
    options = {"transport": "direct", **WAYS[way]}
    job = engine.job(engine.other, options=options, num_ranks=_RANKS, fate=fate, culprit=culprit)
    return run(job, timeout_s=4 * engine.settings.timeout_s)


def _is_refused(ended: list[Ended]) -> bool:
    return all(one.how == "refused" for one in ended)


def _shown(ended: Ended) -> str:
    return f"{ended.how}: {ended.words}" if ended.words else ended.how
