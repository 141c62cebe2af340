"""Measures what ``start`` and ``wait`` save beside ``update``: SmolLM2-135M, FSDP2 on CPUs, the reference engine.

    python benchmarks/started.py --rounds 10 --out benchmarks/results/started-cpu.json

A step is an update and one forward pass of the trainer.  Steps that wait for the update first and steps that compute
while it ends take turns.  Two sets of weights take turns too, and the trainer changes to the other one as soon as it
may.  The engine's digest and its greedy answer must be the same for a set, however it was sent.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from weightcast import WeightUpdater
from weightcast.comm.ports import quiet_port
from weightcast.lab.bench.machine import facts
from weightcast.lab.demo.smollm2 import ensure_smollm2

_PROMPT = [504, 3575, 282, 4649, 314]
_TOKENS = 8
_START_S = 300.0


def train(rank: int, arguments: argparse.Namespace, folder: str, url: str, port: int) -> None:
    """One trainer rank: all steps.  Rank 0 writes the result."""
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=arguments.trainers)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    mesh = init_device_mesh("cpu", (arguments.trainers,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    tokens = torch.randint(0, 1000, (1, arguments.tokens))
    rows: list[dict[str, Any]] = []

    def compute() -> float:
        began = time.monotonic()
        with torch.no_grad():
            model(input_ids=tokens)
        return time.monotonic() - began

    size_bytes = 0
    sets = [weights(model, seed=seed) for seed in (1, 2)]
    use(model, sets[0])
    with WeightUpdater.connect(model, [url], transport=arguments.via) as updater:
        for number in range(4 * (arguments.rounds + 1)):
            beside = number % 4 in (1, 2)
            dist.barrier()
            began = time.monotonic()
            if beside:
                pending = updater.start()
                started_s = time.monotonic() - began
                use(model, sets[1 - number % 2])
                computed_s = compute()
                report = pending.wait()
            else:
                report = updater.update()
                started_s = time.monotonic() - began
                use(model, sets[1 - number % 2])
                computed_s = compute()
            step_s = time.monotonic() - began
            assert report.ok
            size_bytes = report.bytes
            assert report.targets[0].proof == "resident"
            if rank == 0:
                row = {"beside": beside, "step_s": step_s, "start_s": started_s, "compute_s": computed_s}
                row |= {"phases": report.phases, "digest": report.digest, "answer": answer(url, report.version)}
                rows.append(row)
                print(row, flush=True)
                for name in ("digest", "answer"):
                    assert row[name] == rows[number % 2][name], name
    if rank == 0:
        assert rows[0]["answer"] != rows[1]["answer"]
        rows = rows[4:]
    if rank == 0:
        write(arguments, size_bytes, rows)
    dist.destroy_process_group()


def weights(model: torch.nn.Module, *, seed: int) -> list[torch.Tensor]:
    """Other values for this rank's shards of all norms."""
    generator = torch.Generator().manual_seed(seed)
    shards = [local(parameter) for name, parameter in model.named_parameters() if "norm" in name]
    return [(one * torch.empty(one.shape).uniform_(0.5, 1.5, generator=generator)).to(one.dtype) for one in shards]


def use(model: torch.nn.Module, values: list[torch.Tensor]) -> None:
    """Gives the norms these values."""
    shards = [local(parameter) for name, parameter in model.named_parameters() if "norm" in name]
    for one, value in zip(shards, values, strict=True):
        one.copy_(value)


def local(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's shard."""
    return parameter.data.to_local() if isinstance(parameter.data, DTensor) else parameter.data


def answer(url: str, version: int) -> list[int]:
    """The engine's greedy answer."""
    body = {"prompt": _PROMPT, "max_tokens": _TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    found = httpx.post(f"{url}/v1/completions", json=body, timeout=120.0).raise_for_status().json()
    assert found["weight_version"] == version
    return list(found["choices"][0]["token_ids"])


def write(arguments: argparse.Namespace, size_bytes: int, rows: list[dict[str, Any]]) -> None:
    """Writes medians and all steps."""
    median = {
        words: {key: statistics.median(row[key] for row in rows if row["beside"] == beside) for key in _KEYS}
        for words, beside in (("update", False), ("start", True))
    }
    saved_s = median["update"]["step_s"] - median["start"]["step_s"]
    result = {"what": "started", "machine": facts(), "arguments": {**vars(arguments), "out": str(arguments.out)}}
    result |= {"bytes": size_bytes, "median": median, "saved_s": saved_s, "steps": rows}
    print(json.dumps({"median": median, "saved_s": saved_s}), flush=True)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


_KEYS = ("step_s", "start_s", "compute_s")


def main() -> None:
    """Starts the engine and the trainer ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--trainers", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=32, help="length of the forward pass")
    parser.add_argument("--via", default="ipc")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    folder = str(ensure_smollm2(lambda done, total: None))
    port = quiet_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "weightcast.rollout", folder, "--port", str(port), "--dtype", "bfloat16"]
    engine = subprocess.Popen([*command, "--threads", "1"])
    try:
        wait_ready(url, engine)
        mp.spawn(train, (arguments, folder, url, quiet_port()), nprocs=arguments.trainers)
    finally:
        engine.terminate()
        engine.wait(30)


def wait_ready(url: str, engine: subprocess.Popen[bytes]) -> None:
    """Waits until the engine answers."""
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        assert engine.poll() is None, "the engine ended"
        try:
            if httpx.get(f"{url}/health", timeout=5.0).is_success:
                return
        except httpx.TransportError:
            time.sleep(0.2)
    raise TimeoutError("the engine did not start")


if __name__ == "__main__":
    main()
