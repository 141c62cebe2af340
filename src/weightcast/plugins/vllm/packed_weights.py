"""Keeps the loaded form of weights that vLLM packs or quantises, and packs them again after each commit.

On a CPU vLLM packs linear layers into oneDNN handlers and experts into tiles, and drops or overwrites the loaded form.
This module keeps the loaded form beside the model, so an update can be staged, read back and reverted.  It puts the
loaded form into the model while ``load_weights`` runs and packs it again after a commit.

It also checks that the kernels compute with the new weights: a linear layer applied to unit vectors returns the columns
of its weight, exactly.  A tensor that a kernel holds by reference, such as the biases of experts, gets new contents and
never a new object.
"""

# vLLM is not installed where this is checked.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportPrivateUsage=false
from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from weightcast.digest.definition import tensor_digest
from weightcast.errors import ConfigError, EngineFailure, some
from weightcast.plugins.vllm.derivation import Derivation
from weightcast.plugins.vllm.derived_ahead import DerivedAhead, all_derived
from weightcast.plugins.vllm.lora_wrappers import without_wrappers
from weightcast.plugins.vllm.quantised_layers import QuantisedLayer, is_quantised, keep_cache_scales, why_refused
from weightcast.plugins.vllm.weight_copies import AttentionCopies, OutsideReferences
from weightcast.receiver.loader import residents_of
from weightcast.runtime.recorded_launches import LaunchRecorder

_LANES = 3  # layers that are derived side by side; each takes the memory that deriving a layer takes
_PROBE_ROWS = 256
_FEW_ROWS = 8
_SMALL = 1e-3
_KEEP_LAYOUT = ("TRITON", "BATCHED_TRITON")  # vLLM's names of kernels that compute with experts as they are loaded


@dataclass(slots=True, kw_only=True)
class _Packed:
    """A layer that computes with a packed form of its weights.

    Attributes:
        loaded: Tensors that the loader writes, by parameter name; they live as long as the model.
        kind: ``linear``, ``experts`` or ``convolution``.
        live: Parameters of the layer while ``loaded`` takes their place.
    """

    name: str
    layer: Any
    loaded: dict[str, nn.Parameter]
    kind: str
    live: dict[str, nn.Parameter | None] = field(default_factory=dict[str, "nn.Parameter | None"])


