"""Layers that vLLM keeps in 8 or 4 bits: what the loader takes, and what vLLM derives from it for its kernels.

After loading, vLLM's quantisation method changes a layer: it quantises bfloat16 weights, brings the weights of a fused
layer to one scale, transposes, pads or packs them, and gives scales to kernels.  This module keeps the form that the
loader takes beside the layer.  An update is staged, read back and reverted in that form.  ``derive`` then runs vLLM's
own method on a twin of the layer and copies each tensor of the result to where the live layer and its kernels have it.
No object is replaced, because captured graphs and kernels hold addresses.

A parameter that the method leaves as it is needs no second form: the loader writes the live one.  A trial with random
values finds these parameters.  The start then shows that all of it holds: what is derived from the checkpoint must
equal, bit by bit, what vLLM derived when it loaded the same checkpoint.
"""

# vLLM is not installed where this is checked.
# pyright: reportMissingImports=false, reportPrivateUsage=false
from __future__ import annotations

import copy
import re
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from weightcast.digest.copies import bits
from weightcast.digest.definition import tensor_digest
from weightcast.errors import ConfigError, EngineFailure
from weightcast.runtime.recorded_launches import LaunchRecorder, RecordedLaunches

_PACKAGE = "vllm.model_executor.layers.quantization."
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
# Scales of activations, which Marlin computes without; a checkpoint for weights alone has none.
_UNREAD = ("w13_input_global_scale", "w2_input_global_scale")
_SCRATCH = {"workspace"}  # locks of Marlin, all zero between two steps
_DONE = "_already_called_process_weights_after_loading"
_KERNELS = {"moe_kernel", "moe_quant_config"}  # None until a method has processed weights
_DEEPEST = 8
_CACHE_SCALE = re.compile(r".*\.(\w+_)?([kvq]|kv|prob|output)_scale")
_HINT = "use a bfloat16 model or another kernel (--linear-backend, --moe-backend), or vLLM's own weight transfer"


def is_quantised(method: object) -> bool:
    """True for vLLM's methods whose layers this module can update."""
    return _name_of(method) in {_PACKAGE + name for name in (*_LINEAR, *_EXPERTS)}


def why_refused(method: object, layer: object) -> str:
    """The reason why a layer with this method cannot be updated; empty if it can."""
    scheme = getattr(layer, "scheme", None)
    if type(method).__name__ == "CompressedTensorsLinearMethod":
        if _name_of(scheme).removeprefix(_PACKAGE) not in _SCHEMES:
            return f"the scheme {type(scheme).__name__}"
        if getattr(scheme, "is_static_input_scheme", False) or not getattr(scheme, "use_a16", True):
            return f"static scales of activations in {type(scheme).__name__}"
    elif not getattr(method, "use_a16", True):
        return f"experts with static scales of activations in {type(method).__name__}"
    if is_quantised(method) and (other := _other_kernel(method, scheme)):
        return other
    if getattr(method, "static_input_scales", False):
        return f"experts with static scales of activations in {type(method).__name__}"
    if _name_of(method) == f"{_PACKAGE}fp8.Fp8MoEMethod":
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


