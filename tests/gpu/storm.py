"""A trainer that goes on updating while its engines are struck in the middle of it.

Reads one JSON line for each update from stdin and answers with one.  Works on CPUs as well.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any

import torch

from tests.gpu.memory import held_bytes
from tests.gpu.trainer import toy_module
from tests.helpers.toy_engine import toy_weights
from weightcast import WeightcastError, WeightUpdater
from weightcast.errors import UpdateFailed
from weightcast.lab.connect import connect as connect_in_lab


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--transport", required=True)
    parser.add_argument("--direct-by", default="auto")
    parser.add_argument("--rows", type=int, default=96)
    parser.add_argument("--bucket-bytes", type=int, default=8 << 20)
    parser.add_argument("--timeout", type=float, default=5.0)
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    model = toy_module(seed=0, rows=args.rows).to(device)
    strike: dict[str, Any] = {}
    struck_at = 0.0
    updater: WeightUpdater | None = None
    urls: list[str] = []

    def progress(done: int, total: int) -> None:
        nonlocal struck_at
        # The bucket that was counted last is on its way, in a thread of the transport.
        if strike and done > strike["at"] * total:
            pids, number = strike["pids"], strike["signal"]
            strike.clear()
            struck_at = time.monotonic()
            for pid in pids:
                os.kill(pid, number)

    for line in sys.stdin:
        order = json.loads(line)
        weights = toy_weights(seed=order["version"], rows=args.rows)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(weights[name])
        strike.update(order.get("strike") or {})
        answer: dict[str, Any]
        started = time.monotonic()
        try:
            if updater is None:
                updater = connect_in_lab(
                    model,
                    order["urls"],
                    transport=args.transport,
                    direct_by=args.direct_by,
                    keep_mapped=args.direct_by == "shards",
                    bucket_bytes=args.bucket_bytes,
                    timeout_s=args.timeout,
                    progress=progress,
                )
            elif urls != order["urls"]:
                updater.retarget(order["urls"])
            urls = order["urls"]
            started = time.monotonic()
            report = updater.update(version=order["version"])
            answer = {"ok": report.ok, "report": json.loads(report.to_json())}
        except WeightcastError as error:
            answer = {"ok": False, "error": type(error).__name__, "text": str(error)}
            if isinstance(error, UpdateFailed):
                answer["report"] = json.loads(error.report.to_json())
        ended = time.monotonic()
        answer["seconds"] = ended - started
        answer["seconds_after_strike"] = ended - struck_at if struck_at else None
        struck_at = 0.0
        if device.type == "cuda":
            torch.cuda.synchronize()
            answer["held_bytes"], answer["whose"] = held_bytes({os.getpid()}, {device.index or 0})
        print(json.dumps(answer), flush=True)
    os._exit(0)  # destroying NCCL groups after a peer was killed can wait for it


if __name__ == "__main__":
    main()
