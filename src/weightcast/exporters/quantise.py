"""Quantises weights block by block to 8-bit floats, on the trainer's device, before they are sent.

The format is that of DeepSeek-V3's checkpoints: a weight in float8_e4m3fn and ``<name>_scale_inv`` in float32.  There
is one scale for each block of 128 x 128 of the last two dimensions, with smaller blocks at the ends.

    scale = max |x| of the block / 448, 1 if that is 0        q = x / scale, rounded to nearest even

With ``reciprocal`` it is what vLLM computes when it quantises a bfloat16 model in blocks by itself:

    scale = max(max |x| of the block, 1e-4) / 448             q = x * (1 / scale)

In some blocks a few elements differ between the two.  All arithmetic is in float32; x has the dtype that it would
otherwise travel in.  A block has one scale, independent of shards and buckets: where shards cut through blocks, the
ranks first exchange the maxima, a few bytes for each block.  The result is therefore the same on every mesh, and half
the size of bfloat16.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from weightcast.comm.trainer_group import Move, TrainerGroup
from weightcast.errors import ConfigError
from weightcast.exporters.held_parts import Held, Local, slices
from weightcast.exporters.lora import CHUNK_ELEMENTS, rows_of
from weightcast.exporters.ownership import Shared, SharedPart
from weightcast.wire.box import Box, intersection
from weightcast.wire.layout import BucketLayout, TensorSpec, dtype_name

FP8 = torch.float8_e4m3fn
SCALE_SUFFIX = "_scale_inv"

# Elements of one chunk where values are read in place: 8 MiB of float32.
_CHUNK_IN_PLACE = 1 << 21
_LEAST = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Blocks:
    """Selects the weights that are quantised.

    Attributes:
        match: Regular expression for names that engines know.  The default matches the projections of attention, MLPs
            and experts, not embeddings, norms, routers and the output head.
        skip: Regular expression for exceptions from ``match``.
        block: Rows and columns of a block.
        reciprocal: Multiply by the reciprocal of the scale, as vLLM does when it quantises by itself.
    """

    match: str = r".*(_proj(_with_mqa)?|\.experts\.\d+\.w[123])\.weight|.*\.experts\.(gate_up|down)_proj"
    skip: str = r".*(visual|vision|audio)\b.*"
    block: int = 128
    reciprocal: bool = False

    def __post_init__(self) -> None:
        if self.block < 1:
            raise ConfigError(f"a block cannot have {self.block} x {self.block} elements")

    def wants(self, spec: TensorSpec) -> bool:
        """True for a weight that is quantised."""
        wide = spec.torch_dtype.is_floating_point and spec.torch_dtype.itemsize >= 2
        named = re.fullmatch(self.match, spec.name) is not None and re.fullmatch(self.skip, spec.name) is None
        return wide and named and len(spec.shape) in (2, 3) and spec.numel > 0

    def quantization_config(self) -> dict[str, Any]:
        """The ``quantization_config`` that an engine's ``config.json`` needs to read these weights."""
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [self.block, self.block],
        }


def quantised_specs(specs: Sequence[TensorSpec], blocks: Fp8Blocks) -> list[TensorSpec]:
    """The travelling tensors: each quantised weight is followed by its scales."""
    return [spec for spec, _, _ in _expanded(specs, blocks)]


_WEIGHT, _SCALES, _AS_IT_IS = "weight", "scales", "as it is"


def _expanded(specs: Sequence[TensorSpec], blocks: Fp8Blocks) -> list[tuple[TensorSpec, int, str]]:
    """Each travelling tensor, the number of its source, and its kind: weight, scales or unchanged."""
    found: list[tuple[TensorSpec, int, str]] = []
    for number, spec in enumerate(specs):
        if not blocks.wants(spec):
            found.append((spec, number, _AS_IT_IS))
            continue
        grid = _grid_shape(spec.shape, blocks.block)
        found.append((TensorSpec(name=spec.name, dtype=dtype_name(FP8), shape=spec.shape), number, _WEIGHT))
        scales = TensorSpec(name=f"{spec.name}{SCALE_SUFFIX}", dtype="float32", shape=grid)
        found.append((scales, number, _SCALES))
    return found