@dataclass(slots=True)
class Reached:
    """Tensors and numbers that a layer and its kernels hold, by path from the layer.

    Scales may become numbers, floats that kernels are called with.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    numbers: dict[str, float] = field(default_factory=dict[str, float])


class QuantisedLayer:
    """One layer of a vLLM model, in the form that its loader takes.

    Attributes:
        own_bytes: Memory of the ``loaded`` tensors that are no live parameters.
        unread: Names of parameters that the layer's kernels do not read, and a checkpoint need not have.
    """

    def __init__(
        self, name: str, layer: Any, made: Mapping[str, torch.Tensor], always: frozenset[str], device: torch.device
    ) -> None:
        """Finds out what vLLM's method derives, with random values.

        Args:
            made: Its parameters before loading, on the meta device, with their loaders.
            always: Names of tensors that vLLM never changes after loading.

        Raises:
            ConfigError: The result has another structure than the live layer, so it cannot be brought into it.
        """
        self.name = name
        self._layer = layer
        self._always = always
        self.unread = frozenset(key for key in _UNREAD if key in made)
        trial = {key: _made_real(meta, layer, device) for key, meta in made.items()}
        for key, tensor in trial.items():
            fill(tensor, alike="global_scale" in key)
        derived = self._derived_from(trial)
        live = reach(layer)
        self._check_structure(live, derived)
        kept = {
            key
            for key, tensor in trial.items()
            if _alike(tensor, live.tensors.get(f"parameters.{key}"))
            and _equal(tensor, derived.tensors[f"parameters.{key}"])
        }
        self.loaded: dict[str, nn.Parameter] = {}
        for key, tensor in trial.items():
            if key in kept:
                tensor.data = live.tensors[f"parameters.{key}"].data
            else:
                tensor.data.copy_(torch.tensor(_unset(key, tensor)))
            self.loaded[key] = tensor
        self.own_bytes = sum(tensor.nbytes for key, tensor in self.loaded.items() if key not in kept)
        self._kept = kept
        in_place = {_place(live.tensors[f"parameters.{key}"]) for key in kept}
        self._targets = {
            path: tensor
            for path, tensor in live.tensors.items()
            if _place(tensor) not in in_place and derived.tensors[path] is not tensor and tensor.numel()
            if path not in _SCRATCH
        }
        self._check_derived(live, derived)
        self._altered = frozenset(self.loaded)
        self._recorded: RecordedLaunches | None = None
        self._ahead: RecordedLaunches | None = None
        self._as_found = {key: tensor_digest(self.loaded[key].data) for key in kept}

    @property
    def derived(self) -> Mapping[str, torch.Tensor]:
        """Tensors that ``derive`` writes, by path from the layer; a tensor may have several."""
        return self._targets

    @contextmanager
    def unpacked(self) -> Generator[None]:
        """Puts the loaded form into the layer.  The model must not compute meanwhile."""
        table: dict[str, nn.Parameter | None] = self._layer._parameters
        live = dict(table)
        table.clear()
        table.update({key: tensor for key, tensor in live.items() if key in self._always})
        table.update(self.loaded)
        try:
            yield
            moved = [key for key, tensor in self.loaded.items() if table.get(key) is not tensor]
            if moved:
                raise ConfigError(f"load_weights replaces the parameter {self.name}.{moved[0]} by another object")
        finally:
            table.clear()
            table.update(live)

    def derive(self) -> None:
        """Derives again what kernels of the paused model read; ``EngineFailure`` if it does not fit the live layer."""
        if self._targets and not (self._recorded is not None and self._recorded.launch()):
            self._recorded = None
            self._derive()

    def record(self, recorder: LaunchRecorder) -> bool:
        """Records ``derive`` for later calls, once all tensors are where they stay; False if that cannot be done.

        vLLM's methods launch a few kernels for each expert, which costs the host many times what it costs the GPU.  The
        recording must give what vLLM's method gives for random values and then for those that are there, bit by bit.
        """
        if not self._targets:
            return True
        found = {key: tensor.data.clone() for key, tensor in self.loaded.items()}
        try:
            self.fill_randomly()
            random = {key: tensor.data.clone() for key, tensor in self.loaded.items()}
            self._altered = frozenset[str]()
            self._derive()
            self._altered = frozenset(key for key, old in random.items() if not _equal(self.loaded[key], old))
            del random
            self.fill_randomly()
            self._recorded = recorder.record(self._derive, [*self.loaded.values(), *self._targets.values()])
            good = self._recorded is not None
            for values in ({}, found):
                for key, value in values.items():
                    self.loaded[key].data.copy_(value)
                self.derive()
                good = good and not self.first_difference()
        finally:
            for key, value in found.items():
                self.loaded[key].data.copy_(value)
        if not good:
            self._recorded, self._altered = None, frozenset(self.loaded)
            self._derive()
        return good

    def record_ahead(
        self, recorder: LaunchRecorder, waiting: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]
    ) -> bool:
        """Records how a version that waits is derived, as ``record`` does for the live one; call it after that.

        Args:
            waiting: Where the next version of ``loaded`` waits, by the same keys, or the live tensor where none does.
                What waits is written, and has the live values at the end.
            second: Where what is derived goes, by the paths of ``derived``.
        """
        if not self._targets:
            return True
        loaded = {key: _like(tensor, waiting[key]) for key, tensor in self.loaded.items()}
        self._ahead = recorder.record(
            lambda: self._derive(loaded, second), [*(tensor.data for tensor in loaded.values()), *second.values()]
        )
        good = self._ahead is not None
        for random in (True, False):
            for key, tensor in loaded.items():
                if waiting[key] is self.loaded[key]:
                    continue  # no update writes it
                if random:
                    fill(tensor, alike="global_scale" in key)
                else:
                    tensor.data.copy_(self.loaded[key].data)
            spoil(second.values())
            good = good and self.derive_ahead() and not self._difference(loaded, second)
        if not good:
            self._ahead = None
        return good

    def derive_ahead(self) -> bool:
        """Derives the version that waits; False, and nothing is done, if that cannot be done by a recording."""
        return not self._targets or (self._ahead is not None and self._ahead.launch())

    def spoil(self) -> None:
        """Overwrites what ``derive`` writes, so that a derivation that does not happen shows."""
        spoil(self._targets.values())

    def _derive(
        self,
        loaded: Mapping[str, nn.Parameter] | None = None,
        targets: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Derives ``targets`` of ``loaded``; those of the live layer by default."""
        derived = self._derived_from(self.loaded if loaded is None else loaded, self._altered)
        for path, target in (self._targets if targets is None else targets).items():
            tensor = derived.tensors.get(path)
            if tensor is None or not _alike(tensor, target):
                raise EngineFailure(f"{self.name}: vLLM derives {path} in another form than at its start")
            bits(target.data).copy_(bits(tensor.data))
        self._check_numbers(derived)

    def check(self) -> None:
        """Compares what kernels read with a fresh derivation; raises ``EngineFailure``, naming what differs."""
        wrong = self.first_difference()
        if wrong:
            raise EngineFailure(f"computes with other weights than it keeps in {self.name}: {wrong} is not derived")

    def check_start(self) -> None:
        """Checks, after the checkpoint was loaded once more, that vLLM derived the same; ``ConfigError`` if not."""
        moved = [key for key in self._kept if tensor_digest(self.loaded[key].data) != self._as_found[key]]
        wrong = moved[0] if moved else self.first_difference()
        if wrong:
            raise ConfigError(
                f"{self.name} ({type(self._layer.quant_method).__name__}): what vLLM made of {wrong} when it loaded "
                "the checkpoint is not what its own method makes of the same weights now",
                hint=_HINT,
            )

    def first_difference(self) -> str:
        """Path of the first tensor or number that differs from a fresh derivation; empty if none does."""
        return self._difference(self.loaded, self._targets) if self._targets else ""

    def _difference(self, loaded: Mapping[str, nn.Parameter], targets: Mapping[str, torch.Tensor]) -> str:
        derived = self._derived_from(loaded)
        for path, target in targets.items():
            tensor = derived.tensors.get(path)
            if tensor is None or not _alike(tensor, target) or not _equal(tensor, target):
                return path
        return next((path for path, value in reach(self._layer).numbers.items() if derived.numbers[path] != value), "")

    def fill_randomly(self) -> None:
        """Gives the loaded form random values that any kernel can compute with."""
        for key, tensor in self.loaded.items():
            fill(tensor, alike="global_scale" in key)

    def _derived_from(self, loaded: Mapping[str, nn.Parameter], altered: Collection[str] | None = None) -> Reached:
        """Lets vLLM's own method process a twin of the layer.

        It gets copies of the tensors in ``loaded`` that are ``altered``, that is, of those that it writes into; of all
        by default.
        """
        twin = object.__new__(type(self._layer))
        inside = vars(twin)
        inside.update(vars(self._layer))
        for table in ("_parameters", "_buffers", "_modules"):
            inside[table] = dict(inside[table])
        inside["_parameters"] = {
            key: tensor for key, tensor in inside["_parameters"].items() if key in self._always
        } | {
            key: _like(tensor, tensor.data.clone() if altered is None or key in altered else tensor.data)
            for key, tensor in loaded.items()
        }
        inside["_buffers"] = {key: tensor for key, tensor in inside["_buffers"].items() if key in self._always}
        # What vLLM derived must come into being again, also if its method only makes what is not there.
        made = [key for key, value in inside.items() if isinstance(value, torch.Tensor) and key not in self._always]
        for key in (_DONE, *loaded, *made):
            inside.pop(key, None)
        twin.quant_method = method = _own_method(self._layer.quant_method)
        if "scheme" in inside:
            twin.scheme = _own_method(inside["scheme"])
        # Not inside of ``torch.device``: vLLM does not do so either, and torch.compile recurses without end over a
        # parameter of vLLM's classes there.
        with torch.no_grad():
            method.process_weights_after_loading(twin)
        return reach(twin)

    def _check_structure(self, live: Reached, derived: Reached) -> None:
        method = type(self._layer.quant_method).__name__
        for path in sorted(live.tensors.keys() ^ derived.tensors.keys()):
            where = "the live layer only" if path in live.tensors else "a fresh layer only"
            raise ConfigError(f"{self.name} ({method}): {path} is a tensor in {where}", hint=_HINT)
        for path, tensor in live.tensors.items():
            if not _alike(derived.tensors[path], tensor):
                raise ConfigError(
                    f"{self.name} ({method}): vLLM made {path} as {_form(tensor)}, and its method makes it as "
                    f"{_form(derived.tensors[path])} now",
                    hint=_HINT,
                )
        if live.numbers.keys() != derived.numbers.keys():
            path = sorted(live.numbers.keys() ^ derived.numbers.keys())[0]
            raise ConfigError(f"{self.name} ({method}): {path} is a number in one of two equal layers", hint=_HINT)

    def _check_derived(self, live: Reached, derived: Reached) -> None:
        """Refuses tensors of kernels that the method does not make anew, since nobody would renew them."""
        known = {_place(tensor) for key, tensor in self.loaded.items() if key in self._kept}
        known |= {_place(tensor) for path, tensor in live.tensors.items() if path.rpartition(".")[2] in self._always}
        for path, tensor in live.tensors.items():
            if tensor.numel() and derived.tensors[path] is tensor and _place(tensor) not in known:
                raise ConfigError(
                    f"{self.name} ({type(self._layer.quant_method).__name__}): vLLM's method does not make {path} anew",
                    hint=_HINT,
                )

    def _check_numbers(self, derived: Reached) -> None:
        for path, value in reach(self._layer).numbers.items():
            if derived.numbers.get(path) != value:
                raise EngineFailure(
                    f"{self.name}: kernels keep {path} as a number, {value}, and the new weights need "
                    f"{derived.numbers.get(path)}"
                )


