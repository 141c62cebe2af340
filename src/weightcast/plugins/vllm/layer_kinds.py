"""The kinds of layers in a vLLM model: how each gets from what its loader writes to what its kernels read.

On a CPU vLLM packs linear layers into oneDNN handlers, and experts and convolutions into tiles.  On a GPU its
quantisation methods quantise bfloat16 weights, bring the weights of a fused layer to one scale, transpose, pad or pack
them, and give scales to kernels.
"""

# vLLM is not installed where this is checked.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportPrivateUsage=false
from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from weightcast.errors import ConfigError

QUANTISATION = "vllm.model_executor.layers.quantization."
_LINEAR = (
    "fp8.Fp8LinearMethod",
    "online.fp8.Fp8PerTensorOnlineLinearMethod",
    "online.fp8.Fp8PerBlockOnlineLinearMethod",
    "online.fp8.Fp8PtpcOnlineLinearMethod",
    "compressed_tensors.compressed_tensors.CompressedTensorsLinearMethod",
)
_EXPERTS = (
    "fp8.Fp8MoEMethod",
    "online.fp8.Fp8PerTensorOnlineMoEMethod",
    "online.fp8.Fp8PerBlockOnlineMoEMethod",
    "online.fp8.Fp8PtpcOnlineMoEMethod",
    "compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w8a8_fp8.CompressedTensorsW8A8Fp8MoEMethod",
    "compressed_tensors.compressed_tensors_moe.CompressedTensorsW8A8Fp8MoEMethod",  # older versions of vLLM
    "compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w8a8_mxfp8.CompressedTensorsW8A8Mxfp8MoEMethod",
    "compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w4a4_nvfp4.CompressedTensorsW4A4Nvfp4MoEMethod",
)
# Of compressed-tensors, whose method for linear layers hands everything to the layer's scheme.
_SCHEMES = {
    "compressed_tensors.schemes.compressed_tensors_w8a8_fp8.CompressedTensorsW8A8Fp8",
    "compressed_tensors.schemes.compressed_tensors_w8a8_mxfp8.CompressedTensorsW8A8Mxfp8",
    "compressed_tensors.schemes.compressed_tensors_w4a4_nvfp4.CompressedTensorsW4A4Fp4",
}
_PACKED_FORMATS = re.compile(r"(?i)nvfp4|mxfp8|w4a4fp4")
_MARLIN = re.compile(r"vllm\.model_executor\.kernels\.linear\.(nvfp4|mxfp8)\.marlin\.Marlin\w+")
_CACHE_SCALE = re.compile(r".*\.(\w+_)?([kvq]|kv|prob|output)_scale")
_KEEP_LAYOUT = ("TRITON", "BATCHED_TRITON")  # vLLM's names of kernels that compute with experts as they are loaded


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """How the live form of a layer comes from the loaded form.

    Attributes:
        beside: True if the loaded form has memory of its own beside the live one, at least for some parameters.
        whole: True if vLLM's whole method derives the live form; False if only the kernel that the layer has packs it.
        anew: Attributes whose objects nobody can write into, so the layer gets those of its twin.  Their products with
            unit vectors are checked; all else is compared with a twin.
        columns: Number of unit vectors in a full check; None for as many as the weight has columns.
    """

    name: str
    beside: bool = True
    whole: bool = True
    anew: tuple[str, ...] = ()
    columns: int | None = None


LINEAR = LayerKind(name="linear", anew=("cpu_linear",))
EMBEDDING = LayerKind(name="embedding", beside=False, anew=("cpu_linear",), columns=256)  # a head has many rows
CONVOLUTION = LayerKind(name="convolution")
EXPERTS = LayerKind(name="experts", whole=False)  # vLLM itself leaves the packing out when it loads weights again
EXPERTS_AS_LOADED = LayerKind(name="experts as loaded", beside=False)
EXPERTS_IN_PLACE = LayerKind(name="experts in place", beside=False)  # perhaps in another layout: values show it
QUANTISED = LayerKind(name="quantised")


