"""Runs inside vLLM: everything that a model's layers and their kernels hold, and digests of it.

``--worker-extension-cls tests.helpers.vllm_held.Held`` adds a method for ``/collective_rpc`` to a server's workers.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn

from weightcast.plugins.vllm.reach import reach

# What kernels of experts leave of the last step, and scales that a checkpoint for weights alone lacks, so that they are
# never set and never read.
_NO_WEIGHTS = ("._permute_scratch.", ".w13_input_global_scale", ".w2_input_global_scale")


def held(model: nn.Module) -> dict[str, torch.Tensor]:
    """Tensors and floats by layer and path, and all parameters."""
    found: dict[str, torch.Tensor] = dict(model.named_parameters())
    for name, layer in model.named_modules():
        if getattr(layer, "quant_method", None) is None or not layer._parameters:
            continue
        found.update((f"{name}.{path}", torch.as_tensor(value)) for path, value in reach(layer).items())
    return {path: tensor for path, tensor in found.items() if not any(part in path for part in _NO_WEIGHTS)}


def digest(tensor: torch.Tensor) -> str:
    """A digest of dtype, shape, strides and every bit."""
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes()
    return f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()} {hashlib.sha256(raw).hexdigest()[:16]}"


class Held:
    """Methods for vLLM's workers."""

    model_runner: Any

    def held_digests(self) -> dict[str, str]:
        """Digests of everything that is held, by path."""
        return {path: digest(tensor) for path, tensor in held(self.model_runner.get_model()).items()}
