"""Comparison of greedy answers."""

from __future__ import annotations

from collections.abc import Sequence

# Share of tokens in which answers with experts agree on the same weights.  Servers that compile kernels of their own
# round a few logits differently, and some of vLLM's kernels for experts do so from one time to the next; the rest of an
# answer is then another one.
ALIKE = 0.5


def agreement(answers: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> float:
    """The share of tokens that are equal."""
    pairs = [pair for one, other in zip(answers, others, strict=True) for pair in zip(one, other, strict=True)]
    return sum(one == other for one, other in pairs) / len(pairs)
