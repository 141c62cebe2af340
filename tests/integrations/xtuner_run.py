"""Three weight updates of a tiny Qwen3 that xtuner shards and exports itself; runs in an environment of its own.

    python tests/integrations/xtuner_run.py FOLDER URL

FOLDER/model has the first weights; xtuner saves those of each update in FOLDER/1, 2 and 3.  The last line that this
prints is a JSON document.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from xtuner.v1.config import AdamWConfig, FSDPConfig
from xtuner.v1.engine.train_engine import TrainEngine
from xtuner.v1.model import get_model_config_from_hf
from xtuner.v1.rl.rollout.worker import RolloutConfig
from xtuner.v1.rl.weight_update import RolloutWeightUpdateTarget

from weightcast.errors import ConfigError
from weightcast.integrations.xtuner import UpdateWeighter

WORLD = 2
NOWHERE = "http://127.0.0.1:9"  # nothing listens there


def rank_main(rank: int, port: int, folder: str, url: str) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(WORLD),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "XTUNER_USE_LMDEPLOY": "1",
    }
    torch.set_num_threads(1)
    # xtuner calls these on every device, and torch has none of them for CPUs.
    for name in ("empty_cache", "reset_peak_memory_stats", "max_memory_allocated"):
        setattr(torch.cpu, name, int)
    torch.accelerator.synchronize = lambda *_: None
    dist.init_process_group("gloo")
    model_cfg = get_model_config_from_hf(Path(folder, "model"))
    model_cfg.compile_cfg = False
    engine = TrainEngine(model_cfg=model_cfg, optim_cfg=AdamWConfig(), fsdp_cfg=FSDPConfig(torch_compile=False))
    engine.from_hf(Path(folder, "model"))
    parameters = list(engine.model.parameters())
    whole = sum(parameter.numel() for parameter in parameters)
    local = sum(parameter.to_local().numel() for parameter in parameters)

    # The fields of xtuner's worker config that its iterator reads.
    config = SimpleNamespace(model_cfg=model_cfg, update_weight_bucket_size_in_gb=64 / 2**20)
    weighter = UpdateWeighter(
        rank=rank,
        logger=logging.getLogger("xtuner"),
        config=config,
        engine=engine,
        bucket_bytes="64KiB",
        timeout_s=60.0,
    )
    targets = (
        RolloutWeightUpdateTarget(endpoint_rank=0, update_ranks=(0,), server_url=url, lifecycle_state="active"),
        RolloutWeightUpdateTarget(endpoint_rank=1, update_ranks=(1,), server_url=NOWHERE, lifecycle_state="inactive"),
    )
    reports: list[dict[str, Any]] = []
    refused = ""
    for number, transport, in_two_steps in ((1, "ipc", False), (2, "nccl", False), (3, "nccl", True)):
        with torch.no_grad():
            for parameter in parameters:
                parameter.mul_(1.0 + number / 16)
        engine.save_hf(str(Path(folder, str(number))))
        rollout = RolloutConfig(
            env="tiny",
            model_path=Path(folder, "model"),
            model_name="tiny",
            tokenizer_path=str(Path(folder, "model")),
            context_length=256,
            worker_log_dir=Path(folder, "logs"),
            weight_transport_type=transport,
            extra_rollout_config={"lmdeploy_backend": "turbomind"},  # xtuner itself refuses NCCL to it
        )
        weighter.bind_rollout_weight_update(targets=targets, rollout_config=rollout)
        if not in_two_steps:
            report = weighter.weight_update()
        else:
            assert weighter.weight_update(need_register=True, need_update=False) is None
            with torch.no_grad():  # xtuner moves its model off the GPUs here, so that it cannot be read
                for parameter in parameters:
                    parameter.zero_()
            report = weighter.weight_update(need_register=False, need_update=True)
            try:
                weighter.weight_update(need_register=False, need_update=True)
            except ConfigError as error:
                refused = str(error)
        assert report is not None
        reports.append(json.loads(report.to_json()))
    weighter.close()
    if rank == 0:
        print(
            json.dumps(
                {
                    "sharded": local < whole,
                    "versions": [report["version"] for report in reports],
                    "transports": [report["transport"] for report in reports],
                    "urls": [[row["url"] for row in report["targets"]] for report in reports],
                    "proofs": [[row["proof"] for row in report["targets"]] for report in reports],
                    "refused": refused,
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
