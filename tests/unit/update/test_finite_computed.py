"""Values that are NaN or infinite are refused by the name of their tensor, however what travels is computed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.exports import ALONE, CPU, bucketize
from tests.helpers.launches_on_cpu import launches_on_cpu
from tests.helpers.ranks import allocate_slots
from weightcast.digest import on_cpu
from weightcast.errors import NotFinite
from weightcast.exporters.converter import BridgeExporter
from weightcast.exporters.lora_adapter import AdapterExporter
from weightcast.exporters.module import ModuleExporter
from weightcast.exporters.multi_module import ComposedExporter, Part
from weightcast.exporters.quantise import Fp8Blocks, Fp8Channels, Fp8Format, Fp8Tensors, Mxfp8, Nvfp4
from weightcast.exporters.state_dict import StateDictExporter
from weightcast.protocols import BucketUse, Exporter
from weightcast.update.finite import FiniteCheck
from weightcast.wire.layout import BucketLayout, Packing, plan_buckets

peft = pytest.importorskip("peft")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.lora_bias=True. was passed"),
]

BUCKET_BYTES = 1 << 16
VALUES = {"nan": math.nan, "negative nan": math.nan, "inf": math.inf, "negative inf": -math.inf}
FORMATS: list[Fp8Format] = [
    Fp8Blocks(),
    Fp8Blocks(block=16, reciprocal=True),
    Fp8Tensors(),
    Fp8Tensors(scalar=True, reciprocal=True),
    Fp8Channels(),
    Fp8Channels(reciprocal=True),
    Mxfp8(),
    Nvfp4(),
]


@dataclass(frozen=True)
class Case:
    """An exporter, and the trainer's tensors from which a travelling one is computed, by that one's name."""

    exporter: Exporter
    sources: list[tuple[str, torch.Tensor]]


class Dense(nn.Module):
    """Two matrices that divide into the blocks of every format, and a vector that stays as it is."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.q_proj = nn.Linear(64, 48, bias=False, dtype=dtype)
        self.down_proj = nn.Linear(64, 32, bias=False, dtype=dtype)
        self.norm = nn.LayerNorm(40, bias=False, dtype=dtype)


def adapted(dtype: torch.dtype, **options: Any) -> Any:
    targets = ["q_proj", "down_proj"]
    model = peft.get_peft_model(Dense(dtype), peft.LoraConfig(r=4, target_modules=targets, **options)).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.normal_()
    return model


def found_in(model: nn.Module, ends: dict[str, str]) -> list[tuple[str, torch.Tensor]]:
    """The parameters with these endings; each with the name of the tensor that it travels in."""
    sources = [
        (goal, parameter.data)
        for end, goal in ends.items()
        for name, parameter in model.named_parameters()
        if name.endswith(end)
    ]
    assert len(sources) == len(ends)
    return sources


MERGED = {
    "q_proj.base_layer.weight": "q_proj.weight",
    "q_proj.lora_A.default.weight": "q_proj.weight",
    "down_proj.lora_B.default.weight": "down_proj.weight",
    "norm.weight": "norm.weight",
}


def plain(dtype: torch.dtype, **options: Any) -> Case:
    model = Dense(dtype)
    return Case(ModuleExporter(model, **options), [(name, weight.data) for name, weight in model.named_parameters()])


def merged(dtype: torch.dtype, **options: Any) -> Case:
    model = adapted(dtype)
    return Case(ModuleExporter(model, **options), found_in(model, MERGED))


def merged_by_peft(dtype: torch.dtype) -> Case:
    model = adapted(dtype, use_dora=True)
    sources = found_in(model, MERGED | {"q_proj.lora_magnitude_vector.default.weight": "q_proj.weight"})
    return Case(ModuleExporter(model), sources)


def alone(dtype: torch.dtype, **options: Any) -> Case:
    model = adapted(dtype, lora_alpha=6)
    ends = {
        "q_proj.lora_A.default.weight": "base_model.model.q_proj.lora_A.weight",
        "down_proj.lora_B.default.weight": "base_model.model.down_proj.lora_B.weight",
    }
    return Case(AdapterExporter(model, **options), found_in(model, ends))


