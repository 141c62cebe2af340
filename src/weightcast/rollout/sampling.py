"""Chooses one token per row: a pure function of logits and `Sampling`, without random state."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weightcast.rollout.commands import Chosen, Sampling

# Temperatures below this take the likeliest token, because logits divided by less overflow float32.  vLLM has the same
# limit.
_COLDEST = 1e-5


@torch.inference_mode()
def choose(logits: torch.Tensor, sampling: Sampling) -> Chosen:
    """Chooses one token per row of (rows, vocabulary) float32 logits."""
    size = logits.shape[1]
    logprobs = logits.log_softmax(dim=-1)
    # A nan or inf makes the whole row of log-probabilities nan; minus infinity does not, and is never chosen.
    finite = logprobs[:, :256].sum(dim=-1).isnan().logical_not().tolist()
    greedy: list[int] = []
    plain: list[int] = []
    filtered: list[int] = []
    for row, temperature in enumerate(sampling.temperature):
        if temperature < _COLDEST or not finite[row]:
            greedy.append(row)
        elif 0 < sampling.top_k[row] < size or sampling.top_p[row] < 1 or sampling.min_p[row] > 0:
            filtered.append(row)
        else:
            plain.append(row)
    tokens = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    if greedy:
        tokens[greedy] = _rows(logits, greedy).argmax(dim=-1)
    if plain:
        tokens[plain] = _draw(_probabilities(logits, sampling, plain), _column(sampling.uniform, plain, logits))
    if filtered:
        tokens[filtered] = _draw_filtered(logits, sampling, filtered)

    chosen = logprobs.gather(1, tokens[:, None])[:, 0].tolist()
    return Chosen(
        tokens=[token if ok else -1 for token, ok in zip(tokens.tolist(), finite, strict=True)],
        logprobs=[value if ok else 0.0 for value, ok in zip(chosen, finite, strict=True)],
        top=_alternatives(logprobs, sampling, finite),
    )


def _rows(values: torch.Tensor, rows: list[int]) -> torch.Tensor:
    return values if len(rows) == len(values) else values[rows]


def _column(values: Sequence[float], rows: list[int], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor([values[row] for row in rows], dtype=torch.float32, device=like.device)[:, None]


def _probabilities(logits: torch.Tensor, sampling: Sampling, rows: list[int]) -> torch.Tensor:
    part = _rows(logits, rows)
    if any(sampling.temperature[row] != 1 for row in rows):
        part = part / _column(sampling.temperature, rows, logits)
    return part.softmax(dim=-1)


def _draw(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Index where the running sum of weights first exceeds `uniform` of the total; never one of weight 0."""
    sums = weights.cumsum(dim=-1, dtype=torch.float64)  # float32 would lose small weights
    # Rounding may put the threshold on the total; just below the total is the last index with a weight.
    total = sums[:, -1:]
    most = torch.nextafter(total, torch.zeros_like(total))
    return torch.searchsorted(sums, torch.minimum(uniform.double() * total, most), right=True)[:, 0]


def _draw_filtered(logits: torch.Tensor, sampling: Sampling, rows: list[int]) -> torch.Tensor:
    """Draws after min_p, then top_k, then top_p, which is a share of the mass that the others leave."""
    size = logits.shape[1]
    top_k = [sampling.top_k[row] if 0 < sampling.top_k[row] < size else size for row in rows]
    values, order = _probabilities(logits, sampling, rows).topk(max(top_k), dim=-1)
    rank = torch.arange(values.shape[1], device=logits.device)
    limit = torch.tensor(top_k, device=logits.device)[:, None]
    least = values[:, :1] * _column(sampling.min_p, rows, logits)
    values = values.masked_fill((rank >= limit) | (values < least), 0.0)
    before = values.cumsum(dim=-1) - values
    share = _column(sampling.top_p, rows, logits) * values.sum(dim=-1, keepdim=True)
    values = values.masked_fill((before >= share) & (rank > 0), 0.0)
    return order.gather(1, _draw(values, _column(sampling.uniform, rows, logits))[:, None])[:, 0]


def _alternatives(logprobs: torch.Tensor, sampling: Sampling, finite: list[bool]) -> list[list[tuple[int, float]]]:
    found: list[list[tuple[int, float]]] = [[] for _ in finite]
    rows = [row for row, count in enumerate(sampling.top_logprobs) if count > 0 and finite[row]]
    if not rows:
        return found
    width = min(max(sampling.top_logprobs[row] for row in rows), logprobs.shape[1])
    values, tokens = _rows(logprobs, rows).topk(width, dim=-1)
    for row, row_values, row_tokens in zip(rows, values.tolist(), tokens.tolist(), strict=True):
        count = sampling.top_logprobs[row]
        found[row] = list(zip(row_tokens[:count], row_values[:count], strict=True))
    return found