def spoil(tensors: Iterable[torch.Tensor]) -> None:
    """Overwrites tensors of any dtype with zeros."""
    for tensor in tensors:
        bits(tensor.data).zero_()


def fill(tensor: torch.Tensor, *, alike: bool = False) -> None:
    """Fills a tensor of any dtype with random values that are finite and, where they may be scales, positive.

    ``alike`` gives all elements one value: vLLM warns of layers whose parts have different global scales.
    """
    data = tensor.data
    if alike:
        data.fill_(float(torch.rand(())) * 1e-3 + 1e-3)
    elif data.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        data.view(torch.uint8).random_(0, 0x70)  # positive, finite, up to 128
    elif data.is_floating_point():
        data.uniform_(1e-3, 2e-3)
    elif data.dtype == torch.uint8:
        data.random_(0x40, 0x80)  # pairs of 4 bits, or exponents of scales: from 2**-63 to 1
    else:
        data.zero_()


def reach(layer: Any) -> Reached:
    """Finds the tensors and floats that a layer holds, and those that its method and its kernels hold."""
    found = Reached()
    for kind in ("parameters", "buffers"):
        for key, tensor in vars(layer)[f"_{kind}"].items():
            if tensor is not None:
                found.tensors[f"{kind}.{key}"] = tensor
    internal = ("_parameters", "_buffers", "_modules")
    own = {key: it for key, it in vars(layer).items() if key not in internal and not key.endswith("_hooks")}
    for path, value in _inside(own, "", ()):
        if isinstance(value, torch.Tensor):
            found.tensors[path] = value
        else:
            found.numbers[path] = value
    return found