def kind_of(name: str, layer: Any, device: torch.device) -> LayerKind | None:
    """The kind of a layer with a ``quant_method``; None if its kernels read what the loader writes.

    Raises:
        ConfigError: It transforms its weights in a way that is not supported.
    """
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    on_cpu = device.type == "cpu"
    method = _below_lora(layer.quant_method)
    why = why_refused(method, layer)
    if is_quantised(method) and not why:
        return QUANTISED
    if type(method) is UnquantizedEmbeddingMethod:
        return EMBEDDING if on_cpu and hasattr(layer, "cpu_linear") else None
    if type(method) is UnquantizedLinearMethod:
        loaded = made_with(layer)[0]["weight"]
        packed = on_cpu and tuple(layer.weight.shape) != tuple(loaded.shape)
        if loaded.ndim == 3 and on_cpu and (packed or hasattr(layer, "_cpu_unpacked_conv_weight")):
            return CONVOLUTION
        if not packed:
            return None
        if hasattr(layer, "cpu_linear"):
            return LINEAR
    if type(method) is UnquantizedFusedMoEMethod:
        keeps = getattr(getattr(method, "unquantized_backend", None), "name", "unknown") in _KEEP_LAYOUT
        if on_cpu and not keeps:
            return EXPERTS
        shapes = {key: tensor.shape for key, tensor in layer.named_parameters(recurse=False)}
        if all(shapes[key] == meta.shape for key, meta in made_with(layer)[0].items()):
            return EXPERTS_AS_LOADED if keeps else EXPERTS_IN_PLACE
    below = getattr(method, "old_quant_method", None)
    if below is not None:
        why = f"{type(below).__name__} inside {type(method).__name__}, as vLLM has it with --enable-lora"
    raise ConfigError(
        f"{name} transforms its weights in a way that weightcast does not support: {why or type(method).__name__}",
        hint="use a model in bfloat16, in fp8 (blocks, tensors, channels or online), or in NVFP4 or MXFP8 for Marlin, "
        "or vLLM's own weight transfer",
    )


def made_with(layer: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A layer's parameters and buffers as they were before vLLM loaded them, on the meta device."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    return get_layerwise_info(layer).restore_metadata


def _below_lora(method: Any) -> Any:
    """The method of unquantised experts below the one that vLLM's LoRA wrapper gives them; other methods unchanged."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    below = getattr(method, "old_quant_method", None)
    return below if type(below) is UnquantizedFusedMoEMethod else method


def is_quantised(method: object) -> bool:
    """True for vLLM's methods whose layers this module can update."""
    return _name_of(method) in {QUANTISATION + name for name in (*_LINEAR, *_EXPERTS)}


def why_refused(method: object, layer: object) -> str:
    """The reason why a layer with this method cannot be updated; empty if it can."""
    scheme = getattr(layer, "scheme", None)
    if type(method).__name__ == "CompressedTensorsLinearMethod":
        if _name_of(scheme).removeprefix(QUANTISATION) not in _SCHEMES:
            return f"the scheme {type(scheme).__name__}"
        if getattr(scheme, "is_static_input_scheme", False) or not getattr(scheme, "use_a16", True):
            return f"static scales of activations in {type(scheme).__name__}"
    elif not getattr(method, "use_a16", True):
        return f"experts with static scales of activations in {type(method).__name__}"
    if is_quantised(method) and (other := _other_kernel(method, scheme)):
        return other
    if getattr(method, "static_input_scales", False):
        return f"experts with static scales of activations in {type(method).__name__}"
    if _name_of(method) == f"{QUANTISATION}fp8.Fp8MoEMethod":
        scheme = getattr(getattr(method, "quant_config", None), "activation_scheme", "dynamic")
        if scheme != "dynamic":
            return f"experts with {scheme} scales of activations, whose values the loader looks at"
    if getattr(method, "is_scale_e8m0", False):
        return "scales that are powers of two (e8m0)"
    return ""


def _other_kernel(method: object, scheme: object) -> str:
    """The kernel of a packed format if it is not Marlin, with whose packing these formats were tried; else empty."""
    owner = scheme if type(method).__name__ == "CompressedTensorsLinearMethod" else method
    if not _PACKED_FORMATS.search(type(owner).__name__):
        return ""
    if owner is scheme:
        kernel: Any = getattr(scheme, "kernel", None)
        found, marlin = type(kernel).__name__, _MARLIN.fullmatch(_name_of(kernel)) is not None
    else:
        backend: Any = getattr(method, "nvfp4_backend", None) or getattr(method, "fp8_backend", None)
        found = str(getattr(backend, "name", backend))
        marlin = found == "MARLIN"
    return "" if marlin else f"{type(owner).__name__} with the kernel {found}, and not Marlin"


def check_cache_scales(skipped: Iterable[str]) -> None:
    """Raises ``ConfigError`` for scales of the KV cache: vLLM keeps those as numbers that no update reaches.

    ``skipped`` names the tensors that the model's loader puts nowhere.
    """
    found = sorted(name for name in skipped if _CACHE_SCALE.fullmatch(name))
    if found:
        raise ConfigError(
            f"the checkpoint has scales of the KV cache ({found[0]}), which vLLM keeps as numbers that an update "
            "does not reach",
            hint="use a checkpoint without them; --calculate-kv-scales and the default scale of 1 are no weights",
        )


def keep_cache_scales(model: nn.Module) -> None:
    """Makes buffers of the scales of the KV cache, as vLLM does itself from 0.32 on.

    Before, compressed-tensors left them as parameters of attention: a sleep of level 2 lost them, and they looked like
    weights that no checkpoint brings.
    """
    for module in model.modules():
        for name in ("_k_scale", "_v_scale", "_q_scale"):
            scale = module._parameters.pop(name, None)
            if scale is not None:
                module.register_buffer(name, scale.detach())


def _name_of(method: object) -> str:
    return f"{type(method).__module__}.{type(method).__qualname__}"
