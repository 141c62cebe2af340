"""Two training steps under DeepSpeed's ZeRO stage 3, each sent to an engine; runs in DeepSpeed's own environment.

    python tests/integrations/zero3_run.py FOLDER URL

FOLDER has the model.  What was trained is saved in FOLDER/trained.  The last line that it prints is a JSON document.
"""

from __future__ import annotations

import copy
import json
import os
import socket
import sys
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from weightcast import WeightUpdater

WORLD = 2
SETTINGS: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},
}


def rank_main(rank: int, port: int, folder: str, url: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(WORLD),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    deepspeed.ops.__compatible_ops__.clear()  # it would compile collectives of its own, which takes minutes
    deepspeed.init_distributed("gloo")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    plain = copy.deepcopy(model)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=SETTINGS)
    assert next(engine.module.parameters()).numel() == 0  # partitioned
    updater = WeightUpdater.connect(engine, targets=[url], bucket_bytes="64KiB", verify="resident")
    reports: list[dict[str, Any]] = []
    tokens = torch.randint(0, model.config.vocab_size, (1, 12), generator=torch.Generator().manual_seed(rank))
    for step in (1, 2):
        engine.backward(engine(tokens, labels=tokens).loss)
        engine.step()
        reports.append(json.loads(updater.update(version=step).to_json()))
        assert next(engine.module.parameters()).numel() == 0  # partitioned again
    updater.close()
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        plain.load_state_dict(engine.module.state_dict())
    if rank == 0:
        plain.save_pretrained(f"{folder}/trained")
        rows = [report["targets"][0] for report in reports]
        print(
            json.dumps(
                {
                    "deepspeed": deepspeed.__version__,
                    "proofs": [row["proof"] for row in rows],
                    "digests": [report["digest"] for report in reports],
                    "unsummed": [report.get("unsummed") for report in reports],
                }
            )
        )
    dist.destroy_process_group()


def main(folder: str, url: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(rank_main, args=(port, folder, url), nprocs=WORLD)


if __name__ == "__main__":
    main(*sys.argv[1:])
