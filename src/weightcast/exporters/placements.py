"""The placements of all trainer ranks' tensors, agreed in one exchange that grows with ranks times meshes, not tensors.

A rank sends the hash of a table, which is the same on all ranks of a usual job, and a few numbers: its coordinate in
each mesh, and the place of each shard that no mesh describes.  It sends the table itself only where hashes differ.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import msgspec
import torch
from torch.distributed.device_mesh import DeviceMesh

from weightcast.comm.trainer_group import TrainerGroup
from weightcast.digest.copies import host_bytes
from weightcast.errors import ConfigError
from weightcast.exporters.local_shard import Within
from weightcast.exporters.module_tensors import PlacedTensors
from weightcast.exporters.segments import Arranged
from weightcast.wire.box import Box, tiles
from weightcast.wire.layout import TensorSpec, dtype_name

_Spec = tuple[str, str, tuple[int, ...]]


class Class(msgspec.Struct, frozen=True, array_like=True):
    """A way in which tensors are held; tensors of one class have the same boxes on every rank.

    Attributes:
        mesh: Number of the mesh that cuts it; -1 if none does.
        cuts: Dimension of the tensor and dimension of the mesh, in the order of cutting.
        place: Number, among the rank's own numbers, of the tensor's place in the whole one; -1 if it is whole.
        ready: The memory is contiguous and on the device of the trainer's group.
        computed: The values are computed when they are sent.
        held: False if the rank's module does not have the tensor; the fields but ``shape`` then mean nothing.
    """

    shape: tuple[int, ...]
    dtype: str
    mesh: int
    cuts: tuple[tuple[int, int], ...]
    place: int
    ready: bool
    computed: bool
    held: bool = True


class Table(msgspec.Struct, frozen=True, array_like=True):
    """One rank's description of the model, free of anything that is this rank's own.

    ``model`` is a hash of the tensors that travel and of the way they are cut out of stored ones.
    """

    model: str
    meshes: tuple[tuple[int, ...], ...]
    classes: tuple[Class, ...]
    class_of: tuple[int, ...]


class _Claim(msgspec.Struct, frozen=True, array_like=True):
    """A rank's first message: the hash of its table, and its numbers; ``error`` if it has no table."""

    table: str
    numbers: tuple[int, ...]
    error: str | None = None


class _Full(msgspec.Struct, frozen=True, array_like=True):
    """A rank's second message, where tables differ: the table, and the travelling tensors to compare."""

    table: Table
    specs: tuple[_Spec, ...]


class _Answer(msgspec.Struct, frozen=True, array_like=True):
    """The head's answer to the claims.

    Attributes:
        error: Reason why the ranks cannot go on; None if they can.
        spokesmen: One rank for each distinct table, which sends it in full; empty if there is one table.
        variant_of: Number of each rank's table: int16 for each rank, compressed; empty if there is one table.
        numbers: Numbers of the ranks of each table, in order of rank: int64, differences from rank to rank, compressed.
    """

    error: str | None = None
    spokesmen: tuple[int, ...] = ()
    variant_of: bytes = b""
    numbers: tuple[bytes, ...] = ()


class _Tables(msgspec.Struct, frozen=True, array_like=True):
    """The head's answer to tables in full: the tables in order of ``_Answer.spokesmen``, or an error."""

    error: str | None = None
    tables: tuple[Table, ...] = ()


