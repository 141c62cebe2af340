"""Runs inside vLLM's workers: damages a parameter where it lies."""

from __future__ import annotations

from typing import Any

import torch


class Flips:
    """vLLM's ``--worker-extension-cls``; ``/collective_rpc`` calls its methods."""

    def flip(self, name: str) -> str:
        """Flips the lowest bit of the first element of a parameter in float32; returns its dtype."""
        model: Any = self.model_runner.model  # type: ignore[attr-defined]  vLLM's worker has it
        parameter = dict(model.named_parameters())[name]
        parameter.data.view(torch.int32).view(-1)[:1].bitwise_xor_(1)
        return str(parameter.dtype)
