"""One rank of a trainer on the CPU, sharded with FSDP2; a function for ``tests.helpers.ranks.Ranks``."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from transformers import AutoModelForCausalLM

from tests.helpers.harness import share_memory
from weightcast import Target, WeightUpdater
from weightcast.lab.connect import connect as connect_in_lab


def update_sharded(folder: str, url: str, via: str, version: int) -> str:
    """Put a model's weights into an engine once, with the proof of their own answers; the report as JSON."""
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    with WeightUpdater.connect(
        model, [Target(url)], transport=via, verify="behaviour", bucket_bytes=1 << 16, timeout_s=120.0
    ) as updater:
        return updater.update(version=version).to_json()


def update_directly(folder: str, url: str, version: int, options: dict[str, Any]) -> str:
    """Put a model's weights into an engine by ``direct``, without a gather; the report as JSON."""
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if options.get("keep_mapped"):
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        buffer = share_memory(model, mesh, [Shard(0)])  # as long as the engine may read it
    else:
        buffer = None
        fully_shard(model)
    options = {"transport": "direct", "bucket_bytes": 1 << 16, "timeout_s": 120.0} | options
    with connect_in_lab(model, [Target(url)], **options) as updater:
        text = updater.update(version=version).to_json()
    del buffer
    return text
