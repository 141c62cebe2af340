"""Modules of any sharding give the bytes of the plain module; with real gloo ranks."""

from __future__ import annotations

import math
import os
import signal

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from tests.helpers.exports import CPU, bucketize, export
from tests.helpers.ranks import Ranks, allocate_slots, trainer_jobs
from tests.helpers.tiny_module import Tiny, expected, reference_logprobs
from weightcast.comm.trainer_group import TrainerGroup
from weightcast.errors import ConfigError, TrainerRankFailed
from weightcast.exporters.module import ModuleExporter
from weightcast.protocols import BucketUse
from weightcast.runtime.peak_memory import PeakMemory
from weightcast.wire.layout import Packing, plan_buckets


@pytest.fixture(scope="module")
def jobs():
    """Jobs that the tests of this file share."""
    with trainer_jobs() as job:
        yield job


@pytest.fixture
def own_jobs():
    """Jobs of one test.  A mesh leaves gloo groups behind, whose threads each wake up 100 times a second."""
    with trainer_jobs() as job:
        yield job


_meshes: dict[tuple[int, ...], DeviceMesh] = {}

_groups: dict[tuple[int, ...], TrainerGroup] = {}


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    if shape not in _meshes:
        _meshes[shape] = init_device_mesh("cpu", shape, mesh_dim_names=("a", "b", "c")[: len(shape)])
    return _meshes[shape]


def connected() -> TrainerGroup:
    """One group for a whole job, unless it failed before."""
    if () not in _groups or _groups[()]._failure is not None:
        _groups[()] = TrainerGroup.connect(CPU, timeout_s=60)
    return _groups[()]


def check_export(model: nn.Module, want: dict[str, bytes], receivers, wire_dtype, bucket_bytes, packing=None) -> None:
    exporter = ModuleExporter(model, wire_dtype=wire_dtype)
    group, use = connected(), BucketUse(receivers=receivers)
    for _ in range(2):  # the second time uses the cached plan
        got = export(exporter, group, use, bucket_bytes=bucket_bytes, packing=packing)
        if group.rank not in receivers:
            assert got == {}
            continue
        names = [spec.name for spec in exporter.specs()]
        assert (sorted(got) == sorted(names)) if packing is not None and packing.one_dtype else (list(got) == names)
        for name, data in got.items():
            assert data == want[name], (name, group.rank)
        assert set(want) - set(got) <= {"head.weight"}


