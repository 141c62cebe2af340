"""The launches that quantise on a GPU give the bytes of torch's operations on a CPU, however parts cut blocks."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import nn

from tests.gpu.test_exporters_gpu import export
from tests.helpers.exports import bucketize
from tests.helpers.ranks import allocate_slots
from weightcast.comm.trainer_group import TrainerGroup
from weightcast.errors import NotFinite
from weightcast.exporters import quantise, quantise_jobs
from weightcast.exporters.fp8_formats import FP8, Fp8Blocks, Fp8Channels, Fp8Format, Fp8Tensors, Mxfp8
from weightcast.exporters.module import ModuleExporter
from weightcast.exporters.nvfp4 import Nvfp4
from weightcast.exporters.quantise_jobs import Jobs
from weightcast.exporters.scale_blocks import Blocks
from weightcast.update.finite import FiniteCheck
from weightcast.wire.box import Box, slices
from weightcast.wire.layout import Packing, plan_buckets

pytestmark = pytest.mark.gpu

FORMS = {
    "blocks": Fp8Blocks(),
    "blocks as vLLM": Fp8Blocks(reciprocal=True),
    "small blocks": Fp8Blocks(block=32),
    "large blocks": Fp8Blocks(block=256),
    "tensors": Fp8Tensors(),
    "channels": Fp8Channels(),
    "channels as vLLM": Fp8Channels(reciprocal=True),
    "mxfp8": Mxfp8(),
}
STACK = (3, 160, 192)
SHAPES = [(200, 320), (64, 96), (130, 1600), (384, 640), STACK]


def weight_of(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Rows of very different magnitudes, one of zeros, and values that lie between two 8-bit floats."""
    generator = torch.Generator().manual_seed(0)
    spread = torch.randn((*shape[:-1], 1), generator=generator).mul(6).exp()
    weight = torch.randn(shape, generator=generator) * spread
    weight[..., 3, :] = 0
    weight[..., 5, :] = torch.arange(shape[-1]) / 16
    return weight.clamp(-60_000, 60_000).to(dtype)  # finite in float16


def halves(shape: tuple[int, ...], dim: int, at: int) -> list[Box]:
    """The weight as two parts, cut in one dimension."""
    found = []
    for first, end in ((0, at), (at, shape[dim])):
        offset, extent = [0] * len(shape), list(shape)
        offset[dim], extent[dim] = first, end - first
        found.append(Box(offset=tuple(offset), shape=tuple(extent)))
    return found


