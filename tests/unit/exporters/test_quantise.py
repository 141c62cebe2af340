"""Quantised exports equal an independent reference bit for bit, in every format; with real gloo ranks."""

import math

import pytest
import torch
from torch import nn

from tests.helpers import families
from tests.helpers.exports import ALONE, CPU, contents, export, plan, raw
from tests.helpers.launches_on_cpu import launches_on_cpu
from tests.helpers.ranks import allocate_slots
from tests.helpers.sharded_experts import SIZES
from weightcast.errors import ConfigError
from weightcast.exporters.bucketize import bucketize
from weightcast.exporters.module import ModuleExporter
from weightcast.exporters.quantise import Fp8Blocks, Fp8Channels, Fp8Format, Fp8Tensors, Mxfp8
from weightcast.wire.layout import Packing, plan_buckets


def reference(x: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantises one block after the other."""
    x = x.float()
    rows, columns = x.shape
    q = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    scales = torch.empty(math.ceil(rows / block), math.ceil(columns / block))
    for r in range(scales.shape[0]):
        for c in range(scales.shape[1]):
            part = x[r * block : (r + 1) * block, c * block : (c + 1) * block]
            most = max(abs(float(part.min())), abs(float(part.max())))
            scale = torch.tensor(most) / 448 if most else torch.tensor(1.0)
            scales[r, c] = scale
            q[r * block : (r + 1) * block, c * block : (c + 1) * block] = (part / scale).to(torch.float8_e4m3fn)
    return q, scales


def quantised(name: str, x: torch.Tensor, block: int) -> dict[str, bytes]:
    matrices = x if x.dim() > 2 else x[None]
    parts = [reference(matrix, block) for matrix in matrices]
    q, scales = (torch.stack(found) if x.dim() > 2 else found[0] for found in zip(*parts, strict=True))
    return {name: raw(q), f"{name}_scale_inv": raw(scales)}


def one_scale(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantises values that share a scale."""
    most = max(abs(float(x.min())), abs(float(x.max())))
    scale = torch.tensor(most) / 448 if most else torch.tensor(2.0**-23)
    return (x.float() / scale).to(torch.float8_e4m3fn), scale


def power_of_two(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantises 32 values as MXFP8, by way of Python's own floats."""
    mantissa, exponent = math.frexp(max(abs(value) for value in x.double().tolist()))  # mantissa in [0.5, 1)
    byte = max(0, exponent - 1 + (mantissa >= 0.875) - 8 + 127) if mantissa else 0
    return (x.double() * 2.0 ** (127 - byte)).float().to(torch.float8_e4m3fn), torch.tensor(byte, dtype=torch.uint8)


def in_format(form: Fp8Format, name: str, x: torch.Tensor) -> dict[str, bytes]:
    """A matrix in a format, and its scales."""
    if isinstance(form, Fp8Blocks):
        return quantised(name, x, form.block)
    if isinstance(form, Fp8Tensors):
        q, scale = one_scale(x)
        return {name: raw(q), f"{name}_scale": raw(scale)}
    size = 32 if isinstance(form, Mxfp8) else x.shape[1]
    groups = x.reshape(-1, size)
    parts = [power_of_two(group) if isinstance(form, Mxfp8) else one_scale(group) for group in groups]
    q, scales = (torch.stack(found) for found in zip(*parts, strict=True))
    return {name: raw(q), f"{name}_scale": raw(scales)}


FORMATS = [Fp8Blocks(), Fp8Tensors(), Fp8Tensors(scalar=True), Fp8Channels(), Mxfp8()]


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: type(form).__name__)
@pytest.mark.parametrize("bucket_bytes", [11_000, 1 << 20])
def test_dense_layers_and_experts_are_quantised_in_every_format(tmp_path, form, bucket_bytes):
    model = families.make("qwen3_moe", **SIZES).to(torch.bfloat16)
    assert model.model.layers[0].mlp.experts.gate_up_proj.dim() == 3, "the trainer stacks experts"
    want: dict[str, bytes] = {}
    for name, tensor in families.written(model, tmp_path).items():
        want |= in_format(form, name, tensor) if "_proj" in name else {name: raw(tensor)}
    exporter = ModuleExporter(model, quantise=form)
    got = export(exporter, ALONE, bucket_bytes=bucket_bytes)
    assert set(got) == set(want)
    assert [name for name in got if got[name] != want[name]] == []
    shapes = {spec.name: (spec.dtype, spec.shape) for spec in exporter.specs()}
    scales = {
        "Fp8Blocks": ("float32", (1, 2)),
        "Fp8Tensors": ("float32", () if getattr(form, "scalar", False) else (1,)),
        "Fp8Channels": ("float32", (96, 1)),
        "Mxfp8": ("uint8", (96, 5)),
    }
    assert shapes[f"model.layers.0.mlp.experts.0.up_proj.weight{form.suffix}"] == scales[type(form).__name__]


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: type(form).__name__)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_values_at_the_edges_are_quantised_in_every_format(form, dtype):
    torch.manual_seed(2)
    x = torch.randn(40, 64, dtype=torch.float64)
    x[0] = 0
    x[1, :32] = 0
    x[2, 0] = -1000
    x[3] = torch.logspace(-14, 1, 64, 2, dtype=torch.float64)
    for row, most in enumerate([1.75, 1.7421875, 1.7578125, 448.0, 2.0, 1.0, 2.0**-14]):  # near MXFP8's limit
        x[4 + row] = x[4 + row].clamp(-most, most)
        x[4 + row, 0] = most
        x[4 + row, 32] = -most
    model = nn.Module()
    model.up_proj = nn.Linear(64, 40, bias=False, dtype=dtype)
    model.up_proj.weight.data.copy_(x)
    got = export(ModuleExporter(model, quantise=form), bucket_bytes=600)
    assert got == in_format(form, "up_proj.weight", model.up_proj.weight.data)


