"""Runs under a Python that has vLLM: how our plug-in treats single layers, with vLLM's own code that packs them.

The packing of convolutions needs a processor with bfloat16 products (AVX512-BF16).  Two functions are put in from
outside: one says that the processor can, the other packs by a permutation.  Prints one JSON object.
"""

from __future__ import annotations

import json
from types import SimpleNamespace

import torch
from torch import nn
from vllm import _custom_ops as ops
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

from weightcast.errors import ConfigError, EngineFailure
from weightcast.plugins.vllm.unpacked_model import UnpackedModel
from weightcast.plugins.vllm.worker import WeightcastEngine


def packed(weight: torch.Tensor) -> torch.Tensor:
    return weight.t().contiguous().view(-1, 8)


torch.cpu._is_avx512_bf16_supported = lambda: True
ops.causal_conv1d_weight_pack = packed


class Convolution(nn.Module):
    """As Qwen3-Next's and Mamba2's: a linear layer whose weight got a dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(6, 1, 4, dtype=torch.bfloat16), requires_grad=False)
        self.quant_method = UnquantizedLinearMethod()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1d = Convolution()

    def load_weights(self, weights: object) -> None:
        for _, tensor in weights:  # type: ignore[attr-defined]
            self.conv1d.weight.data.copy_(tensor)


def keeps_what_it_loaded() -> bool:
    """Whether a model whose only layer vLLM leaves as the loader wrote it needs no values from a second reading."""
    with set_current_vllm_config(VllmConfig()):
        model = nn.Module()
        model.plain = nn.Linear(4, 6, bias=False)
        model.plain.quant_method = UnquantizedLinearMethod()
    record_metadata_for_reloading(model)
    return UnpackedModel(model, device=torch.device("cpu")).as_loaded


def refusal_of_moving_experts() -> str:
    """The words with which the plug-in ends vLLM's start; vLLM itself allows the setting on GPUs only."""
    engine = object.__new__(WeightcastEngine)
    engine.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(enable_eplb=True))
    try:
        engine._make_receiver()
    except ConfigError as error:
        return str(error)
    return ""


def main() -> dict[str, object]:
    first, second = (torch.randn(6, 1, 4).bfloat16() for _ in range(2))
    with set_current_vllm_config(VllmConfig()):
        model = Model()
    record_metadata_for_reloading(model)
    layer = model.conv1d
    layer.weight.data.copy_(first)
    layer.quant_method.process_weights_after_loading(layer)
    held = layer.weight, layer._cpu_unpacked_conv_weight
    shape_packed = tuple(layer.weight.shape)
    unpacked = UnpackedModel(model, device=torch.device("cpu"))
    unpacked.load_weights([("conv1d.weight", first)])
    unpacked.pack()
    unpacked.check()
    unpacked.load_weights([("conv1d.weight", second)])
    try:
        unpacked.check()
        stale = "not seen"
    except EngineFailure as error:
        stale = str(error)
    unpacked.pack()
    unpacked.check()
    return {
        "packed": shape_packed,
        "resident": torch.equal(unpacked.residents["conv1d.weight"], second),
        "same objects": held[0] is layer.weight and held[1] is layer._cpu_unpacked_conv_weight,
        "computes with": torch.equal(layer.weight, packed(second.view(6, 4))),
        "falls back to": torch.equal(layer._cpu_unpacked_conv_weight, second.view(6, 4)),
        "stale": stale,
        "names suffice": [keeps_what_it_loaded(), unpacked.as_loaded],
        "experts that move": refusal_of_moving_experts(),
    }


if __name__ == "__main__":
    print(json.dumps(main()))
