"""vLLM's LoRA wrappers without vLLM: which of them are taken away while weights load, and which mapper gives names."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from torch import nn

from weightcast.errors import Refused
from weightcast.plugins.vllm.lora_wrappers import renames_of, without_wrappers


class Wrapper(nn.Module):
    """As vLLM's: the layer is below it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = layer


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    layers: Any = ModuleType("vllm.lora.layers")
    layers.BaseLayerWithLoRA = Wrapper
    monkeypatch.setitem(sys.modules, "vllm.lora.layers", layers)
    inner = nn.Module()
    inner.qkv_proj, inner.norm = Wrapper(nn.Linear(2, 3)), nn.LayerNorm(2)
    inner.experts = Wrapper(nn.Linear(3, 2))
    inner.experts.base_layer.lora_base_layer_prefix = "base_layer."  # type: ignore[assignment]
    return nn.ModuleDict({"attn": inner})


def names(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters() if name.endswith("weight")]


def test_layers_take_the_places_of_their_wrappers(model: nn.Module) -> None:
    wrapped = ["attn.qkv_proj.base_layer.weight", "attn.norm.weight", "attn.experts.base_layer.weight"]
    assert names(model) == wrapped
    with without_wrappers(model):
        assert names(model) == ["attn.qkv_proj.weight", "attn.norm.weight", "attn.experts.weight"]
        assert model["attn"].experts.lora_base_layer_prefix == ""  # type: ignore[index]
    assert names(model) == wrapped
    assert model["attn"].experts.base_layer.lora_base_layer_prefix == "base_layer."  # type: ignore[index]


def test_wrappers_come_back_after_an_error(model: nn.Module) -> None:
    before = dict(model.named_modules())
    with pytest.raises(KeyError), without_wrappers(model):
        raise KeyError
    assert dict(model.named_modules()) == before


def test_without_lora_nothing_is_looked_for(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "vllm.lora.layers")
    before = names(model)
    with without_wrappers(model):
        assert names(model) == before


@pytest.mark.parametrize("method", ["get_rename_mapper", "get_unstacked_mapper"])
def test_names_of_fused_projections_are_kept(method: str) -> None:
    mapper = SimpleNamespace(orig_to_new_stacked={".q_proj": (".qkv_proj", "q")}, **{method: lambda: "names"})
    assert renames_of(SimpleNamespace(hf_to_vllm_mapper=mapper)) == "names"


def test_a_mapper_that_would_fuse_names_is_refused() -> None:
    mapper = SimpleNamespace(orig_to_new_stacked={".q_proj": (".qkv_proj", "q")})
    with pytest.raises(Refused, match="fused projections"):
        renames_of(SimpleNamespace(hf_to_vllm_mapper=mapper))


@pytest.mark.parametrize("mapper", [None, SimpleNamespace(orig_to_new_stacked={}), SimpleNamespace()])
def test_other_mappers_are_used_as_they_are(mapper: object) -> None:
    assert renames_of(SimpleNamespace(hf_to_vllm_mapper=mapper)) is mapper
