"""Kimi-K2 as trainer ranks hold it: names and shapes of a module with stacked experts, sharded, and without memory."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.helpers.playing import mesh_of

KIMI = {
    "layers": 61,
    "dense": 1,
    "hidden": 7168,
    "heads": 64,
    "q_lora": 1536,
    "kv_lora": 512,
    "rope": 64,
    "nope": 128,
    "v": 128,
    "inter": 18432,
    "experts": 384,
    "moe": 2048,
    "vocab": 163840,
}

Stored = list[tuple[str, tuple[int, ...]]]


def stored_of(sizes: dict[str, int]) -> Stored:
    """Name and shape of each of the trainer's tensors."""
    h, heads = sizes["hidden"], sizes["heads"]
    found: Stored = [("model.embed_tokens.weight", (sizes["vocab"], h))]
    for layer in range(sizes["layers"]):
        prefix = f"model.layers.{layer}"
        own = {
            "self_attn.q_a_proj": (sizes["q_lora"], h),
            "self_attn.q_a_layernorm": (sizes["q_lora"],),
            "self_attn.q_b_proj": (heads * (sizes["nope"] + sizes["rope"]), sizes["q_lora"]),
            "self_attn.kv_a_proj_with_mqa": (sizes["kv_lora"] + sizes["rope"], h),
            "self_attn.kv_a_layernorm": (sizes["kv_lora"],),
            "self_attn.kv_b_proj": (heads * (sizes["nope"] + sizes["v"]), sizes["kv_lora"]),
            "self_attn.o_proj": (h, heads * sizes["v"]),
            "input_layernorm": (h,),
            "post_attention_layernorm": (h,),
        }
        if layer < sizes["dense"]:
            own |= {
                "mlp.gate_proj": (sizes["inter"], h),
                "mlp.up_proj": (sizes["inter"], h),
                "mlp.down_proj": (h, sizes["inter"]),
            }
        else:
            own |= {
                "mlp.gate": (sizes["experts"], h),
                "mlp.shared_experts.gate_proj": (sizes["moe"], h),
                "mlp.shared_experts.up_proj": (sizes["moe"], h),
                "mlp.shared_experts.down_proj": (h, sizes["moe"]),
            }
        found += [(f"{prefix}.{name}.weight", shape) for name, shape in own.items()]
        if layer >= sizes["dense"]:
            found += [
                (f"{prefix}.mlp.gate.e_score_correction_bias", (sizes["experts"],)),
                (f"{prefix}.mlp.experts.gate_up_proj", (sizes["experts"], 2 * sizes["moe"], h)),
                (f"{prefix}.mlp.experts.down_proj", (sizes["experts"], h, sizes["moe"])),
            ]
    return [*found, ("model.norm.weight", (h,)), ("lm_head.weight", (sizes["vocab"], h))]


def kimi_module(stored: Stored, rank: int, axes: tuple[int, int, int]) -> nn.Module:
    """One rank's module: experts over the second axis and their rows over the third, other tensors over both.

    Args:
        stored: Name and shape of each tensor.
        rank: The rank.
        axes: Number of replicas, of shards of the experts, and of shards of each expert's rows.
    """
    ranks = torch.arange(math.prod(axes)).reshape(axes)
    expert_mesh = mesh_of(ranks, rank)
    dense_mesh = mesh_of(ranks.reshape(axes[0], -1), rank)
    root = nn.Module()
    memory: dict[tuple[int, ...], torch.Tensor] = {}
    for name, shape in stored:
        if ".mlp.experts." in name:
            mesh, placements = expert_mesh, (Replicate(), Shard(0), Shard(1))
        else:
            mesh, placements = dense_mesh, (Replicate(), Shard(0))
        own = list(shape)
        for axis, placement in enumerate(placements):
            if isinstance(placement, Shard):
                chunk = -(-own[placement.dim] // mesh.shape[axis])
                coordinate = mesh.get_coordinate()
                assert coordinate is not None
                start = min(coordinate[axis] * chunk, own[placement.dim])
                own[placement.dim] = min(chunk, own[placement.dim] - start)
        # Tensors of one shape share memory: it is never read, and 2,048 ranks have much of it.
        if tuple(own) not in memory:
            memory[tuple(own)] = torch.empty(own, dtype=torch.bfloat16)
        local = memory[tuple(own)]
        stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
        tensor = DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)
        _put(root, name, tensor)
    return root


def _put(root: nn.Module, name: str, tensor: torch.Tensor) -> None:
    *path, attribute = name.split(".")
    module = root
    for step in path:
        if not hasattr(module, step):
            module.add_module(step, nn.Module())
        module = getattr(module, step)
    module.register_buffer(attribute, tensor)
