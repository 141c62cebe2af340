"""Copies of weights in kernels and attention backends are found, renewed and checked."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from weightcast.errors import ConfigError, EngineFailure
from weightcast.plugins.vllm.weight_copies import AttentionCopies, OutsideReferences


class QuantConfig:
    """Holds a bias that it was given once, as vLLM's kernels for experts do."""

    def __init__(self, bias: torch.Tensor) -> None:
        self.bias = bias


class Experts(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(4), requires_grad=False)
        given = {"object": lambda: self.bias, "view": lambda: self.bias.data[1:], "nobody": lambda: torch.ones(4)}[
            how
        ]()
        self.kernel: Any = SimpleNamespace(config=QuantConfig(given))


@pytest.mark.parametrize("how", ["object", "view"])
def test_a_kernel_that_keeps_a_replaced_parameter_is_named(how: str) -> None:
    model = nn.ModuleDict({"experts": Experts(how)})
    outside = OutsideReferences(model)
    outside.check()
    with torch.no_grad():
        model["experts"].bias.copy_(torch.randn(4))
    outside.check()
    model["experts"].bias = nn.Parameter(torch.randn(4), requires_grad=False)
    with pytest.raises(EngineFailure, match=r"QuantConfig still computes with the old experts\.bias"):
        outside.check()


def test_parameters_that_moved_as_they_are_take_their_references_along() -> None:
    model = nn.ModuleDict({"experts": Experts("object")})
    outside = OutsideReferences(model)
    model["experts"].bias.data = torch.randn(4)
    outside.check()
    view = nn.ModuleDict({"experts": Experts("view")})
    outside = OutsideReferences(view)
    view["experts"].bias.data = torch.randn(4)
    with pytest.raises(EngineFailure, match=r"QuantConfig still computes with the old experts\.bias"):
        outside.check()


def test_tensors_that_the_compiler_traced_with_have_no_memory_to_look_at() -> None:
    model = nn.ModuleDict({"experts": Experts("object")})
    kept = [FakeTensorMode().from_tensor(torch.zeros(4)), torch._to_functional_tensor(torch.zeros(4))]
    with warnings.catch_warnings():  # a warning or an error, by the version of torch
        warnings.simplefilter("error")
        OutsideReferences(model).check()
    del kept


class Wrapper(torch.Tensor):
    """As a DTensor: it has a shape and a device, and its memory is that of the tensor that it wraps."""

    @staticmethod
    def __new__(cls, wrapped: torch.Tensor) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, wrapped.shape, dtype=wrapped.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, *args: Any, **more: Any) -> Any:
        raise NotImplementedError(func)


def test_wrappers_of_other_tensors_in_the_process_have_no_memory_to_look_at() -> None:
    model = nn.ModuleDict({"experts": Experts("object")})
    kept = Wrapper(torch.zeros(4))
    outside = OutsideReferences(model)
    model["experts"].bias = nn.Parameter(torch.randn(4), requires_grad=False)
    with pytest.raises(EngineFailure, match="still computes with the old"):
        outside.check()
    del kept


def test_parameter_without_outside_references_may_be_replaced() -> None:
    model = nn.ModuleDict({"experts": Experts("nobody")})
    outside = OutsideReferences(model)
    model["experts"].bias = nn.Parameter(torch.randn(4), requires_grad=False)
    outside.check()


class Attention(nn.Module):
    def __init__(self, sinks: torch.Tensor) -> None:
        super().__init__()
        self.impl = SimpleNamespace(sinks=sinks)


class Block(nn.Module):
    """gpt-oss: the sinks are a parameter of the block, and the attention below gets them when it is made."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.randn(3).bfloat16(), requires_grad=False)
        self.attn = Attention(self.sinks.float() if how == "copy" else self.sinks)


def test_a_copy_of_sinks_is_renewed_at_its_address() -> None:
    model = nn.ModuleDict({"block": Block("copy")})
    copies = AttentionCopies(model)
    copies.check()
    held = model["block"].attn.impl.sinks
    with torch.no_grad():
        model["block"].sinks.copy_(torch.randn(3))
    with pytest.raises(EngineFailure, match=r"block\.attn computes with other attention sinks"):
        copies.check()
    copies.renew()
    copies.check()
    assert model["block"].attn.impl.sinks is held
    assert torch.equal(held, model["block"].sinks.float())


def test_a_copy_of_sinks_from_the_first_forward_is_renewed_too() -> None:
    """vLLM on CPUs casts float16 sinks in the first forward, when the receiver has looked at the model already."""
    model = nn.ModuleDict({"block": Block("same")})
    copies = AttentionCopies(model)
    made = model["block"].attn.impl.sinks = model["block"].sinks.detach().float()
    with torch.no_grad():
        model["block"].sinks.copy_(torch.randn(3))
    with pytest.raises(EngineFailure, match=r"block\.attn computes with other attention sinks"):
        copies.check()
    copies.renew()
    copies.check()
    assert model["block"].attn.impl.sinks is made


def test_sinks_that_are_the_parameter_need_nothing() -> None:
    model = nn.ModuleDict({"block": Block("same")})
    copies = AttentionCopies(model)
    with torch.no_grad():
        model["block"].sinks.copy_(torch.randn(3))
    copies.check()


def test_sinks_of_an_unknown_origin_are_refused() -> None:
    model = nn.ModuleDict({"block": nn.ModuleDict({"attn": Attention(torch.randn(3))})})
    with pytest.raises(ConfigError, match=r"block\.attn keeps its own copy of attention sinks"):
        AttentionCopies(model)


class Latent(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.impl = SimpleNamespace()
        self.kv_b_proj = nn.Linear(4, 6, bias=False)
        up = self.kv_b_proj.weight.data.t()[:, :3]
        self.W_UV = up if how == "view" else up.clone()


def test_absorbed_matrices_must_be_views_of_their_projection() -> None:
    AttentionCopies(nn.ModuleDict({"attn": Latent("view")}))
    with pytest.raises(ConfigError, match=r"attn computes with its own copy of kv_b_proj \(W_UV\)"):
        AttentionCopies(nn.ModuleDict({"attn": Latent("copy")}))