class UnpackedModel:
    """One rank's vLLM model, with the loaded form of its weights."""

    def __init__(self, model: nn.Module, *, device: torch.device, layers: Collection[str] | None = None) -> None:
        """Finds the layers that pack their weights, and allocates the loaded form of those.

        Args:
            layers: Names of the modules that are its own; None for all of them.

        Raises:
            ConfigError: A layer transforms its weights in a way that is not supported, for example quantisation.
        """
        self._model = model
        self._device = device
        self._packed: list[_Packed] = []
        self._derived: list[tuple[str, Any]] = []  # Any: vLLM is not installed where types are checked
        self._as_found: dict[str, dict[str, str]] = {}
        self._quantised: list[QuantisedLayer] = []
        keep_cache_scales(model)
        for name, layer in model.named_modules():
            method = getattr(layer, "quant_method", None)
            if method is None or not dict(layer.named_parameters(recurse=False)):
                continue
            if layers is not None and name not in layers:
                continue
            kind = _kind(name, layer, method, device)
            if kind == "embedding":
                self._derived.append((name, layer))
            elif kind == "experts in place":
                self._as_found[name] = _digests(layer)
            elif kind == "quantised":
                self._quantised.append(_quantised_layer(name, layer, device))
            elif kind != "plain":
                self._packed.append(_Packed(name=name, layer=layer, loaded=_loaded_form(layer), kind=kind))
        self._derivation = Derivation(self._quantised)
        self._second: DerivedAhead | None = None
        self._outside = OutsideReferences(model)
        self._attention = AttentionCopies(model)
        with self._unpacked():
            self.residents = {
                name: tensor
                for name, tensor in residents_of(model).items()
                if layers is None or name.rpartition(".")[0] in layers
            }
        unread = (f"{layer.name}.{key}" for layer in self._quantised for key in layer.unread)
        with without_wrappers(model):  # as the residents are named
            self.constants = frozenset((*_constants(model), *unread))

    @property
    def as_loaded(self) -> bool:
        """True if each layer computes with what the loader has written, so no value has to be read once more."""
        return not (self._packed or self._as_found or self._quantised)

    @property
    def quantised_bytes(self) -> int:
        """Memory that the loaded form of quantised layers takes beside the live one."""
        return sum(layer.own_bytes for layer in self._quantised)

    @property
    def derived(self) -> Mapping[str, torch.Tensor]:
        """As ``all_derived``."""
        return all_derived(self._quantised)

    @property
    def derives_ahead(self) -> bool:
        """True if a commit finds what is derived for quantised layers ready."""
        return self._derivation.ahead is not None

    @property
    def outside_bytes(self) -> int:
        """As ``DerivedAhead.outside_bytes``."""
        return self._second.outside_bytes if self._second is not None else 0

    def fall_asleep(self, *, discard: bool) -> None:
        """As ``DerivedAhead.fall_asleep``; and so are ``let_go``, ``restore`` and ``wake``."""
        if self._second is not None:
            self._second.fall_asleep(discard=discard)

    def let_go(self) -> int:
        """Frees live tensors that vLLM's sleep does not know; returns their bytes."""
        return self._second.let_go() if self._second is not None else 0

    def restore(self) -> None:
        """Undoes ``let_go``; raises torch.OutOfMemoryError."""
        if self._second is not None:
            self._second.restore()

    def wake(self) -> None:
        """Called once all weights are back."""
        if self._second is not None:
            self._second.wake()

    def record(self, ahead: Callable[[Sequence[QuantisedLayer]], DerivedAhead] | None) -> tuple[int, int]:
        """Records how quantised layers are derived; returns the number of those that are recorded, and of all.

        ``ahead`` makes a second set of what is derived, for what waits; None to derive at the commit.
        """
        if not self._quantised:
            return 0, 0
        with torch.no_grad():
            # Tensors move to where they stay before anything is recorded.
            self._second = ahead(self._quantised) if ahead is not None else None
            recorded = self._derivation.record([LaunchRecorder(self._device) for _ in range(_LANES)], self._second)
        return recorded, len(self._quantised)

    def derive_ahead(self) -> None:
        """Derives for kernels what waits for a commit, where that was recorded.  The model may compute meanwhile."""
        with torch.no_grad():
            self._derivation.run_ahead()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> object:
        """Calls the model's own ``load_weights`` on the loaded form."""
        with self._unpacked():
            return self._model.load_weights(weights)  # type: ignore[operator]  vLLM's models all have it

    def pack(self) -> None:
        """Packs the loaded form again.  This is a finisher: the model must be paused."""
        with torch.no_grad():
            for part in self._packed:
                if part.kind == "linear":
                    part.layer._parameters.update(part.loaded)
                    _process(part.layer)
                else:
                    _bring(part, _packed_anew(part))
            for _, layer in self._derived:
                _process(layer)
            self._derivation.run()
        self._attention.renew()

    def fill_randomly(self) -> None:
        """Fills the loaded form with small random values and packs it, as vLLM fills its own with ``dummy``.

        Raises:
            ConfigError: The kernels of experts may keep another layout than the checkpoint's.  Random weights cannot
                show it, as ``check_layouts`` does.
        """
        modules = dict(self._model.named_modules())
        for name in self._as_found:
            backend = _backend(_below_lora(modules[name].quant_method))
            if backend not in _KEEP_LAYOUT:
                raise ConfigError(
                    f"with --load-format dummy the layout of experts in {name} (backend {backend}) cannot be checked",
                    hint="start vLLM with --moe-backend triton, or without --load-format dummy",
                )
        generator = torch.Generator().manual_seed(0)
        for part in self._packed:
            for tensor in part.loaded.values():
                if tensor.is_floating_point():
                    tensor.data.uniform_(-_SMALL, _SMALL, generator=generator)
        for layer in self._quantised:
            layer.fill_randomly()
        self.pack()

    def check_layouts(self) -> None:
        """Checks, after loading the first weights once more, that the model is as vLLM made it from them.

        Raises:
            ConfigError: The kernels of experts have changed the layout, so an update would mix experts up; or what is
                derived for a quantised layer is not what vLLM derived.
        """
        layers = dict(self._model.named_modules())
        for name, digests in self._as_found.items():
            if _digests(layers[name]) != digests:
                raise ConfigError(
                    f"the kernels of {name} keep experts in another layout than the checkpoint's",
                    hint="use another backend for experts (triton keeps the layout), or vLLM's own weight transfer",
                )
        for layer in self._quantised:
            layer.check_start()

    def spot_check(self) -> None:
        """Checks like ``check``, with a few columns of each linear layer."""
        self._check(_FEW_ROWS)

    def check(self) -> None:
        """Checks that the model computes with every element of the loaded weights; ``EngineFailure`` names a layer."""
        self._check(None)

    def _check(self, rows: int | None) -> None:
        wrong: list[str] = []
        self._outside.check()
        self._attention.check()
        if rows is None:
            for layer in self._quantised:
                layer.check()
        with torch.no_grad():
            for part in self._packed:
                if part.kind != "linear":
                    same = rows is not None or all(
                        torch.equal(_tensors_by_name(part.layer)[name], tensor)
                        for name, tensor in _packed_anew(part).items()
                    )
                else:
                    same = _computes_with(part.layer, part.loaded["weight"], rows)
                if not same:
                    wrong.append(part.name)
            wrong += [
                name for name, layer in self._derived if not _computes_with(layer, layer.weight, rows or _PROBE_ROWS)
            ]
        if wrong:
            raise EngineFailure(f"computes with other weights than it keeps in {some(wrong)}")

    @contextmanager
    def _unpacked(self) -> Generator[None]:
        """Puts the loaded form into the layers.  The model must not compute meanwhile."""
        with ExitStack() as stack:
            stack.enter_context(without_wrappers(self._model))
            for layer in self._quantised:
                stack.enter_context(layer.unpacked())
            stack.enter_context(self._unpacked_parts())
            yield

    @contextmanager
    def _unpacked_parts(self) -> Generator[None]:
        for part in self._packed:
            part.live = {name: part.layer._parameters.get(name) for name in part.loaded}
            part.layer._parameters.update(part.loaded)
        try:
            yield
            for part in self._packed:
                moved = [name for name, tensor in part.loaded.items() if part.layer._parameters.get(name) is not tensor]
                if moved:
                    raise ConfigError(f"load_weights replaces the parameter {part.name}.{moved[0]} by another object")
        finally:
            for part in self._packed:
                part.layer._parameters.update(part.live)
                part.live = {}


