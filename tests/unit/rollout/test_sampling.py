"""Sampling draws from the requested distribution and never outside of it."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from weightcast.rollout.commands import Sampling
from weightcast.rollout.sampling import choose

VOCAB = 1500


def sampling(rows, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, uniform=None, top_logprobs=0):
    return Sampling(
        temperature=[temperature] * rows,
        top_k=[top_k] * rows,
        top_p=[top_p] * rows,
        min_p=[min_p] * rows,
        uniform=uniform or [(row + 0.5) / rows for row in range(rows)],
        top_logprobs=[top_logprobs] * rows,
    )


def logits(seed=0, scale=2.0):
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


def frequencies(row, rows=4000, **settings):
    # Evenly spread uniforms make the counts exact to one draw.
    chosen = choose(row.expand(rows, -1).contiguous(), sampling(rows, **settings))
    return torch.bincount(torch.tensor(chosen.tokens), minlength=len(row)) / rows, chosen


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_are_the_probabilities(temperature):
    row = logits()
    seen, chosen = frequencies(row, temperature=temperature)
    expected = (row / temperature).softmax(-1)
    assert (seen - expected).abs().max() <= 1 / 4000 + 1e-6
    own = row.log_softmax(-1)  # reported before temperature
    assert chosen.logprobs == pytest.approx([own[token].item() for token in chosen.tokens], abs=1e-5)


@pytest.mark.parametrize("top_p", [0.1, 0.6, 0.97])
@pytest.mark.parametrize("scale", [0.1, 2.0])  # 0.1 needs more than a thousand tokens
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p, scale):
    row = logits(scale=scale)
    seen, _ = frequencies(row, top_p=top_p)
    ordered, order = row.softmax(-1).sort(descending=True)
    kept = order[: int((ordered.cumsum(-1) < top_p).sum()) + 1]
    expected = torch.zeros(VOCAB)
    expected[kept] = row.softmax(-1)[kept] / row.softmax(-1)[kept].sum()
    assert (seen - expected).abs().max() <= 1 / 4000 + 1e-6
    assert seen[expected == 0].sum() == 0


def test_top_p_is_a_share_of_what_top_k_leaves():
    row = torch.log(torch.tensor([0.4, 0.3, 0.2, 0.1]))
    seen, _ = frequencies(row, top_k=2, top_p=0.5)
    assert seen.tolist() == [1.0, 0.0, 0.0, 0.0]
    seen, _ = frequencies(row, top_k=2, top_p=0.6)
    assert seen.tolist() == pytest.approx([4 / 7, 3 / 7, 0, 0], abs=1e-3)


@pytest.mark.parametrize("top_p", [0.5, 0.9])
def test_top_p_is_a_share_of_a_top_k_beyond_the_first_candidates(top_p):
    row = logits(scale=1.0)
    seen, _ = frequencies(row, top_k=1400, top_p=top_p)
    ordered, order = row.softmax(-1).sort(descending=True)
    share = ordered[:1400] / ordered[:1400].sum()
    kept = int((share.cumsum(-1) < top_p).sum()) + 1
    expected = torch.zeros(VOCAB)
    expected[order[:kept]] = ordered[:kept] / ordered[:kept].sum()
    assert (seen - expected).abs().max() <= 1 / 4000 + 1e-6
    assert seen[expected == 0].sum() == 0


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


def test_top_k_and_greedy_and_no_top_p():
    row = logits()
    seen, _ = frequencies(row, top_k=3)
    assert set(seen.nonzero()[:, 0].tolist()) == set(row.topk(3).indices.tolist())
    for settings in ({"temperature": 0.0}, {"top_k": 1}, {"top_p": 0.0}):
        seen, _ = frequencies(row, rows=10, **settings)
        assert seen[row.argmax()] == 1


def test_ends_of_the_unit_interval_stay_inside():
    row = torch.full((700,), -math.inf)
    row[[300, 600]] = 0.0
    edge = math.nextafter(1.0, 0.0)
    for uniform, token in ((0.0, 300), (0.49, 300), (0.51, 600), (edge, 600)):
        assert choose(row[None], sampling(1, uniform=[uniform])).tokens == [token]
        assert choose(row[None], sampling(1, uniform=[uniform], top_p=0.999)).tokens == [token]


def test_rows_of_one_batch_do_not_disturb_each_other():
    rows = torch.stack([logits(seed) for seed in range(4)])
    mixed = Sampling(
        temperature=[0.0, 1.0, 0.7, 1.3],
        top_k=[0, 0, 5, 0],
        top_p=[1.0, 1.0, 1.0, 0.8],
        min_p=[0.0, 0.0, 0.0, 0.1],
        uniform=[0.1, 0.9, 0.4, 0.6],
        top_logprobs=[0, 2, 0, 3],
    )
    together = choose(rows, mixed)
    for i in range(4):
        alone = choose(
            rows[i : i + 1],
            Sampling(
                temperature=mixed.temperature[i : i + 1],
                top_k=mixed.top_k[i : i + 1],
                top_p=mixed.top_p[i : i + 1],
                min_p=mixed.min_p[i : i + 1],
                uniform=mixed.uniform[i : i + 1],
                top_logprobs=mixed.top_logprobs[i : i + 1],
            ),
        )
        assert alone.tokens[0] == together.tokens[i]
        assert alone.top[0] == together.top[i]
    assert [len(top) for top in together.top] == [0, 2, 0, 3]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.0}, {"top_p": 0.5, "top_logprobs": 2}])
def test_rows_that_are_not_finite_are_marked(bad, settings):
    rows = torch.stack([logits(), logits(1)])
    rows[0, 1000] = bad
    chosen = choose(rows, sampling(2, **settings))
    assert chosen.tokens[0] == -1
    assert chosen.tokens[1] >= 0
    assert math.isfinite(chosen.logprobs[0])


@pytest.mark.parametrize("temperature", [1e-5, 1e-6, 1e-40, 5e-324])
@pytest.mark.parametrize("settings", [{}, {"top_k": 5}, {"top_p": 0.5}])
def test_a_tiny_temperature_takes_the_likeliest(temperature, settings):
    row = logits(scale=8.0)
    chosen = choose(row.expand(20, -1).contiguous(), sampling(20, temperature=temperature, **settings))
    assert chosen.tokens == [int(row.argmax())] * 20