@pytest.mark.parametrize("form", [Fp8Tensors(), Fp8Channels(), Mxfp8()], ids=lambda form: type(form).__name__)
@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_stay_visible_in_every_format(form, value):
    model = nn.Module()
    model.up_proj = nn.Linear(64, 3, bias=False)
    with torch.no_grad():
        model.up_proj.weight[1, 40] = value
    got = export(ModuleExporter(model, quantise=form))
    q = torch.frombuffer(bytearray(got["up_proj.weight"]), dtype=torch.float8_e4m3fn).view(3, 64)
    assert q[1, 40].isnan()
    scales = got["up_proj.weight_scale"]
    if isinstance(form, Mxfp8):
        assert [byte == 255 for byte in scales] == [False, False, False, True, False, False]
    else:
        found = torch.frombuffer(bytearray(scales), dtype=torch.float32)
        assert (~found.isfinite()).nonzero().flatten().tolist() == ([1] if len(found) == 3 else [0])


def test_the_scale_of_mxfp8_is_nan_whatever_the_sign_of_the_maximum():
    bits = torch.tensor([0x7FC00000, -0x400000, -1, 0x7F800000], dtype=torch.int32)  # NaNs, and infinity
    maxima = bits.view(torch.float32).clone()
    Mxfp8().finish(maxima)
    assert maxima.isnan().all()
    assert Mxfp8().stored(maxima).tolist() == [255] * 4


@pytest.mark.parametrize("form", [Fp8Tensors(), Fp8Channels(), Mxfp8()], ids=lambda form: type(form).__name__)
def test_matrices_that_are_stacked_on_the_wire_are_refused_by_name(form):
    model = nn.Module()
    model.mlp = nn.Module()
    model.mlp.experts = nn.Module()
    model.mlp.experts.gate_up_proj = nn.Parameter(torch.randn(2, 64, 96))
    with pytest.raises(ConfigError, match=r"experts\.\w+ stacks .*, and \w+ has scales for single matrices"):
        ModuleExporter(model, family="plain", quantise=form)


def test_rows_that_mxfp8_cannot_group_are_refused_by_name():
    model = nn.Module()
    model.up_proj = nn.Linear(48, 2, bias=False)
    with pytest.raises(ConfigError, match=r"up_proj\.weight has rows of 48 elements, and MXFP8 needs a multiple of 32"):
        ModuleExporter(model, quantise=Mxfp8())


def test_a_configuration_lists_the_modules_that_stay_wide():
    specs = ModuleExporter(families.make("qwen3_moe"), quantise=Fp8Tensors()).specs()
    wide = ["lm_head", "model.embed_tokens", *(f"model.layers.{n}.mlp.gate" for n in range(2))]
    assert sorted(Fp8Tensors().quantization_config(specs)["modules_to_not_convert"]) == wide
    assert sorted(Fp8Channels().quantization_config(specs)["ignore"]) == wide


def test_a_model_is_quantised_as_the_reference_does(tmp_path):
    model = families.make("qwen3_moe", hidden_size=160, moe_intermediate_size=136).to(torch.bfloat16)
    want: dict[str, bytes] = {}
    kept: list[str] = []
    for name, tensor in families.written(model, tmp_path).items():
        if "_proj" in name:
            want |= quantised(name, tensor, 128)
        else:
            want[name] = raw(tensor)
            kept.append(name)
    assert {"lm_head.weight", "model.norm.weight", "model.layers.0.mlp.gate.weight"} < set(kept)
    got = export(ModuleExporter(model, quantise=Fp8Blocks()), ALONE, bucket_bytes=11_000)
    assert set(got) == set(want)
    assert [name for name in got if got[name] != want[name]] == []


