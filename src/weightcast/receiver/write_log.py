"""Works out what a loader's copies and fills leave in the parameters, from the order in which it made them.

A later write hides what it covers of an earlier one.  What is left are copies that touch no common element, so that
they can be repeated in any order, and constants that the parameters have already.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from weightcast.wire.box import Box, box_of_view, intersection, slices, span_of
from weightcast.wire.routes import Region, Route


@dataclass(slots=True, kw_only=True)
class _Write:
    """One write into a parameter, of which ``parts`` are left.

    Attributes:
        region: What was written, relative to the parameter's first element.
        route: The copy; None for a constant.
        parts: Boxes of the parameter that no later write covers; None for all of it.
    """

    parameter: str
    whole: torch.Tensor
    region: Region
    source: str
    route: Route | None = None
    value: float = 0.0
    parts: list[Box] | None = None

    def box(self) -> tuple[Box, tuple[int | None, ...]] | None:
        """The region as a box of the parameter, and the region's dimension along each of the parameter's."""
        if not self.whole.is_contiguous():
            return None
        return box_of_view(tuple(self.whole.shape), self.region.offset, self.region.shape, self.region.stride)

    def left(self) -> list[Box] | None:
        """``parts``, or the whole box; None if the region is no box."""
        found = self.box()
        return None if found is None else [found[0]] if self.parts is None else self.parts


@dataclass(slots=True, kw_only=True)
class WriteResult:
    """The copies and constants that all writes leave together.

    Attributes:
        routes: Copies, in the order in which they were made.
        constants: Parts of copies that a later constant hides: a place, and the box of the source that it replaces.
        filled: Number of elements that only get a constant, by parameter.
        why: For each source whose writes are no copies: the parameter and the reason.
    """

    routes: list[Route] = field(default_factory=list[Route])
    constants: list[Route] = field(default_factory=list[Route])
    filled: dict[str, int] = field(default_factory=dict[str, int])
    why: dict[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])


class WriteLog:
    """Copies and fills of one run of a loader."""

    def __init__(self) -> None:
        self._by_storage: dict[int, list[_Write]] = {}
        self._order: list[_Write] = []

    def copied(self, whole: torch.Tensor, route: Route) -> None:
        """Notes a copy into a parameter."""
        self._note(
            _Write(parameter=route.parameter, whole=whole, region=route.region, route=route, source=route.source)
        )

    def filled(self, parameter: str, whole: torch.Tensor, target: torch.Tensor, value: float, source: str) -> None:
        """Notes that a view of a parameter got a constant, while the loader had a source in hand."""
        offset = int(target.storage_offset()) - int(whole.storage_offset())
        region = Region(offset=offset, shape=tuple(target.shape), stride=tuple(target.stride()))
        self._note(_Write(parameter=parameter, whole=whole, region=region, value=value, source=source))

    def result(self) -> WriteResult:
        """Works out what all writes leave together."""
        result = WriteResult()
        for writes in self._by_storage.values():
            if any(write.route is None for write in writes):
                self._hide_covered(writes, result)
        last = {_place(write): write for write in self._order if write.route is not None}
        for write in self._order:
            if write.source in result.why:
                continue
            if write.route is None:
                self._check_constant(write, result)
            elif last[_place(write)] is write:  # of two copies to the same place the later one stays
                result.routes += _cut(write.route, write, write.parts)
                if write.parts is not None:
                    result.constants += _cut(write.route, write, self._constant_parts(write))
        return result

    def _note(self, write: _Write) -> None:
        self._order.append(write)
        self._by_storage.setdefault(storage_id(write.whole), []).append(write)

    def _hide_covered(self, writes: list[_Write], result: WriteResult) -> None:
        """Takes from each write what a later one covers, if either is a constant; copies over copies are refused."""
        for number, later in enumerate(writes):
            for earlier in writes[:number]:
                if (later.route is not None and earlier.route is not None) or not _span(later).overlaps(_span(earlier)):
                    continue
                parts, over = earlier.left(), later.box()
                if parts is None or over is None or later.whole is not earlier.whole:
                    words = f"{earlier.parameter} is written twice, in parts that are no boxes"
                    for write in (earlier, later):
                        result.why[write.source] = earlier.parameter, words
                    continue
                earlier.parts = [rest for part in parts for rest in _without(part, over[0])]

    def _constant_parts(self, write: _Write) -> list[Box]:
        """The boxes of a copy that have a constant in the end."""
        found = write.box()
        others = self._by_storage[storage_id(write.whole)]
        fills = [each for each in others if each.route is None and each.whole is write.whole]
        parts = [part for fill in fills for part in fill.left() or ()]
        common = [intersection(part, found[0]) for part in parts] if found is not None else []
        return [part for part in common if part is not None]

    def _check_constant(self, write: _Write, result: WriteResult) -> None:
        """A constant counts only if the parameter has had it since the model's first load, and keeps it."""
        live = write.whole.as_strided(
            write.region.shape, write.region.stride, int(write.whole.storage_offset()) + write.region.offset
        )
        parts = write.parts
        views = [live] if parts is None else [write.whole[slices(part, (0,) * len(part.shape))] for part in parts]
        if not all(bool((view == write.value).all()) for view in views):
            result.why[write.source] = write.parameter, f"{write.parameter} gets a constant that it does not have"
            # Copies of this source that were taken over before stay with the loader too.
            for kept in (result.routes, result.constants):
                kept[:] = [route for route in kept if route.source != write.source]
            return
        count = sum(view.numel() for view in views)
        result.filled[write.parameter] = result.filled.get(write.parameter, 0) + count


