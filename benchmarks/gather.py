"""Measures the gather of a sharded model into buckets, beside NCCL's bandwidth between two ranks in the same run.

    python benchmarks/gather.py --world 4 --layers 36 --out benchmarks/results/gather.json

No trainer and no engine: shapes of Qwen3-8B, each rank holding its rows of every tensor.
"""

import argparse
import json
import os
import statistics
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from weightcast.comm.ports import quiet_port
from weightcast.comm.trainer_group import Move, TrainerGroup
from weightcast.exporters.bucketize import bucketize
from weightcast.exporters.module import ModuleExporter
from weightcast.lab.bench.machine import facts
from weightcast.wire.layout import Packing, plan_buckets, total_bytes

LAYER = {
    "self_attn.q_proj": (4096, 4096),
    "self_attn.k_proj": (1024, 4096),
    "self_attn.v_proj": (1024, 4096),
    "self_attn.o_proj": (4096, 4096),
    "self_attn.q_norm": (128,),
    "self_attn.k_norm": (128,),
    "mlp.gate_proj": (12288, 4096),
    "mlp.up_proj": (12288, 4096),
    "mlp.down_proj": (4096, 12288),
    "input_layernorm": (4096,),
    "post_attention_layernorm": (4096,),
}


def shapes(layers: int) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {"embed_tokens": (151936, 4096)}
    for layer in range(layers):
        found |= {f"layers.{layer}.{name}": shape for name, shape in LAYER.items()}
    return found | {"norm": (4096,), "lm_head": (151936, 4096)}


def work(rank: int, arguments: argparse.Namespace, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    cuda = arguments.device == "cuda"
    if cuda:
        torch.cuda.set_device(rank)
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", rank=rank, world_size=arguments.world)
    mesh = init_device_mesh(arguments.device, (arguments.world,))
    dtype = getattr(torch, arguments.dtype)
    model = nn.Module()
    for name, shape in shapes(arguments.layers).items():
        local = torch.zeros(shape[0] // arguments.world, *shape[1:], dtype=dtype, device=device)
        placed = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        model.register_parameter(name.replace(".", "_"), nn.Parameter(placed, requires_grad=False))
    exporter = ModuleExporter(model, wire_dtype=torch.bfloat16)
    group = TrainerGroup.connect(device, timeout_s=120)
    bucket_bytes = arguments.bucket_mib << 20
    layouts = plan_buckets(exporter.specs(), bucket_bytes=bucket_bytes, packing=Packing())
    payload = total_bytes(exporter.specs())
    rows = []
    for receivers in ((0,), tuple(range(arguments.world))):
        group.receivers = receivers
        free = range(2) if rank in receivers else ()
        slots = [torch.empty(bucket_bytes, dtype=torch.uint8, device=device) for _ in free] or None
        seconds = []
        for _ in range(arguments.repeat + 1):
            group.barrier("start")
            begin = time.perf_counter()
            for _ in bucketize(exporter, layouts, group, slots):
                pass
            group.barrier("end")
            seconds.append(time.perf_counter() - begin)
        median = statistics.median(seconds[1:])
        rows.append(
            {"receivers": len(receivers), "first_s": seconds[0], "median_s": median, "gb_per_s": payload / median / 1e9}
        )
    block = torch.zeros(bucket_bytes, dtype=torch.uint8, device=device)
    seconds = []
    for _ in range(arguments.repeat + 1):
        group.barrier("start")
        begin = time.perf_counter()
        for _ in range(8):
            group.move([Move(0, block)] if rank == 1 else [], [Move(1, block)] if rank == 0 else [], what="a block")
        group.barrier("end")
        seconds.append(time.perf_counter() - begin)
    limit = 8 * bucket_bytes / statistics.median(seconds[1:]) / 1e9
    group.close()
    if rank == 0:
        report = {
            "what": "gather of a sharded model into buckets",
            "machine": facts(),
            "device": torch.cuda.get_device_name() if cuda else "cpu",
            "arguments": vars(arguments),
            "tensors": len(exporter.specs()),
            "buckets": len(layouts),
            "payload_bytes": payload,
            "rank_to_rank_gb_per_s": limit,
            "updates": rows,
        }
        text = json.dumps(report, indent=2)
        print(text)
        if arguments.out:
            with open(arguments.out, "w") as file:
                file.write(text + "\n")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--bucket-mib", type=int, default=512, help="at least 1187 to keep the embedding whole")
    parser.add_argument("--dtype", default="bfloat16", help="of the parameters; they travel as bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--out")
    arguments = parser.parse_args()
    port = quiet_port()
    mp.start_processes(work, args=(arguments, port), nprocs=arguments.world, start_method="spawn")


if __name__ == "__main__":
    main()
