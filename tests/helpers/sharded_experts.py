"""A small Qwen3-MoE whose ranks hold its experts by another dimension than FSDP2 would cut them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.helpers import families

SIZES = {"hidden_size": 160, "moe_intermediate_size": 96, "intermediate_size": 96, "head_dim": 32}


def sharded_experts(mesh: DeviceMesh, experts_by: int) -> Any:
    """The model in bfloat16, sharded over ``mesh``: by FSDP2, and its experts by dimension ``experts_by``."""
    model = families.make("qwen3_moe", **SIZES).to(torch.bfloat16)
    for layer in model.model.layers:
        for name, tensor in list(layer.mlp.experts.named_parameters()):
            placed = distribute_tensor(tensor.detach(), mesh, [Shard(experts_by)], src_data_rank=None)
            layer.mlp.experts.register_parameter(name, nn.Parameter(placed))
        fully_shard(layer, mesh=mesh, ignored_params=set(layer.mlp.experts.parameters()))
    fully_shard(model, mesh=mesh, ignored_params={p for p in model.parameters() if isinstance(p, DTensor)})
    return model
