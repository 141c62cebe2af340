"""Expert-parallel models on any mesh give the bytes of the unsharded model; with real gloo ranks."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.helpers.clock import AMPLE_S
from tests.helpers.exports import ALONE, CPU, export
from tests.helpers.ranks import Ranks
from weightcast.comm.trainer_group import TrainerGroup
from weightcast.errors import ConfigError
from weightcast.exporters import gather_plan
from weightcast.exporters.local_shard import experts_over
from weightcast.exporters.module import ModuleExporter
from weightcast.protocols import BucketUse
from weightcast.wire.layout import Packing


@pytest.fixture(scope="module")
def jobs():
    """Trainer jobs of any size, one at a time, so that at most eight ranks run."""
    started: list[Ranks] = []

    def job(world_size: int) -> Ranks:
        if started and (started[0].broken or started[0].world_size != world_size):
            started.pop().close()
        if not started:
            started.append(Ranks(world_size))
        return started[0]

    yield job
    for ranks in started:
        ranks.close()


class Experts(nn.Module):
    """Stacked experts, as in transformers 5."""

    def __init__(self, experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(experts, 2 * width, hidden))
        self.down_proj = nn.Parameter(torch.randn(experts, hidden, width))


class Layer(nn.Module):
    def __init__(self, experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)  # stays float32
        self.q_proj = nn.Linear(hidden, 2 * hidden).to(torch.bfloat16)
        self.gate = nn.Linear(hidden, experts, bias=False)
        self.mlp = nn.Module()
        self.mlp.experts = Experts(experts, width, hidden).to(torch.bfloat16)


class Model(nn.Module):
    def __init__(self, case: dict) -> None:
        super().__init__()
        torch.manual_seed(case["seed"])
        self.config = SimpleNamespace(model_type=case["model_type"], hidden_size=case["hidden"])
        self.layers = nn.ModuleList([Layer(case["experts"], case["width"], case["hidden"]) for _ in range(2)])
        self.head = nn.Linear(case["hidden"], 11)


_meshes: dict[tuple[int, ...], DeviceMesh] = {}
_groups: list[TrainerGroup] = []


def mesh_of(fsdp: int, ep: int) -> DeviceMesh:
    if (fsdp, ep) not in _meshes:
        _meshes[fsdp, ep] = init_device_mesh("cpu", (fsdp, ep), mesh_dim_names=("fsdp", "ep"))
    return _meshes[fsdp, ep]


def connected() -> TrainerGroup:
    if _groups and _groups[0]._failure is not None:
        _groups.clear()
    if not _groups:
        _groups.append(TrainerGroup.connect(CPU, timeout_s=AMPLE_S))
    return _groups[0]


def place(owner: nn.Module, name: str, mesh: DeviceMesh, placements: list) -> None:
    whole = getattr(owner, name).detach()
    placed = distribute_tensor(whole, mesh, placements, src_data_rank=None)
    setattr(owner, name, nn.Parameter(placed, requires_grad=False))


def shard(model: Model, case: dict) -> dict:
    """Shards a model as a trainer would, and returns the options of its exporter."""
    mesh = mesh_of(case["fsdp"], case["ep"])
    rank = mesh["ep"].get_local_rank()
    options = {}
    for layer in model.layers:
        experts = layer.mlp.experts
        if case["how"] == "placed":  # any placement over both axes of the mesh, uneven or not
            for name, dims in (("gate_up_proj", case["dims"][:2]), ("down_proj", case["dims"][2:])):
                place(experts, name, mesh, [Replicate() if dim is None else Shard(dim) for dim in dims])
            continue
        if case["how"] == "fsdp2":  # FSDP2 over expert parallelism that DTensor describes
            for name in ("gate_up_proj", "down_proj"):
                place(experts, name, mesh["ep"], [Shard(0)])
        else:  # FSDP2 over experts that are plain tensors, so that DTensor describes only this rank's
            options["shard_of"] = experts_over(rank, case["ep"], total=case["experts"])
            chunk = -(-case["experts"] // case["ep"])
            for name in ("gate_up_proj", "down_proj"):
                mine = getattr(experts, name).detach()[rank * chunk : (rank + 1) * chunk].clone()
                setattr(experts, name, nn.Parameter(mine, requires_grad=False))
        if case["fsdp"] > 1 or case["how"] == "fsdp2":
            fully_shard(experts, mesh=mesh["fsdp"])
    # All other parameters are sharded over all ranks.
    everybody = mesh._flatten("all") if math.prod(mesh.shape) > 1 else mesh["fsdp"]
    for layer in model.layers:
        fully_shard(layer, mesh=everybody, ignored_params=set(layer.mlp.experts.parameters()))
    place(model.head, "weight", everybody, [Shard(0)])
    return options


def export_case(case: dict) -> list[str]:
    """Names of the tensors that differ from the unsharded model; checks everything else itself."""
    model = Model(case)
    want = export(ModuleExporter(model, wire_dtype=case["wire_dtype"]), ALONE, packing=case["packing"])
    options = shard(model, case)
    gather_plan.MIN_SCRATCH_BYTES = case["scratch_bytes"]
    exporter = ModuleExporter(model, wire_dtype=case["wire_dtype"], **options)
    receivers = tuple(rank for rank in case["receivers"] if rank < dist.get_world_size()) or (0,)
    group, use = connected(), BucketUse(receivers=receivers)
    assert want
    wrong: list[str] = []
    for _ in range(2):
        got = export(exporter, group, use, bucket_bytes=case["bucket_bytes"], packing=case["packing"])
        assert (got == {}) == (group.rank not in receivers)
        wrong += [name for name in want if group.rank in receivers and got.get(name) != want[name]]
        assert not set(got) - set(want)
    return wrong


@st.composite
def cases(draw, worlds) -> dict:
    ep, fsdp = draw(st.sampled_from([(e, f) for e in range(1, 9) for f in range(1, 9) if e * f in worlds]))
    how = draw(st.sampled_from(["placed", "fsdp2", "plain"]))
    experts = draw(st.integers(ep, 9)) if how == "fsdp2" else draw(st.integers(1, 9))
    dims = st.one_of(st.none(), st.integers(0, 2))
    slices = draw(st.booleans())
    hidden, width = draw(st.integers(1, 7)), draw(st.integers(1, 6))
    types = ["qwen3_moe", "deepseek_v3"] + (["qwen3_vl_moe"] if hidden not in (width, 2 * width) else [])
    return {
        "ep": ep,
        "fsdp": fsdp,
        "how": how,
        "experts": experts,
        "width": width,
        "hidden": hidden,
        "model_type": draw(st.sampled_from(types)),
        "dims": draw(st.lists(dims, min_size=4, max_size=4)),
        "receivers": tuple(sorted(draw(st.sets(st.integers(0, ep * fsdp - 1), min_size=1)))),
        "wire_dtype": draw(st.sampled_from([None, torch.bfloat16, torch.float32])),
        "bucket_bytes": draw(st.sampled_from([600, 2048] if slices else [1 << 16])),
        "packing": Packing(
            alignment_bytes=draw(st.sampled_from([1, 256])), one_dtype=draw(st.booleans()), slices=slices
        ),
        "scratch_bytes": draw(st.sampled_from([64, 1 << 20])),
        "seed": draw(st.integers(0, 1000)),
    }


# No shrinking: after a failure, ranks wait for each other until a deadline.
ONCE = (Phase.explicit, Phase.generate)


@settings(max_examples=12, deadline=None, database=None, derandomize=True, phases=ONCE)
@given(case=cases({4}))
def test_four_ranks_give_the_bytes_of_the_unsharded_model(jobs, case):
    assert jobs(4).run(export_case, case) == [[]] * 4


@settings(max_examples=5, deadline=None, database=None, derandomize=True, phases=ONCE)
@given(case=cases({6}))
def test_six_ranks_give_the_bytes_of_the_unsharded_model(jobs, case):
    assert jobs(6).run(export_case, case) == [[]] * 6


@pytest.mark.wide
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("world_size", range(1, 9))
@settings(max_examples=30, deadline=None, database=None, phases=ONCE)
@given(data=st.data())
def test_any_number_of_ranks_gives_the_bytes_of_the_unsharded_model(jobs, world_size, data):
    case = data.draw(cases({world_size}))
    assert jobs(world_size).run(export_case, case) == [[]] * world_size


def refuse() -> str:
    """Exports from ranks that hold other experts than they say."""
    model = nn.Module()
    model.experts = nn.Module()
    model.experts.gate_up_proj = nn.Parameter(torch.ones(2, 4, 3))
    # Both ranks say that they are the first of two.
    exporter = ModuleExporter(model, shard_of=experts_over(0, 2, match=r"experts\..*"))
    try:
        exporter.prepare(connected())
    except ConfigError as error:
        return str(error)
    return "accepted"


def test_experts_that_no_rank_holds_are_named_on_every_rank(jobs):
    for text in jobs(2).run(refuse):
        assert text.startswith(
            "experts.gate_up_proj: of the trainer's tensor [4, 4, 3] the trainer ranks hold [2, 4, 3] "
        )


def test_a_rank_with_the_wrong_number_of_experts_is_refused():
    model = nn.Module()
    model.experts = nn.Module()
    model.experts.gate_up_proj = nn.Parameter(torch.ones(2, 4, 3))
    with pytest.raises(ConfigError, match="has 2 experts on expert-parallel rank 1 of 2, which should have 3 of 6"):
        ModuleExporter(model, shard_of=experts_over(1, 2, total=6, match=r"experts\..*"))
