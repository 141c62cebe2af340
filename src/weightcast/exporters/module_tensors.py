"""Lists a module's tensors by number: the attribute that has each, its name, and this rank's shard.

Tensors are looked up by attribute whenever they are needed, since optimizers and FSDP2 replace them.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from itertools import repeat
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from weightcast.errors import ConfigError
from weightcast.exporters import casting
from weightcast.exporters.held_parts import Seen
from weightcast.exporters.local_shard import Placement, ShardOf, placement_of, stored_part, whole_shape
from weightcast.exporters.names import strip_wrappers
from weightcast.runtime.tensor_places import TensorPlaces
from weightcast.wire.box import Box
from weightcast.wire.layout import MAX_DIMS, dtype_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The attribute of a module that has a tensor.

    ``name`` is the tensor's path without the segments of wrappers.  ``shape`` (unsharded) and ``dtype`` are as when
    the exporter was made.
    """

    module: nn.Module
    attribute: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Tie:
    """Another place of a tensor that is listed under ``number``."""

    number: int
    place: Place


class PlacedTensors:
    """Parameters and persistent buffers of a module, each once.  Values may change later, the structure may not.

    Args:
        shard_of: Place of a plain parameter in the whole tensor; None if every plain parameter is whole.
        name_of: Function of a module, its path without wrappers, and an attribute.  It returns the tensor's name, or
            None to leave the tensor out.
        fsdp1: As for ``places_of``.

    Attributes:
        places: Every tensor's place, in the order of the module's ``state_dict``.
        ties: The other names of tensors with several.
        roots: The modules that have the tensors.
        device: The device that holds most of their bytes.

    Raises:
        ConfigError: A tensor cannot be sent as it is, or there is none.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        shard_of: ShardOf | None = None,
        name_of: Callable[[nn.Module, str, str], str | None] | None = None,
        fsdp1: bool = False,
    ) -> None:
        self._shard_of = shard_of
        self._fsdp_modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._parts: dict[int, tuple[Box, torch.Tensor] | None] = {}
        self.reshard()
        self.roots: Sequence[nn.Module] = [model]
        self.places: list[Place] = []
        self.ties: list[Tie] = []
        numbers: dict[int, int] = {}
        for place, tensor in places_of(model, shard_of=shard_of, name_of=name_of, fsdp1=fsdp1):
            if id(tensor) in numbers:
                self.ties.append(Tie(numbers[id(tensor)], place))
                continue
            numbers[id(tensor)] = len(self.places)
            check_tensor(place.name, tensor)
            shape = self.gathered_shape(place, tensor)
            self.places.append(place if shape is None else replace(place, shape=shape))
        if not self.places:
            raise ConfigError("the model has no parameters and no persistent buffers")
        self._settle()
        self.remember()

    def _settle(self) -> None:
        device_bytes: Counter[torch.device] = Counter()
        for number, place in enumerate(self.places):
            part = stored_part(place.name, self.tensor(number), self._shard_of) if self.holds(number) else None
            if part is not None:
                device_bytes[part[1].device] += part[1].nbytes
        self.device = device_bytes.most_common(1)[0][0] if device_bytes else torch.device("cpu")

    def remember(self) -> None:
        """Notes the forms of the tensors, to which ``changed`` compares them."""
        self._numbers = [number for number in range(len(self.places)) if self.holds(number)]
        self._all = WatchedTensors(self, self._numbers, None)
        self._meshes = [getattr(self.tensor(number), "_spec", None) for number in self._numbers]
        seen = self._all.now()
        self._layout, self._place = seen.layout, seen.place

    def changed(self) -> bool:
        """True if a tensor has another shape or placement, is tied no more, or cannot be sent as it is.  Cheap.

        What is replaced by the like of it, moved, or kept in another dtype is no change: tensors are looked up anew.
        """
        self.reshard()
        try:
            if not all(self.is_tied(tie) for tie in self.ties):
                return True
            seen = self._all.now()
            if seen.layout is not self._layout and not all(map(self._fits, self._numbers, self._meshes)):
                return True
        except (AttributeError, ConfigError, RuntimeError):  # gone, of another kind, or without memory
            return True
        if seen.place is not self._place and _without_memory(seen):
            return True
        self._layout, self._place = seen.layout, seen.place
        return any(map(torch.Tensor.is_neg, seen.tensors))

    def is_tied(self, tie: Tie) -> bool:
        """True if both names of a tied tensor still have the same memory."""
        one, other = self.tensor(tie.number), getattr(tie.place.module, tie.place.attribute)
        return one is other or _same_memory(one, other)

    def _fits(self, number: int, mesh: object) -> bool:
        place, tensor = self.places[number], self.tensor(number)
        if getattr(tensor, "_spec", None) != mesh:
            return False
        check_tensor(place.name, tensor)
        if tensor.dtype != place.dtype and not (casting.can_cast(tensor.dtype) and casting.can_cast(place.dtype)):
            return False
        return whole_shape(place.name, tensor, self._shard_of) == place.shape

    def gathered_shape(self, place: Place, tensor: torch.Tensor) -> tuple[int, ...] | None:
        """The shape of a tensor that the trainer's framework has partitioned; None for all others."""
        return None

    def holds(self, number: int) -> bool:
        """False for a tensor that is in another rank's module only."""
        return True

    def model_tensor(self, number: int) -> torch.Tensor:
        """The tensor as the whole model has it; only its identity means something."""
        return self.tensor(number)

    @property
    def stored(self) -> list[tuple[str, tuple[int, ...]]]:
        return [(place.name, place.shape) for place in self.places]

    def tensor(self, number: int) -> torch.Tensor:
        """The tensor as the module has it now, possibly sharded."""
        place = self.places[number]
        return getattr(place.module, place.attribute)

    def part(self, number: int) -> tuple[Box, torch.Tensor] | None:
        """This rank's shard of a tensor now and its place in the whole; None if the rank holds nothing.  No copy.

        Raises:
            ConfigError: The tensor's shape has changed, or its placement cannot be exported.
        """
        if number not in self._parts:
            place, tensor = self.places[number], self.tensor(number)
            shape = whole_shape(place.name, tensor, self._shard_of)
            if shape != place.shape:
                raise ConfigError(
                    f"{place.name} has shape {shape} and had {place.shape} when the exporter was made",
                    hint="make a new exporter when the model's structure changes",
                )
            self._parts[number] = stored_part(place.name, tensor, self._shard_of)
        return self._parts[number]

    def placement(self, number: int) -> Placement:
        """How the trainer ranks hold a tensor now.  No communication.  ``ConfigError`` if it cannot be exported."""
        return placement_of(self.places[number].name, self.tensor(number), self._shard_of)

    def watch(self, numbers: Sequence[int]) -> WatchedTensors:
        """This rank's shards of these tensors, to be looked at in update after update."""
        return WatchedTensors(self, numbers, self._shard_of)

    def imagines(self) -> bool:
        """True while tensors are not what the modules have."""
        return False

    @contextmanager
    def looking(self) -> Generator[None]:
        """Caches each tensor's part until the block ends: one stacked tensor is asked for once per expert."""
        self.reshard()
        self._parts.clear()
        try:
            yield
        finally:
            self._parts.clear()

    def reading(self, numbers: Sequence[int]) -> AbstractContextManager[None]:
        """A block in which these tensors have their values.  Collective if a framework gathers them."""
        return self.looking()

    def planning(self, numbers: Sequence[int]) -> AbstractContextManager[None]:
        """A block in which these tensors have the forms that they have in ``reading``.  No communication."""
        return self.looking()

    def reshard(self) -> None:
        """Makes FSDP2 show shards: after some forward passes it leaves parameters gathered."""
        for module in self._fsdp_modules:
            module.reshard()


