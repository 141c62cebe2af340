"""Runs every check, each from an engine that serves a known checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from weightcast.config import Target
from weightcast.errors import WeightcastError
from weightcast.lab.conformance import direct, failures, messages, updates
from weightcast.lab.conformance.engine import ConformanceSettings, EngineUnderTest
from weightcast.lab.conformance.pauses import pauses_by
from weightcast.lab.conformance.result import CheckOutcome, ConformanceResult, Failed, NotApplicable, Row

ConformanceCheck = Callable[[EngineUnderTest], str]
Told = Callable[[Row], None]

_FIRST: dict[str, ConformanceCheck] = {
    "describes itself": updates.describes_itself,
    "takes a full update": updates.takes_an_update,
    "gives the same greedy answers again, alone and under load": updates.repeats_its_answers,
    "gives other answers with other weights": updates.answers_with_other_weights,
    "gives the first answers again after the first weights came back": updates.answers_come_back,
}
# Later checks compare with answers that these have taken.
_NEEDED = ("takes a full update", "gives other answers with other weights")
_MORE: dict[str, ConformanceCheck] = {
    "scores given tokens by the weights that it serves": updates.scores_follow,
    "agrees with the forward pass of transformers": updates.agrees_with_a_forward_pass,
    "keeps exactly the weights that were sent": updates.keeps_what_was_sent,
    "takes updates over ipc": updates.moves_over("ipc"),
    "takes updates over broadcast": updates.moves_over("broadcast"),
    "takes updates over direct from two trainer ranks": direct.takes_shards,
    "takes updates over disk": updates.moves_over("disk"),
    "takes updates over checkpoint-engine": updates.moves_over("checkpoint-engine"),
    "counts its versions": updates.counts_its_versions,
    "pause abort, under load": pauses_by("abort"),
    "pause retract, under load": pauses_by("retract"),
    "pause in_place, under load": pauses_by("in_place"),
    "pause wait, under load": pauses_by("wait"),
    "survives a trainer that raises in the middle of an update": failures.survives_a_trainer_that_raises,
    "survives a trainer that is killed in the middle of an update": failures.survives_a_trainer_that_dies,
    "survives the loss of either trainer rank of direct": direct.survives_a_lost_trainer_rank,
    "refuses rows that were altered on their way by direct": direct.refuses_an_altered_part,
    "refuses malformed messages": messages.refuses_malformed_messages,
    "refuses messages of strangers while it is updated": messages.refuses_strangers,
    "refuses tensors that do not fit": messages.refuses_tensors_that_do_not_fit,
    "refuses messages in the wrong order": messages.refuses_a_wrong_order,
    "keeps the old version after an abort": messages.keeps_the_old_version_after_an_abort,
    "takes back weights that differ from the sent ones": messages.takes_back_what_differs,
    "repeats its answer to a commit, and reverts it": messages.repeats_an_answer_and_reverts,
    "ends sessions that nobody feeds": messages.ends_abandoned_sessions,
    "refuses requests of web pages": messages.refuses_web_pages,
    "asks for its key": messages.asks_for_its_key,
}


def conform(
    target: Target, checkpoints: Sequence[Path], settings: ConformanceSettings, *, told: Told | None = None
) -> ConformanceResult:
    """Runs all checks on an engine, which serves the first checkpoint at the end if it can.

    Nothing else may update the engine or send requests to it meanwhile.

    Args:
        target: The engine.
        checkpoints: Folders of two whole models of one kind with different weights.
        settings: Settings of the run.
        told: Called with each row as it comes.

    Raises:
        WeightcastError: The engine does not answer, or a checkpoint cannot be used.
    """
    engine = EngineUnderTest(target, checkpoints, settings)
    rows: list[Row] = []

    def add(name: str, check: ConformanceCheck) -> None:
        row = _row(name, check, engine)
        rows.append(row)
        if told is not None:
            told(row)

    try:
        for name, check in _FIRST.items():
            add(name, check)
        broken = [row.check for row in rows if row.outcome == "failed" and row.check in _NEEDED]
        for name, check in _MORE.items():
            add(name, check if not broken else _not_reached(broken[0]))
        _leave_it_at_a(engine)
        first = engine.first
        return ConformanceResult(
            url=target.url, engine=first.engine, kind=first.kind, ranks=len(first.ranks), rows=tuple(rows)
        )
    finally:
        engine.close()


def _row(name: str, check: ConformanceCheck, engine: EngineUnderTest) -> Row:
    began = time.monotonic()
    outcome: CheckOutcome = "passed"
    try:
        words = check(engine)
    except NotApplicable as reason:
        outcome, words = "not applicable", str(reason)
    except Failed as error:
        outcome, words = "failed", str(error)
    except WeightcastError as error:
        outcome, words = "failed", f"{type(error).__name__}: {error}"
    if outcome == "failed":
        engine.serves = None  # the next check makes it whole again
    seconds = time.monotonic() - began
    return Row(check=name, outcome=outcome, words=" ".join(words.split()), seconds=round(seconds, 3))


def _not_reached(broken: str) -> ConformanceCheck:
    def check(_: EngineUnderTest) -> str:
        raise NotApplicable(f'not run, because "{broken}" failed')

    return check


def _leave_it_at_a(engine: EngineUnderTest) -> None:
    try:
        engine.to("A")
    except (Failed, WeightcastError):
        return  # the rows have said why
