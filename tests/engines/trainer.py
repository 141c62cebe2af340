"""A trainer on the CPU, sharded with FSDP2 over two processes: ``python -m tests.engines.trainer``.

It puts a model's weights into engines once, with the proof of their own answers, and prints the report as JSON.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from weightcast import Target, WeightUpdater

RANKS = 2


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--url", required=True)
    parser.add_argument("--via", required=True)
    parser.add_argument("--version", type=int, required=True)
    parser.add_argument("--store", required=True)
    parser.add_argument("--rank", type=int, default=-1)
    given = parser.parse_args()
    if given.rank < 0:
        others = [
            subprocess.Popen([sys.executable, "-m", "tests.engines.trainer", *sys.argv[1:], f"--rank={rank}"])
            for rank in range(1, RANKS)
        ]
        train(given, 0)
        sys.exit(max(other.wait() for other in others))
    train(given, given.rank)


def train(given: argparse.Namespace, rank: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{given.store}", rank=rank, world_size=RANKS)
    model = AutoModelForCausalLM.from_pretrained(Path(given.model), dtype=torch.float32).eval()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    with WeightUpdater.connect(
        model, [Target(given.url)], transport=given.via, verify="behaviour", bucket_bytes=1 << 16, timeout_s=120.0
    ) as updater:
        report = updater.update(version=given.version)
    if rank == 0:
        print(report.to_json())
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
