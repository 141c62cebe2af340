"""Records how code builds tensors from other tensors, by running it on meta tensors, which have no memory.

A dispatch mode sees every operation.  Views need no handling: meta tensors have a storage, an offset and strides.  The
recorder notes a copy into new memory (clone, cat, stack) as a strided copy between two storages.  At the end it follows
each tensor back to the sources and returns ``Segment``s.  Nothing is allocated, gathered or read.

Code that computes values, or moves them in a way that is no union of boxes, is refused with ``NotRecorded``.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from weightcast.exporters.segments import NEW, Segment
from weightcast.wire.box import Box, contiguous_strides

_CLONES = {"aten::clone", "aten::contiguous", "aten::_to_copy", "aten::copy", "aten::view_copy"}
_MAX_SEGMENTS = 1 << 16  # of one tensor; an update walks through all of them
_UNBOUNDED = 1 << 62
_steps_of = functools.lru_cache(maxsize=4096)(contiguous_strides)


class NotRecorded(Exception):
    """The code does more than move boxes; the text says what."""


@dataclass(frozen=True, slots=True)
class _StridedCopy:
    """A strided copy: element ``to + sum(i * step_to)`` is element ``of + sum(i * step_of)``, over all ``i < extent``.

    Attributes:
        to: First element written, in the storage of the target.
        of: First element read, in the storage of the source.
        axes: (extent, step in the target, step in the source) in elements.
    """

    to: int
    of: int
    axes: tuple[tuple[int, int, int], ...]


class Recorder(TorchDispatchMode):
    """Records the operations inside a ``with`` block."""

    def __init__(self) -> None:
        super().__init__()
        self._sources: dict[int, tuple[int, tuple[int, ...]]] = {}  # storage: number, shape
        self._writes: dict[
            int, list[tuple[_StridedCopy, int]]
        ] = {}  # storage: copies into it, and their source storages
        self._computed: dict[int, str] = {}  # storage: the operation
        self._dtypes: dict[int, torch.dtype] = {}
        self._followed: dict[int, list[tuple[_StridedCopy, int]]] = {}
        self._alive: list[torch.Tensor] = []  # a new storage would get the address of one that is freed

    def source(self, number: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor without memory that stands for the source of this number."""
        tensor = torch.empty(shape, dtype=dtype, device="meta")
        self._alive.append(tensor)
        self._sources[_storage(tensor)] = number, shape
        self._dtypes[_storage(tensor)] = dtype
        return tensor

    def segments(self, tensor: torch.Tensor) -> tuple[Segment, ...]:
        """The boxes of the sources that make up a tensor; ``NotRecorded`` for values that are computed, or no boxes."""
        shape, storage = tuple(tensor.shape), _storage(tensor)
        if storage in self._computed:
            raise NotRecorded(f"its values are computed by {self._computed[storage]}")
        if storage not in self._dtypes:
            raise NotRecorded("none of its values come from the model's tensors")
        if storage in self._sources:
            number, whole = self._sources[storage]
            if whole == shape and not tensor.storage_offset() and tensor.is_contiguous():
                return (Segment.whole(number, shape),)
        if not tensor.numel():
            raise NotRecorded("it has no elements")
        seen = _StridedCopy(
            0, int(tensor.storage_offset()), tuple(zip(shape, _steps_of(shape), tensor.stride(), strict=True))
        )
        found = [(seen, storage)] if storage in self._sources else self._follow(seen, storage)
        segments: list[Segment] = []
        for copy, origin in found:
            number, whole = self._sources[origin]
            box = _one_box(copy, number, whole, shape)
            if box is not None:  # nearly always
                segments.append(box)
                continue
            for fitted in _compose(_same(shape), copy):
                for piece in _compose(fitted, _same(whole)):
                    segments.extend(_boxes(piece, number, whole, shape))
        if sum(math.prod(segment.box.shape) for segment in segments) != tensor.numel():
            raise NotRecorded("it has gaps or overlaps")
        return tuple(segments)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs an operation and records its copies."""
        named = kwargs or {}
        out = func(*args, **named)
        if func.is_view and isinstance(out, torch.Tensor) and self._dtypes.get(_storage(out)) == out.dtype:
            return out  # thousands of experts are taken apart in this way
        name: str = func._schema.name
        inputs = [tensor for tensor in _tensors((args, named)) if _storage(tensor) in self._dtypes]
        if func._schema.is_mutable:
            for tensor in inputs:
                self._computed[_storage(tensor)] = f"{name}, in place"
            return out
        for made in _tensors(out):
            storage = _storage(made)
            if storage in self._dtypes:  # a view
                if made.dtype != self._dtypes[storage]:
                    self._computed[storage] = f"{name} to {made.dtype}"
                continue
            self._alive.append(made)
            self._dtypes[storage] = made.dtype
            if not self._write_all(name, made, args, named, inputs):
                self._computed[storage] = name
        return out

    def _write_all(
        self, name: str, made: torch.Tensor, args: Sequence[Any], named: Mapping[str, Any], inputs: list[torch.Tensor]
    ) -> bool:
        """Records the copies that fill a new tensor; False if it is not filled by copies."""
        if name in _CLONES:
            parts, targets = [args[0]], [made]
        elif name == "aten::cat":
            parts = [part for part in args[0] if part.numel()]
            dim = (args[1] if len(args) > 1 else named.get("dim", 0)) % max(made.dim(), 1)
            ends = list(itertools.accumulate(part.shape[dim] for part in parts))
            targets = [
                made.narrow(dim, end - part.shape[dim], part.shape[dim]) for part, end in zip(parts, ends, strict=True)
            ]
        elif name == "aten::stack":
            parts = list(args[0])
            dim = (args[1] if len(args) > 1 else named.get("dim", 0)) % made.dim()
            targets = [made.select(dim, index) for index in range(len(parts))]
        else:
            return False
        known = {id(tensor) for tensor in inputs}
        for part, target in zip(parts, targets, strict=True):
            if id(part) not in known or part.dtype != made.dtype:
                return False
            axes = tuple(zip(target.shape, target.stride(), part.stride(), strict=True))
            copy = _StridedCopy(int(target.storage_offset()), int(part.storage_offset()), axes)
            self._writes.setdefault(_storage(target), []).append((copy, _storage(part)))
        return True

    def _follow(self, seen: _StridedCopy, storage: int) -> list[tuple[_StridedCopy, int]]:
        found: list[tuple[_StridedCopy, int]] = []
        for made, origin in self._origins(storage):
            inside = _inside(seen, made)
            if inside is not None:  # nearly always; it would be the only copy that is not empty
                return [(inside, origin)]
            found += [(copy, origin) for copy in _compose(seen, made)]
        return found

    def _origins(self, storage: int) -> list[tuple[_StridedCopy, int]]:
        """Copies into a storage, followed back to the sources."""
        if storage in self._computed:
            raise NotRecorded(f"its values are computed by {self._computed[storage]}")
        if storage not in self._followed:
            found: list[tuple[_StridedCopy, int]] = []
            for copy, origin in self._writes[storage]:
                found.extend([(copy, origin)] if origin in self._sources else self._follow(copy, origin))
            self._followed[storage] = found
        return self._followed[storage]


@functools.lru_cache(maxsize=4096)
def _by_step(axes: tuple[tuple[int, int, int], ...]) -> tuple[tuple[int, int, int], ...]:
    """The axes of a copy that are longer than 1, the largest step in the target first."""
    return tuple(sorted((axis for axis in axes if axis[0] > 1), key=lambda axis: -axis[1]))


def _inside(outer: _StridedCopy, inner: _StridedCopy) -> _StridedCopy | None:
    """Joins two copies if ``outer`` reads nothing but a box of the elements that ``inner`` writes; None otherwise.

    ``inner`` writes into new memory, each element once.  So any way to reach an element along its axes is the only one.
    """
    rest, of = outer.of - inner.to, inner.of
    left: dict[int, tuple[int, int]] = {}  # step in the memory between: extent from there on, step in the source
    for extent, step_to, step_of in _by_step(inner.axes):
        start, rest = divmod(rest, step_to)
        if not 0 <= start < extent:
            return None
        of += start * step_of
        left[step_to] = extent - start, step_of
    if rest:
        return None
    axes: list[tuple[int, int, int]] = []
    for extent, step_to, step_of in outer.axes:
        if extent == 1:
            continue
        found = left.pop(step_of, None)
        if found is None or extent > found[0]:
            return None
        axes.append((extent, step_to, found[1]))
    return _StridedCopy(outer.to, of, tuple(axes))


@functools.lru_cache(maxsize=4096)
def _dims_by_step(shape: tuple[int, ...]) -> dict[int, int]:
    """Dimension of a contiguous tensor by its step; dimensions of extent 1 are left out."""
    return {step: dim for dim, step in enumerate(_steps_of(shape)) if shape[dim] > 1}


def _one_box(copy: _StridedCopy, number: int, source: tuple[int, ...], target: tuple[int, ...]) -> Segment | None:
    """The segment of a copy between a whole source and a whole target, both contiguous; None if it is not one box."""
    offset, at = _position(source, copy.of), _position(target, copy.to)
    shape, dims = [1] * len(source), [NEW] * len(target)
    for extent, step_to, step_of in copy.axes:
        if extent == 1:
            continue
        to, of = _dims_by_step(target).get(step_to), _dims_by_step(source).get(step_of)
        if to is None or of is None or dims[to] != NEW or shape[of] > 1:
            return None
        if at[to] + extent > target[to] or offset[of] + extent > source[of]:
            return None
        dims[to], shape[of] = of, extent
    return Segment(source=number, box=Box(offset=tuple(offset), shape=tuple(shape)), dims=tuple(dims), at=tuple(at))


def _same(shape: tuple[int, ...]) -> _StridedCopy:
    return _StridedCopy(0, 0, tuple((extent, step, step) for extent, step in zip(shape, _steps_of(shape), strict=True)))


def _compose(outer: _StridedCopy, inner: _StridedCopy) -> list[_StridedCopy]:
    """Joins two copies, where ``outer`` reads the storage that ``inner`` writes, clipped to the elements of both.

    The steps of both over the storage between them are sorted into a chain in which each divides the next.  A position
    is then a number with mixed radices, and each copy is a union of boxes of digits.

    Raises:
        NotRecorded: The steps do not divide one another.
    """
    reads = tuple((extent, of, to) for extent, to, of in outer.axes if extent != 1)
    writes = tuple((extent, to, of) for extent, to, of in inner.axes if extent != 1)
    if any(step == 0 for _, step, _ in reads):
        raise NotRecorded("its values are repeated")
    chain = tuple(sorted({1, *(step for _, step, _ in reads), *(step for _, step, _ in writes)}))
    if any(high % low for low, high in itertools.pairwise(chain)):
        raise NotRecorded(f"the steps {chain} of its parts do not divide one another")
    boxes_read, steps_read, base_read = _digits(outer.of, reads, chain)
    boxes_written, steps_written, base_written = _digits(inner.to, writes, chain)
    found: list[_StridedCopy] = []
    for read, written in itertools.product(boxes_read, boxes_written):
        common = [(max(a, b), min(a + m, b + n)) for (a, m), (b, n) in zip(read, written, strict=True)]
        if any(start >= end for start, end in common):
            continue
        found.append(
            _StridedCopy(
                outer.to + base_read + sum(start * step for (start, _), step in zip(common, steps_read, strict=True)),
                inner.of
                + base_written
                + sum(start * step for (start, _), step in zip(common, steps_written, strict=True)),
                tuple(
                    (end - start, a, b)
                    for (start, end), a, b in zip(common, steps_read, steps_written, strict=True)
                    if end - start > 1
                ),
            )
        )
    return found


_Digits = tuple[list[list[tuple[int, int]]], list[int], int]


@functools.lru_cache(maxsize=1 << 16)
def _digits(offset: int, axes: tuple[tuple[int, int, int], ...], chain: tuple[int, ...]) -> _Digits:
    """Expresses one side of a copy, over the storage between two copies, as boxes of digits.

    Each of ``axes`` is (extent, step in that storage, step on the other side).  ``chain`` has the values of the digits,
    lowest first.  Returns boxes, (first, extent) for each digit; the step on the other side for each; its offset.
    """
    axes = tuple(sorted(axes, key=lambda axis: axis[1]))
    place = {step: level for level, step in enumerate(chain)}
    steps, base, level = [0] * len(chain), 0, 0
    boxes: list[list[tuple[int, int]]] = [[]]

    def fix_digits(until: int) -> None:
        nonlocal level
        for k in range(level, until):
            above = chain[k + 1] if k + 1 < len(chain) else _UNBOUNDED
            for box in boxes:
                box.append(((offset % above) // chain[k], 1))
        level = max(level, until)

    for number, (extent, step, other) in enumerate(axes):
        fix_digits(place[step])
        above = axes[number + 1][1] if number + 1 < len(axes) else _UNBOUNDED
        until = place[above] if above != _UNBOUNDED else len(chain)
        start = (offset % above) // step
        if above != _UNBOUNDED and start + extent > above // step:
            raise NotRecorded("one of its parts wraps around")
        radices = [chain[k + 1] // chain[k] if k + 1 < len(chain) else _UNBOUNDED for k in range(level, until)]
        for k in range(level, until):
            steps[k] = other * (chain[k] // step)
        base -= other * start
        boxes = [box + part for box in boxes for part in _interval(start, start + extent, radices)]
        level = until
    fix_digits(len(chain))
    return boxes, steps, base


def _interval(start: int, end: int, radices: list[int]) -> list[list[tuple[int, int]]]:
    """The numbers from ``start`` to before ``end`` as boxes of digits, lowest first; the last digit has no bound."""
    if len(radices) == 1:
        return [[(start, end - start)]]
    radix, rest = radices[0], radices[1:]
    if start // radix == (end - 1) // radix:
        return [[(start % radix, end - start), *high] for high in _interval(start // radix, start // radix + 1, rest)]
    found: list[list[tuple[int, int]]] = []
    if start % radix:
        first = _interval(start // radix, start // radix + 1, rest)
        found += [[(start % radix, radix - start % radix), *high] for high in first]
    low, top = -(-start // radix), end // radix
    if top > low:
        found += [[(0, radix), *high] for high in _interval(low, top, rest)]
    if end % radix:
        found += [[(0, end % radix), *high] for high in _interval(end // radix, end // radix + 1, rest)]
    return found


def _boxes(copy: _StridedCopy, number: int, source: tuple[int, ...], target: tuple[int, ...]) -> Iterator[Segment]:
    """Splits a copy between a whole source and target, both contiguous, into boxes; ``NotRecorded`` for too many."""
    kept: dict[int, tuple[int, int]] = {}  # dimension of the target: dimension of the source, extent
    run: list[tuple[int, int, int, int, int]] = []
    for extent, step_to, step_of in sorted(copy.axes, key=lambda axis: -axis[0]):
        (to, times_to), (of, times_of) = _dim(target, step_to), _dim(source, step_of)
        taken = to in kept or of in {dim for dim, _ in kept.values()}
        if times_to == times_of == 1 and not taken:
            kept[to] = of, extent
        else:
            run.append((extent, to, times_to, of, times_of))
    if math.prod(extent for extent, *_ in run) > _MAX_SEGMENTS:
        raise NotRecorded(f"it needs more than {_MAX_SEGMENTS} boxes")
    shape = [1] * len(source)
    for of, extent in kept.values():
        shape[of] = extent
    dims = tuple(kept[to][0] if to in kept else NEW for to in range(len(target)))
    for index in itertools.product(*(range(extent) for extent, *_ in run)):
        offset, at = _position(source, copy.of), _position(target, copy.to)
        for i, (_, to, times_to, of, times_of) in zip(index, run, strict=True):
            at[to] += i * times_to
            offset[of] += i * times_of
        yield Segment(source=number, box=Box(offset=tuple(offset), shape=tuple(shape)), dims=dims, at=tuple(at))


def _dim(shape: tuple[int, ...], step: int) -> tuple[int, int]:
    """The dimension along which a step moves, and the distance."""
    steps = _steps_of(shape)
    dim = next(dim for dim, own in enumerate(steps) if own <= step and shape[dim] > 1)
    if step % steps[dim]:
        raise NotRecorded(f"one of its parts has a step of {step} in {list(shape)}, which is no box")
    return dim, step // steps[dim]


def _position(shape: tuple[int, ...], offset: int) -> list[int]:
    at: list[int] = []
    for step in _steps_of(shape):
        at.append(offset // step)
        offset %= step
    return at


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, list | tuple):
        for item in tree:
            yield from _tensors(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from _tensors(item)
