"""Penalties, biases, allowed tokens and min_p against the definitions of OpenAI and vLLM, computed another way."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from transformers import MinPLogitsWarper, RepetitionPenaltyLogitsProcessor, TopKLogitsWarper, TopPLogitsWarper

from tests.unit.rollout.test_sampling import VOCAB, frequencies, logits, sampling
from weightcast.rollout.commands import Shift
from weightcast.rollout.sampling import choose, shifted

PROMPT = [3, 7, 7, 1400]
OUTPUT = [7, 9, 9, 9, 12]


def by_hand(row, *, repetition=1.0, frequency=0.0, presence=0.0, bias=None, allowed=None):
    """The definition, token by token, in Python's floats."""
    counts, seen = Counter(OUTPUT), {*PROMPT, *OUTPUT}
    values = []
    for token, logit in enumerate(row.tolist()):
        if allowed is not None and token not in allowed:
            values.append(-math.inf)
            continue
        value = logit + (bias or {}).get(token, 0.0)
        if token in seen:
            value = value / repetition if value > 0 else value * repetition
        values.append(value - frequency * counts[token] - presence * (counts[token] > 0))
    return torch.tensor(values)


CASES = [
    {"repetition": 1.7},
    {"repetition": 0.5},
    {"frequency": 0.8},
    {"presence": -1.5},
    {"bias": {0: 100.0, 7: -3.0, 1499: 2.5}},
    {"allowed": [2, 7, 9, 1400]},
    {"repetition": 1.3, "frequency": 1.1, "presence": 0.7, "bias": {7: 4.0}, "allowed": [7, 9, 12, 30, 31]},
]


@pytest.mark.parametrize("case", CASES)
def test_logits_follow_the_definition(case):
    rows = torch.stack([logits(1), logits(2), logits(3)])
    before = rows.clone()
    after = shifted(rows, [Shift(row=1, prompt=PROMPT, output=OUTPUT, **case)])
    torch.testing.assert_close(after[1], by_hand(rows[1], **case), rtol=1e-6, atol=1e-6)
    assert not torch.equal(after[1], before[1])
    assert torch.equal(after[[0, 2]], before[[0, 2]])
    assert torch.equal(rows, before), "the model's own distribution is still reported"


@pytest.mark.parametrize("penalty", [0.4, 1.9])
def test_repetition_equals_transformers(penalty):
    row = logits(4)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([PROMPT + OUTPUT]), row[None].clone())[0]
    torch.testing.assert_close(
        shifted(row[None], [Shift(row=0, prompt=PROMPT, output=OUTPUT, repetition=penalty)])[0], expected
    )


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_tokens_are_drawn_from_the_changed_logits_and_reported_under_the_models_own(case, temperature):
    row = logits(5)
    shifts = [Shift(row=place, prompt=PROMPT, output=OUTPUT, **case) for place in range(4000)]
    seen, chosen = frequencies(row, temperature=temperature, shifts=shifts)
    expected = (by_hand(row, **case) / temperature).softmax(-1)
    assert (seen - expected).abs().max() <= 1 / 4000 + 1e-6
    own = row.log_softmax(-1)
    assert chosen.logprobs == pytest.approx([own[token].item() for token in chosen.tokens], abs=1e-5)


def test_greedy_takes_the_likeliest_of_the_changed_logits():
    row = logits(6)
    best = int(row.argmax())
    for shift in (
        Shift(row=0, output=[best], presence=2.0, frequency=2.0, bias={best: -20.0}),
        Shift(row=0, bias={best: -100.0}),
        Shift(row=0, allowed=[token for token in range(VOCAB) if token != best]),
    ):
        chosen = choose(row[None], sampling(1, temperature=0.0, shifts=[shift]))
        assert chosen.tokens == [int(row.topk(2).indices[1])]


@pytest.mark.parametrize("scale", [0.1, 2.0])  # 0.1 keeps more than a thousand tokens
@pytest.mark.parametrize(
    "settings",
    [
        {"min_p": 0.3},
        {"min_p": 0.02, "top_p": 0.8},
        {"min_p": 0.6, "top_p": 0.9},
        {"min_p": 0.3, "top_k": 6},
        {"min_p": 0.02, "top_k": 1200, "top_p": 0.7},
        {"min_p": 1.0},
    ],
)
def test_min_p_comes_before_top_k_and_top_p(scale, settings):
    temperature = 0.8
    row = logits(7, scale=scale)
    seen, _ = frequencies(row, temperature=temperature, **settings)
    expected = row[None] / temperature
    warpers = [MinPLogitsWarper(settings["min_p"])]
    warpers += [TopKLogitsWarper(settings["top_k"])] if "top_k" in settings else []
    warpers += [TopPLogitsWarper(settings["top_p"])] if "top_p" in settings else []
    for warper in warpers:
        expected = warper(torch.empty(0), expected)
    expected = expected[0].softmax(-1)
    assert (seen - expected).abs().max() <= 1 / 4000 + 1e-5
    assert seen[expected == 0].sum() == 0


def test_a_row_that_leaves_nothing_to_choose_is_marked():
    rows = torch.stack([logits(8), logits(9)])
    rows[0, [4, 5]] = -math.inf
    chosen = choose(rows, sampling(2, shifts=[Shift(row=0, allowed=[4, 5])]))
    assert chosen.tokens[0] == -1
    assert chosen.tokens[1] >= 0