def _kind(name: str, layer: Any, method: Any, device: torch.device) -> str:
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    on_cpu = device.type == "cpu"
    method = _below_lora(method)
    why = why_refused(method, layer)
    if is_quantised(method) and not why:
        return "quantised"
    if type(method) is UnquantizedEmbeddingMethod:
        return "embedding" if on_cpu and hasattr(layer, "cpu_linear") else "plain"
    if type(method) is UnquantizedLinearMethod:
        loaded = _recorded(layer)["weight"]
        packed = on_cpu and tuple(layer.weight.shape) != tuple(loaded.shape)
        if loaded.ndim == 3 and on_cpu and (packed or hasattr(layer, "_cpu_unpacked_conv_weight")):
            return "convolution"
        if not packed:
            return "plain"
        if hasattr(layer, "cpu_linear"):
            return "linear"
    if type(method) is UnquantizedFusedMoEMethod:
        if on_cpu and _backend(method) not in _KEEP_LAYOUT:
            return "experts"
        if all(dict(layer.named_parameters())[key].shape == meta.shape for key, meta in _recorded(layer).items()):
            return "experts in place"
    below = getattr(method, "old_quant_method", None)
    if below is not None:
        why = f"{type(below).__name__} inside {type(method).__name__}, as vLLM has it with --enable-lora"
    raise ConfigError(
        f"{name} transforms its weights in a way that weightcast does not support: {why or type(method).__name__}",
        hint="use a model in bfloat16, in fp8 (blocks, tensors, channels or online), or in NVFP4 or MXFP8 for Marlin, "
        "or vLLM's own weight transfer",
    )


