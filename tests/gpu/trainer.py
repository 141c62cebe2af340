"""A trainer for tests on GPUs: one process of this for each rank.

Prints one JSON line: the reports, or the error.  ``--die-after N`` kills the process after bucket N of the last update.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.gpu.elsewhere import claim_other_gpus
from tests.gpu.memory import held_bytes
from tests.gpu.sent import Sent
from tests.helpers.harness import on_every_rank
from tests.helpers.toy_engine import toy_weights
from weightcast import Target, WeightcastError
from weightcast.comm.remote_memory import Arena
from weightcast.lab.connect import connect as connect_in_lab
from weightcast.report import UpdateReport
from weightcast.wire.bucket_sources import RemoteMemory


def toy_module(*, seed: int, rows: int) -> nn.Module:
    """The toy engine's weights as a plain module."""
    root = nn.Module()
    for name, tensor in toy_weights(seed=seed, rows=rows).items():
        *path, last = name.split(".")
        module = root
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, nn.Module())
            module = getattr(module, part)
        module.register_parameter(last, nn.Parameter(tensor))
    return root


def build(args: argparse.Namespace, device: torch.device) -> nn.Module:
    """The model on its device, sharded over all ranks if there are several."""
    if args.model == "toy":
        model = toy_module(seed=args.seed, rows=args.rows).to(device)
    else:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype)).to(device)
    if args.world > 1:
        from torch.distributed.fsdp import fully_shard

        for block in getattr(getattr(model, "model", model), "layers", []) if args.model != "toy" else []:
            fully_shard(block)
        fully_shard(model)
    return model


@torch.no_grad()
def move(model: nn.Module) -> None:
    """Gives every weight other memory, with other values; the old memory is overwritten and freed."""
    for parameter in model.parameters():
        local = parameter._local_tensor if hasattr(parameter, "to_local") else parameter.data
        fresh = local.neg()
        local.fill_(float("nan"))
        if hasattr(parameter, "to_local"):
            local.set_(fresh)
        else:
            parameter.data = fresh


def flip_once() -> None:
    """Changes a bit of the first byte of a buffer just before its address is told; once."""
    memory = Arena.memory
    left = [True]

    def flipped(self: Arena, index: int) -> RemoteMemory:
        while left:
            left.pop()
            self.slot(index)[:1].bitwise_xor_(1)
        return memory(self, index)

    Arena.memory = flipped


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--world", type=int, default=1)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--targets", required=True)
    parser.add_argument("--engine", default="auto", help="kind of the engines")
    parser.add_argument("--transport", required=True)
    parser.add_argument("--versions", default="1")
    parser.add_argument("--model", default="toy")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--rows", type=int, default=96)
    parser.add_argument("--bucket-bytes", type=int, default=1 << 20)
    parser.add_argument("--verify", default="resident")
    parser.add_argument("--tolerance", type=float, default=0.1)
    parser.add_argument("--timeout", type=float, default=30.0)
    parser.add_argument("--die-after", type=int, default=-1)
    parser.add_argument("--watch", default="", help="processes whose GPU memory rank 0 looks at after each update")
    parser.add_argument("--watch-gpus", default="")
    parser.add_argument("--direct-by", default="auto")
    parser.add_argument("--keep-mapped", type=int, default=0)
    parser.add_argument("--backend", default="nccl", help="gloo where ranks share a GPU")
    parser.add_argument("--cell-ranks", type=int, default=64)
    parser.add_argument("--apart", type=int, default=0, help="1: its GPUs are none of the engines', as far as it knows")
    parser.add_argument("--flip", type=int, default=0, help="1: a bit of the first buffer that is read by rdma changes")
    parser.add_argument("--between", default="", help="moved: every weight gets other memory after an update; released")
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if args.flip:
        flip_once()
    if args.apart:
        claim_other_gpus()
        os.environ["NCCL_HOSTID"] = f"trainer-{args.rank}"
    if args.world > 1:
        dist.init_process_group(
            args.backend,
            init_method=f"tcp://127.0.0.1:{args.port}",
            rank=args.rank,
            world_size=args.world,
            device_id=device if args.backend == "nccl" else None,
        )
    versions = [int(version) for version in args.versions.split(",")]
    reports: list[UpdateReport] = []
    held: list[int] = []
    seen = 0

    def progress(done: int, total: int) -> None:
        nonlocal seen
        seen += 1
        if seen == args.die_after:
            os.kill(os.getpid(), signal.SIGKILL)

    sent = Sent()
    result: dict[str, Any]
    model = build(args, device)
    try:
        with connect_in_lab(
            model,
            [Target(url, engine=args.engine) for url in args.targets.split(",")],
            transport=args.transport,
            bucket_bytes=args.bucket_bytes,
            verify=args.verify,
            timeout_s=args.timeout,
            progress=progress,
            direct_by=args.direct_by,
            keep_mapped=bool(args.keep_mapped),
            advanced={"cell_ranks": args.cell_ranks, "behaviour_tolerance": args.tolerance},
        ) as updater:
            for version in versions:
                reports.append(updater.update(version=version))
                if args.watch and args.rank == 0:
                    pids, gpus = ([int(each) for each in words.split(",")] for words in (args.watch, args.watch_gpus))
                    held.append(held_bytes(pids, gpus)[0])
                if args.between:
                    updater.release()
                if args.between == "moved":
                    move(model)
        result = {"ok": True, "cells": updater.cells}
    except WeightcastError as error:
        result = {"ok": False, "error": type(error).__name__, "text": str(error)}
    if held:
        result["held_bytes"] = held
    result["sent_bytes"] = sent.size_bytes
    result["reports"] = [json.loads(on_every_rank(report)) for report in reports]
    print(json.dumps(result), flush=True)
    sys.stdout.flush()
    os._exit(0)  # destroying NCCL groups after a peer was killed can wait for it


if __name__ == "__main__":
    main()
