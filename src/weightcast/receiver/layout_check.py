"""Finds parameters that an engine changed after it had loaded them: packed, permuted, transposed or cast.

An update through recorded routes writes what the loader wrote.  If the engine then changed the layout, its kernels
would read wrong values, although every digest is right.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from weightcast.digest.copies import flat_bytes
from weightcast.receiver.loader import Loader
from weightcast.receiver.resident_sums import region_of
from weightcast.wire.box import slices


def changed_since_load(loader: Loader, weights: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """Compares a checkpoint with the live parameters, route by route; returns the names of those that differ.

    The loader's routes were recorded, and the weights are still those of the checkpoint.  ``weights`` has the name and
    whole tensor of everything in it, in the dtypes of its files.  What the loader computes is computed once more.
    """
    changed: set[str] = set()
    for name, tensor in weights:
        changed.update(loader.computing.check_live(name, tensor))
        for route in loader.routes.get(name, ()):
            kept = region_of(loader.residents[route.parameter], route)
            part = tensor[slices(route.box, (0,) * len(route.box_shape))]
            sent = part.to(device=kept.device, dtype=kept.dtype)
            # By bytes: values would hide NaN and the sign of zero.
            if not torch.equal(flat_bytes(kept.contiguous()), flat_bytes(sent.contiguous())):
                changed.add(route.parameter)
    return sorted(changed)
