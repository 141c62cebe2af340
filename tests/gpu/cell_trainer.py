"""One rank of a trainer that updates engines in cells, and may strike some of them in the middle.

All ranks read the same JSON lines from stdin, and answer each with one.  Works on CPUs as well.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.gpu.elsewhere import appear_on, claim_other_gpus
from tests.gpu.sent import Sent
from tests.gpu.trainer import toy_module
from tests.helpers.harness import on_every_rank
from tests.helpers.toy_engine import toy_weights
from weightcast import UpdateFailed, WeightcastError, WeightUpdater
from weightcast.lab.connect import connect as connect_in_lab
from weightcast.report import UpdateReport


class Strike:
    """Sends a signal to processes once a share of the bytes was counted; rank 0 alone does it."""

    def __init__(self) -> None:
        self.order: dict[str, Any] = {}
        self.struck_at: float | None = None

    def progress(self, done: int, total: int) -> None:
        # The bucket that was counted last is on its way, in a thread of the transport.
        if self.order and done > self.order["at"] * total:
            order, self.order = self.order, {}
            self.struck_at = time.monotonic()
            for pid in order["pids"]:
                os.kill(pid, order["signal"])


@torch.no_grad()
def set_weights(model: torch.nn.Module, version: int, rows: int, rank: int, world: int) -> None:
    """Gives this rank's shards the values of a version: FSDP cuts along the first dimension."""
    weights = toy_weights(seed=version, rows=rows)
    for name, parameter in model.named_parameters():
        local = parameter.to_local()
        chunks = weights[name].chunk(world)
        if rank < len(chunks):
            local.copy_(chunks[rank])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--host-id", required=True)
    args = parser.parse_args()
    device = torch.device(args.device)
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    appear_on(args.host_id)
    claim_other_gpus()
    address = f"tcp://127.0.0.1:{args.port}"  # by gloo: both ranks may be on one GPU
    dist.init_process_group("gloo", init_method=address, rank=args.rank, world_size=args.world)
    model = toy_module(seed=0, rows=args.rows).to(device)
    fully_shard(model, mesh=init_device_mesh(device.type, (args.world,)))
    strike, sent = Strike(), Sent()
    updater: WeightUpdater | None = None
    opened: dict[str, Any] = {}
    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        set_weights(model, order["version"], args.rows, args.rank, args.world)
        answer: dict[str, Any] = {"ok": False}
        report: UpdateReport | None = None
        begun = time.monotonic()
        try:
            settings = {"urls": order["urls"], **order["options"]}
            if updater is not None and opened != settings:
                updater.close()
                updater = None
            if updater is None:
                options = {"progress": strike.progress, "verify": "resident"} | order["options"]
                updater, opened = connect_in_lab(model, order["urls"], **options), settings
            if args.rank == 0:
                strike.order, strike.struck_at = dict(order["strike"] or {}), None
            sent.size_bytes = 0
            begun = time.monotonic()
            report = updater.update(version=order["version"])
            answer = {"ok": report.ok, "cells": updater.cells}
        except UpdateFailed as error:
            report = error.report
            answer["text"] = f"{type(error).__name__}: {error}"
        except WeightcastError as error:
            answer["text"] = f"{type(error).__name__}: {error}"
        ended = time.monotonic()
        answer |= {"seconds": ended - begun, "sent_bytes": sent.size_bytes}
        if strike.struck_at is not None:
            answer["seconds_after_strike"] = ended - strike.struck_at
            strike.struck_at = None
        if report is not None:
            answer["report"] = json.loads(on_every_rank(report))
        print(json.dumps(answer), flush=True)
    os._exit(0)  # destroying NCCL groups after a peer was killed can wait for it


if __name__ == "__main__":
    main()
