"""Exporters on GPUs: NCCL, two ranks on one GPU, a rank lost inside NCCL, a checkpoint into device memory."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from tests.gpu.needs import needs
from tests.helpers.exports import bucketize
from tests.helpers.fp8_checkpoints import EXPORTED
from tests.helpers.ranks import Ranks, allocate_slots
from weightcast.comm.trainer_group import TrainerGroup
from weightcast.errors import TrainerRankFailed
from weightcast.exporters.checkpoint import CheckpointExporter
from weightcast.exporters.module import ModuleExporter
from weightcast.protocols import BucketUse
from weightcast.runtime.peak_memory import PeakMemory
from weightcast.wire.layout import Packing, plan_buckets

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MIB = 1 << 20
BOTH = "cpu:gloo,cuda:nccl"


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def model_of(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    # Even rows, uneven rows, and one that is cut along columns below.
    return nn.Sequential(nn.Linear(512, 1024), nn.Linear(1024, 513), nn.Linear(513, 256), nn.Linear(256, 64)).to(
        device()
    )


def export(exporter, group, bucket_bytes: int, receivers: tuple[int, ...] = (0,)) -> dict[str, torch.Tensor]:
    layouts = plan_buckets(exporter.specs(), bucket_bytes=bucket_bytes, packing=Packing())
    slots = allocate_slots(exporter.device, bucket_bytes) if group.rank in receivers else None
    parts: dict[str, list[torch.Tensor]] = {}
    for slot in slots or ():
        slot.random_(0, 256)
    for bucket in bucketize(exporter, layouts, group, slots, use=BucketUse(receivers=receivers)):
        for slot, view in bucket.views() if bucket is not None else ():
            parts.setdefault(slot.spec.name, []).append(view.cpu().clone())
    return {name: torch.cat(pieces) for name, pieces in parts.items()}


def check(sharded: nn.Module, plain: nn.Module, wire_dtype, *, nccl: bool) -> None:
    exporter = ModuleExporter(sharded, wire_dtype=wire_dtype)
    assert exporter.device == device()
    group = TrainerGroup.connect(device(), timeout_s=60)
    assert group.uses_nccl is nccl
    for receivers in ((0,), tuple(range(group.world_size)), (group.world_size - 1,)):
        for bucket_bytes in (8 * MIB, 256 << 10):
            for _ in range(2):
                got = export(exporter, group, bucket_bytes, receivers)
                assert (got != {}) is (group.rank in receivers)
                for name, tensor in got.items():
                    assert torch.equal(tensor, plain.state_dict()[name].to(wire_dtype or torch.float32).cpu()), name
    group.close()
    total = torch.ones(1, device=device() if nccl else "cpu")
    dist.all_reduce(total)
    assert total.item() == group.world_size


def export_fsdp(wire_dtype, nccl: bool) -> None:
    plain, sharded = model_of(1), model_of(1)
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    for layer in sharded:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    check(sharded, plain, wire_dtype, nccl=nccl)


def export_columns(wire_dtype) -> None:
    plain, sharded = model_of(2), model_of(2)
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    for layer in sharded[:1]:
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(1)]))
    check(sharded, plain, wire_dtype, nccl=True)


@pytest.mark.parametrize("wire_dtype", [None, torch.bfloat16], ids=["own", "bf16"])
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=needs(4))])
@needs(2)
def test_fsdp2_over_nccl_gives_the_bytes_of_the_plain_module(world_size, wire_dtype):
    ranks = Ranks(world_size, BOTH)
    try:
        ranks.run(export_fsdp, wire_dtype, True)
        ranks.run(export_columns, wire_dtype)
    finally:
        ranks.close()


def share_one_gpu(wire_dtype) -> None:
    torch.cuda.set_device(0)
    export_fsdp(wire_dtype, False)


def test_ranks_that_share_a_gpu_go_through_host_memory():
    ranks = Ranks(2)
    try:
        ranks.run(share_one_gpu, torch.bfloat16)
    finally:
        ranks.close()


def lose_a_rank(how: int, first_messages: bool) -> tuple[str, float]:
    sharded = model_of(3)
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    for layer in sharded:
        fully_shard(layer, mesh=mesh)
    exporter = ModuleExporter(sharded)
    group = TrainerGroup.connect(device(), timeout_s=5)
    if not first_messages:  # then ranks 0 and 1 have exchanged messages before, in both directions
        export(exporter, group, 256 << 10, (0,))
        export(exporter, group, 256 << 10, (1,))
    use = BucketUse(receivers=tuple(range(group.world_size)))
    layouts = plan_buckets(exporter.specs(), bucket_bytes=256 << 10, packing=Packing())
    buckets = bucketize(exporter, layouts, group, allocate_slots(device(), 256 << 10), use=use)
    next(buckets)
    if group.rank == 1:
        os.kill(os.getpid(), how)
    begin = time.monotonic()
    text = ""
    try:
        for _ in buckets:
            pass
    except TrainerRankFailed as error:
        text = str(error)
    seconds = time.monotonic() - begin
    # The device is still of use.
    assert torch.ones(1 << 20, device=device()).sum().item() == 1 << 20
    group.close()
    return text, seconds


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("first_messages", [True, False], ids=["connecting", "connected"])
@needs(2)
def test_a_rank_lost_inside_nccl_is_named_within_the_deadline(how, first_messages):
    ranks = Ranks(2, BOTH)
    try:
        ranks.start(lose_a_rank, int(how), first_messages)
        text, seconds = ranks.answer(0, timeout_s=60)
        assert text.startswith("trainer rank 1 did not answer within 5 s")
        assert seconds < 20
    finally:
        for process in ranks.processes:
            process.kill()
        ranks.close()


def measure(wire_dtype) -> int:
    sharded = nn.Sequential(*[nn.Linear(2048, 2048, bias=False, device=device()) for _ in range(40)])
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    for layer in sharded:
        fully_shard(layer, mesh=mesh)
    exporter = ModuleExporter(sharded, wire_dtype=wire_dtype)
    group = TrainerGroup.connect(device(), timeout_s=60)
    layouts = plan_buckets(exporter.specs(), bucket_bytes=64 * MIB, packing=Packing())
    exporter.prepare(group)
    with PeakMemory(device()) as peak:
        slots = allocate_slots(device(), 64 * MIB) if group.is_head else None
        for _ in bucketize(exporter, layouts, group, slots):
            pass
    group.close()
    return peak.extra_bytes


@pytest.mark.parametrize("wire_dtype", [None, torch.bfloat16], ids=["own", "bf16"])
@needs(2)
def test_device_memory_is_two_buckets_and_one_by_ranks(wire_dtype):
    ranks = Ranks(2, BOTH)
    try:
        head, other = ranks.run(measure, wire_dtype)
    finally:
        ranks.close()
    assert head <= (2 * 64 + 64 / 2) * MIB
    assert other <= 64 / 2 * MIB


@pytest.mark.parametrize("wire_dtype", [None, torch.float16], ids=["own", "fp16"])
def test_a_checkpoint_is_read_into_device_memory(tmp_path, wire_dtype):
    torch.manual_seed(0)
    # Larger than the staging buffers, not a multiple of them.
    tensors = {"a": torch.randn(3001, 1003), "b": torch.randn(5).bfloat16(), "c": torch.randn(2000, 1001).bfloat16()}
    save_file(tensors, tmp_path / "model.safetensors")
    group = TrainerGroup.connect(device(), timeout_s=5)
    with CheckpointExporter(tmp_path, wire_dtype=wire_dtype, device=device()) as exporter:
        for bucket_bytes in (32 * MIB, 1 * MIB):
            got = export(exporter, group, bucket_bytes)
            for name, tensor in tensors.items():
                assert torch.equal(got[name], tensor.to(wire_dtype or tensor.dtype)), name


@pytest.mark.parametrize("form", EXPORTED.values(), ids=EXPORTED)
def test_a_quantised_model_has_the_bytes_of_the_one_on_a_cpu(form):
    generator = torch.Generator().manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(640, 384, bias=False), "b": nn.Linear(256, 512, bias=False)}).bfloat16()
    with torch.no_grad():
        for weight in model.parameters():  # magnitudes of very different sizes, and a row of zeros
            spread = torch.randn(weight.shape[0], 1, generator=generator).mul(6).exp()
            weight.copy_(torch.randn(weight.shape, generator=generator) * spread)
            weight[3] = 0
    cpu, gpu = torch.device("cpu"), device()
    found = []
    for place in (cpu, gpu):
        exporter = ModuleExporter(model.to(place), quantise=form)
        found.append(export(exporter, TrainerGroup.connect(place, timeout_s=5), 1 * MIB))
    assert found[0].keys() == found[1].keys()
    for name, tensor in found[0].items():
        assert torch.equal(tensor.view(torch.uint8), found[1][name].view(torch.uint8)), name