def _below_lora(method: Any) -> Any:
    """The method of unquantised experts below the one that vLLM's LoRA wrapper gives them; other methods unchanged."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    below = getattr(method, "old_quant_method", None)
    return below if type(below) is UnquantizedFusedMoEMethod else method


def _backend(method: Any) -> str:
    return getattr(getattr(method, "unquantized_backend", None), "name", "unknown")


def _digests(layer: nn.Module) -> dict[str, str]:
    return {name: tensor_digest(parameter.data) for name, parameter in layer.named_parameters(recurse=False)}


def _recorded(layer: nn.Module) -> dict[str, torch.Tensor]:
    """Returns a layer's parameters as they were before vLLM processed them, on the meta device."""
    return _made_with(layer)[0]


def _made_with(layer: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Returns a layer's parameters and buffers as they were before vLLM loaded them, on the meta device."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    return get_layerwise_info(layer).restore_metadata


def _quantised_layer(name: str, layer: Any, device: torch.device) -> QuantisedLayer:
    # Expert maps, biases of routers.
    from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS

    parameters, buffers = _made_with(layer)
    return QuantisedLayer(name, layer, parameters, frozenset(SKIP_TENSORS) | buffers.keys(), device)


def _constants(model: nn.Module) -> Iterator[str]:
    """Yields the names of buffers that come from the model's configuration.  A checkpoint may have them too."""
    for prefix, module in model.named_modules():
        made = _made_with(module)[1]
        for name, _ in module.named_buffers(recurse=False):
            if name in made or name.startswith("_"):  # vLLM's scales of an unquantised cache
                yield f"{prefix}.{name}" if prefix else name


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
    for name in ("_already_called_process_weights_after_loading", "cpu_linear"):
        if hasattr(layer, name):  # the old packed weights go before the new ones are made
            delattr(layer, name)
    layer.quant_method.process_weights_after_loading(layer)
    if hasattr(layer, "update_param_tp_status"):
        layer.update_param_tp_status()  # type: ignore[operator]


def _packed_anew(part: _Packed) -> dict[str, torch.Tensor]:
    """Packs the loaded weights of experts or of a convolution; returns new tensors by attribute of the layer.

    vLLM packs a copy of the layer with copies of the weights, so the live layer and the loaded form stay unchanged.
    For experts, vLLM itself leaves this step out when it loads weights again.
    """
    twin = copy.copy(part.layer)
    twin._parameters = dict(part.layer._parameters)
    for name, tensor in part.loaded.items():
        fresh = nn.Parameter(tensor.detach().clone(), requires_grad=False)
        vars(fresh).update(vars(tensor))
        twin._parameters[name] = fresh
    if part.kind == "experts":
        part.layer.quant_method.moe_kernel.fused_experts.process_weights_after_loading(twin)
    else:
        part.layer.quant_method.process_weights_after_loading(twin)
    before = _tensors_by_name(part.layer)
    return {name: tensor for name, tensor in _tensors_by_name(twin).items() if before.get(name) is not tensor}


def _bring(part: _Packed, packed: dict[str, torch.Tensor]) -> None:
    """Copies packed tensors into the layer's, which its kernel may hold; ``EngineFailure`` if one does not fit."""
    live = _tensors_by_name(part.layer)
    for name, tensor in packed.items():
        target = live.get(name)
        if target is None or target.shape != tensor.shape or target.dtype != tensor.dtype:
            has = "none" if target is None else f"{target.dtype} {tuple(target.shape)}"
            raise EngineFailure(
                f"{part.name}.{name} is packed as {tensor.dtype} {tuple(tensor.shape)}, the layer has {has}"
            )
        target.data.copy_(tensor)


def _tensors_by_name(layer: Any) -> dict[str, torch.Tensor]:
    """Returns the parameters of a layer, and the tensors that are plain attributes."""
    found = {name: tensor for name, tensor in vars(layer).items() if isinstance(tensor, torch.Tensor)}
    found.update((name, tensor) for name, tensor in layer._parameters.items() if tensor is not None)
    return found


def _computes_with(layer: Any, weight: torch.Tensor, rows: int | None) -> bool:
    """Returns whether ``layer(x)`` is the product with this weight.

    For unit vectors the result is a column of the weight, exactly: every sum has one term that is not zero.

    The weight has the shape (outputs, inputs).  So many ``rows`` are tried, at random; None tries all.
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
