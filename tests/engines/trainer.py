"""One rank of a trainer on the CPU, sharded with FSDP2; a function for ``tests.unit.ranks.Ranks``."""

from __future__ import annotations

import torch
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from weightcast import Target, WeightUpdater


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
