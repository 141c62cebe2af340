"""Modules in one process: names, order, bytes, log-probabilities, and what is remembered between two updates."""

from __future__ import annotations

import gc
import warnings
import weakref

import pytest
import torch
from torch import nn

from tests.helpers.exports import ALONE, CPU, bucketize, export, plan, raw
from tests.helpers.ranks import allocate_slots
from tests.helpers.tiny_module import Tiny, expected, reference_logprobs
from weightcast.digest import on_cpu
from weightcast.digest.bucket_sums import sums_of_slots
from weightcast.digest.source_sums import SourceSums
from weightcast.errors import ConfigError
from weightcast.exporters.module import ModuleExporter
from weightcast.exporters.module_tensors import PlacedTensors
from weightcast.protocols import BucketUse
from weightcast.wire.bucket import Bucket
from weightcast.wire.layout import Packing, plan_buckets

# torch.compile imports deprecated parts of torch.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


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


class Masters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(33, 70))
        self.column = nn.Parameter(torch.randn(9, 64).t())  # no launch reads it
        self.narrow = nn.Parameter(torch.randn(5, 3).to(torch.bfloat16))
        self.nothing = nn.Parameter(torch.randn(0, 3))
        self.one = nn.Parameter(torch.tensor(1.2345678))


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("launched", [True, False], ids=["all rows", "with a column"])
def test_masters_are_summed_where_they_lie_and_in_buckets_as_what_they_become(compiled, launched, monkeypatch):
    monkeypatch.setattr(on_cpu, "_found", on_cpu._found if compiled and on_cpu.available() else (None,))
    model = Masters()
    if launched:
        del model.column
    exporter = ModuleExporter(model, family="plain", wire_dtype=torch.bfloat16)
    [layout] = plan_buckets(exporter.specs(), bucket_bytes=1 << 16, packing=Packing())
    [mapped] = plan(exporter, [layout], use=BucketUse(scattered=True, copies=False))
    [filled] = plan(exporter, [layout], use=BucketUse(scattered=True))
    data = torch.zeros(layout.size_bytes, dtype=torch.uint8)
    for planned in (mapped, filled):
        planned.prepare(None)
    for _ in range(2):
        in_place, copied = (SourceSums([planned.sum_places]) for planned in (mapped, filled))
        mapped.sum_own(*in_place.takers)
        filled.fill(data, *copied.takers)
        bucket = Bucket(layout, data)
        for slot, view in bucket.views():
            assert raw(view) == raw(getattr(model, slot.spec.name).to(torch.bfloat16))
        for sources in (in_place, copied):
            assert sources.values[0].tolist() == sums_of_slots(bucket).tolist()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(-1.1)
    names = [slot.spec.name for slot in layout.slots]
    lie = {names[number]: view for number, _, view in mapped.own_memory().views()}
    assert {name: (view.dtype, view.data_ptr()) for name, view in lie.items()} == {
        name: (parameter.dtype, parameter.data_ptr())
        for name, parameter in model.named_parameters()
        if parameter.numel()
    }


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