def _inside(value: Any, path: str, above: tuple[int, ...]) -> Iterator[tuple[str, torch.Tensor | float]]:
    """Yields tensors and floats below a value, with their paths.  Modules and foreign objects are skipped."""
    if isinstance(value, torch.Tensor) or type(value) is float:
        yield path, value
        return
    if isinstance(value, type | nn.Module) or len(above) > _DEEPEST or id(value) in above:
        return
    home = type(value).__module__
    if home.startswith("vllm.config") or (home.startswith(_PACKAGE) and type(value).__name__.endswith("Config")):
        return  # settings of the whole model
    if isinstance(value, dict):
        items: Any = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    elif home.startswith("vllm.") and hasattr(value, "__dict__"):
        items = vars(value).items()
    else:
        return
    for key, item in items:
        yield from _inside(item, f"{path}.{key}" if path else str(key), (*above, id(value)))


def _own_method(method: Any) -> Any:
    """A copy of a method with copies of its kernels, so that what processing writes into them stays there."""
    twin = copy.copy(method)
    for key in _KERNELS & vars(method).keys():
        setattr(twin, key, None)
    for key, value in vars(method).items():
        if type(value).__module__.startswith("vllm.model_executor.kernels.") and not isinstance(value, nn.Module):
            setattr(twin, key, copy.copy(value))
    return twin


