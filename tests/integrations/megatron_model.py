"""A real Megatron-Core model on a CPU, and the real mbridge for it; imported in Megatron's own environment.

Megatron-Core's layers for CPUs are torch's own: without Transformer Engine there are no fused layer norms and no
grouped experts.  So parameters have other names than mbridge's tables expect, and ``LocalBridge`` gives mbridge the
names of the fused layers.  mbridge's own code does all the rest: it gathers over tensor, expert and pipeline ranks,
merges and splits.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from mbridge.models.qwen3moe import Qwen3MoEBridge
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.moe import moe_utils

# Megatron-Core asks for the current GPU where it has a device to name.
torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment]
# Megatron-Core 0.16 reads this name without Transformer Engine, too, and defines it only with it.
moe_utils.te_general_gemm = None

_FUSED = (
    (r"\.input_layernorm\.weight$", ".self_attention.linear_qkv.layer_norm_weight"),
    (r"\.mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight$", r".mlp.experts.\2.weight\1"),
)


class LocalBridge(Qwen3MoEBridge):
    """mbridge's bridge for Qwen3-MoE, for Megatron-Core's layers without Transformer Engine."""

    def _build_base_config(self, **settings: Any) -> Any:
        settings |= {
            "use_cpu_initialization": True,
            "moe_grouped_gemm": False,
            "moe_token_dispatcher_type": "allgather",
            "variable_seq_lengths": False,
            "sequence_parallel": False,
            "persist_layer_norm": False,
            "bias_activation_fusion": False,
            "bias_dropout_fusion": False,
            "masked_softmax_fusion": False,
            "gradient_accumulation_fusion": False,
        }
        return super()._build_base_config(**settings)

    def _get_transformer_layer_spec(self, vp_stage: int | None = None) -> Any:
        self.has_vp_stage = True
        return get_gpt_decoder_block_spec(self.config, use_transformer_engine=False, vp_stage=vp_stage)

    def _weight_name_mapping_mcore_local_to_global(
        self, model: torch.nn.Module, consider_ep: bool = True
    ) -> dict[str, str]:
        found = super()._weight_name_mapping_mcore_local_to_global(model, consider_ep=False)
        assert not consider_ep  # export_weights numbers the experts of other ranks itself
        for pattern, name in _FUSED:
            found = {local: re.sub(pattern, name, whole) for local, whole in found.items()}
        return found


def build(config: Any) -> tuple[LocalBridge, torch.nn.Module]:
    """This rank's part of a random model, and its bridge; call ``initialize_model_parallel`` first."""
    config.rope_theta = config.rope_parameters["rope_theta"]  # where mbridge 0.15 looks for it
    tensor_parallel.random.initialize_rng_tracker(inference_rng_tracker=True)  # the other one is for GPUs only
    bridge = LocalBridge(config, dtype=torch.float32)
    first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    model = bridge._model_provider([])(pre_process=first, post_process=last)
    for parameter in model.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    return bridge, model.eval()


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Gives each parameter other values: the same ones on the ranks that hold the same part of it."""
    with torch.no_grad():
        for number, (name, parameter) in enumerate(model.named_parameters()):
            part = 0
            if parameter.tensor_model_parallel:
                expert = ".local_experts." in name
                part = (
                    parallel_state.get_expert_tensor_parallel_rank()
                    if expert
                    else parallel_state.get_tensor_model_parallel_rank()
                )
                if expert:
                    part += 16 * parallel_state.get_expert_model_parallel_rank()
            part += 256 * parallel_state.get_pipeline_model_parallel_rank()
            generator = torch.Generator().manual_seed(seed * 65536 + part * 64 + number)
            made = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * made if parameter.ndim == 1 else 0.3 * made)


def greedy(model: torch.nn.Module, prompt: list[int], count: int) -> list[int]:
    """Tokens of Megatron's own forward pass; every tensor-parallel rank gets the same ones."""
    tokens = list(prompt)
    for _ in range(count):
        length = len(tokens)
        mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
        with torch.no_grad():
            part = model(torch.tensor([tokens]), torch.arange(length)[None], mask)[0, -1].contiguous()
        parts = [torch.empty_like(part) for _ in range(parallel_state.get_tensor_model_parallel_world_size())]
        torch.distributed.all_gather(parts, part, group=parallel_state.get_tensor_model_parallel_group())
        tokens.append(int(torch.cat(parts).argmax()))
    return tokens[len(prompt) :]
