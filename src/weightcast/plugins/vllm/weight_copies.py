"""References and copies of weights that a vLLM model holds outside its parameters and buffers.

A kernel or an attention backend may keep a parameter object that it was given once, or a copy in another dtype.
New weights must reach those too, so this module finds them, renews them, and checks that they are renewed.
"""

# vLLM is not installed where this is checked.
# pyright: reportPrivateUsage=false
from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from weightcast.errors import ConfigError, EngineFailure


class OutsideReferences:
    """All tensor objects of this process that share memory with a model's parameters and buffers.

    A kernel may hold such an object, or the parameter itself.  If the layer's parameter is replaced, that object keeps
    the old weights.  The objects are found once, through Python's garbage collector, and are referred to weakly.
    """

    def __init__(self, model: nn.Module) -> None:
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        names = {_storage_of(tensor): name for name, tensor in tensors.items() if tensor.numel()}
        # The model's own tensors where they are now, so that a check walks through no modules: it is part of a commit.
        self._places = {name: _place_of(model, name) for name in names.values()}
        self._found: list[tuple[str, weakref.ref[torch.Tensor]]] = []
        for candidate in gc.get_objects():
            # isinstance would ask proxies for their class, and lazy modules would be imported.
            if not issubclass(type(candidate), torch.Tensor):
                continue
            tensor: torch.Tensor = candidate
            if tensor.layout is torch.strided and not tensor.is_meta and not _has_no_memory(tensor) and tensor.numel():
                name = names.get(_storage_of(tensor))
                if name is not None:
                    self._found.append((name, weakref.ref(tensor)))

    def check(self) -> None:
        """Raises ``EngineFailure`` if something holds memory that a parameter had at start and has no longer."""
        with torch._C.DisableTorchFunctionSubclass():  # vLLM's parameters are a subclass, whose every call takes longer
            now = {
                name: current.untyped_storage().data_ptr()
                for name, (tensors, leaf) in self._places.items()
                if (current := tensors.get(leaf)) is not None
            }
            stale: list[tuple[str, str]] = []
            for name, reference in self._found:  # a comprehension's own variables would be found as holders
                tensor = reference()
                if tensor is None or not tensor.numel() or tensor.untyped_storage().data_ptr() == now.get(name):
                    continue
                stale.append((name, _holder(tensor)))
        if stale:
            name, holder = next((found for found in stale if found[1]), stale[0])
            raise EngineFailure(
                f"{holder or 'something'} still computes with the old {name}: it holds memory that {name} had before"
            )


class AttentionCopies:
    """Copies of weights in attention layers: sinks in float32, and MLA's absorbed matrices.

    ``renew`` updates sinks in place, since vLLM 0.25 keeps no reference to the parameter that it copied.  Some backends
    make their copy after loading and others in their first forward, so copies are looked for each time.  MLA's matrices
    must be views of ``kv_b_proj``.
    """

    def __init__(self, model: nn.Module) -> None:
        """Checks the copies that exist already; raises ``ConfigError`` for one that cannot be renewed here."""
        self._modules = dict(model.named_modules())
        self._layers = [name for name, layer in self._modules.items() if hasattr(layer, "impl")]
        for _ in self._copies():
            pass
        for name in self._layers:
            _check_mla(name, self._modules[name])

    def renew(self) -> None:
        """Copies the live parameters into the copies, at the same addresses.  This is a finisher.

        Raises:
            ConfigError: A layer has made a copy that cannot be renewed here.
        """
        with torch.no_grad():
            for _, tensor, parameter in self._copies():
                tensor.copy_(parameter)

    def check(self) -> None:
        """Compares the copies with the live parameters; raises ``EngineFailure`` if a copy has other values."""
        for name, tensor, parameter in self._copies():
            if not torch.equal(tensor, parameter.to(tensor.dtype)):
                raise EngineFailure(f"{name} computes with other attention sinks than it keeps")

    def _copies(self) -> Iterator[tuple[str, torch.Tensor, nn.Parameter]]:
        """Yields each copy of sinks with the name of its layer and the parameter that it was made from."""
        for name in self._layers:
            above = self._modules.get(name.rpartition(".")[0])
            found = dict(above.named_parameters(recurse=False)) if above is not None else {}
            for implementation in _implementations(self._modules[name]):
                sinks = getattr(implementation, "sinks", None)
                if not isinstance(sinks, torch.Tensor):
                    continue
                if any(_storage_of(parameter) == _storage_of(sinks) for parameter in found.values()):
                    continue
                parameter = found.get("sinks")
                if parameter is None or parameter.shape != sinks.shape:
                    raise ConfigError(
                        f"{name} keeps its own copy of attention sinks, made from an unknown parameter",
                        hint="use another attention backend (--attention-backend), or vLLM's own weight transfer",
                    )
                yield name, sinks, parameter


def _implementations(layer: nn.Module) -> Iterator[Any]:
    """Yields the attention backends of a layer: one, or the variants of a composite one."""
    implementation = getattr(layer, "impl", None)
    if implementation is None:
        return
    yield implementation
    variants = getattr(implementation, "get_impl_variants", None)
    if callable(variants):
        yield from variants()  # type: ignore[misc]  vLLM's own


def _check_mla(name: str, layer: nn.Module) -> None:
    projection = getattr(layer, "kv_b_proj", None)
    if not hasattr(layer, "impl") or not isinstance(projection, nn.Module):
        return
    weight = getattr(projection, "weight", None)
    absorbed = {
        key: value
        for key in ("W_UV", "W_UK_T", "W_K", "W_V", "W_UK_T_dcp_qrep")
        if isinstance(value := getattr(layer, key, None), torch.Tensor)
    }
    own = [
        key
        for key, tensor in absorbed.items()
        if not isinstance(weight, torch.Tensor) or _storage_of(tensor) != _storage_of(weight)
    ]
    if own or not absorbed:
        kept = " and ".join(own) or "packed matrices"
        raise ConfigError(
            f"{name} computes with its own copy of kv_b_proj ({kept}), which weightcast cannot update",
            hint="use another attention backend (--attention-backend), or vLLM's own weight transfer",
        )


def _place_of(model: nn.Module, name: str) -> tuple[dict[str, torch.Tensor | None], str]:
    """The module's own dictionary that holds a parameter or buffer, and its key there."""
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    tensors: Any = module._parameters if leaf in module._parameters else module._buffers
    return tensors, leaf


def _has_no_memory(tensor: torch.Tensor) -> bool:
    """True for what torch.compile traces with and may keep, and for a wrapper of other tensors, such as a DTensor."""
    if isinstance(tensor, FakeTensor | FunctionalTensor) or torch._is_functional_tensor(tensor):
        return True
    try:
        tensor.untyped_storage().data_ptr()
    except RuntimeError:  # torch knows no other question; what is wrapped is looked at by itself
        return True
    return False


def _storage_of(tensor: torch.Tensor) -> tuple[str, int]:
    return str(tensor.device), tensor.untyped_storage().data_ptr()


def _holder(tensor: torch.Tensor) -> str:
    """Returns the class of the first object that holds a tensor; empty if Python finds none."""
    for referrer in gc.get_referrers(tensor):
        if isinstance(referrer, dict):
            owners = [owner for owner in gc.get_referrers(referrer) if getattr(owner, "__dict__", None) is referrer]
            if owners:
                return type(owners[0]).__name__
        elif not isinstance(referrer, list | tuple) and type(referrer).__name__ != "frame":
            return type(referrer).__name__
    return ""
