"""NVFP4 exports equal an independent reference bit for bit, whole and sharded over real gloo ranks."""

import math
import struct
from bisect import bisect_left
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers import families
from tests.helpers.exports import ALONE, export, raw
from tests.helpers.sharded_experts import SIZES
from weightcast.errors import ConfigError
from weightcast.exporters.module import ModuleExporter
from weightcast.exporters.quantise import Nvfp4

VALUES = [Fraction(value) for value in ("0", "1/2", "1", "3/2", "2", "3", "4", "6")]
HALFWAY = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
JOINED = [{"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"}]


def f32(value: float) -> float:
    """The float32 nearest to a value; infinite beyond the largest."""
    try:
        return struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        return math.inf


def fp4(value: float) -> int:
    """The code of the nearest of sixteen values, the even code halfway between two.

    Comparisons of floats are exact, and so are the limits.
    """
    size = abs(value)
    code = bisect_left(HALFWAY, size)
    if code < len(HALFWAY) and HALFWAY[code] == size:
        code += code % 2
    return code | (8 if value < 0 else 0)


def reference(name: str, x: torch.Tensor, most: float) -> dict[str, bytes]:
    """A weight in NVFP4, with Python's floats; ``most`` is the largest magnitude of the weights that share a scale."""
    overall = f32(2688 * f32(1 / max(most, 2.0**-126)))
    overall = 1.0 if math.isinf(overall) else overall
    packed, scales = bytearray(), bytearray()
    for row in x.float().tolist():
        codes: list[int] = []
        for start in range(0, len(row), 16):
            group = row[start : start + 16]
            exact = f32(overall * f32(max(map(abs, group)) / 6))
            stored = torch.tensor(min(exact, 448.0)).to(torch.float8_e4m3fn)
            if not float(stored):
                stored = torch.tensor(0.125).to(torch.float8_e4m3fn)
            scales += raw(stored)
            divisor = f32(float(stored) / overall)
            codes += [fp4(f32(value / divisor)) for value in group]
        packed += bytes(low | high << 4 for low, high in zip(codes[0::2], codes[1::2], strict=True))
    return {f"{name}_packed": bytes(packed), f"{name}_scale": bytes(scales), f"{name}_global_scale": raw(f32s(overall))}


def f32s(value: float) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.float32)


def expected(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    """The export of a model: what engines join has one overall scale."""
    most: dict[str, float] = {}
    for name, tensor in tensors.items():
        most[key(name)] = max(most.get(key(name), 0.0), float(tensor.abs().max()))
    want: dict[str, bytes] = {}
    for name, tensor in tensors.items():
        want |= reference(name, tensor, most[key(name)]) if "_proj" in name else {name: raw(tensor)}
    return want


def key(name: str) -> str:
    path, _, last = name.removesuffix(".weight").rpartition(".")
    return next((f"{path}.{sorted(names)[0]}" for names in JOINED if last in names), name)


def alone(x: torch.Tensor, dtype: torch.dtype = torch.float32) -> nn.Module:
    model = nn.Module()
    model.down_proj = nn.Linear(x.shape[1], x.shape[0], bias=False, dtype=dtype)
    model.down_proj.weight.data.copy_(x)
    return model


def test_the_reference_rounds_as_exact_fractions_do():
    torch.manual_seed(7)
    values = [0.0, *HALFWAY, *map(float, VALUES), *(torch.randn(3_000) * 3).tolist(), 1e30]
    values += [math.nextafter(limit, end) for limit in HALFWAY for end in (0.0, 7.0)]
    for value in (*values, *(-value for value in values)):
        size = min(abs(Fraction(value)), Fraction(6))
        code = min(range(8), key=lambda code: (abs(VALUES[code] - size), code % 2))
        assert fp4(value) == code | (8 if value < 0 else 0), value


@pytest.fixture(scope="module")
def model_and_reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dict[str, bytes]]:
    model = families.make("qwen3_moe", **SIZES).to(torch.bfloat16)
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.mul_(3)
    return model, expected(families.written(model, tmp_path_factory.mktemp("written")))