class WatchedTensors:
    """Shards of some tensors, as ``Watched`` in ``held_parts``.  No checks, and no loop for each."""

    def __init__(self, owner: PlacedTensors, numbers: Sequence[int], shard_of: ShardOf | None) -> None:
        self._owner = owner
        self._numbers = list(numbers)
        self._shard_of = shard_of
        self._names: list[str] = [owner.places[number].attribute for number in numbers]
        # Attributes of each module once, and the dictionary of parameters or buffers that each tensor is in.
        self._attributes: list[dict[str, Any]] = []
        self._kinds: list[str] = []
        self._known: list[dict[str, torch.Tensor]] = []
        self._dictionaries: list[dict[str, torch.Tensor]] = []
        self._marks: list[object] = []
        self._layout = object()
        self._places: TensorPlaces | None = None
        self._earlier: dict[tuple[int, ...], TensorPlaces] = {}

    def now(self) -> Seen:
        """The shards as they lie now."""
        tensors = self._find()
        marks: list[object] = []
        if self._shard_of is not None:
            names = [self._owner.places[number].name for number in self._numbers]
            marks.append(list(map(self._shard_of, names, tensors)))
        kinds = set(map(type, tensors))
        if all(issubclass(kind, DTensor) for kind in kinds):
            marks.append(list(map(_spec_of, tensors)))
            tensors = list(map(_local_of, tensors))
            kinds = set(map(type, tensors))
        elif any(issubclass(kind, DTensor) for kind in kinds):
            marks.append([_spec_of(one) if isinstance(one, DTensor) else None for one in tensors])
            tensors = [_local_of(one) if isinstance(one, DTensor) else one for one in tensors]
            kinds = set(map(type, tensors))
        if not all(map(_is_plain, kinds)):  # before the address of one of them is used
            for number, tensor in zip(self._numbers, tensors, strict=True):
                check_tensor(self._owner.places[number].name, tensor)
        known = self._places
        lies, alike = known.compare(tensors) if known is not None and marks == self._marks else (False, False)
        if not alike:
            self._use(TensorPlaces(tensors), marks)
        elif not lies:
            places = TensorPlaces(tensors, like=known)
            if known is None or not places.same_devices(known):
                self._use(places, marks)
            # Memory that is taken away and given back often lies where it lay before.
            if len(self._earlier) >= _KEPT_PLACES:
                self._earlier.clear()
            self._places = self._earlier.setdefault(places.addresses, places)
        assert self._places is not None
        return Seen(tensors, self._layout, self._places)

    def _use(self, places: TensorPlaces, marks: list[object]) -> None:
        self._places, self._marks, self._layout = places, marks, object()
        self._earlier = {places.addresses: places}

    def _find(self) -> list[torch.Tensor]:
        if self._owner.imagines():
            return list(map(self._owner.tensor, self._numbers))
        if not self._known or not all(map(operator.is_, map(dict.get, self._attributes, self._kinds), self._known)):
            self._locate()
        # Not by getattr, which takes eight times as long: there may be tens of thousands, and an update waits.
        found: list[Any] = list(map(dict.get, self._dictionaries, self._names))
        if any(map(operator.is_, found, repeat(None))):
            pairs = zip(found, self._numbers, strict=True)
            found = [self._owner.tensor(number) if tensor is None else tensor for tensor, number in pairs]
        return found

    def _locate(self) -> None:
        modules: dict[tuple[int, str], dict[str, Any]] = {}
        self._dictionaries = []
        for number, name in zip(self._numbers, self._names, strict=True):
            attributes = self._owner.places[number].module.__dict__
            kind = "_buffers" if name in attributes["_buffers"] else "_parameters"
            modules[id(attributes), kind] = attributes
            self._dictionaries.append(attributes[kind])
        self._kinds = [kind for _, kind in modules]
        self._attributes = list(modules.values())
        self._known = [attributes[kind] for (_, kind), attributes in modules.items()]


