"""Layers of vLLM without vLLM: which methods are known, and which layers are refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from weightcast.errors import ConfigError
from weightcast.plugins.vllm.layer_kinds import check_cache_scales, is_quantised, keep_cache_scales, why_refused


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("vllm.model_executor.layers.quantization.fp8.Fp8LinearMethod", True),
        ("vllm.model_executor.layers.quantization.online.fp8.Fp8PerBlockOnlineMoEMethod", True),
        ("vllm.model_executor.layers.quantization.online.mxfp8.Mxfp8OnlineLinearMethod", False),
        ("vllm.model_executor.layers.quantization.modelopt.ModelOptNvFp4LinearMethod", False),
        ("somebody.fp8.Fp8LinearMethod", False),
    ],
)
def test_methods_are_known_by_their_full_names(name: str, known: bool) -> None:
    module, _, short = name.rpartition(".")
    assert is_quantised(type(short, (), {"__module__": module})()) is known


def test_experts_with_static_activations_are_refused() -> None:
    module = "vllm.model_executor.layers.quantization.fp8"
    method = type("Fp8MoEMethod", (), {"__module__": module})()
    method.quant_config = SimpleNamespace(activation_scheme="static")
    assert "experts with static scales" in why_refused(method, nn.Module())
    method.quant_config = SimpleNamespace(activation_scheme="dynamic")
    assert why_refused(method, nn.Module()) == ""
    method.is_scale_e8m0 = True
    assert "powers of two" in why_refused(method, nn.Module())


PACKAGE = "vllm.model_executor.layers.quantization.compressed_tensors"
KERNELS = "vllm.model_executor.kernels.linear"


def named(path: str, **attributes: Any) -> Any:
    """An object of a class with this full name."""
    module, _, name = path.rpartition(".")
    return type(name, (), {"__module__": module, **attributes})()


@pytest.mark.parametrize(
    ("scheme", "a16", "kernel", "said"),
    [
        ("w4a4_nvfp4.CompressedTensorsW4A4Fp4", True, f"{KERNELS}.nvfp4.marlin.MarlinNvFp4LinearKernel", ""),
        (
            "w4a4_nvfp4.CompressedTensorsW4A4Fp4",
            False,
            f"{KERNELS}.nvfp4.marlin.MarlinNvFp4LinearKernel",
            "static scales of activations in CompressedTensorsW4A4Fp4",
        ),
        (
            "w4a4_nvfp4.CompressedTensorsW4A4Fp4",
            True,
            f"{KERNELS}.nvfp4.cutlass.CutlassNvFp4LinearKernel",
            "CompressedTensorsW4A4Fp4 with the kernel CutlassNvFp4LinearKernel, and not Marlin",
        ),
        (
            "w4a4_nvfp4.CompressedTensorsW4A4Fp4",
            True,
            "somebody.MarlinNvFp4LinearKernel",
            "CompressedTensorsW4A4Fp4 with the kernel MarlinNvFp4LinearKernel, and not Marlin",
        ),
        ("w8a8_mxfp8.CompressedTensorsW8A8Mxfp8", None, f"{KERNELS}.mxfp8.marlin.MarlinMxfp8LinearKernel", ""),
        (
            "w8a8_mxfp8.CompressedTensorsW8A8Mxfp8",
            None,
            f"{KERNELS}.mxfp8.emulation.EmulationMxfp8LinearKernel",
            "CompressedTensorsW8A8Mxfp8 with the kernel EmulationMxfp8LinearKernel, and not Marlin",
        ),
    ],
)
def test_packed_formats_are_for_marlin_and_for_weights_alone(
    scheme: str, a16: bool | None, kernel: str, said: str
) -> None:
    method = named(f"{PACKAGE}.compressed_tensors.CompressedTensorsLinearMethod")
    attributes = {"kernel": named(kernel)} | ({} if a16 is None else {"use_a16": a16})
    layer = SimpleNamespace(scheme=named(f"{PACKAGE}.schemes.compressed_tensors_{scheme}", **attributes))
    assert is_quantised(method)
    assert why_refused(method, layer) == said


@pytest.mark.parametrize(
    ("attributes", "said"),
    [
        ({"nvfp4_backend": SimpleNamespace(name="MARLIN")}, ""),
        ({"nvfp4_backend": SimpleNamespace(name="MARLIN"), "use_a16": True}, ""),
        (
            {"nvfp4_backend": SimpleNamespace(name="MARLIN"), "use_a16": False},
            "experts with static scales of activations in CompressedTensorsW4A4Nvfp4MoEMethod",
        ),
        (
            {"nvfp4_backend": SimpleNamespace(name="VLLM_CUTLASS")},
            "CompressedTensorsW4A4Nvfp4MoEMethod with the kernel VLLM_CUTLASS, and not Marlin",
        ),
        ({}, "CompressedTensorsW4A4Nvfp4MoEMethod with the kernel None, and not Marlin"),
    ],
)
def test_packed_experts_are_for_marlin_and_for_weights_alone(attributes: dict[str, Any], said: str) -> None:
    name = "compressed_tensors_moe.compressed_tensors_moe_w4a4_nvfp4.CompressedTensorsW4A4Nvfp4MoEMethod"
    method = named(f"{PACKAGE}.{name}", **attributes)
    assert is_quantised(method)
    assert why_refused(method, nn.Module()) == said


def test_only_some_schemes_of_compressed_tensors_are_known() -> None:
    package = "vllm.model_executor.layers.quantization.compressed_tensors"
    method = type("CompressedTensorsLinearMethod", (), {"__module__": f"{package}.compressed_tensors"})()
    assert is_quantised(method)
    for name, module, said in (
        ("CompressedTensorsW8A8Fp8", f"{package}.schemes.compressed_tensors_w8a8_fp8", ""),
        ("CompressedTensorsW8A8Fp8", "somebody", "the scheme CompressedTensorsW8A8Fp8"),
        ("CompressedTensorsW8A8Mxfp8", f"{package}.schemes.x", "the scheme CompressedTensorsW8A8Mxfp8"),
    ):
        layer = SimpleNamespace(scheme=type(name, (), {"__module__": module})())
        assert why_refused(method, layer) == said
    static = type("CompressedTensorsW8A8Fp8", (), {"__module__": f"{package}.schemes.compressed_tensors_w8a8_fp8"})()
    static.is_static_input_scheme = True
    assert "static scales of activations" in why_refused(method, SimpleNamespace(scheme=static))
    experts = SimpleNamespace(static_input_scales=True)
    assert "experts with static scales" in why_refused(experts, nn.Module())


@pytest.mark.parametrize(
    "name",
    ["model.layers.0.self_attn.k_scale", "model.layers.0.self_attn.attn.v_scale", "l.0.self_attn.k_proj.output_scale"],
)
def test_scales_of_the_cache_that_no_update_reaches_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"scales of the KV cache \(.*_scale\)"):
        check_cache_scales(["lm_head.weight", name])


def test_other_names_that_a_loader_skips_are_not_scales_of_the_cache() -> None:
    check_cache_scales(
        ["lm_head.weight", "mtp.0.q_proj.weight_scale", "mtp.0.q_proj.input_scale", "a.weight_scale_inv"]
    )


def test_scales_of_the_cache_that_are_parameters_become_buffers_of_the_same_memory() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Module())
    attention = model[1]
    attention.register_buffer("_k_scale", torch.ones(()))
    scale = nn.Parameter(torch.full((1,), 2.0))
    attention._k_scale = scale  # as vLLM 0.25 does for compressed-tensors: no buffer any more
    assert [name for name, _ in model.named_parameters()] == ["0.weight", "0.bias", "1._k_scale"]
    keep_cache_scales(model)
    assert [name for name, _ in model.named_parameters()] == ["0.weight", "0.bias"]
    assert dict(model.named_buffers())["1._k_scale"].data_ptr() == scale.data_ptr()
    assert attention._k_scale is dict(model.named_buffers())["1._k_scale"]
