"""vLLM's own way into a running server: its ``ipc`` weight transfer, packed, from a process of its own.

    PYTHONPATH=SITE python benchmarks/vllm_sender.py CHECKPOINT http://127.0.0.1:30000 --rounds 4 --gap-s 1

The tensors of a checkpoint folder are on the device before the first round.  One round is vLLM's own sequence: pause,
start, send, finish, resume.  Rounds with an odd number send the output head negated, so that answers differ; the last
round has an even number.  The last line of the output is JSON: when each round began and ended, in seconds of the
monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import requests
import torch
from safetensors import safe_open

HEAD = "lm_head.weight"


def main() -> int:
    """Loads a checkpoint, then sends it as often as asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("url")
    parser.add_argument("--rounds", type=int, default=4, help="an even number")
    parser.add_argument("--pause", default="keep", choices=["abort", "wait", "keep"], help="vLLM's own modes")
    parser.add_argument("--gap-s", type=float, default=0.0, help="wait before each round")
    args = parser.parse_args()
    from vllm.distributed.weight_transfer.ipc_engine import (  # pyright: ignore[reportMissingImports]
        IPCTrainerSendWeightsArgs,
        IPCWeightTransferEngine,
    )

    torch.cuda.set_device(0)
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(args.checkpoint.glob("*.safetensors")):
        with safe_open(file, "pt", device="cuda:0") as content:
            tensors |= {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118  it is no mapping
    heads = [tensors[HEAD], -tensors[HEAD]]
    # vLLM packs whole tensors, so its buffer must have room for the largest one.
    packed = max(1 << 30, *(tensor.nbytes for tensor in tensors.values()))
    session = requests.Session()
    session.trust_env = False

    def post(path: str, body: Any = None) -> None:
        answer = session.post(args.url + path, json=body, timeout=120)
        if answer.status_code != 200:
            raise RuntimeError(f"{path}: {answer.status_code} {answer.text[:2000]}")

    post("/init_weight_transfer_engine", {"init_info": {}})
    trainer = IPCTrainerSendWeightsArgs(send_mode="http", url=args.url, packed=True, packed_buffer_size_bytes=packed)
    rounds: list[dict[str, float]] = []
    for number in range(1, args.rounds + 1):
        tensors[HEAD] = heads[number % 2]
        torch.cuda.synchronize()
        time.sleep(args.gap_s)
        began = time.monotonic()
        post(f"/pause?mode={args.pause}")
        paused = time.monotonic()
        post("/start_weight_update", {})
        IPCWeightTransferEngine.trainer_send_weights(iter(tensors.items()), trainer)
        post("/finish_weight_update")
        finished = time.monotonic()
        post("/resume")
        ended = time.monotonic()
        rounds.append({"began": began, "paused": paused, "finished": finished, "ended": ended})
    print(json.dumps({"bytes": sum(each.nbytes for each in tensors.values()), "rounds": rounds}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
