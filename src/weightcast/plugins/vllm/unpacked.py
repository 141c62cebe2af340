"""The weights of a vLLM model as its loader writes them, where the model computes with something made from them.

On a CPU vLLM packs linear layers into oneDNN handlers and experts into tiles, and drops or overwrites what was loaded.
This module keeps the loaded form beside the model (so an update can be staged, read back and undone), lends it
to the model while ``load_weights`` runs, makes the packed form anew after a commit, and checks that the kernels
compute with it: a linear layer applied to unit vectors answers with the columns of its weight, exactly.

It knows vLLM's layers; messages, routes and sessions it does not.
"""

# vLLM is not installed where this is checked.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportPrivateUsage=false
from __future__ import annotations

import copy
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from weightcast.errors import ConfigError, EngineFailure
from weightcast.receiver.loader import residents_of
from weightcast.wire.digest import tensor_digest

_PROBE_ROWS = 256
_FEW_ROWS = 8


@dataclass(slots=True, kw_only=True)
class _Packed:
    """A layer that computes with something made from what was loaded.

    Attributes:
        name: In the model.
        layer: The module.
        loaded: What the loader writes, by parameter name; the same tensors for the life of the model.
        kind: ``linear`` or ``experts``.
        live: The parameters that the layer has while ``loaded`` takes their place.
    """

    name: str
    layer: Any
    loaded: dict[str, nn.Parameter]
    kind: str
    live: dict[str, nn.Parameter | None] = field(default_factory=dict[str, "nn.Parameter | None"])


class UnpackedModel:
    """One rank's vLLM model, with the loaded form of its weights."""

    def __init__(self, model: nn.Module, *, device: torch.device) -> None:
        """Find out which layers pack their weights, and make room for the loaded form of those.

        Raises:
            ConfigError: A layer makes something of its weights that is not understood here (quantisation, say).
        """
        self._model = model
        self._packed: list[_Packed] = []
        self._derived: list[tuple[str, Any]] = []  # modules of vLLM, whose attributes are not known here
        self._as_found: dict[str, dict[str, str]] = {}
        for name, layer in model.named_modules():
            method = getattr(layer, "quant_method", None)
            if method is None or not dict(layer.named_parameters(recurse=False)):
                continue
            kind = _kind(name, layer, method, device)
            if kind == "embedding":
                self._derived.append((name, layer))
            elif kind == "experts in place":
                self._as_found[name] = _digests(layer)
            elif kind != "plain":
                self._packed.append(_Packed(name=name, layer=layer, loaded=_loaded_form(layer), kind=kind))
        with self._unpacked():
            self.residents = residents_of(model)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> object:
        """The model's own ``load_weights``, writing the loaded form."""
        with self._unpacked():
            return self._model.load_weights(weights)  # type: ignore[operator]  vLLM's models all have it

    def pack(self) -> None:
        """Make what the model computes with from what was loaded; a finisher, for a model that holds still."""
        with torch.no_grad():
            for part in self._packed:
                if part.kind == "experts":
                    for name, tensor in _packed_experts(part).items():
                        part.layer._parameters[name] = tensor
                else:
                    part.layer._parameters.update(part.loaded)
                    _process(part.layer)
            for _, layer in self._derived:
                _process(layer)

    def check_layouts(self) -> None:
        """After the first weights were loaded once more: do experts that are kept in place lie as they are loaded?

        Raises:
            ConfigError: Their kernels want them otherwise; an update would mix them up.
        """
        layers = dict(self._model.named_modules())
        for name, digests in self._as_found.items():
            if _digests(layers[name]) != digests:
                raise ConfigError(
                    f"the kernels of {name} keep experts in another layout than they are loaded in",
                    hint="another backend for experts (the triton one keeps them), or vLLM's own weight transfer",
                )

    def spot_check(self) -> None:
        """As ``check``, with a few columns of each linear layer."""
        self._check(_FEW_ROWS)

    def check(self) -> None:
        """Does the model compute with what was loaded, to the last element?  Changes nothing.

        Raises:
            EngineFailure: A layer does not; it is named.
        """
        self._check(None)

    def _check(self, rows: int | None) -> None:
        wrong: list[str] = []
        with torch.no_grad():
            for part in self._packed:
                if part.kind == "experts":
                    same = rows is not None or all(
                        torch.equal(part.layer._parameters[name], tensor)
                        for name, tensor in _packed_experts(part).items()
                    )
                else:
                    same = _computes_with(part.layer, part.loaded["weight"], rows)
                if not same:
                    wrong.append(part.name)
            wrong += [
                name for name, layer in self._derived if not _computes_with(layer, layer.weight, rows or _PROBE_ROWS)
            ]
        if wrong:
            shown = ", ".join(wrong[:4]) + (f" and {len(wrong) - 4} more" if len(wrong) > 4 else "")
            raise EngineFailure(f"computes with other weights than it keeps in {shown}")

    @contextmanager
    def _unpacked(self) -> Generator[None]:
        """The model with the loaded form in its layers.  Not while it computes."""
        for part in self._packed:
            part.live = {name: part.layer._parameters.get(name) for name in part.loaded}
            part.layer._parameters.update(part.loaded)
        try:
            yield
            for part in self._packed:
                moved = [name for name, tensor in part.loaded.items() if part.layer._parameters.get(name) is not tensor]
                if moved:
                    raise ConfigError(f"load_weights puts another parameter in the place of {part.name}.{moved[0]}")
        finally:
            for part in self._packed:
                part.layer._parameters.update(part.live)
                part.live = {}


