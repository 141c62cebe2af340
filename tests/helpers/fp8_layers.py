"""fp8 layers without vLLM: a stand-in of a quantisation method, a layer of it, and a GPU's recordings."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from weightcast.plugins.vllm.layer_kinds import QUANTISED, LayerKind
from weightcast.plugins.vllm.twin_layer import TwinLayer

CPU = torch.device("cpu")
VLLM = "vllm.model_executor.layers.stand_in"  # objects of other packages are not looked into


class Kernel:
    """A kernel that was given a scale at its start."""

    def __init__(self, scale: torch.Tensor) -> None:
        self.scale = scale


Kernel.__module__ = VLLM


class Method:
    """As vLLM's: quantises, transposes, and gives a scale to a kernel."""

    number = False
    lazy = False

    def process_weights_after_loading(self, layer: Any) -> None:
        scale = layer.weight.data.abs().amax().float() / 448
        layer.weight = nn.Parameter((layer.weight.data / scale).to(torch.float8_e4m3fn).t(), requires_grad=False)
        layer.weight_scale = nn.Parameter(scale.view(1), requires_grad=False)
        self.kernel = Kernel(layer.weight_scale)
        if self.number:
            layer.scale_float = float(scale)


Method.__module__ = VLLM


class Layer(nn.Module):
    def __init__(self, method: Method) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 6, dtype=torch.bfloat16), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16), requires_grad=False)
        self.quant_method = method


def stand_in_for_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Provides the one function of vLLM's that is needed."""
    name = "vllm.model_executor.model_loader.reload.sanitize"
    parts = name.split(".")
    for end in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(".".join(parts[:end])))
    module = ModuleType(name)
    module.restore_layer_refs = lambda tensor, layer: tensor  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, module)


def loaded(weight: torch.Tensor, method: Method) -> tuple[Layer, dict[str, torch.Tensor]]:
    """A layer as vLLM leaves it after loading, and its parameters as they were before, on the meta device."""
    layer = Layer(method)
    made = {name: nn.Parameter(tensor.data.to("meta")) for name, tensor in layer.named_parameters()}
    layer.weight.data.copy_(weight)
    layer.bias.data.copy_(weight[:, 0])
    method.process_weights_after_loading(layer)
    return layer, made


def twin_layer(
    layer: Layer, made: dict[str, torch.Tensor], name: str = "model.layer", kind: LayerKind = QUANTISED
) -> TwinLayer:
    return TwinLayer(name, layer, kind, made=made, always=frozenset(), device=CPU)


def quantised(weight: torch.Tensor, method: Method, name: str = "model.layer") -> tuple[Layer, TwinLayer]:
    layer, made = loaded(weight, method)
    found = twin_layer(layer, made, name)
    put(layer, found, weight)
    return layer, found


def put(layer: Layer, found: TwinLayer, weight: torch.Tensor) -> None:
    with found.unpacked():
        layer.weight.data.copy_(weight)
        layer.bias.data.copy_(weight[:, 0])


class Replays:
    """Stands in for a recording: launches what ``work`` was, or what it was not."""

    def __init__(self, work: Any) -> None:
        self.work, self.moved, self.launched = work, False, 0

    def launch(self) -> bool:
        self.launched += not self.moved
        if not self.moved:
            self.work()
        return not self.moved


class Recorders:
    """Stands in for the recorder of a GPU."""

    def __init__(self, make: Any = Replays) -> None:
        self.make, self.made = make, list[Any]()

    def record(self, work: Any, tensors: Any) -> Any:
        assert tensors
        self.made.append(self.make(work))
        return self.made[-1]