@dataclass(frozen=True, slots=True)
class StoredParts:
    """The distinct parts of a stored tensor, in order of their place.

    Attributes:
        boxes: Offset and extent of each part: int64 ``[parts, 2, dimensions]``.
        ready: True for each part whose memory all holders can read as it is: contiguous, on the group's device.
        computed: True for each part whose values at least one holder computes.
        dtypes: Dtypes of the holders' memory.
    """

    shape: tuple[int, ...]
    boxes: torch.Tensor
    holders: tuple[tuple[int, ...], ...]
    ready: tuple[bool, ...]
    computed: tuple[bool, ...]
    dtypes: frozenset[str]

    def corners(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Offset and extent of each part."""
        return [(tuple(offset), tuple(extent)) for offset, extent in self.boxes.tolist()]

    def cover(self) -> bool:
        """True if the parts are the whole tensor exactly once."""
        boxes = (Box(offset=offset, shape=extent) for offset, extent in self.corners())
        return tiles(boxes, Box(offset=(0,) * len(self.shape), shape=tuple(self.shape)))


@dataclass(frozen=True)
class _Variant:
    """A table, the ranks that have it, and their numbers: int64 ``[ranks, numbers]``."""

    table: Table
    ranks: torch.Tensor
    numbers: torch.Tensor

    @cached_property
    def first_number(self) -> list[int]:
        """First column of each mesh, and then of each place."""
        widths = [len(shape) for shape in self.table.meshes]
        dims = {one.place: len(one.shape) for one in self.table.classes if one.place >= 0}
        widths += [2 * dims[place] for place in range(len(dims))]
        return [0, *torch.tensor(widths, dtype=torch.int64).cumsum(0).tolist()]

    def boxes(self, number: int) -> torch.Tensor:
        """Box of each rank in a stored tensor: int64 ``[ranks, 2, dimensions]``; a rank without one has extent 0."""
        held = self.table.classes[self.table.class_of[number]]
        dims, ranks = len(held.shape), len(self.ranks)
        offset = torch.zeros(ranks, dims, dtype=torch.int64)
        extent = torch.tensor(held.shape, dtype=torch.int64).expand(ranks, dims).clone()
        if held.place >= 0:
            first = self.first_number[len(self.table.meshes) + held.place]
            offset = self.numbers[:, first : first + dims].clone()
            extent = self.numbers[:, first + dims : first + 2 * dims].clone()
        if held.mesh >= 0:
            shape, first = self.table.meshes[held.mesh], self.first_number[held.mesh]
            coordinates = self.numbers[:, first : first + len(shape)]
            for dim, axis in held.cuts:
                chunk = -(-extent[:, dim] // shape[axis])
                start = torch.minimum(coordinates[:, axis].clamp(min=0) * chunk, extent[:, dim])
                offset[:, dim] += start
                extent[:, dim] = torch.minimum(chunk, extent[:, dim] - start)
        return torch.stack([offset, extent], dim=1)

    def absent(self, number: int) -> torch.Tensor:
        """True for each rank that is outside the tensor's mesh, or whose module does not have the tensor."""
        held = self.table.classes[self.table.class_of[number]]
        if not held.held:
            return torch.ones(len(self.ranks), dtype=torch.bool)
        if held.mesh < 0:
            return torch.zeros(len(self.ranks), dtype=torch.bool)
        return self.numbers[:, self.first_number[held.mesh]] < 0


class Agreed:
    """The placements that all ranks agreed on."""

    def __init__(self, variants: Sequence[_Variant]) -> None:
        self._variants = tuple(variants)
        self._parts: dict[tuple[int, ...], StoredParts] = {}

    def class_of(self, number: int) -> tuple[int, ...]:
        """Key of a stored tensor's placement: tensors with equal keys are held alike."""
        return tuple(variant.table.class_of[number] for variant in self._variants)

    def parts(self, number: int) -> StoredParts:
        """The distinct parts of a stored tensor and the ranks that hold them."""
        key = self.class_of(number)
        if key not in self._parts:
            self._parts[key] = self._find(number, key)
        return self._parts[key]

    def _find(self, number: int, key: tuple[int, ...]) -> StoredParts:
        held = [variant.table.classes[one] for variant, one in zip(self._variants, key, strict=True)]
        boxes = torch.cat([variant.boxes(number) for variant in self._variants])
        ranks = torch.cat([variant.ranks for variant in self._variants])
        flags = torch.tensor([(one.ready, one.computed) for one in held])
        flags = flags.repeat_interleave(torch.tensor([len(variant.ranks) for variant in self._variants]), 0)
        absent = torch.cat([variant.absent(number) for variant in self._variants])
        has = (boxes[:, 1].prod(dim=1) > 0) & ~absent
        order = ranks[has].argsort()
        boxes, ranks, flags = boxes[has][order], ranks[has][order], flags[has][order]
        shape = held[0].shape
        # A column in front, because a tensor without dimensions has no others.
        rows = torch.cat([torch.zeros(len(boxes), 1, dtype=torch.int64), boxes.flatten(1)], dim=1)
        distinct, which = torch.unique(rows, dim=0, return_inverse=True)
        by_part = which.argsort(stable=True)
        ends = torch.bincount(which, minlength=len(distinct)).cumsum(0).tolist()
        spans = list(pairwise([0, *ends]))
        ranked, flags = ranks[by_part].tolist(), flags[by_part]
        return StoredParts(
            shape=shape,
            boxes=distinct[:, 1:].reshape(len(distinct), 2, len(shape)),
            holders=tuple(tuple(ranked[start:end]) for start, end in spans),
            ready=tuple(bool(flags[start:end, 0].all()) for start, end in spans),
            computed=tuple(bool(flags[start:end, 1].any()) for start, end in spans),
            dtypes=frozenset(one.dtype for one in held if one.held),
        )


def agree(
    tensors: PlacedTensors,
    specs: Sequence[TensorSpec],
    model: str,
    group: TrainerGroup,
    computed: Callable[[int], bool],
) -> Agreed:
    """Exchanges the placements of every rank's tensors.  Collective.

    Args:
        specs: The tensors that travel, which must be the same on every rank.
        model: ``model_hash`` of the tensors that travel.
        computed: Function of a stored tensor's number: True if its values are computed when they are sent.

    Raises:
        ConfigError: A rank's tensors cannot be exported, or the ranks do not have the same model; the same on every
            rank.
        TrainerRankFailed: A rank is gone or did not take part in time.
    """
    listed = tuple((spec.name, spec.dtype, spec.shape) for spec in specs)
    table: Table | None = None
    try:
        table, numbers = describe(tensors, model, group.device, computed)
        claim = _Claim(_hash(table), numbers)
    except ConfigError as error:
        # Raised here, it would leave the other ranks waiting for this one's claim.
        claim = _Claim("", (), str(error))
    claims = group.gather_bytes(msgspec.msgpack.encode(claim))
    answer = msgspec.msgpack.decode(
        group.broadcast_bytes(msgspec.msgpack.encode(_compare(claims)) if claims is not None else None), type=_Answer
    )
    if answer.error is not None:
        raise ConfigError(answer.error)
    assert table is not None
    tables: Sequence[Table] = (table,)
    if answer.spokesmen:
        tables = _exchange_tables(table, listed, answer.spokesmen, group)
    return Agreed(_variants(answer, tables, group.world_size))


def model_hash(specs: Sequence[TensorSpec], arranged: Sequence[Arranged]) -> str:
    """Hash of the tensors that travel and of the way they are cut out of stored ones."""
    found = hashlib.sha256(msgspec.json.encode(specs))
    found.update(msgspec.json.encode(arranged))
    return found.hexdigest()


def describe(
    tensors: PlacedTensors, model: str, device: torch.device, computed: Callable[[int], bool]
) -> tuple[Table, tuple[int, ...]]:
    """This rank's table and its own numbers.  No communication.

    Raises:
        ConfigError: A tensor's placement cannot be exported, or its memory is not what the placement says.
    """
    meshes: dict[DeviceMesh, int] = {}
    # Tensors of one shape may lie at different places on this rank, so the shape belongs to the key.
    places: dict[tuple[Within, tuple[int, ...]], int] = {}
    classes: dict[Class, int] = {}
    class_of: list[int] = []
    for number, stored in enumerate(tensors.places):
        if not tensors.holds(number):
            held = Class(stored.shape, "", mesh=-1, cuts=(), place=-1, ready=False, computed=False, held=False)
            class_of.append(classes.setdefault(held, len(classes)))
            continue
        part, placement = tensors.part(number), tensors.placement(number)
        place = -1
        if placement.within is not None:
            place = places.setdefault((placement.within, placement.shape), len(places))
        held = Class(
            shape=stored.shape,
            dtype=dtype_name(stored.dtype if part is None else part[1].dtype),
            mesh=meshes.setdefault(placement.mesh, len(meshes)) if placement.mesh is not None else -1,
            cuts=placement.cuts,
            place=place,
            ready=part is None or (part[1].is_contiguous() and part[1].device == device),
            computed=computed(number),
        )
        class_of.append(classes.setdefault(held, len(classes)))
    numbers: list[int] = []
    for mesh in meshes:
        numbers += mesh.get_coordinate() or [-1] * mesh.ndim
    for within, shape in places:
        numbers += [*within.offset, *shape]
    table = Table(
        model=model,
        meshes=tuple(tuple(mesh.shape) for mesh in meshes),
        classes=tuple(classes),
        class_of=tuple(class_of),
    )
    return table, tuple(numbers)


def _hash(table: Table) -> str:
    return hashlib.sha256(msgspec.msgpack.encode(table)).hexdigest()


def _compare(raw: Iterable[bytes]) -> _Answer:
    """The head's answer to the claims of all ranks, in order."""
    claims = [msgspec.msgpack.decode(one, type=_Claim) for one in raw]
    for rank, claim in enumerate(claims):
        if claim.error is not None:
            return _Answer(error=f"trainer rank {rank}: {claim.error}" if len(claims) > 1 else claim.error)
    variants: dict[tuple[str, int], list[int]] = {}
    for rank, claim in enumerate(claims):
        variants.setdefault((claim.table, len(claim.numbers)), []).append(rank)
    numbers = tuple(_pack([claims[rank].numbers for rank in ranks]) for ranks in variants.values())
    if len(variants) == 1:
        return _Answer(numbers=numbers)
    variant_of = torch.zeros(len(claims), dtype=torch.int16)
    for variant, ranks in enumerate(variants.values()):
        variant_of[ranks] = variant
    spokesmen = tuple(ranks[0] for ranks in variants.values())
    return _Answer(spokesmen=spokesmen, variant_of=zlib.compress(host_bytes(variant_of)), numbers=numbers)


def _exchange_tables(
    table: Table, specs: tuple[_Spec, ...], spokesmen: Sequence[int], group: TrainerGroup
) -> tuple[Table, ...]:
    """Every distinct table, where they differ.  Collective."""
    mine = b""
    if group.rank in spokesmen:
        mine = zlib.compress(msgspec.msgpack.encode(_Full(table, specs)))
    raw = group.gather_bytes(mine)
    answer = None
    if raw is not None:
        fulls = [msgspec.msgpack.decode(zlib.decompress(raw[rank]), type=_Full) for rank in spokesmen]
        answer = zlib.compress(msgspec.msgpack.encode(_same_model(fulls, spokesmen)))
    heard = msgspec.msgpack.decode(zlib.decompress(group.broadcast_bytes(answer)), type=_Tables)
    if heard.error is not None:
        raise ConfigError(heard.error)
    return heard.tables


def _same_model(fulls: Sequence[_Full], ranks: Sequence[int]) -> _Tables:
    """The tables, unless they are of different models."""
    first = fulls[0]
    for rank, other in zip(ranks, fulls, strict=True):
        difference = ""
        if other.specs != first.specs:
            difference = _difference(first.specs, other.specs)
        elif other.table.model != first.table.model:
            difference = "the same tensors are cut out of the trainers' tensors in different ways"
        elif [_shape(first, n) for n in range(len(first.table.class_of))] != [
            _shape(other, n) for n in range(len(other.table.class_of))
        ]:
            difference = "the trainers' own tensors have different shapes"
        if difference:
            return _Tables(error=f"trainer ranks {ranks[0]} and {rank} have different models: {difference}")
    return _Tables(tables=tuple(full.table for full in fulls))


def _shape(full: _Full, number: int) -> tuple[int, ...]:
    return full.table.classes[full.table.class_of[number]].shape


def _variants(answer: _Answer, tables: Sequence[Table], world_size: int) -> list[_Variant]:
    if not answer.variant_of:
        ranks = [torch.arange(world_size)]
    else:
        which = torch.frombuffer(bytearray(zlib.decompress(answer.variant_of)), dtype=torch.int16)
        ranks = [torch.nonzero(which == variant)[:, 0] for variant in range(len(tables))]
    return [
        _Variant(table, mine, _unpack(packed, len(mine)))
        for table, mine, packed in zip(tables, ranks, answer.numbers, strict=True)
    ]


def _pack(rows: Sequence[Sequence[int]]) -> bytes:
    """Rows of numbers, compressed; coordinates of successive ranks differ little."""
    numbers = torch.tensor(rows, dtype=torch.int64).reshape(len(rows), -1)
    steps = numbers.diff(dim=0, prepend=numbers.new_zeros(1, numbers.shape[1]))
    return zlib.compress(host_bytes(steps.t()))


def _unpack(packed: bytes, num_rows: int) -> torch.Tensor:
    raw = zlib.decompress(packed)
    steps = torch.frombuffer(bytearray(raw), dtype=torch.int64) if raw else torch.zeros(0, dtype=torch.int64)
    return steps.reshape(-1, num_rows).t().cumsum(0)


def _difference(mine: Sequence[_Spec], theirs: Sequence[_Spec]) -> str:
    """The first difference between two models, in words."""
    for one, other in zip(mine, theirs, strict=False):
        if one != other:
            return f"{one[0]} {one[1]} {list(one[2])} is {other[0]} {other[1]} {list(other[2])} there"
    return f"{len(mine)} tensors here, {len(theirs)} there"
