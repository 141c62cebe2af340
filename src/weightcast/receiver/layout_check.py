"""Finds parameters that an engine changed after it had loaded them: packed, permuted, transposed or cast.

An update through recorded routes writes what the loader wrote.  If the engine then changed the layout, its kernels
would read wrong values, although every digest is right.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from weightcast.receiver.loader import Loader


def changed_since_load(loader: Loader, weights: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """Compares a checkpoint with the live parameters, route by route; returns the names of those that differ, sorted.

    The loader's routes were recorded, and the weights are still those of the checkpoint.  ``weights`` has the name and
    whole tensor of everything in the checkpoint, in the dtypes of its files.
    """
    changed: set[str] = set()
    for name, tensor in weights:
        for route in loader.routes.get(name, ()):
            live = loader.residents[route.parameter].detach()
            region = route.region
            kept = live.as_strided(region.shape, region.stride, live.storage_offset() + region.offset)
            part = tuple(
                slice(start, start + size) for start, size in zip(route.box_offset, route.box_shape, strict=True)
            )
            sent = tensor[part].to(device=kept.device, dtype=kept.dtype)
            if not torch.equal(_bytes(kept), _bytes(sent)):
                changed.add(route.parameter)
    return sorted(changed)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor: values would hide NaN and the sign of zero."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)