def shard_tiny(how: str, model: Tiny) -> None:
    world = dist.get_world_size()
    if how == "fsdp":
        mesh = mesh_of((world,))
    elif how == "hsdp":
        mesh = mesh_of((2, world // 2))
    else:  # tensor parallel inside FSDP2, on the same dimension and on another
        mesh = mesh_of((2, world // 2))["a"]
        tp = mesh_of((2, world // 2))["b"]
        for layer, dim in ((0, 0), (2, 1)):
            linear = model.layers[layer]
            for name, parameter in list(linear.named_parameters(recurse=False)):
                placed = distribute_tensor(parameter.detach(), tp, [Shard(dim if parameter.dim() > 1 else 0)])
                setattr(linear, name, nn.Parameter(placed))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def export_tiny(how: str, receivers, wire_dtype, bucket_bytes: int) -> None:
    model = Tiny()
    want = expected(model, wire_dtype)
    shard_tiny(how, model)
    sharded = [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]
    assert len(sharded) == 7
    check_export(model, want, receivers, wire_dtype, bucket_bytes)


@pytest.mark.parametrize("wire_dtype", [None, torch.bfloat16], ids=["own", "bf16"])
@pytest.mark.parametrize(
    ("world_size", "how", "receivers"),
    [
        (1, "fsdp", (0,)),
        (2, "fsdp", (0,)),
        (2, "fsdp", (0, 1)),
        (4, "fsdp", (0,)),
        (4, "fsdp", (0, 1, 2, 3)),
        (4, "hsdp", (0,)),
        (4, "hsdp", (1, 2)),
        (4, "fsdp+tp", (0,)),
        (4, "fsdp+tp", (0, 1, 2, 3)),
    ],
)
def test_fsdp2_gives_the_bytes_of_the_plain_module(jobs, world_size, how, receivers, wire_dtype):
    # The buckets are so small that tensors are cut between rows, and rows between ranks.
    jobs(world_size).run(export_tiny, how, receivers, wire_dtype, 512)


def after_a_forward() -> None:
    """Exports after a forward pass without gradients, when FSDP2 leaves the root's parameters gathered."""
    model = Tiny().eval()
    want, tokens = expected(model), [1, 5, 12, 3]
    log_p = reference_logprobs(model, tokens)
    shard_tiny("fsdp", model)
    with torch.no_grad():
        model(torch.tensor([tokens]))
    assert not isinstance(model.embed.weight, DTensor)
    check_export(model, want, (0,), None, 4096)
    exporter = ModuleExporter(model)
    torch.testing.assert_close(torch.tensor(exporter.logprobs(tokens)), log_p, rtol=1e-4, atol=1e-4)
    check_export(model, want, (0,), None, 4096)


def test_a_forward_pass_between_updates_changes_nothing(jobs):
    jobs(2).run(after_a_forward)


def train_a_step() -> None:
    plain, sharded = Tiny(), Tiny()
    shard_tiny("fsdp", sharded)
    before = expected(plain)
    tokens = torch.tensor([[1, 5, 12, 3]])
    for model in (plain, sharded):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        model.eval()
        model(tokens).square().sum().backward()
        optimizer.step()
    got = export(ModuleExporter(sharded), connected(), BucketUse(receivers=(0, 1)))
    assert got["embed.weight"] != before["embed.weight"]
    for name, data in got.items():
        if name == "mask":
            continue
        dtype = dict(plain.state_dict())[name].dtype
        mine = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
        theirs = plain.state_dict()[name].reshape(-1)
        torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-3)


def test_values_that_an_optimizer_wrote_are_sent(jobs):
    jobs(2).run(train_a_step)


DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8]

Tensor = tuple[tuple[int, ...], int, tuple[int | None, ...]]


@st.composite
def placed_tensors(draw, mesh_dims: int) -> list[Tensor]:
    tensors = []
    for _ in range(draw(st.integers(1, 5))):
        shape = tuple(draw(st.lists(st.integers(0, 9), min_size=0, max_size=3)))
        dims = st.none() if not shape else st.one_of(st.none(), st.integers(0, len(shape) - 1))
        placements = tuple(draw(st.lists(dims, min_size=mesh_dims, max_size=mesh_dims)))
        tensors.append((shape, draw(st.integers(0, len(DTYPES) - 1)), placements))
    return tensors


@st.composite
def cases(draw) -> dict:
    mesh = draw(st.sampled_from([(1,), (2,), (4,), (2, 2), (1, 4), (4, 1)]))
    world_size = math.prod(mesh)
    return {
        "mesh": mesh,
        "tensors": draw(placed_tensors(len(mesh))),
        "receivers": tuple(sorted(draw(st.sets(st.integers(0, world_size - 1), min_size=1)))),
        "wire_dtype": draw(st.sampled_from([None, torch.bfloat16, torch.float32])),
        "bucket_bytes": draw(st.sampled_from([1024, 2048, 1 << 16])),
        "packing": Packing(
            alignment_bytes=draw(st.sampled_from([1, 16, 256])),
            one_dtype=draw(st.booleans()),
            slices=draw(st.booleans()),
        ),
        "scratch_bytes": draw(st.sampled_from([64, 256, 1 << 20])),
        "seed": draw(st.integers(0, 1000)),
    }


def export_case(case: dict) -> None:
    from weightcast.exporters import gather_plan

    gather_plan.MIN_SCRATCH_BYTES = case["scratch_bytes"]  # small enough to make several waves
    mesh = mesh_of(case["mesh"])
    torch.manual_seed(case["seed"])
    plain, model = nn.Module(), nn.Module()
    for number, (shape, dtype, dims) in enumerate(case["tensors"]):
        full = (torch.randn(shape) * 50).to(DTYPES[dtype])
        placements = [Replicate() if dim is None else Shard(dim) for dim in dims]
        placed = distribute_tensor(full, mesh, placements)
        plain.register_parameter(f"t{number}", nn.Parameter(full, requires_grad=False))
        model.register_parameter(f"t{number}", nn.Parameter(placed, requires_grad=False))
    want = expected(plain, case["wire_dtype"])
    check_export(model, want, case["receivers"], case["wire_dtype"], case["bucket_bytes"], case["packing"])
    gather_plan.MIN_SCRATCH_BYTES = 1 << 20


@settings(max_examples=30, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases())
def test_any_mesh_and_placement_gives_the_bytes_of_the_plain_tensor(own_jobs, case):
    if not case["packing"].slices:
        case["bucket_bytes"] = 1 << 16
    own_jobs(math.prod(case["mesh"])).run(export_case, case)


def replicated() -> None:
    """Exports a model that every rank has whole, as under DDP, so that nothing moves to a rank with a bucket."""
    model = Tiny()
    want = expected(model)
    wrapped = nn.parallel.DistributedDataParallel(model)
    for receivers in ((0,), (1,), (0, 1)):
        check_export(wrapped, want, receivers, None, 512)


def test_a_replicated_model_is_sent_without_moves(jobs):
    jobs(2).run(replicated)


def change_dtype() -> str:
    model = nn.Linear(8, 8, bias=False)
    fully_shard(model, mesh=mesh_of((2,)))
    exporter = ModuleExporter(model)
    group = connected()
    export(exporter, group)
    if dist.get_rank() == 1:
        model.weight = nn.Parameter(
            DTensor.from_local(torch.ones(4, 8, dtype=torch.float64), mesh_of((2,)), [Shard(0)])
        )
    try:
        export(exporter, group)
    except (ConfigError, TrainerRankFailed) as error:
        return str(error)
    return "no error"


def test_a_dtype_that_changes_on_one_rank_is_an_error_on_all(jobs):
    first, second = jobs(2).run(change_dtype)
    assert second.startswith("weight is torch.float64")
    assert first.startswith("trainer rank 1 gave up: ConfigError: weight is torch.float64")


def refuse(what: str) -> str:
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = mesh_of((world,))
    model = nn.Linear(4, 4, bias=False)
    if what == "partial":
        model.weight = nn.Parameter(DTensor.from_local(torch.ones(4, 4), mesh, [Partial()], run_check=False))
    elif what == "other shape":
        model = nn.Linear(4, 4 + rank, bias=False)
    elif what == "other names":
        model.extra = nn.Parameter(torch.ones(2)) if rank else None
    elif what == "wrong local":
        local = torch.ones(3 if rank else 1, 4)
        model.weight = nn.Parameter(
            DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=(4, 4), stride=(4, 1))
        )
    elif what == "outside":
        part = DeviceMesh("cpu", [0])
        model.weight = nn.Parameter(
            DTensor.from_local(torch.ones(2, 4), part, [Shard(0)], run_check=False, shape=(4, 4), stride=(4, 1))
        )
    try:
        exporter = ModuleExporter(model)
        exporter.prepare(connected())
    except ConfigError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("partial", "weight is placed as"),
        ("other shape", "trainer ranks 0 and 1 have different models: weight"),
        ("other names", "1 tensors here, 2 there"),
    ],
)
def test_models_that_cannot_be_gathered_are_refused_on_every_rank(jobs, what, words):
    for text in jobs(2).run(refuse, what):
        assert words in text


def lose_a_rank(timeout_s: float) -> str:
    mesh = mesh_of((2, 2))
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)])
    for layer in model:
        fully_shard(layer, mesh=mesh)
    exporter = ModuleExporter(model)
    group = TrainerGroup.connect(CPU, timeout_s=timeout_s)
    layouts = plan_buckets(exporter.specs(), bucket_bytes=32 << 10, packing=Packing())
    slots = allocate_slots(CPU, 32 << 10) if group.is_head else None
    buckets = bucketize(exporter, layouts, group, slots)
    next(buckets)
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        for _ in buckets:
            pass
    except TrainerRankFailed as error:
        return str(error)
    return "done"