def composed(dtype: torch.dtype) -> Case:
    """The first part has nothing that is computed."""
    model, other = adapted(dtype), {"first": torch.ones(40, 40, dtype=dtype)}
    parts = {"other": StateDictExporter(other), "policy": Part(exporter=ModuleExporter(model))}
    return Case(ComposedExporter(parts), [*found_in(model, MERGED), ("first", other["first"])])


def converted(dtype: torch.dtype) -> Case:
    weight = torch.randn(40, 40, dtype=dtype)
    return Case(BridgeExporter(lambda: iter([("up.weight", weight * 2)])), [("up.weight", weight)])


KINDS: dict[str, Callable[[torch.dtype], Case]] = {
    "plain": plain,
    "cast": lambda dtype: plain(dtype, wire_dtype=torch.float16),
    "merged": merged,
    "merged and cast": lambda dtype: merged(dtype, wire_dtype=torch.bfloat16),
    "merged by peft": merged_by_peft,
    "adapter": alone,
    "scaled adapter": lambda dtype: alone(dtype, scaled=True),
    "composed": composed,
    "converted": converted,
}


def refused(exporter: Exporter, layouts: Sequence[BucketLayout], *, sums: bool, scattered: bool) -> list[str]:
    """Names of the tensors that the check refuses in one update, as the head sees buckets."""
    slots, names = allocate_slots(CPU, BUCKET_BYTES), []
    for bucket in bucketize(exporter, layouts, ALONE, slots, BucketUse(scattered=scattered), sums=sums):
        assert bucket is not None
        try:
            FiniteCheck().check(bucket)
        except NotFinite as error:
            names += error.names
    return names


def poisoned(tensor: torch.Tensor) -> Iterator[str]:
    """Puts each bad value at the beginning, in the middle and at the end of a tensor, one at a time."""
    flat = tensor.view(-1)
    for (name, value), place in itertools.product(VALUES.items(), (0, flat.numel() // 2 + 1, flat.numel() - 1)):
        before = flat[place].clone()
        flat[place] = value
        if name == "negative nan":
            bits = flat.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])
            bits[place] |= torch.iinfo(bits.dtype).min
        assert bool(flat[place].signbit()) == name.startswith("negative")
        yield f"{name} at {place} of {flat.numel()}"
        flat[place] = before


def check(case: Case, *, scattered: bool = False) -> None:
    """Every bad value in every source is refused, with sums of the source and without; and nothing else is."""
    layouts = plan_buckets(case.exporter.specs(), bucket_bytes=BUCKET_BYTES, packing=Packing())
    update = partial(refused, case.exporter, layouts, scattered=scattered)
    missed = []
    for sums in (True, False):
        assert update(sums=sums) == []
        for name, tensor in case.sources:
            for what in poisoned(tensor):
                names = update(sums=sums)
                if not any(found.startswith(name) for found in names):
                    missed.append(f"{name}, {what}, sums={sums}: refused {names}")
        assert update(sums=sums) == []
    assert missed == []


def short(form: Fp8Format) -> str:
    return type(form).__name__ + (" reciprocal" if form.multiplies else "")


@pytest.fixture(autouse=True)
def compiled_sums() -> None:
    assert on_cpu.available(), "their launches look at values on the way"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_no_kind_of_tensor_hides_a_value_that_is_not_finite(kind, dtype):
    check(KINDS[kind](dtype))


@pytest.mark.parametrize("kind", ["plain", "cast", "merged"])
def test_nor_does_a_bucket_that_engines_read_where_it_lies(kind):
    case = KINDS[kind](torch.bfloat16)
    assert case.exporter.scatters
    case.exporter.prepare(ALONE)
    check(case, scattered=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("form", FORMATS, ids=short)
def test_no_format_hides_a_value_that_is_not_finite(form, dtype):
    check(plain(dtype, quantise=form))


@pytest.mark.parametrize("form", FORMATS, ids=short)
def test_no_format_hides_an_adapter_that_is_not_finite(form):
    check(merged(torch.bfloat16, quantise=form))


@pytest.mark.parametrize("form", FORMATS, ids=short)
def test_no_format_hides_it_where_a_gpu_quantises_in_launches(form):
    case = plain(torch.bfloat16, quantise=form)
    with launches_on_cpu() as made:
        check(case)
    assert bool(made) == (not isinstance(form, Nvfp4))
