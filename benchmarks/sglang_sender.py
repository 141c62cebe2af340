"""SGLang's own way into a running server, as trainers use it today: ``update_weights_from_tensor``, flattened buckets.

    PYTHONPATH=SITE python benchmarks/sglang_sender.py CHECKPOINT http://127.0.0.1:30000 --device cuda --rounds 3

A process of its own, with SGLang's classes: the tensors of a checkpoint folder are on the device already; each bucket
is concatenated, its handle pickled and posted, and answered before the next one.  Around it are SGLang's own pause,
flush and resume.  The last line of the output is JSON with the seconds of each round.
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
from buckets import buckets_of
from safetensors import safe_open


def main() -> int:
    """Loads a checkpoint, then sends it as often as asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("url")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bucket-bytes", type=int, default=512 << 20)
    args = parser.parse_args()
    from sglang.srt.utils import MultiprocessingSerializer  # pyright: ignore[reportMissingImports]
    from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions  # pyright: ignore[reportMissingImports]
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket  # pyright: ignore[reportMissingImports]

    if args.device == "cuda":  # it rewrites what names a GPU
        monkey_patch_torch_reductions()
    else:  # file descriptors go to relatives of this process only
        torch.multiprocessing.set_sharing_strategy("file_system")
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(args.checkpoint.glob("*.safetensors")):
        with safe_open(file, "pt", device=args.device) as content:
            tensors |= {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118  it is no mapping
    session = requests.Session()
    session.trust_env = False

    def post(path: str, may_lack: bool = False, **body: Any) -> None:
        answer = session.post(args.url + path, json=body, timeout=120)
        if answer.status_code != 200 and not (may_lack and answer.status_code in (404, 405)):
            raise RuntimeError(f"{path}: {answer.status_code} {answer.text[:500]}")

    rounds: list[dict[str, float]] = []
    for _ in range(args.rounds):
        started = time.perf_counter()
        post("/pause_generation", mode="retract")
        post("/flush_cache")
        post("/begin_weight_update", may_lack=True)
        opened, count = time.perf_counter(), 0
        for named in buckets_of(tensors.items(), args.bucket_bytes, one_dtype=True):
            bucket = FlattenedTensorBucket(named_tensors=named)
            content = {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}
            payload = MultiprocessingSerializer.serialize(content, output_str=True)
            if args.device == "cuda":
                torch.cuda.synchronize()
            post(
                "/update_weights_from_tensor",
                serialized_named_tensors=[payload],
                load_format="flattened_bucket",
                flush_cache=False,
            )
            count += 1
        sent = time.perf_counter()
        post("/end_weight_update", may_lack=True)
        post("/continue_generation")
        over = time.perf_counter()
        rounds.append({"seconds": round(over - started, 4), "buckets_s": round(sent - opened, 4), "buckets": count})
    size = sum(tensor.nbytes for tensor in tensors.values())
    print(json.dumps({"bytes": size, "bucket_bytes": args.bucket_bytes, "rounds": rounds}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
