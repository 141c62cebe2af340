"""fp8 layers without vLLM: what a stand-in of a method derives, and what is refused."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.fp8_layers import (
    CPU,
    VLLM,
    Kernel,
    Layer,
    Method,
    Recorders,
    Replays,
    loaded,
    put,
    quantised,
    stand_in_for_vllm,
)
from weightcast.errors import ConfigError, EngineFailure
from weightcast.plugins.vllm import derivation
from weightcast.plugins.vllm.quantised_layers import (
    QuantisedLayer,
    check_cache_scales,
    fill,
    is_quantised,
    keep_cache_scales,
    why_refused,
)


@pytest.fixture(autouse=True)
def without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_for_vllm(monkeypatch)


def addresses(layer: Layer) -> list[int]:
    return [tensor.data_ptr() for tensor in (*layer.parameters(), layer.quant_method.kernel.scale)]


def test_what_is_derived_is_what_the_method_derives_and_stays_in_its_place() -> None:
    first, second = (torch.randn(4, 6).bfloat16() for _ in range(2))
    layer, found = quantised(first, Method())
    held = addresses(layer)
    found.check_start()
    assert found.own_bytes == 4 * 6 * 2, "the bias is not derived from anything"
    put(layer, found, second)
    assert found.first_difference() == "parameters.weight"
    found.derive()
    found.check()
    wanted, _ = loaded(second, Method())
    assert torch.equal(layer.weight.view(torch.uint8), wanted.weight.view(torch.uint8))
    assert torch.equal(layer.quant_method.kernel.scale, wanted.weight_scale)
    assert torch.equal(layer.bias, second[:, 0])
    assert addresses(layer) == held


class Greedy(Method):
    """Quantises where the loaded weight is."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.weight.data.mul_(2)
        super().process_weights_after_loading(layer)


@pytest.mark.parametrize("method", [Method, Greedy])
def test_a_recording_derives_what_the_method_derives_and_writes_into_nothing_that_was_loaded(
    method: type[Method],
) -> None:
    recorders: Any = Recorders()
    first, second = (torch.randn(4, 6).bfloat16() for _ in range(2))
    layer, found = quantised(first, method())
    assert found.record(recorders)
    found.check_start()
    [recording] = recorders.made
    launched = recording.launched
    for weight, moved in ((second, False), (first, False), (second, True), (first, False)):
        recording.moved = moved
        put(layer, found, weight)
        found.derive()
        found.check()
        assert torch.equal(found.loaded["weight"].data, weight)
        wanted, _ = loaded(weight.clone(), method())
        assert torch.equal(layer.weight.view(torch.uint8), wanted.weight.view(torch.uint8))
    assert recording.launched == launched + 2, "what has moved is never launched again"


@pytest.mark.parametrize("make", [lambda _: None, lambda _: Replays(lambda: None)], ids=["none", "another"])
def test_a_recording_that_does_something_else_is_not_used(make: Any) -> None:
    recorders: Any = Recorders(make)
    first, second = (torch.randn(4, 6).bfloat16() for _ in range(2))
    layer, found = quantised(first, Method())
    assert not found.record(recorders)
    found.check_start()
    put(layer, found, second)
    found.derive()
    found.check()


@pytest.mark.parametrize("disturbed", [False, True])
def test_layers_are_derived_side_by_side_unless_they_disturb_one_another(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *, disturbed: bool
) -> None:
    weights = [torch.randn(4, 6).bfloat16() for _ in range(5)]
    pairs = [quantised(weight, Method()) for weight in weights]
    beside: list[int] = []

    @contextmanager
    def together(recorders: Any) -> Generator[None]:
        beside.append(len(recorders))
        yield
        if disturbed and len(recorders) > 1:
            pairs[3][0].weight.data.view(torch.uint8).add_(1)

    monkeypatch.setattr(derivation, "side_by_side", together)
    recorders: list[Any] = [Recorders() for _ in range(2)]
    found = derivation.Derivation([layer for _, layer in pairs])
    assert found.record(recorders) == 5
    assert [len(recorder.made) for recorder in recorders] == [3, 2]
    assert beside == ([2, 0] if disturbed else [2])
    assert ("one by one" in caplog.text) == disturbed
    for layer, kept in pairs:
        put(layer, kept, torch.randn(4, 6).bfloat16())
    found.run()
    for _, kept in pairs:
        kept.check()


