"""Quantised exports of shards over real gloo ranks."""

import math
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.helpers import families
from tests.helpers.clock import AMPLE_S
from tests.helpers.exports import CPU, export, raw
from tests.helpers.launches_on_cpu import launches_on_cpu
from tests.helpers.ranks import Ranks
from tests.helpers.sharded_experts import SIZES, sharded_experts
from tests.unit.exporters.test_quantise import FORMATS, in_format
from weightcast.comm.trainer_group import TrainerGroup
from weightcast.exporters.module import ModuleExporter
from weightcast.exporters.quantise import Fp8Blocks, Fp8Channels, Fp8Format, Fp8Tensors, Mxfp8
from weightcast.protocols import BucketUse

_meshes: dict[tuple[int, ...], DeviceMesh] = {}


_groups: list[TrainerGroup] = []


def export_case(case: dict) -> list[str]:
    mesh = case["mesh"]
    if mesh not in _meshes:
        _meshes[mesh] = init_device_mesh("cpu", mesh)
    if _groups and _groups[0]._failure is not None:
        _groups.clear()
    if not _groups:
        _groups.append(TrainerGroup.connect(CPU, timeout_s=AMPLE_S))
    group = _groups[0]
    receivers = tuple(rank for rank in case["receivers"] if rank < dist.get_world_size()) or (0,)
    torch.manual_seed(case["seed"])
    model = nn.Module()
    want: dict[str, bytes] = {}
    for number, (shape, dims) in enumerate(case["tensors"]):
        whole = (torch.randn(shape) * 10).to(case["dtype"])
        placed = distribute_tensor(
            whole, _meshes[mesh], [Replicate() if d is None else Shard(d) for d in dims], src_data_rank=None
        )
        model.register_parameter(f"t{number}", nn.Parameter(placed, requires_grad=False))
        want |= in_format(case["form"], f"t{number}", whole.to(case["wire_dtype"] or case["dtype"]))
    exporter = ModuleExporter(model, wire_dtype=case["wire_dtype"], quantise=case["form"])
    wrong: list[str] = []
    for launches in (nullcontext(), launches_on_cpu()):
        with launches:
            for _ in range(2):
                got = export(exporter, group, BucketUse(receivers=receivers), bucket_bytes=case["bucket_bytes"])
                assert set(got) == (set(want) if group.rank in receivers else set())
                wrong += [name for name in got if got[name] != want[name]]
    return wrong


@st.composite
def cases(draw, mesh_shapes) -> dict:
    mesh = draw(st.sampled_from(mesh_shapes))
    forms: list[Fp8Format] = [Fp8Blocks(match=".*", block=block) for block in (1, 3, 4)]
    form = draw(st.sampled_from([*forms, Fp8Tensors(match=".*"), Fp8Channels(match=".*"), Mxfp8(match=".*")]))
    tensors = []
    for _ in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(1, 11), min_size=2, max_size=3 if form.stacks else 2)))
        if isinstance(form, Mxfp8):
            shape = (shape[0], 32 * (1 + shape[1] % 3))
        dims = st.one_of(st.none(), st.integers(0, len(shape) - 1))
        tensors.append((shape, tuple(draw(st.lists(dims, min_size=len(mesh), max_size=len(mesh))))))
    return {
        "mesh": mesh,
        "tensors": tensors,
        "form": form,
        "dtype": draw(st.sampled_from([torch.float32, torch.bfloat16])),
        "wire_dtype": draw(st.sampled_from([None, torch.bfloat16])),
        "receivers": tuple(sorted(draw(st.sets(st.integers(0, math.prod(mesh) - 1), min_size=1)))),
        "bucket_bytes": draw(st.sampled_from([600, 1 << 16])),
        "seed": draw(st.integers(0, 1000)),
    }


# No shrinking: after a failure, ranks wait for each other until a deadline.
ONCE = (Phase.explicit, Phase.generate)


@pytest.fixture(scope="module")
def four():
    ranks = Ranks(4)
    yield ranks
    ranks.close()


@settings(max_examples=30, deadline=None, database=None, derandomize=True, phases=ONCE)
@given(case=cases([(4,), (2, 2)]))
def test_shards_that_cut_through_blocks_change_nothing(four, case):
    assert four.run(export_case, case) == [[]] * 4


def export_model(form: Fp8Format, folder: str, *, experts_by: int) -> list[str]:
    """Names that a sharded export has otherwise than the reference: FSDP2, and experts over another dimension."""
    mesh = init_device_mesh("cpu", (4,))
    group = TrainerGroup.connect(CPU, timeout_s=30)
    model = sharded_experts(mesh, experts_by)
    want: dict[str, bytes] = {}
    for name, tensor in load_file(f"{folder}/model.safetensors").items():
        want |= in_format(form, name, tensor) if "_proj" in name else {name: raw(tensor)}
    got = export(ModuleExporter(model, quantise=form), group, BucketUse(receivers=(0, 2)), bucket_bytes=20_000)
    group.close()
    return sorted(set(got) ^ set(want)) + [n for n in got if n in want and got[n] != want[n]] if got else []


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: type(form).__name__)
@pytest.mark.parametrize("experts_by", [0, 1, 2])
def test_sharded_experts_have_the_same_scales_as_whole_ones(four, form, experts_by, tmp_path):
    families.make("qwen3_moe", **SIZES).to(torch.bfloat16).save_pretrained(tmp_path)
    assert four.run(partial(export_model, form, str(tmp_path), experts_by=experts_by)) == [[]] * 4


@pytest.mark.wide
@pytest.mark.timeout(1200)
@settings(max_examples=120, deadline=None, database=None, phases=ONCE)
@given(case=cases([(4,), (2, 2), (1, 4), (4, 1)]))
def test_many_shards_that_cut_through_blocks_change_nothing(four, case):
    assert four.run(export_case, case) == [[]] * 4
