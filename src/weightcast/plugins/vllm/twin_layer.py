"""A layer of a vLLM model in two forms: the one that the loader writes, and the one that kernels read.

After loading, vLLM changes many layers: it packs them for a CPU, or quantises them for a GPU (``layer_kinds``).  This
module keeps the form that the loader takes beside the layer.  An update is staged, read back and reverted in that form.
``derive`` then runs vLLM's own method on a twin of the layer and copies each tensor of the result to where the live
layer and its kernels have it.  No tensor is replaced, because captured graphs and kernels hold addresses.

A parameter that the method leaves as it is needs no second form: the loader writes the live one.  A trial with random
values finds these parameters.  The start then shows that all of it holds: what is derived from the checkpoint must
equal, bit by bit, what vLLM derived when it loaded the same checkpoint.

A oneDNN handler is no tensor.  The layer gets the twin's, and is checked by what it computes: a linear layer applied to
unit vectors returns the columns of its weight, exactly.
"""

# vLLM is not installed where this is checked.
# pyright: reportMissingImports=false, reportPrivateUsage=false
from __future__ import annotations

import copy
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from weightcast.digest.copies import bits
from weightcast.digest.definition import tensor_digest
from weightcast.errors import ConfigError, EngineFailure
from weightcast.plugins.vllm.layer_kinds import LayerKind
from weightcast.plugins.vllm.reach import reach
from weightcast.runtime.recorded_launches import LaunchRecorder, RecordedLaunches

# Scales of activations, which Marlin computes without; a checkpoint for weights alone has none.
_UNREAD = ("w13_input_global_scale", "w2_input_global_scale")
_SCRATCH = {"workspace"}  # locks of Marlin, all zero between two steps
_DONE = "_already_called_process_weights_after_loading"
_KERNELS = {"moe_kernel", "moe_quant_config"}  # None until a method has processed weights
_BLOCK = 65521  # a prime, so that no dimension of a tensor divides it
_UNIT_VECTORS = 256  # multiplied at a time
_FEW_COLUMNS = 8
_HINT = "use a bfloat16 model or another kernel (--linear-backend, --moe-backend), or vLLM's own weight transfer"