def quantised() -> nn.Module:
    """Embeddings stay a parameter; the weights of the linear layer are packed, and no list of parameters has them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that this way will go, and that its own storage classes will
        return torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4)), {nn.Linear})


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (meta, "meta device"),
        (lambda: nn.LazyLinear(3), "lazy"),
        (lambda: with_parameter(torch.eye(3).to_sparse()), "only dense"),
        (quantised, "1 is Linear of torch.ao.nn.quantized.dynamic"),
        (lambda: with_parameter(torch.randn(3, dtype=torch.complex64)), "complex64"),
        (lambda: with_parameter(torch.ones([1] * 9)), "9 dimensions"),
        (nn.Identity, "no parameters"),
    ],
    ids=["meta", "lazy", "sparse", "quantised", "complex", "nine", "empty"],
)
def test_tensors_that_cannot_be_sent_are_refused_by_name(make, words):
    with pytest.raises(ConfigError, match=words):
        ModuleExporter(make())


def test_non_contiguous_parameters_are_sent_in_order():
    model = with_parameter(torch.arange(12.0).reshape(3, 4).t())
    assert export(ModuleExporter(model))["odd"] == raw(torch.arange(12.0).reshape(3, 4).t().contiguous())


def test_another_models_layout_is_refused():
    layouts = plan_buckets(ModuleExporter(Tiny()).specs(), bucket_bytes=1 << 20, packing=Packing())
    other = ModuleExporter(nn.Linear(3, 3))
    with pytest.raises(ConfigError, match="and the exporter"):
        plan(other, layouts)


def test_a_structure_that_changes_is_noticed():
    model = Tiny()
    exporter = ModuleExporter(model)
    layouts = plan_buckets(exporter.specs(), bucket_bytes=1 << 20, packing=Packing())
    model.embed.weight = nn.Parameter(torch.randn(14, 6))
    with pytest.raises(ConfigError, match="has shape"):
        plan(exporter, layouts)[0].fill(torch.empty(1 << 20, dtype=torch.uint8))


def test_buffers_too_small_for_the_buckets_are_refused():
    exporter = ModuleExporter(Tiny())
    layouts = plan_buckets(exporter.specs(), bucket_bytes=1 << 20, packing=Packing())
    with pytest.raises(ConfigError, match="buffers of"):
        next(bucketize(exporter, layouts, ALONE, allocate_slots(CPU, 16)))


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


class _Memory(bytearray):
    """A tensor holder that supports weak references."""


def _on(values: torch.Tensor) -> tuple[torch.Tensor, weakref.ref[_Memory]]:
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


class Holding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(16.0).view(4, 4), requires_grad=False)
        self.register_buffer("steps", torch.arange(4))


def new_dictionary(model: nn.Module) -> None:
    model._parameters = dict(model._parameters)
    model.weight = nn.Parameter(torch.ones(4, 4))


SWAPS = {
    "another parameter": lambda model: setattr(model, "weight", nn.Parameter(torch.ones(4, 4))),
    "another buffer": lambda model: setattr(model, "steps", torch.arange(4) * 2),
    "another storage": lambda model: setattr(model.weight, "data", model.weight.data.clone()),
    "another dictionary": new_dictionary,
    "a parametrization": lambda model: nn.utils.parametrize.register_parametrization(model, "weight", nn.Tanh()),
}
OTHER_FORMS = {
    "another dtype": lambda model: setattr(model.weight, "data", model.weight.data.view(torch.int32)),
    "other strides": lambda model: setattr(model.weight, "data", model.weight.data.t()),
    "another shape": lambda model: setattr(model.weight, "data", model.weight.data.view(2, 8)),
    "another device": lambda model: setattr(model, "weight", nn.Parameter(model.weight.to("meta"))),
    "other strides of a buffer": lambda model: setattr(model, "steps", torch.arange(8)[::2]),
}


@pytest.mark.parametrize("what", [*SWAPS, *OTHER_FORMS])
def test_tensors_that_are_watched_are_those_of_now(what):
    model = Holding()
    tensors = PlacedTensors(model)
    watched = tensors.watch(range(len(tensors.places)))
    before = watched.now()
    assert watched.now().layout == before.layout
    assert watched.now().addresses == before.addresses
    (SWAPS | OTHER_FORMS)[what](model)
    for _ in range(2):
        now = watched.now()
        assert now.addresses == tuple(getattr(model, name).data_ptr() for name in ("weight", "steps")) or "para" in what
        assert (now.layout == before.layout) is (what in SWAPS)
        assert what not in SWAPS or now.addresses != before.addresses
        assert all(map(torch.equal, now.tensors[1:], [model.steps]))
        assert now.tensors[0].is_meta or torch.equal(now.tensors[0], model.weight)


def test_watching_keeps_no_tensor_alive():
    model = Holding()
    watched = PlacedTensors(model).watch([0, 1])
    watched.now()
    kept = [weakref.ref(tensor) for tensor in (model.weight, model.steps)]
    model.weight, model.steps = nn.Parameter(torch.ones(4, 4)), torch.arange(4)
    assert [one() for one in kept] == [None, None]
    assert torch.equal(watched.now().tensors[0], model.weight)