def _without(box: Box, hole: Box) -> Iterable[Box]:
    """Boxes that make up one box without the elements of another."""
    common = intersection(box, hole)
    if common is None:
        yield box
        return
    offset, shape = list(box.offset), list(box.shape)
    for dim, (first, size) in enumerate(zip(common.offset, common.shape, strict=True)):
        for start, end in ((offset[dim], first), (first + size, offset[dim] + shape[dim])):
            if start < end:
                yield Box(
                    offset=(*offset[:dim], start, *offset[dim + 1 :]),
                    shape=(*shape[:dim], end - start, *shape[dim + 1 :]),
                )
        offset[dim], shape[dim] = first, size


def _cut(route: Route, write: _Write, parts: list[Box] | None) -> list[Route]:
    """A copy of parts of the parameter; None takes all of it."""
    found = write.box()
    if parts is None or found is None:
        return [route]
    whole, along = found
    cut: list[Route] = []
    for part in parts:
        offset, shape = [0] * len(route.box_shape), list(route.box_shape)
        for dim, at in enumerate(along):
            if at is not None:
                offset[at], shape[at] = part.offset[dim] - whole.offset[dim], part.shape[dim]
        begin = sum(steps * stride for steps, stride in zip(offset, route.region.stride, strict=True))
        cut.append(
            Route(
                source=route.source,
                box_offset=tuple(a + b for a, b in zip(route.box_offset, offset, strict=True)),
                box_shape=tuple(shape),
                parameter=route.parameter,
                region=Region(offset=route.region.offset + begin, shape=tuple(shape), stride=route.region.stride),
            )
        )
    return cut


def _span(write: _Write):
    return span_of(int(write.whole.storage_offset()) + write.region.offset, write.region.shape, write.region.stride)


def _place(write: _Write) -> tuple[object, ...]:
    """The same for writes to the same elements, whatever the parameters are called."""
    dims = sorted(pair for pair in zip(write.region.shape, write.region.stride, strict=True) if pair[0] != 1)
    offset = int(write.whole.storage_offset()) + write.region.offset
    return storage_id(write.whole), write.whole.dtype, offset, tuple(dims)


def storage_id(tensor: torch.Tensor) -> int:
    """Identity of a tensor's storage, which its views share; meta tensors have one although they have no memory."""
    return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]