def _grid_shape(shape: tuple[int, ...], block: int) -> tuple[int, ...]:
    return (*shape[:-2], -(-shape[-2] // block), -(-shape[-1] // block))


class Quantiser:
    """Quantises parts of tensors as a gatherer asks for them; ``self.specs`` are the travelling tensors."""

    def __init__(self, specs: Sequence[TensorSpec], local: Local, shared: Shared, blocks: Fp8Blocks) -> None:
        self._wide = tuple(specs)
        self._local = local
        self._block = blocks.block
        self._reciprocal = blocks.reciprocal
        expanded = _expanded(specs, blocks)
        self.specs = tuple(spec for spec, _, _ in expanded)
        self._kinds = [(number, kind) for _, number, kind in expanded]
        self._number = {spec.name: number for number, spec in enumerate(self.specs)}
        self._shared = shared
        self._group: TrainerGroup | None = None
        self._split: set[int] = set()
        # For the bucket that is being filled, by source.
        self._grids: dict[int, torch.Tensor] = {}
        self._parts: dict[int, Sequence[Held]] = {}

    def source(self, number: int) -> int:
        """Number of the tensor that a travelling one is computed from."""
        return self._kinds[number][0]

    def agree(self, group: TrainerGroup) -> None:
        """Implements ``Shared.agree``; also finds the weights whose shards cut through blocks."""
        if self._group is group:
            return
        self._shared.agree(group)
        self._split.clear()
        known: dict[tuple[int, tuple[int, ...]], bool] = {}
        for source, kind in self._kinds:
            if kind == _WEIGHT:
                parts = self._shared.parts(source)
                key = id(parts), self._wide[source].shape  # layers that are held alike share their list
                if key not in known:
                    known[key] = any(self._cuts_a_block(source, part.box) for part in parts)
                if known[key]:
                    self._split.add(source)
        self._group = group

    def parts(self, number: int) -> Sequence[SharedPart]:
        """Implements ``Shared.parts``, for the travelling tensors."""
        source, kind = self._kinds[number]
        parts = self._shared.parts(source)
        if kind == _AS_IT_IS:
            return parts
        if kind == _WEIGHT:
            return [replace(part, ready=False, computed=True) for part in parts]
        if source not in self._split:
            return [replace(part, box=_grid_box(part.box, self._block), ready=False, computed=True) for part in parts]
        assert self._group is not None
        shape = self.specs[number].shape
        whole = Box(offset=(0,) * len(shape), shape=shape)
        return [SharedPart(whole, tuple(range(self._group.world_size)), ready=False, computed=True)]

    def begin(self, layout: BucketLayout, group: TrainerGroup) -> None:
        """Computes the scales that a bucket needs.  Collective if shards cut through blocks; ``end`` frees them."""
        wanted: dict[int, list[tuple[int, int]]] = {}
        for slot in layout.slots:
            number = self._number.get(slot.spec.name)
            if number is None:
                raise ConfigError(f"bucket {layout.index} carries {slot.spec.name}, and the exporter does not have it")
            source, kind = self._kinds[number]
            if kind != _AS_IT_IS and slot.num_rows:
                wanted.setdefault(source, []).append(
                    self._grid_rows(source, kind, slot.first_row, slot.first_row + slot.num_rows)
                )
        shapes = {source: _grid_shape(self._wide[source].shape, self._block) for source in wanted}
        scales = torch.zeros(sum(map(math.prod, shapes.values())), dtype=torch.float32, device=group.device)
        parts = scales.split([math.prod(shape) for shape in shapes.values()])
        self._parts = {source: self._local(source) for source in wanted}
        self._grids = {source: part.view(shapes[source]) for source, part in zip(wanted, parts, strict=True)}
        shared: list[torch.Tensor] = []
        for source, ranges in wanted.items():
            first, last = min(start for start, _ in ranges), max(end for _, end in ranges)
            grid = self._grids[source]
            self._measure(source, grid, first, last)
            if source in self._split:
                shared.append(grid[first:last])
        if shared and group.world_size > 1:
            _share_maxima(shared, group, f"the scales of bucket {layout.index}")
        if self._reciprocal:
            scales.clamp_(min=_LEAST)
        scales.div_(torch.finfo(FP8).max)
        scales.masked_fill_(scales == 0, 1.0)

    def end(self) -> None:
        """Frees the scales."""
        self._grids = {}
        self._parts = {}

    def local(self, number: int) -> Sequence[Held]:
        """This rank's parts of a travelling tensor."""
        source, kind = self._kinds[number]
        if kind == _AS_IT_IS:
            return self._local(source)
        if kind == _SCALES:
            shape = _grid_shape(self._wide[source].shape, self._block)
            if source in self._split:  # every rank has all of these scales
                return [_Scales(Box(offset=(0,) * len(shape), shape=shape), self._grid_of, source)]
            return [_Scales(_grid_box(held.box, self._block), self._grid_of, source) for held in self._held(source)]
        wide = self._wide[source].torch_dtype
        return [
            _Quantised(held.box, held, wide, self._grid_of, source, self._block, self._reciprocal)
            for held in self._held(source)
        ]

    def _held(self, source: int) -> Sequence[Held]:
        found = self._parts.get(source)
        return self._local(source) if found is None else found

    def _grid_of(self, source: int) -> torch.Tensor:
        return self._grids[source]

    def _grid_rows(self, source: int, kind: str, first: int, last: int) -> tuple[int, int]:
        """First and end index, in the grid's dimension 0, of the scales for some rows of a travelling tensor."""
        if kind == _SCALES or len(self._wide[source].shape) > 2:
            return first, last
        return first // self._block, -(-last // self._block)

    def _cuts_a_block(self, source: int, box: Box) -> bool:
        return any(
            start % self._block or (end % self._block and end != extent)
            for start, end, extent in (
                (box.offset[dim], box.offset[dim] + box.shape[dim], self._wide[source].shape[dim]) for dim in (-2, -1)
            )
        )

    def _measure(self, source: int, grid: torch.Tensor, first: int, last: int) -> None:
        """Writes the maxima of this rank's parts into some rows of a grid."""
        shape = self._wide[source].shape
        stacked = len(shape) > 2
        rows = (first, last) if stacked else (first * self._block, min(last * self._block, self._wide[source].num_rows))
        needed = Box(offset=(rows[0], *(0 for _ in shape[1:])), shape=(rows[1] - rows[0], *shape[1:]))
        dtype = self._wide[source].torch_dtype
        for held in self._parts[source]:
            common = intersection(held.box, needed)
            for piece in _matrices(common, held, self._block) if common is not None else ():
                x = _values(held, piece, dtype, grid.device)
                blocks = _in_blocks(x, piece, self._block)
                # Magnitudes and their maximum are exact in any dtype.
                most = _maxima(x, piece, self._block) if blocks is None else blocks.abs().amax(dim=(-3, -1))
                found = grid[slices(_grid_box(piece, self._block), (0,) * len(shape))]
                torch.maximum(found, most.float().view_as(found), out=found)


@dataclass(frozen=True, slots=True)
class _Scales:
    """Some scales of a weight."""

    box: Box
    grid: Callable[[int], torch.Tensor]
    source: int

    @property
    def memory(self) -> torch.Tensor | None:
        return None

    @property
    def origin(self) -> torch.Tensor:
        return self.grid(self.source)[slices(self.box, (0,) * len(self.box.shape))]

    def write(self, box: Box, out: torch.Tensor) -> None:
        out.copy_(self.grid(self.source)[slices(box, (0,) * len(box.shape))])


@dataclass(frozen=True, slots=True)
class _Quantised:
    """A part of a weight, divided by its scales."""

    box: Box
    held: Held
    dtype: torch.dtype
    grid: Callable[[int], torch.Tensor]
    source: int
    block: int
    reciprocal: bool

    @property
    def memory(self) -> torch.Tensor | None:
        return None

    @property
    def origin(self) -> torch.Tensor:
        return self.held.origin

    def write(self, box: Box, out: torch.Tensor) -> None:
        grid = self.grid(self.source)
        most = torch.finfo(FP8).max
        for piece in _matrices(box, self.held, self.block):
            x = _values(self.held, piece, self.dtype, grid.device)
            target = out[slices(piece, box.offset)]
            blocks, into = _in_blocks(x, piece, self.block), _in_blocks(target, piece, self.block)
            if blocks is not None and into is not None and x.dtype.itemsize <= 4:
                scales = grid[slices(_grid_box(piece, self.block), (0,) * len(box.shape))]
                scales = scales[..., :, None, :, None]
                # The arithmetic is in float32 because the scales are.
                q = torch.mul(blocks, 1.0 / scales) if self.reciprocal else torch.div(blocks, scales)
                into.copy_(q.clamp_(-most, most))
                continue
            rows, columns = (
                torch.arange(start, start + extent, device=grid.device) // self.block
                for start, extent in zip(piece.offset[-2:], piece.shape[-2:], strict=True)
            )
            scales = grid[piece.offset[0]] if len(box.shape) > 2 else grid
            # Indexing both dimensions at once would need eight bytes of index for each element.
            scales = scales.index_select(0, rows).index_select(1, columns).view_as(x)
            x = x.to(torch.float32, copy=True)
            x = x.mul_(1.0 / scales) if self.reciprocal else x.div_(scales)
            target.copy_(x.clamp_(-most, most))


def _matrices(box: Box, held: Held, block: int) -> list[Box]:
    """Cuts a box into boxes of whole rows of one matrix, none cut within a block, each small enough for one chunk."""
    elements = CHUNK_ELEMENTS if held.memory is None else _CHUNK_IN_PLACE
    if len(box.shape) == 2:
        return list(rows_of(box, elements, multiple=block))
    return [
        Box(offset=(index, *piece.offset), shape=(1, *piece.shape))
        for index in range(box.offset[0], box.offset[0] + box.shape[0])
        for piece in rows_of(Box(offset=box.offset[1:], shape=box.shape[1:]), elements, multiple=block)
    ]


def _values(held: Held, box: Box, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Values of a box on ``device`` in ``dtype``; read-only, since they may be the model's own memory."""
    memory = held.memory
    if memory is not None and memory.dtype == dtype and memory.device == device:
        return memory[slices(box, held.box.offset)]
    x = torch.empty(box.shape, dtype=dtype, device=device)
    held.write(box, x)
    return x


def _grid_box(box: Box, block: int) -> Box:
    """The box of blocks that a box of elements touches."""
    starts = (*box.offset[:-2], *(start // block for start in box.offset[-2:]))
    ends = [start + extent for start, extent in zip(box.offset, box.shape, strict=True)]
    ends = [*ends[:-2], *(-(-end // block) for end in ends[-2:])]
    return Box(offset=starts, shape=tuple(end - start for start, end in zip(starts, ends, strict=True)))


def _in_blocks(tensor: torch.Tensor, box: Box, block: int) -> torch.Tensor | None:
    """A view as ``(..., rows of blocks, block, columns of blocks, block)``; None if the box cuts through a block."""
    if any(start % block or extent % block for start, extent in zip(box.offset[-2:], box.shape[-2:], strict=True)):
        return None
    return tensor.unflatten(-1, (-1, block)).unflatten(-3, (-1, block))


def _maxima(x: torch.Tensor, box: Box, block: int) -> torch.Tensor:
    """Largest magnitude in each block that a box touches, as a matrix."""
    (top, left), (rows, columns) = (start % block for start in box.offset[-2:]), box.shape[-2:]
    high, wide = -(-(top + rows) // block), -(-(left + columns) // block)
    padded = torch.zeros(high * block, wide * block, dtype=x.dtype, device=x.device)
    padded[top : top + rows, left : left + columns] = x.reshape(rows, columns)
    return padded.abs_().view(high, block, wide, block).amax(dim=(1, 3))


def _share_maxima(grids: Sequence[torch.Tensor], group: TrainerGroup, what: str) -> None:
    """Replaces every rank's maxima with those over all ranks."""
    mine = torch.cat([grid.reshape(-1) for grid in grids])
    others = [rank for rank in range(group.world_size) if rank != group.rank]
    theirs = [torch.empty_like(mine) for _ in others]
    group.move(
        [Move(rank, mine) for rank in others],
        [Move(rank, tensor) for rank, tensor in zip(others, theirs, strict=True)],
        what=what,
    )
    most = mine
    for tensor in theirs:
        most = torch.maximum(most, tensor)
    start = 0
    for grid in grids:
        grid.copy_(most[start : start + grid.numel()].view(grid.shape))
        start += math.prod(grid.shape)