def grid_by_torch(form: Fp8Format, weight: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    grid = torch.zeros(blocks.grid_shape)
    whole = Box(offset=(0,) * weight.dim(), shape=tuple(weight.shape))
    for piece in blocks.pieces(whole, 1 << 21):
        found = grid[slices(blocks.touched(piece), (0,) * weight.dim())]
        torch.maximum(found, blocks.maxima(weight[slices(piece, whole.offset)], piece), out=found)
    return grid


def encoded_by_torch(form: Fp8Format, weight: torch.Tensor, blocks: Blocks, grid: torch.Tensor) -> torch.Tensor:
    rows, columns = (torch.arange(extent) for extent in weight.shape[-2:])
    scales = grid[..., rows // blocks.rows, :][..., columns // blocks.columns]
    x = weight.float()
    return form.encoded(x * (1.0 / scales) if form.multiplies else x / scales).to(FP8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("form", "shape"),
    [
        pytest.param(form, shape, id=f"{name}-{shape}")
        for name, form in FORMS.items()
        for shape in SHAPES
        if len(shape) == 2 or form.stacks
    ],
)
def test_parts_have_the_scales_and_bytes_that_torch_computes_on_a_cpu(form, shape, dtype):
    from weightcast.exporters.quantise_kernel import Launches

    device = torch.device("cuda:0")
    blocks, weight = Blocks.of(shape, form), weight_of(shape, dtype)
    wanted_grid = grid_by_torch(form, weight, blocks)
    on_gpu = weight.to(device)
    for dim in range(len(shape)):
        for at in (shape[dim] // 2, random.Random(dim).randrange(1, shape[dim])):
            parts = halves(shape, dim, at)
            # Each part has memory of its own, and rows that are further apart than they are long.
            memories = [
                torch.empty((*part.shape[:-1], part.shape[-1] + 8), dtype=dtype, device=device) for part in parts
            ]
            memories = [
                memory[..., 8:].copy_(on_gpu[slices(part, (0,) * len(shape))])
                for memory, part in zip(memories, parts, strict=True)
            ]
            grid = torch.zeros(blocks.grid_shape, device=device)
            jobs = Jobs(form, device, grid.data_ptr())
            for part, memory in zip(parts, memories, strict=True):
                assert jobs.takes(memory, dtype, part.offset, part, blocks, grid)
            Launches(jobs).measure(grid.data_ptr())
            assert torch.equal(grid.cpu(), wanted_grid)
            scales = wanted_grid.clone()
            form.finish(scales)
            wanted = encoded_by_torch(form, weight, blocks, scales)
            scales = scales.to(device)
            around = torch.zeros((*shape[:-1], shape[-1] + 8), dtype=torch.uint8, device=device)
            jobs = Jobs(form, device, scales.data_ptr(), around.data_ptr())
            for part, memory in zip(parts, memories, strict=True):
                out = around.view(FP8)[..., 3:-5][slices(part, (0,) * len(shape))]
                assert jobs.takes(memory, dtype, part.offset, part, blocks, scales, out)
            Launches(jobs).encode(scales.data_ptr(), around.data_ptr())
            assert torch.equal(around[..., 3:-5].cpu(), wanted.view(torch.uint8))
            assert not around[..., :3].any()
            assert not around[..., -5:].any()


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_update_after_update_has_the_bytes_that_torch_computes(form, monkeypatch):
    """Aligned parts, launches that come again, and weights that move in between."""
    sizes = [(384, 640), (256, 512), (4096, 1024)]
    model = nn.ModuleDict({f"a{n}_proj": nn.Linear(wide, high, bias=False) for n, (high, wide) in enumerate(sizes)})
    model, device = model.bfloat16().to("cuda:0"), torch.device("cuda:0")
    group = TrainerGroup.connect(device, timeout_s=5)
    exporter = ModuleExporter(model, quantise=form)
    for number, moves in enumerate((False, False, True, False)):
        with torch.no_grad():
            for weight in model.parameters():
                value = weight_of(tuple(weight.shape), torch.bfloat16).roll(number).to(device)
                if moves:
                    weight.set_(value)
                else:
                    weight.copy_(value)
        got = export(exporter, group, 1 << 20)
        with monkeypatch.context() as without:
            for module in (quantise, quantise_jobs):
                without.setattr(module, "launches_on", lambda _: False)
            wanted = export(ModuleExporter(model, quantise=form), group, 1 << 20)
        assert got.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert torch.equal(tensor.view(torch.uint8), got[name].view(torch.uint8)), (name, number)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("form", [*FORMS.values(), Nvfp4()], ids=[*FORMS, "nvfp4"])
def test_a_weight_that_is_not_finite_is_refused_in_every_format(form, dtype):
    device = torch.device("cuda:0")
    model = nn.ModuleDict({"up_proj": nn.Linear(640, 384, bias=False), "q_proj": nn.Linear(512, 256, bias=False)})
    model = model.to(device, dtype)
    group = TrainerGroup.connect(device, timeout_s=5)
    exporter = ModuleExporter(model, quantise=form)
    layouts = plan_buckets(exporter.specs(), bucket_bytes=1 << 20, packing=Packing())
    slots = allocate_slots(device, 1 << 20)

    def refused() -> list[str]:
        names = []
        for bucket in bucketize(exporter, layouts, group, slots, sums=True):
            try:
                FiniteCheck().check(bucket)
            except NotFinite as error:
                names += error.names
        return names

    assert refused() == []
    for name, weight in model.named_parameters():
        flat, missed = weight.data.view(-1), []
        bits = flat.view(torch.int16 if dtype.itemsize == 2 else torch.int32)
        for value in (math.nan, -math.nan, math.inf, -math.inf):
            for place in (0, flat.numel() // 2 + 1, flat.numel() - 1):
                before = flat[place].clone()
                flat[place] = value
                if math.copysign(1, value) < 0:
                    bits[place] |= torch.iinfo(bits.dtype).min
                if not any(found.startswith(name) for found in refused()):
                    missed.append((value, place))
                flat[place] = before
        assert missed == []
    assert refused() == []


def test_what_the_launches_cannot_compute_is_left_to_torch():
    device = torch.device("cuda:0")
    whole = Box(offset=(0, 0), shape=(64, 96))
    grid = torch.zeros(1, 1, device=device)
    weight = torch.zeros(64, 96, dtype=torch.bfloat16, device=device)
    blocks, jobs = Blocks.of((64, 96), Fp8Blocks()), Jobs(Fp8Blocks(), device)
    assert not jobs.takes(None, torch.bfloat16, (0, 0), whole, blocks, grid)  # values that are computed
    assert not jobs.takes(weight, torch.float32, (0, 0), whole, blocks, grid)  # of another dtype
    assert not jobs.takes(weight.cpu(), torch.bfloat16, (0, 0), whole, blocks, grid)
    turned = torch.zeros(96, 64, dtype=torch.bfloat16, device=device).T
    assert not jobs.takes(turned, torch.bfloat16, (0, 0), whole, blocks, grid)
    odd = Blocks.of((640, 960), Fp8Blocks(block=100))
    assert not jobs.takes(weight, torch.bfloat16, (0, 0), whole, odd, torch.zeros(7, 10, device=device))
    assert not jobs
