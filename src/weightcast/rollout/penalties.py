"""Changes logits as a request asks: penalties, biases, allowed tokens.

Definitions and order are vLLM's: allowed tokens, biases, then repetition, frequency and presence penalties.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weightcast.rollout.commands import Shift


def shifted(logits: torch.Tensor, shifts: Sequence[Shift]) -> torch.Tensor:
    """Applies shifts to rows of (rows, vocabulary) float32 logits; the argument is unchanged."""
    if not shifts:
        return logits
    logits = logits.clone()
    for shift in shifts:
        _shift(logits[shift.row], shift)
    return logits


def _shift(row: torch.Tensor, shift: Shift) -> None:
    if shift.allowed is not None:
        allowed = torch.tensor(shift.allowed, device=row.device)
        kept = row[allowed]
        row.fill_(-torch.inf)
        row[allowed] = kept
    if shift.bias:
        row[torch.tensor(list(shift.bias), device=row.device)] += torch.tensor(
            list(shift.bias.values()), dtype=row.dtype, device=row.device
        )
    if shift.repetition != 1:
        seen = torch.tensor(sorted({*shift.prompt, *shift.output}), dtype=torch.int64, device=row.device)
        values = row[seen]
        row[seen] = torch.where(values > 0, values / shift.repetition, values * shift.repetition)
    if shift.output and (shift.frequency or shift.presence):
        output = torch.tensor(shift.output, device=row.device)
        tokens, counts = output.unique(return_counts=True)
        row[tokens] -= shift.frequency * counts + shift.presence
