"""Records what a model's ``load_weights`` does, by watching it once.

The loader is run on weights without memory (meta tensors) under a dispatch mode that sees every operation.  A copy
from a view of a source tensor into a resident parameter becomes a ``Route`` and is not carried out.  Any other write
into a parameter is *computed*: its source stays with the loader.  So the slicing, fusing and stacking of any engine is
learnt from its own code, and can be staged, replayed and read back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from weightcast.errors import ConfigError
from weightcast.receiver.write_log import WriteLog, storage_id
from weightcast.wire.box import box_of_view, span_of
from weightcast.wire.layout import TensorSpec
from weightcast.wire.routes import Region, Route

LoadWeights = Callable[[Iterable[tuple[str, torch.Tensor]]], Any]
# In inference mode the first one is not taken apart into the second.
_MOVES = (torch.ops.aten.to, torch.ops.aten._to_copy)
_CLONES = (torch.ops.aten.clone, torch.ops.aten.contiguous)
_FILLS = (torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor, torch.ops.aten.zero_.default)


@dataclass(slots=True, kw_only=True)
class RecordedLoad:
    """The copies that a loader makes, and the writes that are no copies.

    Attributes:
        routes: By source name, in the order of the copies.
        why: Reason why no route describes a source completely, by source name.
        filled: Number of elements that only get a constant (the padding of a vocabulary), by parameter.
        constants: Boxes of sources that the loader does not keep, and the places that have a constant instead.
        opaque: True if a source's writes could not be seen at all: the loader looks at values.
    """

    routes: dict[str, list[Route]] = field(default_factory=dict[str, list[Route]])
    why: dict[str, str] = field(default_factory=dict[str, str])
    written: set[str] = field(default_factory=set[str])
    filled: dict[str, int] = field(default_factory=dict[str, int])
    constants: list[Route] = field(default_factory=list[Route])
    opaque: bool = False

    @property
    def computed(self) -> list[str]:
        """Names of the sources that stay with the loader."""
        return list(self.why)


def record_routes(
    load_weights: LoadWeights, specs: Sequence[TensorSpec], residents: Mapping[str, torch.Tensor]
) -> RecordedLoad:
    """Runs ``load_weights`` without changing anything, and records its copies of whole sources.

    It runs once with all sources.  If some writes are computed it runs again with each source by itself, as an update
    will call it for the sources that stay with it.  It raises ConfigError for a parameter that is written only when
    several are there at once.
    """
    everything = _watch(load_weights, specs, residents)
    if not everything.why:
        return everything
    # A loader that computes may have combined several sources: whose values it wrote cannot be told.
    found = RecordedLoad()
    for spec in specs:
        alone = _watch(load_weights, [spec], residents)
        found.routes.update(alone.routes)
        found.why.update(alone.why)
        found.written |= alone.written
        found.filled.update(alone.filled)
        found.constants += alone.constants
        found.opaque |= alone.opaque
    lost = _written(everything) - _written(found)
    if lost:
        raise ConfigError(
            f"load_weights writes {', '.join(sorted(lost))} only when it is given several weights at once, and an "
            "update brings them one by one",
            hint="copy each weight into its part of the parameter when it comes",
        )
    return found


def _written(recording: RecordedLoad) -> set[str]:
    return recording.written | {route.parameter for found in recording.routes.values() for route in found}


def _watch(
    load_weights: LoadWeights, specs: Sequence[TensorSpec], residents: Mapping[str, torch.Tensor]
) -> RecordedLoad:
    """Takes the copy of a source for the source, unless the loader then needs its memory in order."""
    found = _watch_once(load_weights, specs, residents, through_clones=True)
    return _watch_once(load_weights, specs, residents, through_clones=False) if found.opaque else found


def _watch_once(
    load_weights: LoadWeights,
    specs: Sequence[TensorSpec],
    residents: Mapping[str, torch.Tensor],
    *,
    through_clones: bool,
) -> RecordedLoad:
    mode = _Recorder(specs, residents, through_clones=through_clones)
    try:
        with torch.no_grad(), mode:
            load_weights(mode.sources())
    except (RuntimeError, TypeError, ValueError, AttributeError, AssertionError, LookupError) as error:
        # A loader that looks at values cannot run on meta tensors: every source stays with it.
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return RecordedLoad(why={spec.name: reason for spec in specs}, opaque=True)
    return mode.recording()


class _Recorder(TorchDispatchMode):
    def __init__(
        self, specs: Sequence[TensorSpec], residents: Mapping[str, torch.Tensor], *, through_clones: bool
    ) -> None:
        super().__init__()
        self._through_clones = through_clones
        self._specs = {spec.name: spec for spec in specs}
        self._residents: dict[int, list[tuple[str, torch.Tensor]]] = {}
        for name, tensor in residents.items():
            self._residents.setdefault(storage_id(tensor), []).append((name, tensor))
        self._source_of: dict[int, str] = {}
        self._numbers: dict[int, float] = {}  # by storage of the tensor that holds it
        self._keep: list[torch.Tensor] = []
        self._why: dict[str, str] = {}
        self._written: set[str] = set()
        self._writes = WriteLog()
        self._current = ""

    def sources(self) -> Iterator[tuple[str, torch.Tensor]]:
        for spec in self._specs.values():
            tensor = torch.empty(spec.shape, dtype=spec.torch_dtype, device="meta")
            self._keep.append(tensor)  # a freed storage's address would be given to the next one
            self._source_of[storage_id(tensor)] = spec.name
            self._current = spec.name
            yield spec.name, tensor

    def recording(self) -> RecordedLoad:
        result = self._writes.result()
        for source, (parameter, words) in result.why.items():
            self._why.setdefault(source, words)
            self._written.add(parameter)
        routes: dict[str, list[Route]] = {name: [] for name in self._specs if name not in self._why}
        for route in result.routes:
            if route.source in routes:
                routes[route.source].append(route)
            else:  # the loader places a computed source whole, its pure copies too
                self._written.add(route.parameter)
        constants = [route for route in result.constants if route.source in routes]
        return RecordedLoad(
            routes=routes, why=self._why, written=self._written, filled=result.filled, constants=constants
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.copy_.default:
            target, source = args[0], args[1]
            if storage_id(target) in self._residents:
                self._copy(target, source)
                return target
        if self._through_clones and func.overloadpacket in _CLONES and storage_id(args[0]) in self._source_of:
            return args[0]  # if the loader changes the clone, it is seen as a change of the source: computed
        if func.overloadpacket in _MOVES and self._only_moves(func, args, kwargs):
            return args[0]
        if func in _FILLS and self._fill(args[0], args[1] if len(args) > 1 else 0):
            return args[0]
        written = list(_written_tensors(func, args, kwargs)) if func._schema.is_mutable else []
        for tensor in written:
            source = self._source_of.get(storage_id(tensor))
            if source is not None:
                self._why[source] = f"{func} changes the source in place"
        residents = [tensor for tensor in written if storage_id(tensor) in self._residents]
        for tensor in residents:
            names = [name for name, _ in self._owners(tensor)]
            self._why[self._current] = f"{func} writes {' and '.join(names)}"
            self._written.update(names)
        if residents:
            return residents[0] if func._schema.returns else None
        for tensor in written:
            self._numbers.pop(storage_id(tensor), None)
        if func is torch.ops.aten.lift_fresh.default and not args[0].dim() and args[0].device.type == "cpu":
            self._keep.append(args[0])
            self._numbers[storage_id(args[0])] = args[0].item()
        return func(*args, **kwargs)

    def _only_moves(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """True if a source is brought to another device and stays what it is; here it has no memory to bring."""
        names = [argument.name for argument in func._schema.arguments]
        options = {**dict(zip(names, args, strict=False)), **kwargs}
        moved = storage_id(args[0]) in self._source_of and options.get("device") not in (None, torch.device("meta"))
        return moved and options.get("dtype") in (None, args[0].dtype)

    def _owners(self, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """The resident that a tensor lies in; every resident of its storage if it lies in none of them."""
        sharing = self._residents.get(storage_id(tensor), [])
        if len(sharing) < 2:
            return sharing
        return next(([owner] for owner in sharing if _lies_in(tensor, owner[1])), sharing)

    def _fill(self, target: torch.Tensor, value: float | torch.Tensor) -> bool:
        """Notes a constant; False if it goes to more than one parameter, or is computed."""
        # `weight[row] = 0` makes a tensor of its 0 on the CPU, whatever device the weight is on.
        number = self._numbers.get(storage_id(value)) if isinstance(value, torch.Tensor) else value
        if number is None:
            return False
        owners = self._owners(target)
        if len(owners) == 1:
            self._writes.filled(*owners[0], target, number, self._current)
        return len(owners) == 1

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        owners = self._owners(target)
        name = self._source_of.get(storage_id(source))
        if len(owners) > 1:
            several = [parameter for parameter, _ in owners]
            self._why[name or self._current] = f"one copy writes {' and '.join(several)}, which share memory"
            self._written.update(several)
            return
        parameter, whole = owners[0]
        if name is None:
            self._why[self._current] = f"{parameter} gets values computed from the source"
            self._written.add(parameter)
            return
        spec = self._specs[name]
        if target.shape != source.shape:
            self._why[name] = f"{parameter} gets a broadcast of the source"
            self._written.add(parameter)
            return
        if not source.numel() and spec.numel:
            return  # this rank keeps nothing of the source
        found = box_of_view(spec.shape, int(source.storage_offset()), tuple(source.shape), source.stride())
        if found is None:
            self._why[name] = f"{parameter} gets a part of the source that is not a box"
            self._written.add(parameter)
            return
        box, dims = found
        stride = tuple(target.stride(dim) if dim is not None else 0 for dim in dims)
        offset = int(target.storage_offset()) - int(whole.storage_offset())
        region = Region(offset=offset, shape=box.shape, stride=stride)
        route = Route(source=name, box_offset=box.offset, box_shape=box.shape, parameter=parameter, region=region)
        self._writes.copied(whole, route)


def _lies_in(tensor: torch.Tensor, whole: torch.Tensor) -> bool:
    """True if every element of one view is an element of another view of the same storage."""
    if tensor.dtype != whole.dtype:
        return False
    first, last = span_of(int(whole.storage_offset()), whole.shape, whole.stride())
    start, end = span_of(int(tensor.storage_offset()), tensor.shape, tensor.stride())
    if start < first or last < end:
        return False
    if whole.numel() == last - first:
        return True
    seen = torch.zeros(last - first, dtype=torch.bool)
    seen.as_strided(whole.shape, whole.stride(), 0).fill_(True)
    return bool(seen.as_strided(tensor.shape, tensor.stride(), start - first).all())


def _written_tensors(func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """The tensors that an operation writes, by its own schema."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        yield from (item for item in (value if isinstance(value, list | tuple) else [value]) if item is not None)