class TwinLayer:
    """One layer of a vLLM model whose kernels read another form of its weights than the loader writes.

    Attributes:
        loaded: Parameters that the loader writes, by name.  They live as long as the model.
        derived: Tensors that ``derive`` writes, by path from the layer; a tensor may have several.
        own_bytes: Memory of the ``loaded`` tensors that are no live parameters.
        unread: Names of parameters that the layer's kernels do not read, and a checkpoint need not have.
    """

    def __init__(
        self,
        name: str,
        layer: Any,
        kind: LayerKind,
        *,
        made: Mapping[str, torch.Tensor],
        always: frozenset[str],
        device: torch.device,
    ) -> None:
        """Allocates the loaded form, and finds out what vLLM's method derives.

        Args:
            made: The layer's parameters before loading, on the meta device, with their loaders.
            always: Names of tensors that vLLM never changes after loading.

        Raises:
            ConfigError: The result has another structure than the live layer, so it cannot be brought into it.
        """
        self.name = name
        self.kind = kind
        self._layer = layer
        self._always = always
        # Keys of loaded tensors that vLLM's method may write into.
        self._altered = frozenset(() if kind.anew else made)
        self._recorded: RecordedLaunches | None = None
        self._ahead: RecordedLaunches | None = None
        self.unread = frozenset(key for key in _UNREAD if key in made)
        self.derived: dict[str, torch.Tensor] = {}
        live: dict[str, nn.Parameter] = {key: it for key, it in layer._parameters.items() if it is not None}
        self.loaded: dict[str, nn.Parameter] = live
        kept = set(live)
        if kind.beside:
            self.loaded = {key: _made_real(meta, layer, device) for key, meta in made.items()}
            kept = self._try()
        self.own_bytes = sum(tensor.nbytes for key, tensor in self.loaded.items() if key not in kept)
        self._as_found = {key: tensor_digest(self.loaded[key].data) for key in kept}

    def _try(self) -> set[str]:
        """Derives from random values; returns the keys of what that leaves as it is, whose memory becomes the live."""
        self.fill_randomly()
        live, derived = reach(self._layer), reach(self._twin(self.loaded))
        for path in sorted(live.keys() | derived.keys()):
            one, other = live.get(path), derived.get(path)
            if not _alike(one, other):
                forms = f"{_form(one)}, and its method makes it as {_form(other)} now"
                raise ConfigError(f"{self._described}: vLLM made {path} as {forms}", hint=_HINT)
        tensors = {path: tensor for path, tensor in live.items() if isinstance(tensor, torch.Tensor)}
        kept: set[str] = set()
        in_place: set[tuple[object, ...]] = set()
        for key, tensor in self.loaded.items():
            current = tensors.get(path := f"parameters.{key}")
            if current is not None and _alike(tensor, current) and _equal(tensor, derived[path]):
                tensor.data = current.data
                kept.add(key)
                in_place.add(_place(current))
            else:
                tensor.data.copy_(torch.tensor(_unset(key, tensor)))
        self.derived = {
            path: tensor
            for path, tensor in tensors.items()
            if _place(tensor) not in in_place and derived[path] is not tensor and tensor.numel()
            if path not in _SCRATCH
        }
        # Others of kernels, which the method does not make anew, nobody would renew.
        known = in_place | {_place(tensor) for tensor in self.derived.values()}
        known |= {_place(tensor) for path, tensor in tensors.items() if path.rpartition(".")[2] in self._always}
        for path, tensor in tensors.items():
            if tensor.numel() and derived[path] is tensor and _place(tensor) not in known:
                raise ConfigError(f"{self._described}: vLLM's method does not make {path} anew", hint=_HINT)
        return kept

    @contextmanager
    def unpacked(self) -> Generator[None]:
        """Puts the loaded form into the layer.  The model must not compute meanwhile."""
        if not self.kind.beside:
            yield
            return
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
        if self._recorded is not None and self._recorded.launch():
            return
        self._recorded = None
        for key in self.kind.anew:  # the old goes before the new is made
            vars(self._layer).pop(key, None)
        if self.derived or self.kind.anew:
            twin = self._derive(self.loaded, self.derived)
            for key in self.kind.anew:
                setattr(self._layer, key, getattr(twin, key))

    def record(self, recorder: LaunchRecorder) -> bool:
        """Records ``derive`` for later calls, once all tensors are where they stay; False if that cannot be done.

        vLLM's methods launch a few kernels for each expert, which costs the host many times what it costs the GPU.
        """
        if not self.derived:
            return True
        found = {key: tensor.data.clone() for key, tensor in self.loaded.items()}
        self.fill_randomly()
        random = {key: tensor.data.clone() for key, tensor in self.loaded.items()}
        self._altered = frozenset[str]()
        self._derive(self.loaded, self.derived)
        self._altered = frozenset(key for key, old in random.items() if not _equal(self.loaded[key], old))
        del random
        self._recorded = self._recording(recorder, self.loaded, self.derived, found)
        if self._recorded is None:
            self._altered = frozenset(self.loaded)
            self.derive()
        return self._recorded is not None

    def record_ahead(
        self, recorder: LaunchRecorder, waiting: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]
    ) -> bool:
        """Records how a version that waits is derived, as ``record`` does for the live one; call it after that.

        Args:
            waiting: Where the next version of ``loaded`` waits, by the same keys, or the live tensor where none does.
                What waits is written, and has the live values at the end.
            second: Where what is derived goes, by the paths of ``derived``.
        """
        if not self.derived:
            return True
        loaded = {key: _like(tensor, waiting[key]) for key, tensor in self.loaded.items()}
        written = {key: tensor.data for key, tensor in self.loaded.items() if waiting[key] is not tensor}
        self._ahead = self._recording(recorder, loaded, second, written)
        return self._ahead is not None

    def _recording(
        self,
        recorder: LaunchRecorder,
        loaded: Mapping[str, nn.Parameter],
        targets: Mapping[str, torch.Tensor],
        values: Mapping[str, torch.Tensor],
    ) -> RecordedLaunches | None:
        """Records how ``targets`` are derived; None if that cannot be done.

        The recording must give what vLLM's method gives for random values and then for ``values`` of what is loaded,
        which stay there, bit by bit.
        """
        found = recorder.record(lambda: self._derive(loaded, targets), [*loaded.values(), *targets.values()])
        good = found is not None
        for random in (True, False):
            for key, value in values.items():
                if random:
                    fill(loaded[key], alike="global_scale" in key)
                else:
                    loaded[key].data.copy_(value)
            spoil(targets.values())
            good = good and found is not None and found.launch() and not self._difference(loaded, targets)
        return found if good else None

    def derive_ahead(self) -> bool:
        """Derives the version that waits; False, and nothing is done, if that cannot be done by a recording."""
        return not self.derived or (self._ahead is not None and self._ahead.launch())

    def check(self, *, few: bool = False) -> None:
        """Checks that kernels compute with the loaded form; ``EngineFailure`` names what they do not.

        With ``few`` it multiplies a few unit vectors, and compares nothing with a twin.
        """
        if few and not self.kind.anew:
            return
        wrong = self.first_difference(few=few)
        if wrong:
            raise EngineFailure(f"computes with other weights than it keeps in {self.name}: {wrong} is not derived")

    def check_start(self) -> None:
        """Checks, after the checkpoint was loaded once more, that vLLM derived the same; ``ConfigError`` if not."""
        moved = [key for key, digest in self._as_found.items() if tensor_digest(self.loaded[key].data) != digest]
        wrong = moved[0] if moved else self.first_difference(few=True)
        if wrong:
            raise ConfigError(
                f"{self._described}: what vLLM made of {wrong} when it loaded the checkpoint is not what its own "
                "method makes of the same weights now",
                hint=_HINT,
            )

    def first_difference(self, *, few: bool = False) -> str:
        """Path of the first of what kernels read that does not come from the loaded form; empty if all does."""
        if self.kind.anew and not self._computes(_FEW_COLUMNS if few else self.kind.columns):
            return self.kind.anew[0]
        return self._difference(self.loaded, self.derived) if self.derived else ""

    def fill_randomly(self) -> None:
        """Gives the loaded form random values that any kernel can compute with, if it is not the live one."""
        if self.kind.beside:
            for key, tensor in self.loaded.items():
                fill(tensor, alike="global_scale" in key)

    @property
    def _described(self) -> str:
        return f"{self.name} ({type(self._layer.quant_method).__name__})"

    def _derive(self, loaded: Mapping[str, nn.Parameter], targets: Mapping[str, torch.Tensor]) -> Any:
        """Brings what a twin with the loaded tensors derives into the targets; returns the twin."""
        twin = self._twin(loaded)
        derived = reach(twin)
        for path, target in targets.items():
            tensor = derived.get(path)
            if not isinstance(tensor, torch.Tensor) or not _alike(tensor, target):
                raise EngineFailure(f"{self.name}: vLLM derives {path} in another form than at its start")
            bits(target.data).copy_(bits(tensor.data))
        for path, value in self._numbers().items():
            if (other := derived.get(path)) != value:
                raise EngineFailure(
                    f"{self.name}: kernels keep {path} as a number, {value}, and the new weights need {other}"
                )
        return twin

    def _difference(self, loaded: Mapping[str, nn.Parameter], targets: Mapping[str, torch.Tensor]) -> str:
        derived = reach(self._twin(loaded))
        wanted = {**targets, **self._numbers()}
        return next((path for path, value in wanted.items() if not _equal(value, derived.get(path))), "")

    def _numbers(self) -> dict[str, float]:
        """Numbers that kernels are called with; they cannot be written."""
        return {path: value for path, value in reach(self._layer).items() if isinstance(value, float)}

    def _computes(self, most: int | None) -> bool:
        """Returns whether the layer's products with unit vectors are the columns of its weight.

        That is exact: every sum has one term that is not zero.  So many columns are tried, at random; None tries all.
        """
        weight = self.loaded["weight"]  # outputs, inputs
        inputs = int(weight.shape[1])
        wanted = torch.arange(inputs) if most is None or most >= inputs else torch.randperm(inputs)[:most]
        for start in range(0, len(wanted), _UNIT_VECTORS):
            columns = wanted[start : start + _UNIT_VECTORS].to(weight.device)
            unit = torch.zeros(len(columns), inputs, dtype=weight.dtype, device=weight.device)
            unit[torch.arange(len(columns), device=weight.device), columns] = 1
            answer = self._layer.quant_method.apply(self._layer, unit, None)
            if not torch.equal(answer, weight[:, columns].t()):
                return False
        return True

    def _twin(self, loaded: Mapping[str, nn.Parameter]) -> Any:
        """A twin of the layer with loaded tensors, as vLLM's own method has processed it.

        It gets copies of the tensors that the method writes into.
        """
        twin = object.__new__(type(self._layer))
        inside = vars(twin)
        inside.update(vars(self._layer))
        for table in ("_parameters", "_buffers", "_modules"):
            inside[table] = dict(inside[table])
        always = {key: tensor for key, tensor in inside["_parameters"].items() if key in self._always}
        inside["_parameters"] = always | {
            key: _like(tensor, tensor.data.clone() if key in self._altered else tensor.data)
            for key, tensor in loaded.items()
        }
        if self.kind.whole:
            inside["_buffers"] = {key: tensor for key, tensor in inside["_buffers"].items() if key in self._always}
            # What vLLM derived must come into being again, also if its method only makes what is not there.
            made = [key for key, value in inside.items() if isinstance(value, torch.Tensor) and key not in self._always]
            for key in (_DONE, *loaded, *made):
                inside.pop(key, None)
            twin.quant_method = processor = _own_method(self._layer.quant_method)
            if "scheme" in inside:
                twin.scheme = _own_method(inside["scheme"])
        else:
            processor = self._layer.quant_method.moe_kernel.fused_experts
        # Not inside of ``torch.device``: vLLM does not do so either, and torch.compile recurses without end over a
        # parameter of vLLM's classes there.
        with torch.no_grad():
            processor.process_weights_after_loading(twin)
        return twin


