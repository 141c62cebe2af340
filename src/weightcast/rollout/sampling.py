"""Choosing one token per row of logits.

A pure function of logits and `Sampling`: it holds no random state and knows no requests.
"""

from __future__ import annotations

import torch

from weightcast.rollout.commands import Chosen, Sampling

_NUCLEUS = 1024  # candidates looked at before a whole vocabulary is sorted for top_p


@torch.inference_mode()
def choose(logits: torch.Tensor, sampling: Sampling) -> Chosen:
    """One token per row.

    Args:
        logits: (rows, vocabulary), float32.
        sampling: One entry per row.
    """
    top = logits.amax(dim=-1, keepdim=True)
    log_mass = torch.exp(logits - top).sum(dim=-1, keepdim=True).log_().add_(top)
    finite = torch.isfinite(log_mass[:, 0]).tolist()

    tokens = logits.argmax(dim=-1)
    plain: list[int] = []
    filtered: list[int] = []
    for row, temperature in enumerate(sampling.temperature):
        if temperature > 0 and finite[row]:
            some = 0 < sampling.top_k[row] < logits.shape[1] or sampling.top_p[row] < 1
            (filtered if some else plain).append(row)
    for rows, pick in ((plain, _pick), (filtered, _pick_filtered)):
        if rows:
            tokens[rows] = pick(logits, sampling, rows)

    chosen = logits.gather(1, tokens[:, None])
    logprobs = (chosen - log_mass)[:, 0].tolist()
    picked = tokens.tolist()
    return Chosen(
        tokens=[token if ok else -1 for token, ok in zip(picked, finite, strict=True)],
        logprobs=[value if ok else 0.0 for value, ok in zip(logprobs, finite, strict=True)],
        top=_alternatives(logits, log_mass, sampling, finite),
    )


def _column(values: list[float], rows: list[int], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor([values[row] for row in rows], dtype=torch.float32, device=like.device)[:, None]


def _weights(logits: torch.Tensor, sampling: Sampling, rows: list[int]) -> torch.Tensor:
    """Unnormalised probabilities at each row's temperature."""
    part = logits if len(rows) == len(logits) else logits[rows]
    scaled = part / _column(sampling.temperature, rows, logits)
    return scaled.sub_(scaled.amax(dim=-1, keepdim=True)).exp_()


def _draw(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Index where the cumulative weight first exceeds `uniform` of the total; never one of weight 0."""
    # In float32 the running sum would swallow the tail of a large vocabulary.
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    threshold = torch.minimum(uniform.double() * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, threshold, right=True)[:, 0]


def _pick(logits: torch.Tensor, sampling: Sampling, rows: list[int]) -> torch.Tensor:
    return _draw(_weights(logits, sampling, rows), _column(sampling.uniform, rows, logits))


def _pick_filtered(logits: torch.Tensor, sampling: Sampling, rows: list[int]) -> torch.Tensor:
    weights = _weights(logits, sampling, rows)
    weights /= weights.sum(dim=-1, keepdim=True)
    size = logits.shape[1]
    top_k = [sampling.top_k[row] if 0 < sampling.top_k[row] < size else size for row in rows]
    top_p = _column(sampling.top_p, rows, logits)
    width = min(max(min(k, _NUCLEUS) for k in top_k), size)
    values, tokens = weights.topk(width, dim=-1)
    limit = torch.tensor(top_k, device=logits.device)[:, None]
    if ((limit > width) & (values.sum(dim=-1, keepdim=True) < top_p)).any():
        values, tokens = weights.sort(dim=-1, descending=True)
    rank = torch.arange(values.shape[1], device=logits.device)
    values = values.masked_fill(rank[None] >= limit, 0.0)
    # top_p is a share of what top_k left; without top_k, of everything, also of what is not in `values`.
    mass = torch.where(limit < size, values.sum(dim=-1, keepdim=True), torch.ones_like(top_p))
    share = values / mass
    before = share.cumsum(dim=-1) - share
    values = values.masked_fill(before >= top_p, 0.0)
    values[:, 0] = values[:, 0].clamp_min(torch.finfo(torch.float32).tiny)  # top_p of 0 keeps the likeliest
    drawn = _draw(values, _column(sampling.uniform, rows, logits))
    return tokens.gather(1, drawn[:, None])[:, 0]


def _alternatives(
    logits: torch.Tensor, log_mass: torch.Tensor, sampling: Sampling, finite: list[bool]
) -> list[list[tuple[int, float]]]:
    found: list[list[tuple[int, float]]] = [[] for _ in finite]
    rows = [row for row, count in enumerate(sampling.top_logprobs) if count > 0 and finite[row]]
    if not rows:
        return found
    width = min(max(sampling.top_logprobs[row] for row in rows), logits.shape[1])
    values, tokens = (logits[rows] - log_mass[rows]).topk(width, dim=-1)
    for row, row_values, row_tokens in zip(rows, values.tolist(), tokens.tolist(), strict=True):
        count = sampling.top_logprobs[row]
        found[row] = list(zip(row_tokens[:count], row_values[:count], strict=True))
    return found