def _kind(name: str, layer: Any, method: Any, device: torch.device) -> str:
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    on_cpu = device.type == "cpu"
    if type(method) is UnquantizedEmbeddingMethod:
        return "embedding" if on_cpu and hasattr(layer, "cpu_linear") else "plain"
    if type(method) is UnquantizedLinearMethod:
        packed = on_cpu and tuple(layer.weight.shape) != tuple(_recorded(layer)["weight"].shape)
        return "linear" if packed else "plain"
    if type(method) is UnquantizedFusedMoEMethod:
        if on_cpu:
            return "experts"
        if all(dict(layer.named_parameters())[key].shape == meta.shape for key, meta in _recorded(layer).items()):
            return "experts in place"
    raise ConfigError(
        f"{name} makes something of its weights that cannot be followed here: {type(method).__name__}",
        hint="a model without quantisation, or vLLM's own weight transfer",
    )


def _digests(layer: nn.Module) -> dict[str, str]:
    return {name: tensor_digest(parameter.data) for name, parameter in layer.named_parameters(recurse=False)}


def _recorded(layer: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters of a layer as they were before vLLM processed them, on the meta device."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    return get_layerwise_info(layer).restore_metadata[0]


def _loaded_form(layer: nn.Module) -> dict[str, nn.Parameter]:
    from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor
    from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

    found: dict[str, nn.Parameter] = {}
    for name, meta in _recorded(layer).items():
        tensor = restore_layer_refs(materialize_meta_tensor(meta), layer)
        tensor.data.zero_()
        found[name] = tensor
    return found


def _process(layer: Any) -> None:
    """vLLM's own packing of one layer, as after a first load."""
    for name in ("_already_called_process_weights_after_loading", "cpu_linear"):
        if hasattr(layer, name):  # the old packed weights go before the new ones are made
            delattr(layer, name)
    layer.quant_method.process_weights_after_loading(layer)
    if hasattr(layer, "update_param_tp_status"):
        layer.update_param_tp_status()  # type: ignore[operator]


def _packed_experts(part: _Packed) -> dict[str, nn.Parameter]:
    """The experts' kernel packs what it is given; what it is given here is a copy of the layer with copies of the
    weights.  vLLM itself leaves this step out when weights are loaded again."""
    experts = part.layer.quant_method.moe_kernel.fused_experts
    twin = copy.copy(part.layer)
    twin._parameters = dict(part.layer._parameters)
    for name, tensor in part.loaded.items():
        fresh = nn.Parameter(tensor.detach().clone(), requires_grad=False)
        vars(fresh).update(vars(tensor))
        twin._parameters[name] = fresh
    experts.process_weights_after_loading(twin)
    return {name: tensor for name in part.loaded if (tensor := twin._parameters[name]) is not None}


def _computes_with(layer: Any, weight: torch.Tensor, rows: int | None) -> bool:
    """Is ``layer(x)`` the product with this weight?

    Unit vectors make it answer with columns of the weight, exactly: every sum has one term that is not zero.

    Args:
        layer: A linear layer (or an embedding that is used as one).
        weight: Shape (outputs, inputs).
        rows: How many unit vectors to try, at random; None for all.
    """
    inputs = int(weight.shape[1])
    wanted = torch.arange(inputs) if rows is None or rows >= inputs else torch.randperm(inputs)[:rows]
    for start in range(0, len(wanted), _PROBE_ROWS):
        columns = wanted[start : start + _PROBE_ROWS].to(weight.device)
        unit = torch.zeros(len(columns), inputs, dtype=weight.dtype, device=weight.device)
        unit[torch.arange(len(columns), device=weight.device), columns] = 1
        answer = layer.quant_method.apply(layer, unit, None)
        if not torch.equal(answer, weight[:, columns].t()):
            return False
    return True
