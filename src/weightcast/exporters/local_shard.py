"""Computes which part of a tensor this rank holds.

Only this module reads DTensor's placements.  It does the arithmetic itself, because torch's own helper is private, has
changed between releases and allocates an index for every row.  A placement cuts a dimension into chunks as
``torch.chunk`` does.  Unknown placements are refused.  Trainers that shard without DTensor give the place of each shard
with a ``ShardOf``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from weightcast.errors import ConfigError
from weightcast.wire.box import Box


@dataclass(frozen=True, slots=True, kw_only=True)
class Within:
    """The place of this rank's tensor, or of its DTensor: its first element, and the shape of the whole tensor."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """How the trainer ranks hold one tensor, and what of it is this rank's own.

    Attributes:
        mesh: The mesh that cuts the tensor; None for a tensor that a rank holds as it is.
        cuts: Dimension of the tensor and dimension of the mesh, in the order in which the mesh cuts.  Dimensions of the
            mesh that cut nothing hold replicas.
        shape: Shape of this rank's tensor, or of its DTensor, before the mesh cuts it.
        within: Place of that tensor in the whole one, which may differ from rank to rank; None if it is whole.
    """

    mesh: DeviceMesh | None
    cuts: tuple[tuple[int, int], ...]
    shape: tuple[int, ...]
    within: Within | None


# Function of a parameter's name and the parameter; None for one that is whole or that DTensor describes.
ShardOf = Callable[[str, torch.Tensor], Within | None]


def experts_over(
    rank: int, size: int, *, total: int | None = None, match: str = r".*\.experts\.[^.]+(\.weight|\.bias)?"
) -> ShardOf:
    """Describes stacked experts whose dimension 0 is divided among the ranks of an expert-parallel group, in order.

    Args:
        rank: This rank in its expert-parallel group.
        size: Number of ranks in the group.
        total: Experts of all ranks, if ranks may have different numbers: every rank but the last ones has
            ``ceil(total / size)``.  None if every rank has the same number.
        match: Regular expression for the names of stacked experts.
    """
    wanted = re.compile(match)

    def shard_of(name: str, tensor: torch.Tensor) -> Within | None:
        if tensor.dim() < 2 or not wanted.fullmatch(name):
            return None
        mine = int(tensor.shape[0])
        experts = mine * size if total is None else total
        chunk = -(-experts // size)
        start = min(rank * chunk, experts)
        if mine != min(chunk, experts - start):
            raise ConfigError(
                f"{name} has {mine} experts on expert-parallel rank {rank} of {size}, which should have "
                f"{min(chunk, experts - start)} of {experts}"
            )
        rest = tuple(tensor.shape[1:])
        return Within(offset=(start, *(0 for _ in rest)), shape=(experts, *rest))

    return shard_of


def whole_shape(name: str, tensor: torch.Tensor, shard_of: ShardOf | None) -> tuple[int, ...]:
    """Shape of the unsharded tensor."""
    within = shard_of(name, tensor) if shard_of is not None else None
    return tuple(tensor.shape) if within is None else within.shape


def stored_part(name: str, tensor: torch.Tensor, shard_of: ShardOf | None) -> tuple[Box, torch.Tensor] | None:
    """Does the same as ``local_part``, for trainers that have a ``ShardOf``.

    Raises:
        ConfigError: The same as for ``local_part``, or the tensor does not fit at the place from ``shard_of``.
    """
    part = local_part(name, tensor)
    within = shard_of(name, tensor) if shard_of is not None else None
    if within is None or part is None:
        return part
    ends = [start + extent for start, extent in zip(within.offset, tensor.shape, strict=True)]
    if any(end > extent for end, extent in zip(ends, within.shape, strict=True)):
        raise ConfigError(f"{name} {list(tensor.shape)} cannot lie at {within.offset} of {list(within.shape)}")
    box, local = part
    offset = tuple(start + mine for start, mine in zip(within.offset, box.offset, strict=True))
    return Box(offset=offset, shape=box.shape), local


def local_part(name: str, tensor: torch.Tensor) -> tuple[Box, torch.Tensor] | None:
    """This rank's part of a plain (whole) tensor or a DTensor: its box in the whole, and the model's own memory.

    None if the rank holds nothing.  No communication, no copy.

    Raises:
        ConfigError: The placement is unknown, or ``Partial``, so that no rank has the values.
    """
    if not isinstance(tensor, DTensor):
        return Box(offset=(0,) * tensor.dim(), shape=tuple(tensor.shape)), tensor.detach()
    with torch.no_grad():
        local = tensor.to_local()
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:  # this rank is outside the tensor's mesh
        return None
    box = _box(tensor, cuts_of(name, tensor), coordinate)
    if math.prod(box.shape) == 0 and local.numel() == 0:
        return None
    if tuple(local.shape) != box.shape:
        raise ConfigError(
            f"{name}: this rank should hold {box.shape} of {tuple(tensor.shape)} under {tensor.placements}, "
            f"and holds {tuple(local.shape)}"
        )
    return box, local.detach()


def placement_of(name: str, tensor: torch.Tensor, shard_of: ShardOf | None) -> Placement:
    """How the trainer ranks hold a tensor.  No communication.  Raises ``ConfigError`` if it cannot be exported."""
    within = shard_of(name, tensor) if shard_of is not None else None
    sharded = isinstance(tensor, DTensor)
    return Placement(
        mesh=tensor.device_mesh if sharded else None,
        cuts=cuts_of(name, tensor) if sharded else (),
        shape=tuple(tensor.shape),
        within=within,
    )


def cuts_of(name: str, tensor: DTensor) -> tuple[tuple[int, int], ...]:
    """Dimensions of tensor and mesh, in the order in which the mesh cuts; ``ConfigError`` for unknown placements."""
    mesh_shape: tuple[int, ...] = tuple(tensor.device_mesh.shape)
    cuts: list[tuple[int, int]] = []
    strided: list[tuple[int, int]] = []
    for mesh_dim, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate):
            continue
        # Duck-typed: the strided shard is private, and a subclass of Shard in some releases of torch only.
        split_factor: int | None = getattr(placement, "split_factor", None)
        if split_factor is not None:
            strided.append((mesh_dim, split_factor))
        elif type(placement) is Shard:
            cuts.append((placement.dim, mesh_dim))
        else:
            raise ConfigError(
                f"{name} is placed as {placement} on mesh dimension {mesh_dim}, which cannot be exported",
                hint="only Shard and Replicate hold values that can be sent as they are",
            )
    # FSDP over tensor parallel cuts the tensor-parallel dimensions, further right in the mesh, first.
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
        cuts.append((dim, mesh_dim))
    return tuple(cuts)


def _box(tensor: DTensor, cuts: Sequence[tuple[int, int]], coordinate: Sequence[int]) -> Box:
    offset, extent = [0] * tensor.dim(), list(tensor.shape)
    for dim, mesh_dim in cuts:
        chunk = -(-extent[dim] // tensor.device_mesh.shape[mesh_dim])
        start = min(coordinate[mesh_dim] * chunk, extent[dim])
        offset[dim] += start
        extent[dim] = min(chunk, extent[dim] - start)
    return Box(offset=tuple(offset), shape=tuple(extent))
