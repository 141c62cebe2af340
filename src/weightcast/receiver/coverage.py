"""Checks that routes write every element of every parameter exactly once.  It moves nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from weightcast.errors import ConfigError
from weightcast.wire.box import Box, Span, are_disjoint, box_of_view, span_of
from weightcast.wire.routes import Route


def uncovered(
    routes: Iterable[Route], residents: Mapping[str, torch.Tensor], filled: Mapping[str, int] | None = None
) -> list[str]:
    """Names of the residents that all routes together leave unwritten, wholly or in part.

    ``filled`` is the number of elements of a resident that get a constant instead, by name.  It raises ConfigError if
    two routes write the same element, whose value would depend on the order of arrival.
    """
    by_parameter: dict[str, list[Route]] = {}
    for route in routes:
        by_parameter.setdefault(route.parameter, []).append(route)
    missing: list[str] = []
    for name, tensor in residents.items():
        written = by_parameter.get(name, [])
        if _overlap(written, tuple(tensor.shape)):
            sources = ", ".join(sorted({route.source for route in written}))
            raise ConfigError(f"{name} is written twice, from {sources}")
        constant = (filled or {}).get(name, 0)
        if sum(route.box.numel for route in written) + constant < tensor.numel():
            missing.append(name)
    return missing


def within(tensor: torch.Tensor, others: Mapping[str, torch.Tensor]) -> bool:
    """True if the others of the same storage and dtype cover every element of a tensor, of any strides."""
    if not tensor.numel():
        return False
    place = _storage_of(tensor)
    sharing = [other for other in others.values() if _storage_of(other) == place and other.dtype == tensor.dtype]
    if not sharing:
        return False
    first, last = span_of(int(tensor.storage_offset()), tensor.shape, tensor.stride())
    spans = [span_of(int(other.storage_offset()), other.shape, other.stride()) for other in sharing]
    start, end = min([first, *(begin for begin, _ in spans)]), max([last, *(stop for _, stop in spans)])
    seen = torch.zeros(end - start, dtype=torch.bool)
    for other in sharing:
        seen.as_strided(other.shape, other.stride(), int(other.storage_offset()) - start).fill_(True)
    return bool(seen.as_strided(tensor.shape, tensor.stride(), first - start).all())


def overlapping(tensors: Mapping[str, torch.Tensor]) -> str:
    """Names two of these tensors that share a byte of memory; empty if none do."""
    by_storage: dict[tuple[str, int], list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in tensors.items():
        if tensor.numel():
            by_storage.setdefault(_storage_of(tensor), []).append((name, tensor))
    for sharing in by_storage.values():
        for index, (name, tensor) in enumerate(sharing):
            for other_name, other in sharing[:index]:
                if _share_bytes(tensor, other):
                    return f"{other_name} and {name} share memory"
    return ""


def _storage_of(tensor: torch.Tensor) -> tuple[str, int]:
    return str(tensor.device), tensor.untyped_storage().data_ptr()


def _share_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    spans: list[Span] = []
    for tensor in (one, other):
        first, last = span_of(int(tensor.storage_offset()), tensor.shape, tensor.stride())
        spans.append(Span(first * tensor.element_size(), last * tensor.element_size()))
    if not spans[0].overlaps(spans[1]):
        return False
    if one.dtype != other.dtype:
        return True  # the spans overlap; tensors of two dtypes are not compared byte by byte
    size = one.element_size()
    start, end = min(spans[0][0], spans[1][0]) // size, max(spans[0][1], spans[1][1]) // size
    seen = torch.zeros(end - start, dtype=torch.bool)
    seen.as_strided(one.shape, one.stride(), int(one.storage_offset()) - start).fill_(True)
    return bool(seen.as_strided(other.shape, other.stride(), int(other.storage_offset()) - start).any())


def _overlap(routes: list[Route], shape: tuple[int, ...]) -> bool:
    if len(routes) < 2:
        return False
    boxes: list[Box] = []
    for route in routes:
        found = box_of_view(shape, route.region.offset, route.region.shape, route.region.stride)
        if found is None:
            return _overlap_by_mask(routes)
        boxes.append(found[0])
    return not are_disjoint(boxes)


def _overlap_by_mask(routes: list[Route]) -> bool:
    # Not by the parameter's number of elements: one that is a view with gaps has its last elements further on.
    spans = [span_of(route.region.offset, route.region.shape, route.region.stride) for route in routes]
    first = min(start for start, _ in spans)
    seen = torch.zeros(max(end for _, end in spans) - first, dtype=torch.bool)
    for route in routes:
        part = seen.as_strided(route.region.shape, route.region.stride, route.region.offset - first)
        if bool(part.any()):
            return True
        part.fill_(True)
    return False
