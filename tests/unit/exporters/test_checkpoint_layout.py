"""Models of transformers get the names and layouts of a checkpoint, or are refused with a hint."""

import sys

import pytest
import torch
import transformers
from torch import nn

from tests.helpers import families, library
from tests.helpers.exports import ALONE, export, raw
from weightcast.errors import ConfigError
from weightcast.exporters.module import ModuleExporter

# One model of each kind of conversion: renamed, split, merged, transposed, stepped, tied, without a table.
CHOICE = [
    "AyaVisionForConditionalGeneration",
    "CamembertForCausalLM",
    "DeepseekV2ForCausalLM",
    "DeepseekV4ForCausalLM",
    "Dots1ForCausalLM",
    "Ernie4_5_MoeForCausalLM",
    "Gemma3ForConditionalGeneration",
    "Glm4MoeLiteForCausalLM",
    "GptOssForCausalLM",
    "GraniteMoeForCausalLM",
    "HunYuanMoEV1ForCausalLM",
    "InternVLForConditionalGeneration",
    "JambaForCausalLM",
    "KimiLinearForCausalLM",
    "Kimi_K25ForConditionalGeneration",
    "Lfm2MoeForCausalLM",
    "LlavaForConditionalGeneration",
    "LlavaOnevisionForConditionalGeneration",
    "MiniMaxForCausalLM",
    "Mistral3ForConditionalGeneration",
    "MllamaForConditionalGeneration",
    "NemotronHForCausalLM",
    "OlmoeForCausalLM",
    "PaliGemmaForConditionalGeneration",
    "PhimoeForCausalLM",
    "Qwen3NextForCausalLM",
]
# Configurations whose defaults build no model, or that need packages that are not installed.
NOT_TINY = {
    "CohereCompassForCausalLM",
    "CohereCompassForConditionalGeneration",
    "DbrxForCausalLM",
    "DiffusionGemmaForBlockDiffusion",
    "Dots3NoteForCausalLM",
    "Dots3NoteForConditionalGeneration",
    "FastVlmForConditionalGeneration",
    "Gemma3nForCausalLM",
    "Gemma3nForConditionalGeneration",
    "Gemma4AssistantForCausalLM",
    "Gemma4UnifiedAssistantForCausalLM",
    "Granite4VisionForConditionalGeneration",
    "InklingForConditionalGeneration",
    "Molmo2ForConditionalGeneration",
    "PerceptionLMForConditionalGeneration",
    "Qwen3OmniMoeForConditionalGeneration",
    "Qwen4ExpForCausalLM",
    "Qwen4ExpForConditionalGeneration",
    "ZambaForCausalLM",
}
# transformers 5.24 pads the output embedding of these with rows of zeros.  An export has no tensors that no rank holds.
REFUSED = {
    "Inkling2ForCausalLM",
    "Inkling2ForConditionalGeneration",
    "Inkling2LoopForCausalLM",
    "Inkling2LoopForConditionalGeneration",
}
# transformers writes these otherwise than published checkpoints; test_exporters_mapping.py checks them.
PUBLISHED_OTHERWISE = {"Qwen3VLMoeForConditionalGeneration"}


def present(class_names) -> list[str]:
    """The classes in the installed version of transformers."""
    known = set(dir(transformers))  # asking for a class imports its model
    return [name for name in class_names if name in known]


def exported(model: nn.Module) -> dict[str, torch.Tensor]:
    exporter = ModuleExporter(model)
    specs = {spec.name: spec for spec in exporter.specs()}
    found = export(exporter, bucket_bytes=1 << 24)
    values = {name: torch.frombuffer(bytearray(data), dtype=torch.uint8) for name, data in found.items() if data}
    empty = torch.empty(0, dtype=torch.uint8)
    return {name: values.get(name, empty).view(specs[name].torch_dtype).view(specs[name].shape) for name in found}


def check_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert set(got) == set(want)
    for name, tensor in want.items():
        assert (got[name].shape, got[name].dtype) == (tensor.shape, tensor.dtype), name
        same = torch.equal(got[name].contiguous().view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8))
        assert same, name


@pytest.mark.parametrize("class_name", present(CHOICE))
def test_an_export_equals_save_pretrained(class_name, tmp_path):
    model = library.make(class_name)
    check_same(exported(model), library.written(model, tmp_path))


@pytest.mark.wide
@pytest.mark.parametrize("class_name", library.class_names())
def test_every_export_equals_save_pretrained(class_name, tmp_path):
    try:
        model = library.make(class_name)
    except library.CannotBeTiny as error:
        if class_name in NOT_TINY:
            pytest.skip(str(error))
        raise
    assert class_name not in NOT_TINY
    if class_name in REFUSED:
        with pytest.raises(
            ConfigError, match=rf"{class_name}.*unembed\.weight: its values are computed by aten::new_zeros"
        ):
            ModuleExporter(model)
        return
    want = library.written(model, tmp_path)
    if class_name in PUBLISHED_OTHERWISE:
        assert set(exported(model)) == set(want)
    else:
        check_same(exported(model), want)


