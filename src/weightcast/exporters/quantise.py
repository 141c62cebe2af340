"""Quantises weights to floats of 8 or 4 bits, on the trainer's device, before they are sent.

``fp8_formats`` and ``nvfp4`` have the formats and their arithmetic.  A scale belongs to a *block* of a matrix, which
may also be a row, a part of one, or the matrix.  A block has one scale, independent of shards and buckets: where shards
cut through blocks, the ranks first exchange the maxima, a few bytes for each block.  The result is therefore the same
on every mesh, and a half or a quarter of the size of bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from weightcast.comm.trainer_group import Move, TrainerGroup
from weightcast.errors import ConfigError
from weightcast.exporters.fp8_formats import Fp8Blocks, Fp8Channels, Fp8Format, Fp8Tensors, Mxfp8
from weightcast.exporters.held_parts import Computed, Held, InMemory, Local, Watched, Write
from weightcast.exporters.lora import CHUNK_ELEMENTS
from weightcast.exporters.nvfp4 import Nvfp4
from weightcast.exporters.ownership import PartTable, SharedPart
from weightcast.exporters.quantise_jobs import Jobs, launches_on
from weightcast.exporters.quantise_steps import QuantiseSteps, ScaleCopy
from weightcast.exporters.scale_blocks import Blocks, spreads, whole_box
from weightcast.wire.box import Box, intersection, slices
from weightcast.wire.bucket import Bucket
from weightcast.wire.layout import BucketLayout, TensorSpec, dtype_name

__all__ = ["Fp8Blocks", "Fp8Channels", "Fp8Format", "Fp8Tensors", "Mxfp8", "Nvfp4", "Quantiser", "quantised_specs"]

# Elements of one chunk where values are read in place: 8 MiB of float32.
_CHUNK_IN_PLACE = 1 << 21


def quantised_specs(specs: Sequence[TensorSpec], form: Fp8Format) -> list[TensorSpec]:
    """The travelling tensors: each quantised weight is followed by its scales.  Errors as for ``Fp8Format.wants``."""
    return [spec for spec, _, _ in _expanded(specs, form)]


_WEIGHT, _SCALES, _OVERALL, _AS_IT_IS = "weight", "scales", "overall scale", "as it is"


def _expanded(specs: Sequence[TensorSpec], form: Fp8Format) -> list[tuple[TensorSpec, int, str]]:
    """Each travelling tensor, the number of its source, and its kind: weight, scales, overall scale or unchanged."""
    found: list[tuple[TensorSpec, int, str]] = []
    for number, spec in enumerate(specs):
        if not form.wants(spec):
            found.append((spec, number, _AS_IT_IS))
            continue
        shape = (*spec.shape[:-1], spec.shape[-1] // form.packs)
        weight = TensorSpec(name=spec.name + form.weight_suffix, dtype=dtype_name(form.weight_dtype), shape=shape)
        found.append((weight, number, _WEIGHT))
        scales = TensorSpec(
            name=spec.name + form.suffix, dtype=dtype_name(form.scale_dtype), shape=form.scale_shape(spec.shape)
        )
        found.append((scales, number, _SCALES))
        if form.overall_suffix:
            overall = TensorSpec(name=spec.name + form.overall_suffix, dtype="float32", shape=(1,))
            found.append((overall, number, _OVERALL))
    return found


class Quantiser:
    """Quantises parts of tensors as a gatherer asks for them; ``self.specs`` are the travelling tensors."""

    def __init__(self, specs: Sequence[TensorSpec], local: Local, shared: PartTable, form: Fp8Format) -> None:
        """Takes the arguments of a gatherer of the tensors before they are quantised."""
        self._wide = tuple(specs)
        self._local = local
        self._form = form
        expanded = _expanded(specs, form)
        self.specs = tuple(spec for spec, _, _ in expanded)
        self._kinds = [(number, kind) for _, number, kind in expanded]
        self._blocks = {n: Blocks.of(specs[n].shape, form) for n, kind in self._kinds if kind == _WEIGHT}
        self._number = {spec.name: number for number, spec in enumerate(self.specs)}
        # Weights that share an overall scale.
        self._joined: dict[str, list[int]] = {}
        for source in self._blocks if form.overall_suffix else ():
            self._joined.setdefault(form.joined(specs[source].name), []).append(source)
        self._shared = shared
        self._group: TrainerGroup | None = None
        self._split: set[int] = set()
        # For the bucket that is being filled.
        self._scales = torch.empty(0)
        self._now: QuantiseSteps | None = None  # None where nothing is remembered
        # By source.
        self._grids: dict[int, torch.Tensor] = {}
        self._overall: dict[int, torch.Tensor] = {}
        self._parts: dict[int, Sequence[Held]] = {}

    def source(self, number: int) -> int:
        """Number of the tensor that a travelling one is computed from."""
        return self._kinds[number][0]

    def agree(self, group: TrainerGroup) -> None:
        """Implements ``PartTable.agree``; also finds the weights whose shards cut through blocks.

        Raises:
            ConfigError: Shards cut through a byte that several values are packed into.
        """
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
                    if any(part.box.offset[-1] % self._form.packs for part in parts):
                        raise ConfigError(
                            f"shards of {self._wide[source].name} begin at an odd column, and "
                            f"{type(self._form).__name__} packs {self._form.packs} columns into a byte",
                            hint="shard it by rows, or at even columns",
                        )
                    known[key] = any(self._blocks[source].cut_by(part.box) for part in parts)
                if known[key]:
                    self._split.add(source)
        self._group = group

    def parts(self, number: int) -> Sequence[SharedPart]:
        """Implements ``PartTable.parts``, for the travelling tensors."""
        source, kind = self._kinds[number]
        parts = self._shared.parts(source)
        if kind == _AS_IT_IS:
            return parts
        if kind == _WEIGHT:
            return [replace(part, box=self._packed(part.box), ready=False, computed=True) for part in parts]
        if kind == _SCALES and source not in self._split:
            blocks = self._blocks[source]
            return [replace(part, box=blocks.scales_of(part.box), ready=False, computed=True) for part in parts]
        assert self._group is not None
        everyone = tuple(range(self._group.world_size))
        return [SharedPart(whole_box(self.specs[number].shape), everyone, ready=False, computed=True)]

    def plan(self, layout: BucketLayout, watched: Watched) -> QuantiseSteps:
        """Works out which scales a bucket needs; ``watched`` is the memory that its values are computed from."""
        return QuantiseSteps(layout, self._wanted(layout), watched)

    def begin(self, steps: QuantiseSteps, group: TrainerGroup) -> None:
        """Computes the scales that a bucket needs.  Collective if shards cut through blocks; ``end`` frees them."""
        wanted = steps.wanted
        scales = self._make_grids(wanted, group.device)
        self._use(steps, group.device)
        if self._now is not None and self._now.measuring is not None:
            self._now.measuring.measure(scales.data_ptr())
        else:
            self._measure_all(wanted, scales)
        shared = [self._grids[source][first:last] for source, (first, last) in wanted.items() if source in self._split]
        most = self._most_of_joined(wanted, group.device)
        if most.numel():
            shared.append(most)
        if shared and group.world_size > 1:
            _share_maxima(shared, group, f"the scales of bucket {steps.layout.index}")
        if not self._form.overall_suffix:
            self._form.finish(scales)
            return
        overall = self._form.overall(most)
        found = {name: overall[number : number + 1] for number, name in enumerate(self._sets(wanted))}
        for source, grid in self._grids.items():
            self._overall[source] = found[self._form.joined(self._wide[source].name)]
            self._form.finish(grid, self._overall[source])

    def _make_grids(self, sources: Iterable[int], device: torch.device) -> torch.Tensor:
        """Makes the grids of a bucket, and returns all of their elements as one tensor of zeros."""
        shapes = {source: self._blocks[source].grid_shape for source in sources}
        self._scales = torch.zeros(sum(map(math.prod, shapes.values())), dtype=torch.float32, device=device)
        parts = self._scales.split([math.prod(shape) for shape in shapes.values()])
        self._grids = {source: part.view(shape) for (source, shape), part in zip(shapes.items(), parts, strict=True)}
        return self._scales

    def _use(self, steps: QuantiseSteps, device: torch.device) -> None:
        """Remembers the launches of a bucket from now on, until ``end``, where there are launches."""
        if launches_on(device):
            steps.look()
            self._now = steps

    def _measure_all(self, wanted: Mapping[int, tuple[int, int]], scales: torch.Tensor) -> None:
        self._parts = {source: self._local(source) for source in wanted}
        jobs = Jobs(self._form, scales.device, scales.data_ptr())
        known = [self._measure(source, *rows, jobs) for source, rows in wanted.items()]
        if not jobs:
            return
        from weightcast.exporters.quantise_kernel import Launches

        launches = Launches(jobs)
        launches.measure(scales.data_ptr())
        if self._now is not None and all(known):
            self._now.measuring = launches

    def prepare_scales(self, steps: QuantiseSteps, device: torch.device) -> None:
        """Prepares the launches of a GPU for a bucket.  ``prepare`` may follow, and then ``end``."""
        self._use(steps, device)
        if self._now is None or steps.measuring is not None:
            return
        wanted = steps.wanted
        jobs = Jobs(self._form, device, self._make_grids(wanted, device).data_ptr())
        taken = [
            jobs.takes(held.memory, self._wide[source].torch_dtype, held.box.offset, common, self._blocks[source], grid)
            and _is_watched(held)
            for (source, rows), grid in zip(wanted.items(), self._grids.values(), strict=True)
            for held, common in self._common(source, *rows)
        ]
        if not jobs:
            return
        from weightcast.exporters import quantise_kernel

        quantise_kernel.prepare(jobs)
        if all(taken):
            steps.measuring = quantise_kernel.Launches(jobs)

    def prepare(self, bucket: Bucket, key: object, writes: Callable[[], list[Write]]) -> None:
        """Implements ``held_parts.Batch``."""
        steps, device = self._now, bucket.data.device
        if steps is None or self._form.overall_suffix:
            return
        jobs = Jobs(self._form, device, self._make_grids(steps.wanted, device).data_ptr(), bucket.data.data_ptr())
        parts = writes()
        others = self._sort(parts, jobs)
        copies = _copies(parts, others, bucket)
        if jobs and copies is not None:
            from weightcast.exporters.quantise_kernel import Launches

            steps.remember(key, Launches(jobs), copies)

    @staticmethod
    def _sort(writes: Iterable[Write], jobs: Jobs) -> list[Write]:
        """Puts what can be quantised in launches among the jobs, and returns the others."""
        return [
            (held, box, out)
            for held, box, out in writes
            if not (isinstance(held, _Quantised) and held.is_among(jobs, box, out))
        ]

    def _wanted(self, layout: BucketLayout) -> Mapping[int, tuple[int, int]]:
        """First and end index, in the grid's dimension 0, of the scales that a bucket needs, by source."""
        wanted: dict[int, tuple[int, int]] = {}
        for slot in layout.slots:
            number = self._number.get(slot.spec.name)
            if number is None:
                raise ConfigError(f"bucket {layout.index} carries {slot.spec.name}, and the exporter does not have it")
            source, kind = self._kinds[number]
            if kind != _AS_IT_IS and slot.num_rows:
                end_row = slot.first_row + slot.num_rows
                first, last = _grid_rows(self._blocks[source], kind, slot.first_row, end_row)
                start, end = wanted.get(source, (first, last))
                if start == end:  # so far only a scale of the whole weight, which is in no row of the grid
                    wanted[source] = first, last
                elif first < last:
                    wanted[source] = min(start, first), max(end, last)
        return wanted

    def write(self, bucket: Bucket, key: object, writes: Callable[[], list[Write]]) -> None:
        """Implements ``held_parts.Batch`` for the bucket that ``begin`` was called for."""
        steps, scales = self._now, self._scales
        if steps is not None and steps.write(key, bucket, scales, self._form):
            return
        jobs = Jobs(self._form, bucket.data.device, scales.data_ptr(), bucket.data.data_ptr())
        parts = writes()
        others = self._sort(parts, jobs)
        for held, box, out in others:
            held.write(box, out)
        if not jobs:
            return
        from weightcast.exporters.quantise_kernel import Launches

        launches = Launches(jobs)
        launches.encode(scales.data_ptr(), bucket.data.data_ptr())
        copies = _copies(parts, others, bucket)
        if steps is not None and copies is not None:
            steps.remember(key, launches, copies)

    def end(self) -> None:
        """Frees the scales."""
        self._scales = torch.empty(0)
        self._now = None
        self._grids = {}
        self._overall = {}
        self._parts = {}

    def local(self, number: int) -> Sequence[Held]:
        """This rank's parts of a travelling tensor."""
        source, kind = self._kinds[number]
        if kind == _AS_IT_IS:
            return self._local(source)
        blocks = self._blocks[source]
        if kind == _OVERALL:
            return [_Overall(whole_box((1,)), self._overall_of, source)]
        if kind == _SCALES:
            # Every rank has all scales of a split weight.
            whole = [whole_box(blocks.scales)]
            boxes = whole if source in self._split else [blocks.scales_of(held.box) for held in self._held(source)]
            return [_Scales(box, self._grid_of, source, blocks, self._form) for box in boxes]
        wide = self._wide[source].torch_dtype
        return [
            _Quantised(self._packed(held.box), held, wide, self._grid_of, self._overall_of, source, blocks, self._form)
            for held in self._held(source)
        ]

    def _packed(self, box: Box) -> Box:
        """The box of the travelling weight that belongs to a box of elements."""
        packs = self._form.packs
        if packs == 1:
            return box
        return Box(offset=(*box.offset[:-1], box.offset[-1] // packs), shape=(*box.shape[:-1], box.shape[-1] // packs))

    def _sets(self, sources: Iterable[int]) -> list[str]:
        return list(dict.fromkeys(self._form.joined(self._wide[source].name) for source in sources))

    def _most_of_joined(self, sources: Collection[int], device: torch.device) -> torch.Tensor:
        """The largest magnitude in this rank's parts of each set, float32; empty without overall scales."""
        sets = self._sets(sources) if self._form.overall_suffix else []
        most = torch.zeros(len(sets), dtype=torch.float32, device=device)
        for found, members in zip(most, (self._joined[name] for name in sets), strict=True):
            for source in members:
                for held in self._held(source):
                    for piece in self._blocks[source].pieces(held.box, _chunk(held)):
                        x = _values(held, piece, self._wide[source].torch_dtype, device)
                        if x.numel():
                            torch.maximum(found, x.abs().amax().float(), out=found)
        return most

    def _held(self, source: int) -> Sequence[Held]:
        found = self._parts.get(source)
        return self._local(source) if found is None else found

    def _grid_of(self, source: int) -> torch.Tensor:
        return self._grids[source]

    def _overall_of(self, source: int) -> torch.Tensor | None:
        return self._overall.get(source)

    def _measure(self, source: int, first: int, last: int, jobs: Jobs) -> bool:
        """Writes the maxima of this rank's parts into some rows of a grid, at once or among the jobs.

        Returns:
            True if all are among the jobs, and it is noticed if one moves.
        """
        blocks, dtype, grid = self._blocks[source], self._wide[source].torch_dtype, self._grids[source]
        known = True
        for held, common in self._common(source, first, last):
            if jobs.takes(held.memory, dtype, held.box.offset, common, blocks, grid):
                known = known and _is_watched(held)
                continue
            known = False
            for piece in blocks.pieces(common, _chunk(held)):
                x = _values(held, piece, dtype, grid.device)
                found = grid[slices(blocks.touched(piece), (0,) * grid.dim())]
                torch.maximum(found, blocks.maxima(x, piece), out=found)
        return known

    def _common(self, source: int, first: int, last: int) -> Iterator[tuple[Held, Box]]:
        """This rank's parts of a weight, each with the box of it that belongs to some rows of the grid."""
        blocks, spec = self._blocks[source], self._wide[source]
        step = blocks.rows if len(spec.shape) == 2 else 1
        rows = first * step, min(last * step, spec.num_rows)
        needed = Box(offset=(rows[0], *(0 for _ in spec.shape[1:])), shape=(rows[1] - rows[0], *spec.shape[1:]))
        for held in self._held(source):
            common = intersection(held.box, needed)
            if common is not None:
                yield held, common


@dataclass(frozen=True, slots=True)
class _Scales(Computed):
    """Some scales of a weight."""

    box: Box
    grid: Callable[[int], torch.Tensor]
    source: int
    blocks: Blocks
    form: Fp8Format

    @property
    def origin(self) -> torch.Tensor:
        return self.part(self.box)

    def write(self, box: Box, out: torch.Tensor) -> None:
        out.copy_(self.form.stored(self.part(box)))

    def part(self, box: Box) -> torch.Tensor:
        """A view of the bucket's scales."""
        return self.grid(self.source).view(self.blocks.scales)[slices(box, (0,) * len(box.shape))]


@dataclass(frozen=True, slots=True)
class _Overall(Computed):
    """The overall scale of a weight, which every rank has."""

    box: Box
    overall: Callable[[int], torch.Tensor | None]
    source: int

    @property
    def origin(self) -> torch.Tensor:
        found = self.overall(self.source)
        assert found is not None
        return found

    def write(self, box: Box, out: torch.Tensor) -> None:
        out.copy_(self.origin[slices(box, (0,))])


@dataclass(frozen=True, slots=True)
class _Quantised(Computed):
    """A part of a weight, divided by its scales.  Its box is one of the travelling weight."""

    box: Box
    held: Held
    dtype: torch.dtype
    grid: Callable[[int], torch.Tensor]
    overall: Callable[[int], torch.Tensor | None]
    source: int
    blocks: Blocks
    form: Fp8Format

    @property
    def origin(self) -> torch.Tensor:
        return self.held.origin

    def is_among(self, jobs: Jobs, box: Box, out: torch.Tensor) -> bool:
        """Adds a box to the jobs, if they take it."""
        held = self.held
        return jobs.takes(held.memory, self.dtype, held.box.offset, box, self.blocks, self.grid(self.source), out)

    def write(self, box: Box, out: torch.Tensor) -> None:
        grid, overall, packs = self.grid(self.source), self.overall(self.source), self.form.packs
        elements = Box(
            offset=(*box.offset[:-1], box.offset[-1] * packs), shape=(*box.shape[:-1], box.shape[-1] * packs)
        )
        for piece in self.blocks.pieces(elements, _chunk(self.held)):
            x = _values(self.held, piece, self.dtype, grid.device)
            rows = slices(Box(offset=piece.offset[:-1], shape=piece.shape[:-1]), elements.offset[:-1])
            target = out[rows]  # a piece has whole rows of the box
            touched = self.blocks.touched(piece)
            scales = grid[slices(touched, (0,) * len(elements.shape))]
            if overall is not None:
                scales = scales / overall
            if spreads(touched.shape, piece.shape):
                target.copy_(self._encoded(x, scales))
                continue
            blocks = self.blocks.in_blocks(x, piece)
            into = self.blocks.in_blocks(target, piece) if packs == 1 else None
            if blocks is not None and into is not None:
                into.copy_(self._encoded(blocks, scales[..., :, None, :, None]))
                continue
            for dim, step in ((-2, self.blocks.rows), (-1, self.blocks.columns)):
                start = piece.offset[dim]
                index = torch.arange(start, start + piece.shape[dim], device=grid.device) // step - touched.offset[dim]
                # Indexing both dimensions at once would need eight bytes of index for each element.
                scales = scales.index_select(dim, index)
            target.copy_(self._encoded(x, scales))

    def _encoded(self, x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        # The arithmetic is in float32 because the scales are.
        x = x.float() if x.dtype.itemsize > 4 else x
        q = torch.mul(x, 1.0 / scales) if self.form.multiplies else torch.div(x, scales)
        return self.form.encoded(q)


def _is_watched(held: Held) -> bool:
    """True if ``Watched`` notices that a part has moved."""
    return isinstance(held, InMemory) and held.source is not None


def _copies(parts: Iterable[Write], others: Sequence[Write], bucket: Bucket) -> list[ScaleCopy] | None:
    """The copies of scales among ``others``; None if the parts cannot be written without looking them up again."""
    copies = [ScaleCopy.of(held.part(box), out, bucket) for held, box, out in others if isinstance(held, _Scales)]
    if len(copies) < len(others):
        return None
    return copies if all(_is_watched(held.held) for held, _, _ in parts if isinstance(held, _Quantised)) else None


def _grid_rows(blocks: Blocks, kind: str, first: int, last: int) -> tuple[int, int]:
    """First and end index, in the grid's dimension 0, of the scales for some rows of a travelling tensor."""
    if len(blocks.shape) > 2:
        return first, last
    if kind == _OVERALL:
        return 0, 0
    if kind == _SCALES:
        return (first, last) if len(blocks.scales) > 1 else (0, 1)
    return first // blocks.rows, -(-last // blocks.rows)


def _chunk(held: Held) -> int:
    """Elements that are computed at a time."""
    return CHUNK_ELEMENTS if held.memory is None else _CHUNK_IN_PLACE


def _values(held: Held, box: Box, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Values of a box on ``device`` in ``dtype``; read-only, since they may be the model's own memory."""
    memory = held.memory
    if memory is not None and memory.dtype == dtype and memory.device == device:
        return memory[slices(box, held.box.offset)]
    x = torch.empty(box.shape, dtype=dtype, device=device)
    held.write(box, x)
    return x


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
