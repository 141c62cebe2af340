"""Layers in two forms without vLLM: what a stand-in of a method derives, and what is refused."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.fp8_layers import (
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
    twin_layer,
)
from weightcast.errors import ConfigError, EngineFailure
from weightcast.plugins.vllm import derivation
from weightcast.plugins.vllm.layer_kinds import EXPERTS, LINEAR
from weightcast.plugins.vllm.twin_layer import fill


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


class Handlers(Method):
    """As vLLM's on a CPU: packs the weight into a handler that nobody can look into."""

    def process_weights_after_loading(self, layer: Any) -> None:
        packed = layer.weight.data.clone()
        layer.cpu_linear = lambda x: x @ packed.t()
        layer.weight = nn.Parameter(torch.empty(0, dtype=torch.bfloat16), requires_grad=False)

    def apply(self, layer: Any, x: torch.Tensor, bias: object) -> torch.Tensor:
        return layer.cpu_linear(x)


def test_a_handler_is_made_anew_and_checked_by_what_it_computes() -> None:
    first, second = (torch.randn(4, 6).bfloat16() for _ in range(2))
    layer, made = loaded(first, Handlers())
    found = twin_layer(layer, made, kind=LINEAR)
    bias, empty = layer.bias, layer.weight
    put(layer, found, first)
    found.check_start()
    put(layer, found, second)
    for few in (False, True):
        with pytest.raises(EngineFailure, match=r"model\.layer: cpu_linear is not derived"):
            found.check(few=few)
    found.derive()
    found.check()
    assert (layer.bias is bias, layer.weight is empty) == (True, True)
    assert torch.equal(layer.bias, second[:, 0])


class Tiles(Method):
    """As vLLM's for experts on a CPU: its kernel packs the weights once and keeps a bias."""

    def __init__(self) -> None:
        self.moe_kernel = Kernel(torch.zeros(()))
        self.moe_kernel.fused_experts = self  # type: ignore[attr-defined]

    def process_weights_after_loading(self, layer: Any) -> None:
        self.moe_kernel.scale = self.moe_kernel.scale if self.moe_kernel.scale.dim() else layer.bias
        layer.bias.data = torch.cat([layer.bias.data, torch.zeros(2, dtype=torch.bfloat16)])
        layer.weight = nn.Parameter(layer.weight.data.t().contiguous(), requires_grad=False)


def test_a_kernel_that_packs_keeps_its_own_objects() -> None:
    first, second = (torch.randn(4, 6).bfloat16() for _ in range(2))
    layer, made = loaded(first, Tiles())
    found = twin_layer(layer, made, kind=EXPERTS)
    held = layer.quant_method.moe_kernel.scale
    assert held is layer.bias
    put(layer, found, first)
    found.check_start()
    put(layer, found, second)
    found.check(few=True)
    with pytest.raises(EngineFailure, match=r"parameters\.\w+ is not derived"):
        found.check()
    found.derive()
    found.check()
    assert held is layer.bias
    assert torch.equal(held, torch.cat([second[:, 0], torch.zeros(2).bfloat16()]))
    assert torch.equal(layer.weight, second.t())


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
    with pytest.raises(ConfigError, match=r"vLLM made packed as .* and its method makes it as nothing now"):
        twin_layer(layer, made)


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
        twin_layer(layer, made)


def test_a_layer_in_another_form_than_its_method_makes_is_refused() -> None:
    layer, made = loaded(torch.randn(4, 6).bfloat16(), Method())
    layer.weight = nn.Parameter(layer.weight.data.contiguous(), requires_grad=False)
    with pytest.raises(ConfigError, match=r"vLLM made parameters\.weight as .* with strides \(4, 1\)"):
        twin_layer(layer, made)


def test_a_loader_that_replaces_a_parameter_is_refused() -> None:
    layer, found = quantised(torch.randn(4, 6).bfloat16(), Method())
    with pytest.raises(ConfigError, match=r"replaces the parameter model\.layer\.weight"), found.unpacked():
        layer.weight = nn.Parameter(torch.zeros(4, 6))


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