@pytest.mark.parametrize("class_name", ["LlavaForConditionalGeneration", "Qwen3MoeForCausalLM", "JambaForCausalLM"])
def test_a_loaded_model_is_exported_as_it_would_be_saved(class_name, tmp_path):
    library.make(class_name).save_pretrained(tmp_path / "first")
    model = getattr(transformers, class_name).from_pretrained(tmp_path / "first", dtype=None)
    library.fill(model)
    before = repr(getattr(model, "_weight_conversions", None))
    got = exported(model)
    assert repr(getattr(model, "_weight_conversions", None)) == before
    check_same(got, library.written(model, tmp_path / "second"))


def test_a_compiled_model_is_exported_as_it_would_be_saved(tmp_path):
    model = library.make("OlmoeForCausalLM")
    check_same(exported(torch.compile(model, backend="eager")), library.written(model, tmp_path))


@pytest.fixture
def conversion(monkeypatch):
    """Replaces transformers' reverse conversion."""
    module = sys.modules.get("transformers.core_model_loading")
    if module is None:
        pytest.skip("transformers 4 has no conversion")

    def replace(function):
        monkeypatch.setattr(module, "revert_weight_conversion", function)

    return replace


def moved(model, state):
    """A later version whose function takes other arguments."""
    raise TypeError("revert_weight_conversion() missing 1 required argument")


def computed(model, state):
    return {name: tensor * 2 if name.endswith("q_proj.weight") else tensor for name, tensor in state.items()}


def dropped(model, state):
    return dict(list(state.items())[1:])


def doubled(model, state):
    return state | {"again": next(iter(state.values())).clone()}


def narrowed(model, state):
    return {name: tensor.to(torch.bfloat16) for name, tensor in state.items()}


def overwritten(model, state):
    return {name: tensor.clone().zero_() for name, tensor in state.items()}


WRONG = [
    (moved, "TypeError: revert_weight_conversion"),
    (computed, r"q_proj\.weight: its values are computed by aten::mul"),
    (dropped, "uses 0 of its"),
    (doubled, "some of them twice"),
    (narrowed, "its values are computed by aten::_to_copy"),
    (overwritten, "aten::zero_, in place"),
]


@pytest.mark.parametrize(("function", "words"), WRONG, ids=lambda x: getattr(x, "__name__", ""))
def test_an_unrecorded_conversion_is_refused_and_never_guessed(conversion, function, words):
    model = library.make("GlmForCausalLM")
    conversion(function)
    with pytest.raises(ConfigError, match=rf"(?s)^GlmForCausalLM: .*model\.embed_tokens\.weight.*{words}") as caught:
        ModuleExporter(model)
    assert "CheckpointExporter" in (caught.value.hint or "")


@pytest.mark.parametrize(("function", "words"), WRONG, ids=lambda x: getattr(x, "__name__", ""))
def test_a_table_is_used_and_logged_if_recording_fails(conversion, function, words, tmp_path, caplog):
    model = families.make("qwen3_moe")
    want = families.written(model, tmp_path)
    conversion(function)
    exporter = ModuleExporter(model)
    assert exporter.family.name == "stacked-experts"
    assert "weightcast uses the table 'stacked-experts'" in caplog.text
    assert {spec.name for spec in exporter.specs()} == set(want)


def test_tensors_that_transformers_keeps_in_float32_are_not_cast():
    model = library.make("Dots1ForCausalLM")
    dtypes = {spec.name: spec.dtype for spec in ModuleExporter(model, wire_dtype=torch.bfloat16).specs()}
    kept = {name for name, dtype in dtypes.items() if dtype == "float32"}
    assert kept >= {f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in range(2)}
    assert kept == {name for name in dtypes if library.stays_in_float32(model, name)}


def test_a_model_inside_another_module_is_refused_with_its_path():
    class WithValueHead(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.policy = families.make("llama")
            self.value = nn.Linear(24, 1)

    model = WithValueHead()
    with pytest.raises(ConfigError, match=r"WithValueHead.*policy is a LlamaForCausalLM.*policy\.\*") as caught:
        ModuleExporter(model)
    assert "model.policy" in (caught.value.hint or "")
    want = set(model.policy.state_dict())
    assert set(export(ModuleExporter(model.policy), ALONE)) == want
    named = ModuleExporter(model, family="plain", names=lambda name: name.removeprefix("policy."))
    assert {spec.name for spec in named.specs()} == want | {"value.weight", "value.bias"}


@pytest.mark.parametrize(
    "name", ["q_proj.base_layer.weight", "embed.token_adapter.weight", "head.modules_to_save.default.weight"]
)
def test_a_name_with_an_adapter_segment_is_refused(name):
    model = nn.Module()
    owner = model
    *path, last = name.split(".")
    for step in path:
        owner.add_module(step, nn.Module())
        owner = getattr(owner, step)
    owner.register_parameter(last, nn.Parameter(torch.ones(2, 2)))
    with pytest.raises(ConfigError, match=rf"^{name} is part of an adapter"):
        ModuleExporter(model)


def test_a_derived_class_has_the_names_of_its_base(tmp_path):
    class Policy(type(families.make("llama"))):
        """A trainer's own subclass."""

    model = families.make("llama")
    want = {name: raw(tensor) for name, tensor in families.written(model, tmp_path).items()}
    model.__class__ = Policy
    assert export(ModuleExporter(model), ALONE) == want