_KEPT_PLACES = 16
_PLAIN = {torch.Tensor, nn.Parameter}
_QUANTISED = "torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized"
_local_of = attrgetter("_local_tensor")  # ``to_local`` takes a hundred times as long
_spec_of = attrgetter("_spec")  # mesh, placements and whole shape


def places_of(
    model: nn.Module,
    *,
    shard_of: ShardOf | None = None,
    name_of: Callable[[nn.Module, str, str], str | None] | None = None,
    fsdp1: bool = False,
) -> Iterator[tuple[Place, torch.Tensor]]:
    """Every tensor of a module, once for each of its names, in the order of the ``state_dict``.

    With ``fsdp1``, modules that FSDP1 has wrapped are taken as they are.

    Raises:
        ConfigError: The module is sharded in a way that cannot be sent, or has weights that are no tensors with shapes.
    """
    for path, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel) and not fsdp1:
            raise ConfigError(
                "the model is sharded with FSDP1",
                hint="use Fsdp1Exporter, as connect(model) does, or shard it with torch's fully_shard (FSDP2)",
            )
        if type(module).__module__.startswith(_QUANTISED):
            raise ConfigError(
                f"{path or 'the model'} is {type(module).__name__} of {type(module).__module__}, which keeps its "
                "weights packed for torch's kernels and not as parameters",
                hint="send the model that it was quantised from; the engine quantises it by its own settings",
            )
        prefix = strip_wrappers(model, path)
        for attribute, tensor in own_tensors(module):
            name = f"{prefix}.{attribute}" if prefix else attribute
            if name_of is not None:
                name = name_of(module, prefix, attribute)
            if name is not None and is_lazy(tensor):
                raise ConfigError(f"{name} is a lazy parameter without a shape", hint="run one forward pass first")
            if name is not None:
                shape = whole_shape(name, tensor, shard_of)
                yield Place(module=module, attribute=attribute, name=name, shape=shape, dtype=tensor.dtype), tensor


