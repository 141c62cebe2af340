"""Qwen3-30B-A3B's shape from FSDP2 over expert parallel: what arrives of it, how fast, and in an engine.

``WEIGHTCAST_MOE_LAYERS=48`` is the whole model, for which a folder of 61 GB is read as zeros; the default is a quarter.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.gpu.moe import Shape, sharded, zeros
from tests.gpu.test_reference_engine_gpu import serve
from tests.gpu.test_updates_gpu import info, needs
from tests.helpers.exports import bucketize
from tests.helpers.ranks import Ranks, allocate_slots
from weightcast import WeightUpdater
from weightcast.comm.trainer_group import TrainerGroup
from weightcast.digest.definition import tensor_digest
from weightcast.exporters.module import ModuleExporter
from weightcast.exporters.quantise import Fp8Blocks
from weightcast.protocols import BucketUse
from weightcast.runtime.peak_memory import PeakMemory
from weightcast.wire.layout import Packing, plan_buckets, total_bytes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(500),
]

MIB = 1 << 20
BOTH = "cpu:gloo,cuda:nccl"
BUCKET_BYTES = 512 * MIB
SHAPE = Shape(layers=int(os.environ.get("WEIGHTCAST_MOE_LAYERS", "12")))
Record = Callable[[str, Any], None]


def run(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """In that many ranks, each on a GPU of its own."""
    ranks = Ranks(world_size, BOTH)
    try:
        ranks.start(function, *args)
        return [ranks.answer(rank, timeout_s=400) for rank in range(world_size)]
    finally:
        ranks.close()


def here() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def time_gather(shape: Shape, fsdp: int, ep: int, kind: str) -> dict[str, Any]:
    """Seconds by phase, bytes, and the digests of some experts beside those of what the ranks hold."""
    times = [time.perf_counter()]

    def lap() -> float:
        torch.cuda.synchronize()
        times.append(time.perf_counter())
        return times[-1] - times[-2]

    model = sharded(shape, fsdp=fsdp, ep=ep, device=here())
    found: dict[str, Any] = {"kind": kind, "layers": shape.layers, "fsdp": fsdp, "ep": ep, "build_s": lap()}
    exporter = ModuleExporter(model, quantise=Fp8Blocks() if kind == "fp8" else None)
    found["exporter_s"] = lap()
    group = TrainerGroup.connect(here(), timeout_s=120)
    lap()
    layouts = plan_buckets(exporter.specs(), bucket_bytes=BUCKET_BYTES, packing=Packing())
    found["plan_s"] = lap()
    exporter.prepare(group)
    found["prepare_s"] = lap()
    payload = total_bytes(exporter.specs())
    found |= {"tensors": len(exporter.specs()), "buckets": len(layouts), "payload_bytes": payload, "updates": []}
    for receivers in ((0,), tuple(range(group.world_size))):
        use = BucketUse(receivers=receivers)
        with PeakMemory(here()) as peak:
            slots = allocate_slots(here(), BUCKET_BYTES) if group.rank in receivers else None
            seconds: list[float] = []
            for _ in range(4):
                group.barrier("start")
                lap()
                for _ in bucketize(exporter, layouts, group, slots, use=use):
                    pass
                group.barrier("end")
                seconds.append(lap())
        del slots
        median = statistics.median(seconds[1:])
        found["updates"].append(
            {
                "receivers": len(receivers),
                "first_s": seconds[0],
                "median_s": median,
                "gb_per_s": payload / median / 1e9,
                "peak_extra_bytes": peak.extra_bytes,
                "digests": check_experts(exporter, layouts, group, use, model, shape) if kind == "own" else {},
            }
        )
        torch.cuda.empty_cache()
    group.close()
    return found


def check_experts(
    exporter: Any, layouts: Any, group: TrainerGroup, use: BucketUse, model: Any, shape: Shape
) -> dict[str, str]:
    """Checks that some experts arrive equal to their ``full_tensor``, and returns the digests."""
    watched = {
        f"model.layers.0.mlp.experts.{expert}.{which}_proj.weight"
        for expert in (0, shape.experts // 2 - 1, shape.experts - 1)
        for which in ("gate", "down")
    }
    slots = allocate_slots(here(), BUCKET_BYTES) if group.rank in use.receivers else None
    got: dict[str, torch.Tensor] = {}
    for bucket in bucketize(exporter, layouts, group, slots, use=use):
        for slot, view in bucket.views() if bucket is not None else ():
            if slot.spec.name in watched:
                assert slot.whole
                got[slot.spec.name] = view.clone()
    experts = model.get_submodule("model.layers.0.mlp.experts")
    wholes = {name: parameter.full_tensor() for name, parameter in experts.named_parameters()}
    digests: dict[str, str] = {}
    for name, tensor in got.items():
        expert = int(name.split(".")[5])
        want = wholes["down_proj"][expert] if "down" in name else wholes["gate_up_proj"][expert, : shape.width]
        assert torch.equal(tensor, want), name
        digests[name] = tensor_digest(tensor.contiguous())
    assert set(got) == (watched if group.rank in use.receivers else set())
    return digests


@pytest.mark.parametrize("kind", ["own", "fp8"])
@pytest.mark.parametrize(
    ("fsdp", "ep"),
    [
        pytest.param(1, 2, id="ep2", marks=needs(2)),
        pytest.param(1, 4, id="ep4", marks=needs(4)),
        pytest.param(2, 2, id="fsdp2 x ep2", marks=needs(4)),
    ],
)
def test_what_is_gathered_is_what_the_ranks_hold(fsdp: int, ep: int, kind: str, record: Record) -> None:
    found = run(fsdp * ep, time_gather, SHAPE, fsdp, ep, kind)
    digests = [update["digests"] for rank in found for update in rank["updates"][1:]]
    assert all(each == digests[0] for each in digests)
    extra = max(update["peak_extra_bytes"] for rank in found for update in rank["updates"])
    record("gather", found[0] | {"peak_extra_bytes": extra})
    assert extra <= 2 * BUCKET_BYTES + BUCKET_BYTES // 4 + 96 * MIB


def update(shape: Shape, fsdp: int, ep: int, url: str, transport: str) -> list[dict[str, Any]]:
    """Three versions, each of other weights than the one before."""
    model = sharded(shape, fsdp=fsdp, ep=ep, device=here())
    reports: list[dict[str, Any]] = []
    with WeightUpdater.connect(
        model, [url], transport=transport, bucket_bytes=BUCKET_BYTES, verify="resident", timeout_s=120.0
    ) as updater:
        for version in (1, 2, 3):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(-1.5)
            reports.append(json.loads(updater.update(version=version).to_json()))
    return reports


def answer(url: str) -> list[int]:
    body = {"prompt": [5, 6, 7, 8], "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    reply = httpx.post(f"{url}/v1/completions", json=body, timeout=120, trust_env=False)
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["token_ids"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a model of zeros that the engines start from."""
    path = tmp_path_factory.mktemp("moe") / "zeros"
    zeros(path, SHAPE)
    return path


