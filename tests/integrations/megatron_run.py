"""Two updates from a real Megatron-Core model on four ranks; runs in Megatron's own environment, as a script.

    python tests/integrations/megatron_run.py TP PP EP ETP FOLDER URL

FOLDER has the ``config.json`` of the model.  The last line that it prints is a JSON document for the test.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from typing import Any

import megatron.core
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron_model import build, greedy, randomise
from transformers import AutoConfig

from weightcast import WeightUpdater
from weightcast.exporters.converter import BridgeExporter

WORLD = 4
PROMPT = [5, 17, 99, 3, 250]


def rank_main(rank: int, port: int, tp: int, pp: int, ep: int, etp: int, folder: str, url: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(WORLD), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
    )
    bridge, model = build(AutoConfig.from_pretrained(folder))
    randomise(model, 1)
    exporter = BridgeExporter(lambda: bridge.export_weights([model]))
    updater = WeightUpdater.connect(exporter, targets=[url], bucket_bytes="64KiB", verify="resident")
    said: dict[str, Any] = {"megatron": megatron.core.__version__, "updates": []}
    for version in (1, 2):
        randomise(model, version)
        report = updater.update(version=version)
        row = json.loads(report.to_json())["targets"][0]
        tokens = greedy(model, PROMPT, 12) if pp == 1 else []
        said["updates"].append({"version": version, "proof": row["proof"], "tokens": tokens})
    held = {name: tensor for name, tensor in bridge.export_weights([model])}
    updater.close()
    if rank == 0:
        torch.save(held, f"{folder}/held.pt")
        print(json.dumps(said))
    dist.destroy_process_group()


def main(tp: str, pp: str, ep: str, etp: str, folder: str, url: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    sizes = (int(tp), int(pp), int(ep), int(etp))
    torch.multiprocessing.spawn(rank_main, args=(port, *sizes, folder, url), nprocs=WORLD)


if __name__ == "__main__":
    main(*sys.argv[1:])