def test_a_start_from_other_weights_than_the_checkpoints_is_refused() -> None:
    first = torch.randn(4, 6).bfloat16()
    layer, found = quantised(first, Method())
    put(layer, found, torch.cat([first[:, :1], first[:, 1:] * 2], dim=1))  # with the same bias
    with pytest.raises(ConfigError, match=r"model\.layer \(Method\): what vLLM made of parameters\.weight"):
        found.check_start()


def test_a_kernel_that_holds_other_weights_is_named() -> None:
    layer, found = quantised(torch.randn(4, 6).bfloat16(), Method())
    layer.quant_method.kernel.scale.data.mul_(2)
    with pytest.raises(EngineFailure, match="computes with other weights than it keeps"):
        found.check()


def test_a_scale_that_kernels_keep_as_a_number_is_refused_when_it_would_change() -> None:
    method = Method()
    method.number = True
    first = torch.randn(4, 6).bfloat16()
    layer, found = quantised(first, method)
    found.check_start()
    put(layer, found, first)
    found.derive()
    put(layer, found, first * 2)
    with pytest.raises(EngineFailure, match="kernels keep scale_float as a number"):
        found.derive()


def test_a_layer_with_more_than_its_method_makes_is_refused() -> None:
    layer, made = loaded(torch.randn(4, 6).bfloat16(), Method())
    layer.packed = torch.zeros(3)
    with pytest.raises(ConfigError, match="packed is a tensor in the live layer only"):
        QuantisedLayer("model.layer", layer, made, frozenset(), CPU)


def test_what_the_method_makes_only_once_is_made_anew_too() -> None:
    class Once(Method):
        def process_weights_after_loading(self, layer: Any) -> None:
            if not hasattr(layer, "sums"):
                layer.sums = layer.weight.data.float().sum(dim=1)
            super().process_weights_after_loading(layer)

    first, second = (torch.randn(4, 6).bfloat16() for _ in range(2))
    layer, found = quantised(first, Once())
    found.check_start()
    put(layer, found, second)
    found.derive()
    assert torch.equal(layer.sums, second.float().sum(dim=1))


def test_a_tensor_of_a_kernel_that_is_not_made_anew_is_refused() -> None:
    class Keeps(Method):
        kept: Any = None

        def process_weights_after_loading(self, layer: Any) -> None:
            self.kept = self.kept or Kernel(layer.weight.data.float().sum(dim=1))
            super().process_weights_after_loading(layer)

    Keeps.__module__ = VLLM
    layer, made = loaded(torch.randn(4, 6).bfloat16(), Keeps())
    with pytest.raises(ConfigError, match=r"vLLM's method does not make quant_method\.kept\.scale anew"):
        QuantisedLayer("model.layer", layer, made, frozenset(), CPU)


def test_a_layer_in_another_form_than_its_method_makes_is_refused() -> None:
    layer, made = loaded(torch.randn(4, 6).bfloat16(), Method())
    layer.weight = nn.Parameter(layer.weight.data.contiguous(), requires_grad=False)
    with pytest.raises(ConfigError, match=r"vLLM made parameters\.weight as .* with strides \(4, 1\)"):
        QuantisedLayer("model.layer", layer, made, frozenset(), CPU)


def test_a_loader_that_replaces_a_parameter_is_refused() -> None:
    layer, found = quantised(torch.randn(4, 6).bfloat16(), Method())
    with pytest.raises(ConfigError, match=r"replaces the parameter model\.layer\.weight"), found.unpacked():
        layer.weight = nn.Parameter(torch.zeros(4, 6))


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


def test_locks_of_a_kernel_are_neither_compared_nor_written() -> None:
    class Locks(Method):
        def process_weights_after_loading(self, layer: Any) -> None:
            layer.workspace = torch.zeros(4, dtype=torch.int32)
            super().process_weights_after_loading(layer)

    first, second = (torch.randn(4, 6).bfloat16() for _ in range(2))
    layer, found = quantised(first, Locks())
    found.check_start()
    layer.workspace[1] = 7  # a kernel is at work
    found.check()
    put(layer, found, second)
    found.derive()
    found.check()
    assert layer.workspace.tolist() == [0, 7, 0, 0]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float8_e4m3fn])
def test_a_trial_changes_every_dtype_and_gives_parts_one_global_scale(dtype: torch.dtype) -> None:
    tensor = torch.zeros(64).to(dtype)
    fill(tensor)
    assert len(set(tensor.float().tolist())) > 8, "a method that leaves a tensor as it is would not be told from others"
    scale = torch.zeros(3)
    fill(scale, alike=True)
    assert scale.unique().numel() == 1
    assert 0 < float(scale[0]) < 1


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
