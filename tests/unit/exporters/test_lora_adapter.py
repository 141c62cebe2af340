"""Adapters by themselves, in the form that an engine's slots keep: B with its scale in it."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from tests.helpers import families
from tests.helpers.exports import ALONE
from tests.unit.exporters.test_lora import adapted, tensors_of
from weightcast.digest.definition import tensor_digest
from weightcast.errors import ConfigError
from weightcast.exporters.lora_adapter import AdapterExporter, adapters_of
from weightcast.update.arguments import adapter_of
from weightcast.wire.adapters import adapter_request, decode_adapter_request

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")


def layers_of(model: Any) -> dict[str, Any]:
    """Adapted layers by PEFT's name."""
    return {path: module for path, module in model.named_modules() if hasattr(module, "lora_A")}


@pytest.mark.parametrize("rslora", [False, True])
def test_b_has_its_scale_in_it(rslora):
    model = adapted(use_rslora=rslora, rank_pattern={"down_proj": 2}, alpha_pattern={"down_proj": 5})
    exporter = AdapterExporter(model, scaled=True)
    for _ in range(2):
        got = tensors_of(exporter)
        for path, layer in layers_of(model).items():
            scale = layer.scaling["default"]
            assert scale != 1
            assert torch.equal(got[f"{path}.lora_A.weight"], layer.lora_A["default"].weight)
            assert torch.equal(got[f"{path}.lora_B.weight"], layer.lora_B["default"].weight * scale)
        for layer in layers_of(model).values():  # a trainer may change it
            layer.scaling["default"] *= 3


def test_the_configuration_has_a_scale_of_one():
    model = adapted(rank_pattern={"down_proj": 2}, alpha_pattern={"down_proj": 5})
    config = AdapterExporter(model, scaled=True).config
    assert json.loads(json.dumps(config)) == config
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (4, 4, False)
    assert config["alpha_pattern"] == config["rank_pattern"] == {"down_proj": 2}
    assert AdapterExporter(model).config["lora_alpha"] == 6


def test_a_dtype_of_the_wire_is_cast_after_the_scale():
    model = adapted()
    got = tensors_of(AdapterExporter(model, scaled=True, wire_dtype=torch.bfloat16))
    for path, layer in layers_of(model).items():
        want = (layer.lora_B["default"].weight * layer.scaling["default"]).to(torch.bfloat16)
        assert tensor_digest(got[f"{path}.lora_B.weight"]) == tensor_digest(want)


def test_adapters_of_stacked_experts_have_the_names_that_peft_saves(tmp_path):
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    )
    model = peft.get_peft_model(families.make("qwen3_moe"), config)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    got = tensors_of(AdapterExporter(model))
    assert any("experts.base_layer.lora_A" in name for name in saved)
    assert {name: tensor.shape for name, tensor in got.items()} == {name: t.shape for name, t in saved.items()}
    assert all(torch.equal(got[name], tensor) for name, tensor in saved.items())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"use_dora": True}, "lora_magnitude_vector"),
        ({"modules_to_save": ["embed_tokens"]}, "modules_to_save"),
        ({"target_modules": ["embed_tokens", "q_proj"]}, "lora_embedding_A"),
        ({"lora_bias": True}, "lora_B has a bias"),
        ({"bias": "all"}, "biases of the model"),
    ],
)
@pytest.mark.filterwarnings("ignore:.lora_bias=True. was passed")
def test_what_is_neither_a_nor_b_is_refused(options, words):
    with pytest.raises(ConfigError, match=f"cannot be sent by itself: .*{words}"):
        AdapterExporter(adapted(**options))


def test_the_name_is_pefts_or_the_engines():
    model = adapted()
    assert adapters_of(model) == ("default",)
    _, _, request = adapter_of(model, "alice", None)  # the only adapter, whatever PEFT calls it
    assert request.name == "alice"
    assert {spec.name for spec in request.specs} == set(tensors_of(AdapterExporter(model)))
    model.add_adapter("bob", peft.LoraConfig(r=2, target_modules=["q_proj"]))
    exporter, _, _ = adapter_of(model, "bob", "bfloat16")
    assert {spec.dtype for spec in exporter.specs()} == {"bfloat16"}
    assert all("q_proj" in spec.name for spec in exporter.specs())
    with pytest.raises(ConfigError, match="several LoRA adapters: default, bob"):
        adapter_of(model, "alice", None)
    with pytest.raises(ConfigError, match="no LoRA adapter"):
        adapter_of(torch.nn.Linear(2, 2), "alice", None)
    with pytest.raises(ConfigError, match="scaled=True"):
        adapter_of(AdapterExporter(model), "alice", None)
    exporter.prepare(ALONE)


def test_a_name_that_no_route_can_have_is_refused():
    specs = tuple(AdapterExporter(adapted(), scaled=True).specs())
    for name in ("", "a/b", "..", "a b", "x" * 129, "a\n"):
        with pytest.raises(ConfigError, match="adapter=") as caught:
            adapter_request(name, {}, specs)
        assert "letters, digits" in (caught.value.hint or "")
    request = adapter_request("a-b_c.1", {"r": 4}, specs)
    assert decode_adapter_request(msgspec.json.encode(request)) == request