def test_a_rank_killed_in_the_middle_is_named():
    ranks = Ranks(4)
    try:
        ranks.start(lose_a_rank, 5.0)
        assert "trainer rank 1 closed its connection; rank 0 was waiting for its part of bucket" in ranks.answer(0)
    finally:
        ranks.close()


MIB = 1 << 20


def measure(how: str, wire_dtype) -> tuple[int, int]:
    """Peak of extra memory and the size of the two buckets, in bytes, for a model of ten or five buckets."""
    world = dist.get_world_size()
    bucket_bytes, rows = 16 * MIB, 1024
    model = nn.Module()
    mesh = mesh_of((world,))
    num_bytes = 0
    for number in range(20):
        # Not created whole: memory that the test allocates and frees must not hide the exporter's.
        if how == "columns":
            local, placement = torch.ones(rows, 2048 // world), Shard(1)
        else:
            local, placement = torch.ones(rows // world, 2048), Shard(0)
        placed = DTensor.from_local(local, mesh, [placement], run_check=False)
        model.register_parameter(f"t{number}", nn.Parameter(placed, requires_grad=False))
        num_bytes += rows * 2048 * (4 if wire_dtype is None else 2)
    group = connected()
    exporter = ModuleExporter(model, wire_dtype=wire_dtype)
    layouts = plan_buckets(exporter.specs(), bucket_bytes=bucket_bytes, packing=Packing())
    assert len(layouts) == num_bytes // bucket_bytes
    exporter.prepare(group)
    slots = allocate_slots(CPU, bucket_bytes) if group.is_head else None
    with PeakMemory(CPU) as peak:
        for slot in slots or ():
            slot.fill_(0)
        for bucket in bucketize(exporter, layouts, group, slots):
            if bucket is not None:
                assert all(view.min() == 1 == view.max() for _, view in bucket.views())
    return peak.extra_bytes, 2 * bucket_bytes if group.is_head else 0


@pytest.mark.parametrize("how", ["rows", "columns"])
@pytest.mark.parametrize("wire_dtype", [None, torch.bfloat16], ids=["own", "bf16"])
def test_memory_beside_the_buckets_is_one_bucket_by_ranks(jobs, how, wire_dtype):
    for world_size in (2, 4):
        for extra, slots in jobs(world_size).run(measure, how, wire_dtype):
            assert extra < slots + 16 * MIB / world_size + 6 * MIB
