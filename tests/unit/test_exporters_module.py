"""Modules of any sharding give the bytes of the plain module; with real gloo ranks."""

import gc
import itertools
import math
import os
import signal
import weakref
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from tests.unit.exports import ALONE, CPU, export, raw
from tests.unit.ranks import Ranks, allocate_slots
from weightcast.comm.trainer_group import TrainerGroup
from weightcast.errors import ConfigError, TrainerRankFailed
from weightcast.exporters.bucketize import bucketize
from weightcast.exporters.module import ModuleExporter
from weightcast.runtime.peak_memory import PeakMemory
from weightcast.wire.bucket import Bucket
from weightcast.wire.layout import Packing, plan_buckets

# torch.compile imports deprecated parts of torch.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


@contextmanager
def trainer_jobs():
    """Trainer jobs of 1, 2 and 4 ranks, started when first asked for."""
    started: dict[int, Ranks] = {}

    def job(world_size: int) -> Ranks:
        if world_size in started and started[world_size].broken:
            started.pop(world_size).close()
        if world_size not in started:
            started[world_size] = Ranks(world_size)
        return started[world_size]

    try:
        yield job
    finally:
        for ranks in started.values():
            ranks.close()


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


# -- names, order and bytes, without processes


class Tiny(nn.Module):
    """Odd sizes, tied weights, two dtypes, buffers of both kinds, a scalar and an empty tensor."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(13, 6)
        self.layers = nn.ModuleList([nn.Linear(6, 6, bias=layer == 0) for layer in range(3)])
        self.layers[1].to(torch.bfloat16)
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("scale", torch.randn(()))
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.arange(12).reshape(3, 4) % 2 == 0)
        self.register_buffer("cache", torch.randn(9), persistent=False)
        self.register_buffer("empty", torch.empty(0, 5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        x = self.layers[0](x)
        x = self.layers[1](x.to(torch.bfloat16)).float()
        x = self.norm(self.layers[2](x).transpose(1, 2)).transpose(1, 2)
        return self.head(x * self.scale)


def expected(model: nn.Module, wire_dtype: torch.dtype | None = None) -> dict[str, bytes]:
    cast = {}
    for name, tensor in model.state_dict().items():
        floating = tensor.is_floating_point() and wire_dtype is not None
        cast[name] = raw(tensor.to(wire_dtype) if floating else tensor)
    return cast


def test_plain_module_lists_what_a_checkpoint_has():
    model = Tiny()
    exporter = ModuleExporter(model)
    names = [spec.name for spec in exporter.specs()]
    assert names == [name for name in model.state_dict() if name != "head.weight"]
    assert "mask" in names
    assert "cache" not in names
    assert {spec.name: spec.dtype for spec in exporter.specs()}["layers.1.weight"] == "bfloat16"
    got, want = export(exporter), expected(model)
    del want["head.weight"]
    assert got == want


def test_every_update_reads_the_current_weights():
    model = Tiny()
    exporter = ModuleExporter(model)
    before = export(exporter)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    model.layers[0].weight = nn.Parameter(torch.randn(6, 6))
    after = export(exporter)
    assert after["layers.0.weight"] == raw(model.layers[0].weight)
    assert after["embed.weight"] == raw(model.embed.weight) != before["embed.weight"]


@pytest.mark.parametrize("wire_dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_floats_are_cast_and_nothing_else(wire_dtype):
    model = Tiny()
    model.fp8 = nn.Parameter(torch.randn(4, 4).to(torch.float8_e4m3fn), requires_grad=False)
    got = export(ModuleExporter(model, wire_dtype=wire_dtype))
    want = expected(model, wire_dtype) | {"fp8": raw(model.fp8)}
    del want["head.weight"]
    assert got == want


@pytest.mark.parametrize("wire_dtype", [torch.float8_e4m3fn, torch.int8])
def test_a_dtype_that_needs_scales_is_refused(wire_dtype):
    with pytest.raises(ConfigError, match="cast"):
        ModuleExporter(Tiny(), wire_dtype=wire_dtype)


@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel], ids=["compile", "data-parallel"])
def test_wrappers_leave_no_trace_in_names(wrap):
    model = Tiny()
    names = [spec.name for spec in ModuleExporter(model).specs()]
    assert [spec.name for spec in ModuleExporter(wrap(model)).specs()] == names


def test_checkpoint_wrapper_leaves_no_trace_in_names():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = Tiny()
    names = [spec.name for spec in ModuleExporter(model).specs()]
    model.layers[1] = torch.compile(checkpoint_wrapper(model.layers[1]))
    assert [spec.name for spec in ModuleExporter(model).specs()] == names


def test_a_child_that_is_called_module_keeps_its_name():
    model = nn.Module()
    model.module = nn.Linear(2, 2)
    assert [spec.name for spec in ModuleExporter(model).specs()] == ["module.weight", "module.bias"]


def test_names_can_be_mapped_and_must_stay_different():
    model = Tiny()
    exporter = ModuleExporter(model, names=lambda name: f"model.{name}")
    assert exporter.specs()[0].name == "model.scale"
    with pytest.raises(ConfigError, match="two tensors"):
        ModuleExporter(model, names=lambda name: "same")
    with pytest.raises(ConfigError, match="printable"):
        ModuleExporter(model, names=lambda name: name + " ")


def meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Linear(2, 2)


def with_parameter(tensor: torch.Tensor) -> nn.Module:
    model = nn.Linear(2, 2)
    model.odd = nn.Parameter(tensor, requires_grad=False)
    return model


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (meta, "meta device"),
        (lambda: nn.LazyLinear(3), "lazy"),
        (lambda: with_parameter(torch.eye(3).to_sparse()), "dense"),
        (lambda: with_parameter(torch.randn(3, dtype=torch.complex64)), "complex64"),
        (lambda: with_parameter(torch.ones([1] * 9)), "9 dimensions"),
        (nn.Identity, "no parameters"),
    ],
    ids=["meta", "lazy", "sparse", "complex", "nine", "empty"],
)
def test_tensors_that_cannot_be_sent_are_refused_by_name(make, words):
    with pytest.raises(ConfigError, match=words):
        ModuleExporter(make())


def test_non_contiguous_parameters_are_sent_in_order():
    model = with_parameter(torch.arange(12.0).reshape(3, 4).t())
    assert export(ModuleExporter(model))["odd"] == raw(torch.arange(12.0).reshape(3, 4).t().contiguous())


def test_shards_of_a_plain_module_are_its_own_memory():
    model = Tiny()
    shards = list(ModuleExporter(model, wire_dtype=torch.bfloat16).shards())
    assert [shard.spec.name for shard in shards] == [name for name in model.state_dict() if name != "head.weight"]
    first = next(shard for shard in shards if shard.spec.name == "embed.weight")
    assert first.tensor.data_ptr() == model.embed.weight.data_ptr()
    assert first.tensor.dtype == torch.float32
    assert first.spec.dtype == "bfloat16"
    assert (first.box.offset, first.box.shape) == ((0, 0), (13, 6))


def test_another_models_layout_is_refused():
    layouts = plan_buckets(ModuleExporter(Tiny()).specs(), bucket_bytes=1 << 20, packing=Packing())
    other = ModuleExporter(nn.Linear(3, 3))
    with pytest.raises(ConfigError, match="and the exporter"):
        other.fill(
            Bucket(layouts[0], torch.empty(1 << 20, dtype=torch.uint8)),
            layouts[0],
            TrainerGroup.connect(CPU, timeout_s=5),
        )


def test_a_structure_that_changes_is_noticed():
    model = Tiny()
    exporter = ModuleExporter(model)
    layouts = plan_buckets(exporter.specs(), bucket_bytes=1 << 20, packing=Packing())
    model.embed.weight = nn.Parameter(torch.randn(14, 6))
    group = TrainerGroup.connect(CPU, timeout_s=5)
    with pytest.raises(ConfigError, match="has shape"):
        exporter.fill(Bucket(layouts[0], torch.empty(1 << 20, dtype=torch.uint8)), layouts[0], group)


def test_buffers_too_small_for_the_buckets_are_refused():
    exporter = ModuleExporter(Tiny())
    layouts = plan_buckets(exporter.specs(), bucket_bytes=1 << 20, packing=Packing())
    with pytest.raises(ConfigError, match="buffers of"):
        next(bucketize(exporter, layouts, ALONE, allocate_slots(CPU, 16)))


# -- logprobs


def reference_logprobs(model: nn.Module, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([tokens]))
    return torch.log_softmax(logits[0, :-1].float(), -1).gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0]


def test_logprobs_are_those_of_eval_mode_and_the_mode_is_restored():
    model = Tiny()
    model.train()
    model.layers[0].eval()
    tokens = [1, 5, 12, 3]
    modes = [module.training for module in model.modules()]
    got = ModuleExporter(torch.compile(model)).logprobs(tokens)
    assert [module.training for module in model.modules()] == modes
    model.eval()
    torch.testing.assert_close(torch.tensor(got), reference_logprobs(model, tokens))
    with pytest.raises(ValueError, match="two tokens"):
        ModuleExporter(model).logprobs([1])


def test_logprobs_of_a_hugging_face_model():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config)
    exporter = ModuleExporter(model)
    assert "lm_head.weight" not in {spec.name for spec in exporter.specs()}
    assert not any("inv_freq" in spec.name for spec in exporter.specs())
    tokens = [3, 1, 4, 1, 5]
    want = torch.log_softmax(model.eval()(torch.tensor([tokens])).logits[0, :-1].float(), -1)
    want = want.gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0].detach()
    torch.testing.assert_close(torch.tensor(exporter.logprobs(tokens)), want)


# -- sharded

_meshes: dict[tuple[int, ...], DeviceMesh] = {}
_groups: dict[tuple[int, ...], TrainerGroup] = {}


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    if shape not in _meshes:
        _meshes[shape] = init_device_mesh("cpu", shape, mesh_dim_names=("a", "b", "c")[: len(shape)])
    return _meshes[shape]


def group_of(receivers: tuple[int, ...]) -> TrainerGroup:
    """One group for a whole job, unless it failed before."""
    if () not in _groups or _groups[()]._failure is not None:
        _groups[()] = TrainerGroup.connect(CPU, timeout_s=60)
    _groups[()].receivers = receivers
    return _groups[()]


def check_export(model: nn.Module, want: dict[str, bytes], receivers, wire_dtype, bucket_bytes, packing=None) -> None:
    exporter = ModuleExporter(model, wire_dtype=wire_dtype)
    group = group_of(receivers)
    for _ in range(2):  # the second time uses the cached plan
        got = export(exporter, group, bucket_bytes=bucket_bytes, packing=packing)
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
    got = export(ModuleExporter(sharded), group_of((0, 1)))
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


def shards_cover_the_model() -> list[tuple]:
    model = Tiny()
    plain = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    shard_tiny("fsdp+tp", model)
    held = []
    for shard in ModuleExporter(model).shards():
        index = tuple(slice(o, o + n) for o, n in zip(shard.box.offset, shard.box.shape, strict=True))
        assert torch.equal(shard.tensor, plain[shard.spec.name][index])
        held.append((shard.spec.name, shard.spec.shape, shard.box.offset, shard.box.shape))
    return held


def test_shards_have_the_right_boxes_and_cover_everything(jobs):
    boxes: dict[str, set] = {}
    shapes = {}
    for name, shape, offset, extent in itertools.chain(*jobs(4).run(shards_cover_the_model)):
        boxes.setdefault(name, set()).add((offset, extent))
        shapes[name] = shape
    assert boxes["layers.0.weight"] == {((o, 0), (n, 6)) for o, n in ((0, 2), (2, 1), (3, 2), (5, 1))}
    for name, found in boxes.items():
        assert sum(math.prod(extent) for _, extent in found) == math.prod(shapes[name])


# -- any placement

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
    group = group_of((0,))
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


# -- refusals of sharded models


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
        exporter.prepare(group_of((0,)))
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


# -- failure and memory


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
    group = group_of((0,))
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


# -- cached plans


class _Memory(bytearray):
    """A tensor holder that supports weak references."""


def _on(values: torch.Tensor) -> tuple[torch.Tensor, "weakref.ref[_Memory]"]:
    memory = _Memory(values.numel() * values.element_size())
    held = torch.frombuffer(memory, dtype=values.dtype).view(values.shape)
    held.copy_(values)
    return held, weakref.ref(memory)


def test_parameters_may_get_other_memory_and_none_of_it_is_kept_alive():
    model = nn.Linear(4, 6)
    exporter = ModuleExporter(model)
    for seed in range(4):
        torch.manual_seed(seed)
        weight, memory = _on(torch.randn(6, 4))
        model.weight.data = weight if seed % 2 else weight.view(4, 6).t()  # other strides every other time
        expected = raw(model.weight.detach().contiguous())
        assert export(exporter)["weight"] == expected
        del weight
        model.weight.data = torch.zeros(6, 4)
        gc.collect()
        assert memory() is None


def test_a_parameter_in_another_dtype_than_before_is_cast():
    model = nn.Linear(4, 6)
    exporter = ModuleExporter(model)
    before = export(exporter)["weight"]
    model.weight.data = model.weight.data.double()
    assert export(exporter)["weight"] == before
    model.weight.data = model.weight.data.bfloat16()
    assert export(exporter)["weight"] == raw(model.weight.detach().float())


def test_a_parameter_of_another_shape_is_refused_the_second_time_too():
    model = nn.Linear(4, 6)
    exporter = ModuleExporter(model)
    export(exporter)
    model.weight = nn.Parameter(torch.zeros(6, 5))
    with pytest.raises(ConfigError, match="has shape"):
        export(exporter)