def _made_real(meta: torch.Tensor, layer: Any, device: torch.device) -> nn.Parameter:
    """A parameter as it was before vLLM loaded it, with memory; its loader is the one below vLLM's delaying wrapper."""
    from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

    data = torch.empty_strided(tuple(meta.shape), meta.stride(), dtype=meta.dtype, device=device)
    real = _like(meta, data)
    restore_layer_refs(real, layer)
    loader = getattr(real, "weight_loader", None)
    while getattr(loader, "__name__", "") == "online_process_loader":
        loader = loader.__wrapped__  # type: ignore[union-attr]
        real.weight_loader = loader  # type: ignore[attr-defined]
    return real


def _like(tensor: torch.Tensor, data: torch.Tensor) -> nn.Parameter:
    """A parameter of the class and with the attributes of another, with other contents."""
    fresh = nn.Parameter(data, requires_grad=False)
    fresh.__class__ = tensor.__class__  # type: ignore[assignment]
    vars(fresh).update(vars(tensor))
    return fresh


def _unset(key: str, tensor: torch.Tensor) -> float:
    """The value that vLLM gives an element before loading: its methods tell by it which scales a checkpoint has."""
    if type(tensor).__name__ == "PerTensorScaleParameter":
        return torch.finfo(torch.float32).min
    return 1.0 if "scale" in key else 0.0


def _alike(tensor: torch.Tensor, other: torch.Tensor | None) -> bool:
    return (
        other is not None
        and tensor.shape == other.shape
        and tensor.dtype == other.dtype
        and tensor.device.type == other.device.type
        and _steps(tensor) == _steps(other)
    )


def _steps(tensor: torch.Tensor) -> list[int]:
    """Strides of the dimensions that have more than one element."""
    return [step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def _equal(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(bits(tensor.data), bits(other.data))


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    return str(tensor.device), tensor.untyped_storage().data_ptr()


def _form(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()}"


def _name_of(method: object) -> str:
    return f"{type(method).__module__}.{type(method).__qualname__}"