def as_vllm_does(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """DeepGEMM's way, in which vLLM quantises a matrix of bfloat16 in blocks of 128."""
    rows, columns = x.shape
    padded = torch.zeros(math.ceil(rows / 128) * 128, math.ceil(columns / 128) * 128, dtype=x.dtype)
    padded[:rows, :columns] = x
    view = padded.view(-1, 128, padded.shape[1] // 128, 128)
    scales = view.abs().float().amax(dim=(1, 3), keepdim=True).clamp(1e-4) / 448
    q = (view * (1.0 / scales)).to(torch.float8_e4m3fn).view_as(padded)[:rows, :columns]
    return q.contiguous(), scales.view(view.shape[0], view.shape[2])


@pytest.mark.parametrize("shape", [(256, 384), (200, 300)])
def test_blocks_are_quantised_as_vllm_does_if_asked(shape):
    model = nn.Module()
    model.up_proj = nn.Linear(*reversed(shape), bias=False).to(torch.bfloat16)
    with torch.no_grad():
        model.up_proj.weight.normal_(0, 0.05, generator=torch.Generator().manual_seed(10))
        model.up_proj.weight[:128, :128] = 0
    q, scales = as_vllm_does(model.up_proj.weight.detach())
    got = export(ModuleExporter(model, quantise=Fp8Blocks(reciprocal=True)), bucket_bytes=40_000)
    assert got == {"up_proj.weight": raw(q), "up_proj.weight_scale_inv": raw(scales)}
    assert export(ModuleExporter(model, quantise=Fp8Blocks()))["up_proj.weight"] != raw(q)


def test_nothing_is_quantised_by_default():
    specs = ModuleExporter(families.make("qwen3")).specs()
    assert {spec.dtype for spec in specs} == {"float32"}


def test_values_come_back_within_the_format_s_precision():
    model = nn.Module()
    model.up_proj = nn.Linear(300, 200, bias=False)
    with torch.no_grad():
        model.up_proj.weight[:128, :128] *= 1000
        model.up_proj.weight[128:, :128] = 0
    exporter = ModuleExporter(model, quantise=Fp8Blocks())
    assert [spec.name for spec in exporter.specs()] == ["up_proj.weight", "up_proj.weight_scale_inv"]
    got = export(exporter)
    q = torch.frombuffer(bytearray(got["up_proj.weight"]), dtype=torch.float8_e4m3fn).view(200, 300)
    scales = torch.frombuffer(bytearray(got["up_proj.weight_scale_inv"]), dtype=torch.float32).view(2, 3)
    back = q.float() * scales.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :300]
    torch.testing.assert_close(back, model.up_proj.weight.detach(), rtol=2**-4, atol=float(scales[0, 1]) * 2**-9)
    assert torch.equal(back[128:, :128], torch.zeros(72, 128))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_whole_blocks_are_read_in_place(dtype):
    torch.manual_seed(1)
    wholes = {
        "plain": torch.randn(16, 24),
        "turned": torch.randn(24, 16).t(),
        "every other": torch.randn(16, 48)[:, ::2],
        "experts": torch.randn(3, 16, 8),
        "with a zero block": torch.randn(8, 8) * (torch.arange(8) < 4),
        "ragged": torch.randn(18, 9),
    }
    model = nn.Module()
    want: dict[str, bytes] = {}
    for number, whole in enumerate(wholes.values()):
        model.register_parameter(f"t{number}", nn.Parameter(whole.to(dtype), requires_grad=False))
        want |= quantised(f"t{number}", whole.to(dtype), 8)
    exporter = ModuleExporter(model, quantise=Fp8Blocks(match=".*", block=8))
    for bucket_bytes in (300, 1 << 16):
        got = export(exporter, bucket_bytes=bucket_bytes)
        assert {name: got[name] == want[name] for name in want} == dict.fromkeys(want, True)


# -- sharded


def weights_like(model: nn.Module, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(weight.shape, generator=generator).to(weight.dtype) for weight in model.parameters()]


def exported(model: nn.Module, form: Fp8Format) -> dict[str, bytes]:
    return export(ModuleExporter(model, quantise=form), ALONE, bucket_bytes=30_000)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: type(form).__name__)
def test_launches_are_made_at_the_start_and_kept_for_weights_that_stay_where_they_are(form):
    model = families.make("qwen3_moe", **SIZES).to(torch.bfloat16)
    exporter = ModuleExporter(model, quantise=form)
    layouts = plan_buckets(exporter.specs(), bucket_bytes=30_000, packing=Packing())
    with launches_on_cpu() as made:
        planned, slots = plan(exporter, layouts), allocate_slots(CPU, 30_000)
        for number, bucket in enumerate(planned):
            bucket.prepare(slots[number % len(slots)])
        assert made, "before any update"
    for number, moves in enumerate((False, False, True, False)):
        with torch.no_grad():
            for weight, value in zip(model.parameters(), weights_like(model, number), strict=True):
                if moves:
                    weight.set_(value.clone())
                else:
                    weight.copy_(value)
        with launches_on_cpu() as made:
            got = contents(bucketize(planned, slots))
            assert bool(made) == moves
        assert got == exported(model, form)
