"""Chooses one token per row: a pure function of logits and `Sampling`, without random state."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weightcast.rollout.commands import Chosen, Sampling

_NUCLEUS = 1024  # candidates that are tried before the whole vocabulary is sorted for top_p
_BLOCK = 256
# Temperatures below this take the likeliest token, because logits divided by less overflow float32.  vLLM has the same
# limit.
_COLDEST = 1e-5


@torch.inference_mode()
def choose(logits: torch.Tensor, sampling: Sampling) -> Chosen:
    """Chooses one token per row of (rows, vocabulary) float32 logits."""
    size = logits.shape[1]
    logprobs = logits.log_softmax(dim=-1)
    # A nan or inf makes the whole row of log-probabilities nan; minus infinity does not, and is never chosen.
    finite = logprobs[:, :_BLOCK].sum(dim=-1).isnan().logical_not().tolist()
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
        _pick_filtered(logits, sampling, filtered, tokens, width=_NUCLEUS)

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
    """Index where the cumulative weight first exceeds `uniform` of the total; never one of weight 0.

    It searches for the block and then inside it, because a running sum over the whole vocabulary is slow and loses
    small weights in float32.
    """
    rows, size = weights.shape
    if size % _BLOCK:
        weights = torch.nn.functional.pad(weights, (0, _BLOCK - size % _BLOCK))
    blocks = weights.view(rows, -1, _BLOCK)
    by_block = blocks.sum(dim=-1).double()
    block, threshold = _search(by_block, uniform.double() * by_block.sum(dim=-1, keepdim=True))
    inside = blocks[torch.arange(rows, device=weights.device), block].double()
    place, _ = _search(inside, threshold)
    return block * _BLOCK + place


def _search(weights: torch.Tensor, threshold: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """First index whose running sum exceeds the threshold, and the threshold minus the sum before that index."""
    sums = weights.cumsum(dim=-1)
    # Rounding may put the threshold on the total; just below the total is the last index with a weight.
    total = sums[:, -1:]
    index = torch.searchsorted(
        sums, torch.minimum(threshold, torch.nextafter(total, torch.zeros_like(total))), right=True
    )
    before = sums.gather(1, index) - weights.gather(1, index)
    return index[:, 0], (threshold - before).clamp_min(0)


def _pick_filtered(
    logits: torch.Tensor, sampling: Sampling, rows: list[int], tokens: torch.Tensor, *, width: int
) -> None:
    """Sets the tokens of filtered rows from the `width` likeliest, or from all if those are too few."""
    size = logits.shape[1]
    width = min(width, size)
    top_k = [sampling.top_k[row] if 0 < sampling.top_k[row] < size else size for row in rows]
    top_p = _column(sampling.top_p, rows, logits)
    limit = torch.tensor(top_k, device=logits.device)[:, None]
    values, order = _probabilities(logits, sampling, rows).topk(min(width, max(top_k)), dim=-1)
    rank = torch.arange(values.shape[1], device=logits.device)
    least = values[:, :1] * _column(sampling.min_p, rows, logits)
    cut = (values[:, -1:] < least) & (least > 0)  # min_p keeps none beyond `values`
    values = values.masked_fill((rank >= limit) | (values < least), 0.0)
    found = values.sum(dim=-1, keepdim=True)
    # top_p is a share of the mass that min_p and top_k keep; without them, of the whole distribution.
    share = values / torch.where((limit < size) | (least > 0), found, torch.ones_like(found))
    values = values.masked_fill((share.cumsum(dim=-1) - share >= top_p) & (rank > 0), 0.0)
    # If top_k or min_p reaches further than `values`, the whole mass is not known.
    whole = (limit >= size) & (least == 0) & (found >= top_p)
    enough = ((limit <= values.shape[1]) | cut | whole)[:, 0].tolist()
    drawn = order.gather(1, _draw(values, _column(sampling.uniform, rows, logits))[:, None])[:, 0]
    tokens[rows] = drawn
    rest = [row for row, ok in zip(rows, enough, strict=True) if not ok]
    if rest and width < size:
        _pick_filtered(logits, sampling, rest, tokens, width=size)


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