def spoil(tensors: Iterable[torch.Tensor]) -> None:
    """Overwrites tensors of any dtype with zeros."""
    for tensor in tensors:
        bits(tensor.data).zero_()


def fill(tensor: torch.Tensor, *, alike: bool = False) -> None:
    """Fills a tensor of any dtype with random values that are finite and, where they may be scales, positive.

    A block of values repeats, since a CPU makes few random numbers in a second.  ``alike`` gives all elements one
    value: vLLM warns of layers whose parts have different global scales.
    """
    data = tensor.data
    block = torch.empty(1 if alike else _BLOCK, dtype=data.dtype, device=data.device)
    if block.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        block.view(torch.uint8).random_(0, 0x70)  # positive, finite, up to 128
    elif block.is_floating_point():
        block.uniform_(1e-3, 2e-3)
    elif block.dtype == torch.uint8:
        block.random_(0x40, 0x80)  # pairs of 4 bits, or exponents of scales: from 2**-63 to 1
    else:
        block.zero_()
    repeated = bits(block).repeat(data.numel() // block.numel() + 1)[: data.numel()]
    bits(data).copy_(repeated.view(data.shape))


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


def _alike(one: torch.Tensor | float | None, other: torch.Tensor | float | None) -> bool:
    """True for two numbers, and for tensors of one form on one kind of device."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return type(one) is type(other)
    return (one.shape, one.dtype, one.device.type, _steps(one)) == (
        other.shape,
        other.dtype,
        other.device.type,
        _steps(other),
    )


def _steps(tensor: torch.Tensor) -> list[int]:
    """Strides of the dimensions that have more than one element."""
    return [step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def _equal(one: torch.Tensor | float, other: torch.Tensor | float | None) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return one is other or (isinstance(one, float) and one == other)
    return _alike(one, other) and torch.equal(bits(one.data), bits(other.data))


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    return str(tensor.device), tensor.untyped_storage().data_ptr()


def _form(found: torch.Tensor | float | None) -> str:
    if not isinstance(found, torch.Tensor):
        return "nothing" if found is None else "a number"
    return f"{found.dtype} {tuple(found.shape)} with strides {found.stride()}"