def own_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """A module's parameters and persistent buffers by attribute, without those of its children."""
    yield from module.named_parameters(recurse=False, remove_duplicate=False)
    # torch's only public list of persistent buffers is the whole state dict.
    hidden: set[str] = module._non_persistent_buffers_set  # pyright: ignore[reportPrivateUsage]
    for attribute, tensor in module.named_buffers(recurse=False, remove_duplicate=False):
        if attribute not in hidden:
            yield attribute, tensor


def check_tensor(name: str, tensor: torch.Tensor) -> None:
    """Refuses, with ``ConfigError``, a tensor that has no memory, or bytes that are not its values."""
    if tensor.is_meta:
        raise ConfigError(f"{name} is on the meta device", hint="give the model its weights before exporting them")
    if tensor.layout != torch.strided:
        raise ConfigError(
            f"{name} is {tensor.layout}, and only dense tensors can be sent",
            hint="give the model a parameter made by to_dense()",
        )
    if tensor.dim() > MAX_DIMS:
        raise ConfigError(f"{name} has {tensor.dim()} dimensions, and at most {MAX_DIMS} can be sent")
    dtype_name(tensor.dtype)
    local = _local_of(tensor) if isinstance(tensor, DTensor) else tensor
    # The storage of a subclass with its own dispatch (quantised, nested, ...) does not hold its values.
    if not _is_plain(type(local)):
        raise ConfigError(
            f"{name} is a {type(local).__name__}, whose bytes are not its values",
            hint="give the model a plain parameter, such as dequantize() makes, or send the model it was made from",
        )
    if local.is_neg() or local.is_conj():
        raise ConfigError(
            f"{name} is a view that is negated or conjugated when it is read, so its bytes are not its values",
            hint="give the model the values: resolve_neg() or resolve_conj(), then clone()",
        )
    if local.numel() and not local.data_ptr():
        raise ConfigError(
            f"{name} has no memory: its storage has {local.untyped_storage().nbytes()} bytes",
            hint="give the tensor its memory back before the update, or update before it is freed",
        )


def _is_plain(kind: type[torch.Tensor]) -> bool:
    """True if the memory of such tensors holds their values."""
    return kind in _PLAIN or _dispatch(kind) is _dispatch(torch.Tensor)


def _dispatch(kind: type[torch.Tensor]) -> object:
    return getattr(kind, "__torch_dispatch__", None)


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if two tensors are views of the same elements."""
    if isinstance(one, DTensor) and isinstance(other, DTensor) and _spec_of(one) == _spec_of(other):
        one, other = _local_of(one), _local_of(other)
    if not _is_plain(type(one)) or not _is_plain(type(other)) or one.device != other.device:
        return False
    form = one.dtype, one.shape, one.stride(), one.data_ptr()
    return bool(one.data_ptr()) and form == (other.dtype, other.shape, other.stride(), other.data_ptr())


def _without_memory(seen: Seen) -> bool:
    return 0 in seen.addresses and any(
        tensor.numel() for tensor, address in zip(seen.tensors, seen.addresses, strict=True) if not address
    )
