"""Records what a model's ``load_weights`` does, by watching it once.

The loader is run on weights without memory (meta tensors) under a dispatch mode that sees every operation.  A copy
from a view of a source tensor into a resident parameter becomes a ``Route`` and is not carried out.  Any other write
into a parameter is *computed*: its sources stay with the loader, and the recorder notes the place that it writes.  So
the slicing, fusing and stacking of any engine is learnt from its own code, and can be staged, replayed and read back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

from weightcast.errors import ConfigError, some
from weightcast.receiver.write_log import WriteLog, storage_id
from weightcast.wire.box import Box, Span, are_disjoint, box_of_view, span_of
from weightcast.wire.layout import TensorSpec
from weightcast.wire.routes import Region, Route

LoadWeights = Callable[[Iterable[tuple[str, torch.Tensor]]], Any]
# In inference mode the first one is not taken apart into the second.
_MOVES = (torch.ops.aten.to, torch.ops.aten._to_copy)
_CLONES = (torch.ops.aten.clone, torch.ops.aten.contiguous)
_FILLS = (torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor, torch.ops.aten.zero_.default)


class ComputedGroup(NamedTuple):
    """Sources that a loader computes with together, so that it must get them in one call.

    Attributes:
        sources: Their names, in the order of a full update.
        places: What it writes: parts of parameters, no element twice.  Each is a route from the whole of a tensor of
            the region's shape, which exists while the loader runs.
        boxes: For each source, the parts of it that the loader reads, no element twice.
    """

    sources: tuple[str, ...]
    places: tuple[Route, ...]
    boxes: tuple[tuple[Box, ...], ...]


@dataclass(slots=True, kw_only=True)
class RecordedLoad:
    """The copies that a loader makes, and the writes that are no copies.

    Attributes:
        routes: By source name, in the order of the copies.
        groups: The sources that the loader computes with.
        why: Reason why no route describes a source completely, by source name.
        filled: Number of elements that only get a constant (the padding of a vocabulary), by parameter.
        constants: Boxes of sources that the loader does not keep, and the places that have a constant instead.
    """

    routes: dict[str, list[Route]] = field(default_factory=dict[str, list[Route]])
    groups: list[ComputedGroup] = field(default_factory=list[ComputedGroup])
    why: dict[str, str] = field(default_factory=dict[str, str])
    filled: dict[str, int] = field(default_factory=dict[str, int])
    constants: list[Route] = field(default_factory=list[Route])

    @property
    def computed(self) -> list[str]:
        """Names of the sources that stay with the loader."""
        return [name for group in self.groups for name in group.sources]

    @property
    def places(self) -> list[Route]:
        """The places of all groups."""
        return [place for group in self.groups for place in group.places]


def record_routes(
    load_weights: LoadWeights, specs: Sequence[TensorSpec], residents: Mapping[str, torch.Tensor]
) -> RecordedLoad:
    """Runs ``load_weights`` without changing anything, and records its copies of whole sources.

    It runs once with all sources.  If some writes are computed it runs again with each group of sources by itself, as
    an update will call it for the sources that stay with it.

    Raises:
        ConfigError: The loader looks at values, so that it does not show what it writes; or it writes a parameter only
            when it is given more sources at once than it computes that parameter from.
    """
    found = _watch(load_weights, specs, residents)
    if isinstance(found, _Unwatched):
        alone = ((spec.name, _watch(load_weights, [spec], residents)) for spec in specs)
        culprits = {name: one.reason for name, one in alone if isinstance(one, _Unwatched)}
        names = list(culprits) or [spec.name for spec in specs]
        raise ConfigError(
            f"load_weights cannot be watched with weights that have no values, {some(names)} among them, so no update "
            f"could be proven: {next(iter(culprits.values()), found.reason)}",
            hint="let load_weights go by names, shapes and dtypes of weights, and not by their values",
        )
    if not found.groups:
        return found
    by_name = {spec.name: spec for spec in specs}
    written = {place.parameter for place in found.places}
    groups: list[ComputedGroup] = []
    for group in found.groups:
        alone = _watch(load_weights, [by_name[name] for name in group.sources], residents)
        if isinstance(alone, RecordedLoad):
            groups += alone.groups
            found.routes.update(alone.routes)
            found.constants += alone.constants
    found.groups = groups
    lost = written - {place.parameter for place in found.places}
    if lost:
        raise ConfigError(
            f"load_weights writes {', '.join(sorted(lost))} only when it is given several weights at once, and an "
            "update brings it those alone that it computes with",
            hint="copy each weight into its part of the parameter when it comes",
        )
    return found


@dataclass(frozen=True, slots=True)
class _Unwatched:
    """A run of a loader that ended in an error."""

    reason: str


def _watch(
    load_weights: LoadWeights, specs: Sequence[TensorSpec], residents: Mapping[str, torch.Tensor]
) -> RecordedLoad | _Unwatched:
    """Takes the copy of a source for the source, unless the loader then needs its memory in order."""
    found = _watch_once(load_weights, specs, residents, through_clones=True)
    if isinstance(found, RecordedLoad):
        return found
    return _watch_once(load_weights, specs, residents, through_clones=False)


def _watch_once(
    load_weights: LoadWeights,
    specs: Sequence[TensorSpec],
    residents: Mapping[str, torch.Tensor],
    *,
    through_clones: bool,
) -> RecordedLoad | _Unwatched:
    mode = _Recorder(specs, residents, through_clones=through_clones)
    try:
        with torch.no_grad(), mode:
            load_weights(mode.sources())
    except (RuntimeError, TypeError, ValueError, AttributeError, AssertionError, LookupError) as error:
        # A loader that looks at values cannot run on meta tensors.
        return _Unwatched(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
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
        self._writes = WriteLog()
        self._origins = _Origins()
        self._current = ""

    def sources(self) -> Iterator[tuple[str, torch.Tensor]]:
        for spec in self._specs.values():
            tensor = torch.empty(spec.shape, dtype=spec.torch_dtype, device="meta")
            self._keep.append(tensor)  # a freed storage's address would be given to the next one
            self._source_of[storage_id(tensor)] = spec.name
            self._origins.add(tensor, {spec.name})
            self._current = spec.name
            yield spec.name, tensor

    def recording(self) -> RecordedLoad:
        result = self._writes.result()
        for source, (_, words) in result.why.items():
            self._why.setdefault(source, words)
        groups = self._origins.groups(self._why, self._specs)
        computed = {name for group in groups for name in group.sources}
        routes: dict[str, list[Route]] = {name: [] for name in self._specs if name not in computed}
        for route in result.routes:
            if route.source in routes:  # the loader places a computed source whole, its pure copies too
                routes[route.source].append(route)
        constants = [route for route in result.constants if route.source in routes]
        return RecordedLoad(routes=routes, groups=groups, why=self._why, filled=result.filled, constants=constants)

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
        read = list(tensors_in((args, kwargs)))
        origins = self._origins.of(read)
        if not is_view(func):
            for tensor in read:
                self._read(tensor)
        written = list(written_tensors(func, args, kwargs)) if func._schema.is_mutable else []
        for tensor in written:
            source = self._source_of.get(storage_id(tensor))
            if source is not None:
                self._why[source] = f"{func} changes the source in place"
        residents = [tensor for tensor in written if storage_id(tensor) in self._residents]
        for tensor in residents:
            names = [name for name, _ in self._owners(tensor)]
            self._compute(f"{func} writes {' and '.join(names)}", tensor, origins)
        if residents:
            return residents[0] if func._schema.returns else None
        for tensor in written:
            self._numbers.pop(storage_id(tensor), None)
        if func is torch.ops.aten.lift_fresh.default and not args[0].dim() and args[0].device.type == "cpu":
            self._keep.append(args[0])
            self._numbers[storage_id(args[0])] = args[0].item()
        found = _run(func, args, kwargs)
        if origins:
            for tensor in (*written, *tensors_in(found)):
                if storage_id(tensor) not in self._residents:
                    self._keep.append(tensor)
                    self._origins.add(tensor, origins)
        return found

    def _only_moves(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """True if a tensor without memory is brought to another device and stays what it is."""
        names = [argument.name for argument in func._schema.arguments]
        options = {**dict(zip(names, args, strict=False)), **kwargs}
        moved = args[0].is_meta and options.get("device") not in (None, torch.device("meta"))
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
            self._origins.write(owners[0], target, {self._current})
        return len(owners) == 1

    def _compute(self, words: str, target: torch.Tensor, origins: Set[str]) -> None:
        """Notes a write of values that are made from some sources; from the one at hand if it is not known which."""
        sources = origins or {self._current}
        if not target.numel() and any(self._specs[name].numel for name in sources):
            return  # this rank keeps nothing of them
        for name in sources:
            self._why.setdefault(name, words)
        for owner in self._owners(target):
            self._origins.write(owner, target, sources)

    def _read(self, tensor: torch.Tensor) -> None:
        """Notes which part of a source a view is."""
        name = self._source_of.get(storage_id(tensor))
        if name is not None:
            spec = self._specs[name]
            same = tensor.dtype == spec.torch_dtype
            shape, stride = tuple(tensor.shape), tensor.stride()
            found = box_of_view(spec.shape, int(tensor.storage_offset()), shape, stride) if same else None
            self._origins.read(name, found[0] if found is not None else _whole(spec))

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._read(source)
        owners = self._owners(target)
        name = self._source_of.get(storage_id(source))
        origins = self._origins.of([source])
        if len(owners) > 1:
            several = [parameter for parameter, _ in owners]
            self._compute(f"one copy writes {' and '.join(several)}, which share memory", target, origins)
            return
        parameter, whole = owners[0]
        if name is None:
            self._compute(f"{parameter} gets values computed from the source", target, origins)
            return
        spec = self._specs[name]
        if target.shape != source.shape:
            self._compute(f"{parameter} gets a broadcast of the source", target, origins)
            return
        if not source.numel() and spec.numel:
            return  # this rank keeps nothing of the source
        found = box_of_view(spec.shape, int(source.storage_offset()), tuple(source.shape), source.stride())
        if found is None:
            self._compute(f"{parameter} gets a part of the source that is not a box", target, origins)
            return
        box, dims = found
        stride = tuple(target.stride(dim) if dim is not None else 0 for dim in dims)
        offset = int(target.storage_offset()) - int(whole.storage_offset())
        region = Region(offset=offset, shape=box.shape, stride=stride)
        route = Route(source=name, box_offset=box.offset, box_shape=box.shape, parameter=parameter, region=region)
        self._writes.copied(whole, route)
        self._origins.write(owners[0], target, origins)


class _Origins:
    """Which sources the values of tensors were made from, and which of these were written where."""

    def __init__(self) -> None:
        self._of: dict[int, set[str]] = {}  # by storage
        self._log: list[tuple[frozenset[str], str, torch.Tensor, Region]] = []
        self._boxes: dict[str, dict[Box, None]] = {}  # that were read of each source
        self._into: dict[int, list[tuple[Span, Set[str]]]] = {}  # by storage of a parameter

    def of(self, tensors: Iterable[torch.Tensor]) -> set[str]:
        """Names of the sources that these tensors were made from, or that were written into them so far."""
        found: set[str] = set()
        for tensor in tensors:
            found.update(self._of.get(storage_id(tensor), ()))
            span = _span(tensor)
            found.update(*(names for other, names in self._into.get(storage_id(tensor), ()) if other.overlaps(span)))
        return found

    def add(self, tensor: torch.Tensor, sources: Set[str]) -> None:
        """Notes what a tensor is made from.  The caller keeps it alive, so that no other gets its address."""
        self._of.setdefault(storage_id(tensor), set()).update(sources)

    def read(self, source: str, box: Box) -> None:
        """Notes that a part of a source was read."""
        self._boxes.setdefault(source, {})[box] = None

    def write(self, owner: tuple[str, torch.Tensor], target: torch.Tensor, sources: Set[str]) -> None:
        """Notes a write into a view of a parameter."""
        parameter, whole = owner
        offset = int(target.storage_offset()) - int(whole.storage_offset())
        region = Region(offset=offset, shape=tuple(target.shape), stride=tuple(target.stride()))
        self._log.append((frozenset(sources), parameter, whole, region))
        self._into.setdefault(storage_id(target), []).append((_span(target), frozenset(sources)))

    def groups(self, computed: Iterable[str], specs: Mapping[str, TensorSpec]) -> list[ComputedGroup]:
        """Groups the sources that are computed with, and those that they are combined with.

        A source that the loader writes nowhere is in no group.
        """
        group_of = {name: {name} for name in computed}
        for sources in sorted({sources for sources, *_ in self._log if len(sources) > 1}, key=sorted):
            if any(name in group_of for name in sources):
                merged = set(sources).union(*(group_of.get(name, ()) for name in sources))
                group_of.update(dict.fromkeys(merged, merged))
        found: list[ComputedGroup] = []
        for group in {id(group): group for group in group_of.values()}.values():
            regions: dict[str, tuple[torch.Tensor, list[Region]]] = {}
            for sources, parameter, whole, region in self._log:
                if not sources.isdisjoint(group):
                    regions.setdefault(parameter, (whole, []))[1].append(region)
            names = tuple(name for name in specs if name in group)
            places = tuple(
                _place(names[0], parameter, region)
                for parameter, (whole, found_regions) in regions.items()
                for region in _apart(whole, found_regions)
            )
            if places:
                found.append(ComputedGroup(names, places, tuple(self._read_of(specs[name]) for name in names)))
        return found

    def _read_of(self, spec: TensorSpec) -> tuple[Box, ...]:
        """The boxes of a source that were read; all of it where they overlap."""
        boxes = tuple(box for box in self._boxes.get(spec.name, ()) if box.numel)
        return boxes if boxes and are_disjoint(boxes) else (_whole(spec),)


def _span(tensor: torch.Tensor) -> Span:
    return span_of(int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())


def _whole(spec: TensorSpec) -> Box:
    return Box(offset=(0,) * len(spec.shape), shape=spec.shape)


def _place(source: str, parameter: str, region: Region) -> Route:
    zeros = (0,) * len(region.shape)
    return Route(source=source, box_offset=zeros, box_shape=region.shape, parameter=parameter, region=region)


def _apart(whole: torch.Tensor, regions: Sequence[Region]) -> list[Region]:
    """Regions of a parameter that have no element in common; all of it where they overlap in part."""
    apart = list(dict.fromkeys(regions))
    if len(apart) < 2:
        return apart
    boxes = [box_of_view(tuple(whole.shape), region.offset, region.shape, region.stride) for region in apart]
    found = [box[0] for box in boxes if box is not None]
    if whole.is_contiguous() and len(found) == len(apart) and are_disjoint(found):
        return apart
    return [Region(offset=0, shape=tuple(whole.shape), stride=tuple(whole.stride()))]


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """Runs an operation; where some of its tensors have no memory, it takes the others' shapes and dtypes alone."""
    tensors = [tensor for tensor in tensors_in((args, kwargs)) if tensor.dim() or tensor.is_meta]
    if len({tensor.is_meta for tensor in tensors}) < 2:
        return func(*args, **kwargs)
    originals: dict[int, torch.Tensor] = {}

    def without_memory(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.is_meta or not value.dim():
            return value
        made = torch.empty_strided(tuple(value.shape), value.stride(), dtype=value.dtype, device="meta")
        originals[id(made)] = value
        return made

    found = func(*tree_map(without_memory, args), **tree_map(without_memory, kwargs))
    return with_originals(found, originals)


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


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """The tensors in the arguments or results of an operation."""
    return (value for value in tree_iter(values) if isinstance(value, torch.Tensor))


def is_view(func: Any) -> bool:
    """True if an operation returns views of its arguments, or may do so, and changes nothing."""
    return not func._schema.is_mutable and any(result.alias_info is not None for result in func._schema.returns)


def with_originals(found: Any, originals: Mapping[int, torch.Tensor]) -> Any:
    """The results of an operation, with an argument's original, by id, in the place of what stood for it."""

    def original(value: object) -> object:
        return originals.get(id(value), value)

    return tree_map(original, found)


def written_tensors(func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """The tensors that an operation writes, by its own schema."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        yield from (item for item in (value if isinstance(value, list | tuple) else [value]) if item is not None)
