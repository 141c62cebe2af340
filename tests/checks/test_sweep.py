"""The tables of docs/models.md are those of the kept results, and no kept result is wrong."""

import math

import pytest

from tests.sweep.models import FAMILIES
from tests.sweep.play import COUNT, Result, outcome, why_not_served
from tests.sweep.table import BEGIN, END, PAGE, read, tables

SAID = [([3] * COUNT, [-1.0] * COUNT)]
OTHER = [([4] * COUNT, [-1.0] * COUNT)]


def test_the_page_shows_the_kept_results():
    text = PAGE.read_text()
    shown = text.partition(BEGIN)[2].partition(END)[0]
    assert shown.strip() == tables(list(read().values())).strip()
    assert {family for _, family, _ in read()} <= set(FAMILIES)


def test_no_family_was_accepted_and_wrong():
    assert [result for result in read().values() if result.wrong] == []


@pytest.mark.parametrize(
    ("pushed", "apart", "cell"),
    [
        (SAID, math.inf, "equal"),
        (OTHER, math.inf, "WRONG: off by inf nats from a fresh server"),
        ([(SAID[0][0], [-1.01] * COUNT)], 1.0, "WRONG: off by 0.01 nats from a fresh server"),
        (SAID, 0.01, "no result: the answers to two sets of weights cannot be told apart"),
        ("refused: because", 1.0, "refused: because"),
    ],
)
def test_an_outcome_names_what_was_seen(pushed, apart, cell):
    assert outcome(pushed, SAID, apart) == cell


def test_a_wrong_outcome_is_shown_and_counted():
    bad = Result(family="llama", engine="vllm", tp=2, checkpoint="equal", live="WRONG: off by 1 nats")
    assert bad.wrong
    assert "| `llama` | 2 | equal | **wrong** | off by 1 nats |" in tables([bad])


def test_a_tensor_that_no_checkpoint_has_is_named_as_such():
    cell = "equal, and not in the checkpoint: visual.bias"
    kept = Result(family="llama", engine="vllm", tp=2, checkpoint=cell, live=cell)
    assert "| `llama` | 2 | equal | equal | not in the checkpoint: visual.bias |" in tables([kept])


def test_a_refusal_by_weightcast_is_told_from_an_engine_that_does_not_serve():
    log = "vLLM did not start:\n(Worker) weightcast.errors.ConfigError: no\nRuntimeError: Engine core initialization"
    assert why_not_served(log) == "refused at the start: no"
    log = "vLLM did not start:\nValueError: no such model\nRuntimeError: Engine core initialization failed"
    assert why_not_served(log) == "not served by the engine: ValueError: no such model"
