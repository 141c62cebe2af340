"""Which part of a tensor this rank holds.

The one place that reads DTensor's placements.  It does the arithmetic itself, since torch's own helper is private,
has changed between releases and allocates an index for every row; the sum is short: a placement cuts a dimension
into chunks as ``torch.chunk`` does.  What it does not know for certain it refuses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from weightcast.errors import ConfigError
from weightcast.wire.digest import Box


def local_part(name: str, tensor: torch.Tensor) -> tuple[Box, torch.Tensor] | None:
    """What this rank holds of a tensor, and where in the whole it lies.  No communication, no copy.

    Args:
        name: For the error.
        tensor: A plain tensor, which every rank holds whole, or a DTensor.

    Returns:
        The box, in elements of the whole tensor, and a tensor of the box's shape, the model's own memory;
        None if the rank holds nothing.

    Raises:
        ConfigError: The placement is one whose values this rank does not have (``Partial``) or that is unknown.
    """
    if not isinstance(tensor, DTensor):
        return Box(offset=(0,) * tensor.dim(), shape=tuple(tensor.shape)), tensor.detach()
    with torch.no_grad():
        local = tensor.to_local()
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:  # this rank is outside the tensor's mesh
        return None
    box = _box(name, tuple(tensor.shape), tensor, coordinate)
    if math.prod(box.shape) == 0 and local.numel() == 0:
        return None
    if tuple(local.shape) != box.shape:
        raise ConfigError(
            f"{name}: this rank should hold {box.shape} of {tuple(tensor.shape)} under {tensor.placements}, "
            f"and holds {tuple(local.shape)}"
        )
    return box, local.detach()


def _box(name: str, shape: tuple[int, ...], tensor: DTensor, coordinate: Sequence[int]) -> Box:
    offset, extent = [0] * len(shape), list(shape)
    strided: list[tuple[int, int]] = []
    mesh_shape: tuple[int, ...] = tuple(tensor.device_mesh.shape)

    def cut(dim: int, mesh_dim: int) -> None:
        chunk = -(-extent[dim] // mesh_shape[mesh_dim])
        start = min(coordinate[mesh_dim] * chunk, extent[dim])
        offset[dim] += start
        extent[dim] = min(chunk, extent[dim] - start)

    for mesh_dim, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate):
            continue
        # Duck-typed: a strided shard is a Shard in some releases of torch and not in others, and is private in all.
        split_factor: int | None = getattr(placement, "split_factor", None)
        if split_factor is not None:
            strided.append((mesh_dim, split_factor))
        elif type(placement) is Shard:
            cut(placement.dim, mesh_dim)
        else:
            raise ConfigError(
                f"{name} is placed as {placement} on mesh dimension {mesh_dim}, which cannot be exported",
                hint="only Shard and Replicate hold values that can be sent as they are",
            )
    # FSDP over tensor parallel: the tensor-parallel dimensions, further right in the mesh, were cut first.
    for mesh_dim, split_factor in reversed(strided):
        dim: int = getattr(tensor.placements[mesh_dim], "dim")  # noqa: B009  # a private class, see above
        right = [
            mesh_shape[other]
            for other in range(mesh_dim + 1, len(mesh_shape))
            if getattr(tensor.placements[other], "dim", None) == dim
        ]
        if split_factor != math.prod(right):
            raise ConfigError(
                f"{name} is placed as {tensor.placements}: a strided shard with split factor {split_factor} and "
                f"{math.prod(right)} shards to its right cannot be exported"
            )
        cut(dim, mesh_dim)
    return Box(offset=tuple(offset), shape=tuple(extent))
