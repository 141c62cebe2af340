"""Is every element of every parameter written exactly once?  Arithmetic on routes; it moves nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch

from weightcast.errors import ConfigError
from weightcast.receiver.recorder import box_of, span_of
from weightcast.wire.routes import Route


def uncovered(
    routes: Iterable[Route], residents: Mapping[str, torch.Tensor], filled: Mapping[str, int] | None = None
) -> list[str]:
    """Residents that the routes leave unwritten, wholly or in part, by name.

    Args:
        routes: All of them.
        residents: Parameters and buffers by name.
        filled: How many elements of a resident get a constant instead, by name.

    Raises:
        ConfigError: Two routes write the same element: the loader's last word would depend on the order of arrival.
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
        if sum(math.prod(route.box_shape) for route in written) + constant < tensor.numel():
            missing.append(name)
    return missing


def _overlap(routes: list[Route], shape: tuple[int, ...]) -> bool:
    if len(routes) < 2:
        return False
    boxes: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for route in routes:
        box = box_of(shape, route.region.offset, route.region.shape, route.region.stride)
        if box is None:
            return _overlap_by_mask(routes)
        boxes.append((box[0], box[1]))
    return any(
        all(a < d + e and d < a + b for a, b, d, e in zip(first[0], first[1], second[0], second[1], strict=True))
        for index, first in enumerate(boxes)
        for second in boxes[:index]
    )


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