@pytest.mark.parametrize(
    ("fsdp", "ep", "transport", "engine"),
    [
        pytest.param(1, 2, "ipc", ("cuda:0", 2), id="ep2 to tp2 on the same GPUs", marks=needs(2)),
        pytest.param(1, 4, "ipc", ("cuda:0", 4), id="ep4 to tp4 on the same GPUs", marks=needs(4)),
        pytest.param(2, 2, "ipc", ("cuda:0", 4), id="fsdp2 x ep2 to tp4 on the same GPUs", marks=needs(4)),
        pytest.param(1, 2, "broadcast", ("cuda:2", 2), id="ep2 to tp2 on other GPUs", marks=needs(4)),
    ],
)
def test_every_rank_of_an_engine_proves_what_expert_parallel_trainers_sent(
    fsdp: int, ep: int, transport: str, engine: tuple[str, int], folder: Path, record: Record
) -> None:
    device, tp = engine
    with serve(folder, tp=tp, device=device, dtype="bfloat16") as url:
        before = answer(url)
        reports = run(fsdp * ep, update, SHAPE, fsdp, ep, url, transport)[0]
        assert answer(url) != before
        now = info(url)
    assert now["version"] == 3
    assert len({report["digest"] for report in reports}) == 3
    for version, report in enumerate(reports, start=1):
        [row] = report["targets"]
        assert (row["status"], row["version_after"], row["proof"]) == ("serving", version, "resident"), row
        assert (row["digests_matched"], row["ranks"]) == (tp, tp), row
        assert report["bytes"] == 2 * SHAPE.parameters()
    record("layers", SHAPE.layers)
    record("reports", reports)
