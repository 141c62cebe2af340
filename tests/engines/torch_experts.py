"""A plug-in of vLLM that computes experts with LoRA in PyTorch, where vLLM on a CPU has no kernels for them.

vLLM chooses Triton's kernels for experts as soon as it serves adapters, and on a CPU it starts and fails at the first
request.  Layers, wrappers, slots and loaders are vLLM's own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

ENTRY = "torch_experts"


def install() -> None:
    """Puts the product of each token with its experts in the place of Triton's kernels."""
    from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts

    TritonExperts.apply = apply


def apply(
    self: Any,
    output: torch.Tensor,
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *_: Any,
    **__: Any,
) -> None:
    """The same as ``TritonExperts.apply`` for gated experts with SiLU, without quantisation."""
    lora = self._lora_context
    slots = lora.punica_wrapper.token_lora_indices.tolist()
    on = lora.adapter_enabled.tolist()
    output.zero_()
    for token, x in enumerate(hidden_states):
        slot = slots[token] if slots[token] >= 0 and on[slots[token]] else None
        for expert, weight in zip(topk_ids[token].tolist(), topk_weights[token], strict=True):
            both = w1[expert] @ x
            if slot is not None:
                for half, a, b in zip(both.chunk(2), lora.w13_lora_a_stacked, lora.w13_lora_b_stacked, strict=True):
                    half += b[slot, expert] @ (a[slot, expert] @ x)
            gate, up = both.chunk(2)
            inner = torch.nn.functional.silu(gate) * up
            row = w2[expert] @ inner
            if slot is not None:
                row += lora.w2_lora_b_stacked[0][slot, expert] @ (lora.w2_lora_a_stacked[0][slot, expert] @ inner)
            output[token] += weight * row


def metadata(folder: Path) -> Path:
    """A folder for a ``PYTHONPATH`` on which vLLM finds this plug-in."""
    inside = folder / "torch_experts-0.dist-info"
    inside.mkdir(parents=True)
    (inside / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-experts\nVersion: 0\n")
    (inside / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{ENTRY} = {__name__}:install\n")
    return folder