@pytest.mark.parametrize("bucket_bytes", [4_000, 1 << 20])
def test_a_model_is_quantised_as_the_reference_does(model_and_reference, bucket_bytes):
    model, want = model_and_reference
    exporter = ModuleExporter(model, quantise=Nvfp4())
    got = export(exporter, ALONE, bucket_bytes=bucket_bytes)
    assert set(got) == set(want)
    assert [name for name in got if got[name] != want[name]] == []
    shapes = {spec.name: (spec.dtype, spec.shape) for spec in exporter.specs()}
    name = "model.layers.0.mlp.experts.0.up_proj.weight"
    assert shapes[f"{name}_packed"] == ("uint8", (96, 80))
    assert shapes[f"{name}_scale"] == ("float8_e4m3fn", (96, 10))
    assert shapes[f"{name}_global_scale"] == ("float32", (1,))
    attention = "model.layers.0.self_attn"
    shared = {got[f"{attention}.{part}_proj.weight_global_scale"] for part in "qkv"}
    assert len(shared) == 1
    assert got[f"{attention}.o_proj.weight_global_scale"] not in shared


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("factor", ["1", "largest", "subnormal", "zero"])
def test_values_at_the_edges_are_quantised(dtype, factor):
    torch.manual_seed(4)
    x = torch.randn(24, 64, dtype=torch.float64)
    x[0] = 0
    x[1, :16] = 0
    x[2] = torch.logspace(-14, 1, 64, 2, dtype=torch.float64)
    x[3] = -0.0
    # In these rows the scale of a group is 1, and so its values lie on and between those of the format.
    limits = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=torch.float64)
    for row, step in enumerate((0.0, 2.0**-10, -(2.0**-10)), 4):
        x[row, :7], x[row, 7:14], x[row, 14], x[row, 15] = limits + step, -limits - step, 6, -6
    x[7, 0] = 2688  # makes the overall scale 1
    if factor == "largest":
        x *= torch.finfo(dtype).max / 2688
    elif factor == "subnormal":
        x *= torch.finfo(dtype).tiny / 64
    elif factor == "zero":
        x *= 0
    model = alone(x, dtype)
    weight = model.down_proj.weight.data
    got = export(ModuleExporter(model, quantise=Nvfp4()), bucket_bytes=600)
    assert got == reference("down_proj.weight", weight, float(weight.abs().max()))


def test_weights_with_a_common_scale_have_it_in_every_bucket():
    torch.manual_seed(5)
    model = nn.Module()
    weights = {f"{name}_proj.weight": torch.randn(32, 64) * size for name, size in (("q", 1), ("k", 9), ("v", 2))}
    for name, weight in weights.items():
        layer = nn.Linear(64, 32, bias=False)
        layer.weight.data.copy_(weight)
        model.add_module(name.partition(".")[0], layer)
    got = export(ModuleExporter(model, quantise=Nvfp4()), bucket_bytes=700)
    assert got == expected(weights)


@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_stay_visible(value):
    torch.manual_seed(6)
    model = alone(torch.randn(3, 64))
    with torch.no_grad():
        model.down_proj.weight[1, 40] = value
    got = export(ModuleExporter(model, quantise=Nvfp4()))
    scales = torch.frombuffer(bytearray(got["down_proj.weight_scale"]), dtype=torch.float8_e4m3fn).view(3, 4)
    assert scales.float().isnan().nonzero().tolist() == [[1, 2]]


@pytest.mark.parametrize(
    ("shape", "words"), [((2, 24), r"down_proj\.weight has rows of 24 elements"), ((2, 64), "no name that ends with")]
)
def test_weights_that_nvfp4_cannot_have_are_refused_by_name(shape, words):
    model = alone(torch.randn(shape))
    if shape[1] == 64:
        model.down_proj.register_parameter("other", nn.Parameter(torch.randn(shape)))
    with pytest.raises(ConfigError, match=words):
        ModuleExporter(model, quantise=Nvfp4(match=".*"))


def test_the_configuration_is_that_of_weights_alone():
    specs = ModuleExporter(families.make("qwen3_moe", **SIZES), quantise=Nvfp4()).specs()
    config = Nvfp4().quantization_config(specs)
    assert config["format"] == "nvfp4-pack-quantized"
    assert config["config_groups"]["group_0"]["input_activations"] is None
    wide = {"lm_head", "model.embed_tokens", *(f"model.layers.{n}.mlp.gate" for n in range(2))}
    assert set(config["ignore"]) == wide


# -- sharded
