"""Sharded tensors into whole ones, bucket by bucket, from the rank that holds a part to the ranks that need it.

No rank ever holds a whole tensor beside its bucket.  Where a part lies contiguously in the bucket it is received
there and nowhere else; where it does not, or where it has to be cast before it is sent, it passes through a scratch
buffer of one bucket divided by the number of ranks.  All traffic of a bucket is one batch, or a few where the scratch
buffer sets the pace.

Every rank works out the same plan from the same table of who holds what, so nobody asks anybody during an update.
Knows boxes and ranks; it does not know what a mesh, a module or an engine is.
"""

from __future__ import annotations

import math
import mmap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import torch

from weightcast.comm.local import Move, TrainerGroup
from weightcast.errors import ConfigError
from weightcast.wire.bucket import Bucket
from weightcast.wire.copies import Flat, bits, copy_all, flat_bytes
from weightcast.wire.digest import Box, Piece
from weightcast.wire.layout import BucketLayout, TensorSlot, TensorSpec
from weightcast.wire.transfers import RepeatedTransfers, Transfer, can_transfer, transfers_on

# Sent from where it lies a tensor is a broadcast of its own; below this a copy is quicker.
MIN_LENT_BYTES = 4 << 20
# Below this a scratch buffer only costs round trips.
MIN_SCRATCH_BYTES = 1 << 20
_SCRATCH_ALIGNMENT_BYTES = 64


class Held(Protocol):
    """A part of a tensor that this rank can give."""

    @property
    def box(self) -> Box:
        """Which part, in elements of the whole tensor."""
        ...

    @property
    def memory(self) -> torch.Tensor | None:
        """The part as it lies in memory, shape ``box.shape``; None if its values are computed."""
        ...

    def write(self, box: Box, out: torch.Tensor) -> None:
        """Write a box that lies in the part to ``out``: shape ``box.shape``, any strides, the wire dtype."""
        ...


Local = Callable[[int], Sequence[Held]]
# What this rank holds now of the tensor with this number, and what that is: equal as long as it is the same part of the
# same tensor, laid out alike.
Look = Callable[[int], tuple[object, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Stored:
    """A part that lies in memory.

    Attributes:
        box: Which part.
        memory: Shape ``box.shape``.
        source: Number of the tensor whose memory it is a view of, for ``Look``; None if that cannot be asked.
    """

    box: Box
    memory: torch.Tensor
    source: int | None = None

    def write(self, box: Box, out: torch.Tensor) -> None:
        """Copy and cast."""
        out.copy_(self.memory[slices(box, self.box.offset)])


class _Part(msgspec.Struct, frozen=True, array_like=True):
    """A part that a rank holds; ``ready`` if its memory can be sent as it is: contiguous, wire dtype, right device."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    ready: bool


class _Table(msgspec.Struct, frozen=True):
    """What one rank holds: for each tensor its parts; ``error`` if it cannot say."""

    specs: tuple[tuple[str, str, tuple[int, ...]], ...]
    held: tuple[tuple[_Part, ...], ...]
    error: str | None = None


@dataclass(frozen=True, slots=True)
class _Shared:
    """A part of a tensor and the ranks that hold it, in order; ``ready`` if all of those can send it as it is."""

    box: Box
    holders: tuple[int, ...]
    ready: bool


@dataclass(frozen=True, slots=True)
class _Piece:
    """A box of one slot, on its way from one rank to others."""

    slot: TensorSlot
    box: Box
    source: int
    targets: tuple[int, ...]
    source_scratch_bytes: int
    target_scratch_bytes: int


@dataclass(frozen=True, slots=True)
class _Copy:
    """A copy out of this rank's memory into a bucket, in elements: of a box of the tensor in one slot.

    Numbers only: a view would keep memory alive that the trainer wants to give back between two updates.
    """

    source: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    target_stride: tuple[int, ...]
    target_offset: int
    full_shape: tuple[int, ...]
    box: Box
    slot: int


@dataclass(frozen=True, slots=True, eq=False)
class _Replay:
    """How this rank's own parts get into a bucket.

    Attributes:
        looks: What each tensor was when this was worked out, by number.
        summed: Copies that are summed on their way.
        copies: Plain copies.
        rest: What has to be asked for each time, because it is computed.
        lent: Names of the tensors that stay where they are.
    """

    looks: dict[int, object]
    summed: list[_Copy]
    copies: list[_Copy]
    rest: list[tuple[TensorSlot, Box]]
    lent: frozenset[str]


@dataclass(slots=True)
class _Steps:
    """What one rank does for one bucket."""

    layout: BucketLayout
    receivers: tuple[int, ...]
    copies: list[tuple[TensorSlot, Box]] = field(default_factory=list)
    replay: _Replay | None = None
    gathers: list[TensorSlot] = field(default_factory=list)
    waves: list[list[_Piece]] = field(default_factory=list)
    scratch_bytes: int = 0


class Gatherer:
    """Gathers the tensors of one exporter.

    Args:
        specs: Every tensor, the same on every rank.
        local: What this rank holds of the tensor with this number, now; asked anew for every bucket.  The parts
            of all ranks together must be the tensor exactly once, but for parts that several ranks hold alike.
        look: Quicker than ``local``, for what lies in memory; None if there is nothing quicker.
    """

    def __init__(self, specs: Sequence[TensorSpec], local: Local, look: Look | None = None) -> None:
        self._specs = tuple(specs)
        self._local = local
        self._look = look
        self._number = {spec.name: number for number, spec in enumerate(self._specs)}
        self._group: TrainerGroup | None = None
        self._parts: list[list[_Shared]] = []
        self._steps: dict[int, _Steps] = {}
        self._transfers = RepeatedTransfers()

    def prepare(self, group: TrainerGroup) -> None:
        """Learn who holds what.  Collective; communicates the first time only.

        Raises:
            ConfigError: The ranks do not have the same model, or together do not hold every tensor exactly; the
                same on every rank.
            TrainerRankFailed: A rank is gone or did not take part in time.
        """
        if self._group is group:
            return
        tables = [
            msgspec.json.decode(raw, type=_Table)
            for raw in group.all_gather_bytes(msgspec.json.encode(self._table(group)))
        ]
        for rank, table in enumerate(tables):
            if table.error is not None:
                raise ConfigError(f"trainer rank {rank}: {table.error}" if len(tables) > 1 else table.error)
            if table.specs != tables[0].specs:
                raise ConfigError(f"trainer ranks 0 and {rank} have different models: {_difference(tables[0], table)}")
        self._parts = [
            _parts(spec, [table.held[number] for table in tables]) for number, spec in enumerate(self._specs)
        ]
        self._steps.clear()
        self._group = group

    def boxes(self, number: int) -> list[Box]:
        """The distinct parts that the ranks hold of a tensor; known after ``prepare``."""
        return [part.box for part in self._parts[number]]

    def fill(
        self,
        bucket: Bucket | None,
        layout: BucketLayout,
        group: TrainerGroup,
        receivers: tuple[int, ...] | None = None,
    ) -> torch.Tensor | None:
        """Write the layout's tensors into the bucket of every receiver.  Collective.

        When it returns, the bucket is complete and the model's memory may be written again.

        Args:
            bucket: Where to, on a receiver; None elsewhere.
            layout: What; the same on every rank.
            group: The trainer ranks.
            receivers: Who has a bucket, in order; None for ``group.receivers``.

        Returns:
            ``Bucket.sums``, where this rank copied all of the bucket on a GPU and nothing was cast or computed.

        Raises:
            ConfigError: The layout is not of these tensors, or the model has changed since it was prepared.
            TrainerRankFailed: Another rank failed; the message names it.
        """
        self.prepare(group)
        try:
            return self._fill(bucket, layout, group, receivers or group.receivers)
        except BaseException as error:
            # The others are about to wait for this rank.
            group.abort(f"{type(error).__name__}: {error}")
            raise

    def lend(self, layout: BucketLayout, group: TrainerGroup) -> dict[str, torch.Tensor]:
        """Large tensors of a bucket whose bytes lie here as they travel: ``Bucket.lent``, this rank's own memory."""
        self.prepare(group)
        found: dict[str, torch.Tensor] = {}
        for slot in layout.slots:
            if slot.size_bytes < MIN_LENT_BYTES:
                continue
            box = Box(offset=(slot.first_row, *(0 for _ in slot.spec.shape[1:])), shape=slot.shape)
            for held in self._local(self._number[slot.spec.name]):
                if held.memory is None or not _contains(held.box, box):
                    continue
                memory = held.memory.detach()[slices(box, held.box.offset)]
                if _is_ready(memory, slot.spec, group.device):
                    found[slot.spec.name] = flat_bytes(memory)
        return found

    def _fill(
        self, bucket: Bucket | None, layout: BucketLayout, group: TrainerGroup, receivers: tuple[int, ...]
    ) -> torch.Tensor | None:
        if (group.rank in receivers) != (bucket is not None):
            raise ConfigError(f"trainer rank {group.rank} must have a bucket if, and only if, it is a receiver")
        steps = self._steps.get(layout.index)
        if steps is None or steps.receivers != receivers or steps.layout != layout:
            steps = self._steps[layout.index] = self._plan(layout, group, receivers)
        what = f"its part of bucket {layout.index}"
        sums = None
        with torch.no_grad():
            if steps.copies:
                assert bucket is not None
                sums = self._copy_own(steps, bucket)
            if steps.gathers:
                assert bucket is not None
                group.all_gather([bucket.view(slot) for slot in steps.gathers], what=what)
            scratch = _Scratch(steps.scratch_bytes, group.device)
            for wave in steps.waves:
                self._move(wave, bucket, group, scratch, what)
        return sums if not steps.gathers and not steps.waves else None

    def _copy_own(self, steps: _Steps, bucket: Bucket) -> torch.Tensor | None:
        """This rank's own parts into the bucket.

        Returns:
            The sums of the slots, if those of all parts were taken.
        """
        replay = steps.replay
        found = {source: self._look(source) for source in replay.looks} if replay and self._look else {}
        changed = replay is None or replay.lent != frozenset(bucket.lent)
        if replay is None or changed or any(found[source][0] != look for source, look in replay.looks.items()):
            replay = steps.replay = self._work_out(steps, bucket)
            found = {source: self._look(source) for source in replay.looks} if self._look else {}
        sums = self._copy_and_sum(steps.layout, replay, found, bucket) if replay.summed else None
        if not replay.copies and not replay.rest:
            return sums
        memory = {source: (tensor, bits(tensor)) for source, (_, tensor) in found.items()}
        flat = Flat(bucket.data)
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for copy in replay.copies:
            source, as_bits = memory[copy.source]
            same = source.dtype == copy.dtype
            source = as_bits if same else source
            sources.append(source.as_strided(copy.shape, copy.stride, source.storage_offset() + copy.offset))
            targets.append(flat.region(copy.dtype, copy.shape, copy.target_stride, copy.target_offset, as_bits=same))
        copy_all(targets, sources)
        for slot, box in replay.rest:
            self._own(slot, box).write(box, _region(bucket, slot, box))
        return None

    def _copy_and_sum(
        self,
        layout: BucketLayout,
        replay: _Replay,
        found: Mapping[int, tuple[object, torch.Tensor]],
        bucket: Bucket,
    ) -> torch.Tensor:
        def transfers() -> list[Transfer]:
            flat = Flat(bucket.data)
            return [_transfer_of(copy, found[copy.source][1], flat) for copy in replay.summed]

        where = tuple(tensor.data_ptr() for _, tensor in found.values())
        place = layout.index, bucket.data.data_ptr()
        # The same memory may be read otherwise than before: ``replay`` is another one then.
        what = layout, where, replay
        return self._transfers.run(place, what, bucket.data.device, len(layout.slots), transfers)

    def _work_out(self, steps: _Steps, bucket: Bucket) -> _Replay:
        replay = _Replay({}, [], [], [], frozenset(bucket.lent))
        flat = Flat(bucket.data)
        number = {slot.spec.name: number for number, slot in enumerate(steps.layout.slots)}
        for slot, box in steps.copies:
            if slot.spec.name in replay.lent:
                continue
            held = self._own(slot, box)
            if self._look is None or not isinstance(held, Stored) or held.source is None:
                replay.rest.append((slot, box))
                continue
            replay.looks[held.source], whole = self._look(held.source)
            view, target = held.memory[slices(box, held.box.offset)], _region(bucket, slot, box)
            copy = _Copy(
                source=held.source,
                dtype=target.dtype,
                shape=tuple(view.shape),
                stride=view.stride(),
                offset=int(view.storage_offset()) - int(whole.storage_offset()),
                target_stride=target.stride(),
                target_offset=(target.data_ptr() - bucket.data.data_ptr()) // target.element_size(),
                full_shape=slot.spec.shape,
                box=box,
                slot=number[slot.spec.name],
            )
            fits = transfers_on(bucket.data.device) and can_transfer(_transfer_of(copy, whole, flat))
            (replay.summed if fits else replay.copies).append(copy)
        return replay

    def _move(
        self, wave: Sequence[_Piece], bucket: Bucket | None, group: TrainerGroup, scratch: _Scratch, what: str
    ) -> None:
        scratch.reset()
        sends: list[Move] = []
        receives: list[Move] = []
        scatters: list[tuple[torch.Tensor, torch.Tensor]] = []
        for piece in wave:
            dtype = piece.slot.spec.torch_dtype
            if piece.source == group.rank:
                if piece.source_scratch_bytes:
                    outgoing = scratch.take(piece.box.shape, dtype)
                    self._own(piece.slot, piece.box).write(piece.box, outgoing)
                elif bucket is not None and _is_contiguous(piece.box.shape, piece.slot.shape):
                    outgoing = _region(bucket, piece.slot, piece.box)  # cast and in place already
                else:
                    outgoing = _as_it_lies(self._own(piece.slot, piece.box), piece, group.device)
                sends.extend(Move(target, outgoing) for target in piece.targets)
            elif group.rank in piece.targets:
                assert bucket is not None
                region = incoming = _region(bucket, piece.slot, piece.box)
                if piece.target_scratch_bytes:
                    incoming = scratch.take(piece.box.shape, dtype)
                    scatters.append((region, incoming))
                receives.append(Move(piece.source, incoming))
        group.move(sends, receives, what=what)
        for region, incoming in scatters:
            region.copy_(incoming)

    def _own(self, slot: TensorSlot, box: Box) -> Held:
        """This rank's part that has a box."""
        for held in self._local(self._number[slot.spec.name]):
            if _contains(held.box, box):
                return held
        raise ConfigError(f"{slot.spec.name}: the model has been sharded anew since the exporter was prepared")

    def _table(self, group: TrainerGroup) -> _Table:
        specs = tuple((spec.name, spec.dtype, spec.shape) for spec in self._specs)
        held: list[tuple[_Part, ...]] = []
        try:
            for number, spec in enumerate(self._specs):
                held.append(
                    tuple(
                        _Part(part.box.offset, part.box.shape, _is_ready(part.memory, spec, group.device))
                        for part in self._local(number)
                    )
                )
        except ConfigError as error:
            # Said to everybody rather than raised here, where it would leave the others waiting.
            return _Table(specs=specs, held=(), error=str(error))
        return _Table(specs=specs, held=tuple(held))

    def _plan(self, layout: BucketLayout, group: TrainerGroup, receivers: tuple[int, ...]) -> _Steps:
        steps = _Steps(layout, receivers)
        budget_bytes = max(layout.size_bytes // group.world_size, MIN_SCRATCH_BYTES)
        budget_bytes -= budget_bytes % _SCRATCH_ALIGNMENT_BYTES
        load: Counter[int] = Counter()
        used: Counter[int] = Counter()
        wave: list[_Piece] = []
        for slot in layout.slots:
            number = self._number.get(slot.spec.name)
            if number is None or self._specs[number] != slot.spec:
                raise ConfigError(
                    f"bucket {layout.index} carries {slot.spec.name}, which this exporter does not have so"
                )
            gathered = self._in_rank_order(slot, number, group, receivers)
            if gathered:
                steps.gathers.append(slot)
            for part in self._parts[number]:
                box = _cut_rows(part.box, slot)
                if box is None:
                    continue
                if group.rank in part.holders and group.rank in receivers:
                    steps.copies.append((slot, box))
                if gathered:
                    continue
                for piece in self._pieces(slot, part, box, receivers, load, budget_bytes):
                    needs = {rank: _scratch_bytes(piece, rank) for rank in (piece.source, *piece.targets)}
                    if any(used[rank] + needed > budget_bytes for rank, needed in needs.items() if needed):
                        steps.waves.append(wave)
                        wave = []
                        used.clear()
                    used.update(needs)
                    wave.append(piece)
        steps.waves.append(wave)
        mine = [
            [piece for piece in wave if group.rank == piece.source or group.rank in piece.targets]
            for wave in steps.waves
        ]
        steps.waves = [wave for wave in mine if wave]
        steps.scratch_bytes = max(
            (sum(_scratch_bytes(piece, group.rank) for piece in wave) for wave in mine), default=0
        )
        return steps

    def _in_rank_order(self, slot: TensorSlot, number: int, group: TrainerGroup, receivers: tuple[int, ...]) -> bool:
        """True if rank r holds the r-th of equal parts of the slot and everybody wants all of them."""
        parts = self._parts[number]
        world = group.world_size
        if not group.uses_nccl or not slot.whole or len(receivers) != world or len(parts) != world:
            return False
        rows = slot.spec.num_rows // world
        return all(
            part.holders == (rank,)
            and part.box.offset == (rank * rows, *(0 for _ in slot.spec.shape[1:]))
            and part.box.shape == (rows, *slot.spec.shape[1:])
            for rank, part in enumerate(parts)
        )

    def _pieces(
        self,
        slot: TensorSlot,
        part: _Shared,
        box: Box,
        receivers: tuple[int, ...],
        load: Counter[int],
        budget_bytes: int,
    ) -> Iterator[_Piece]:
        targets = tuple(rank for rank in receivers if rank not in part.holders)
        if not targets:
            return
        itemsize = slot.spec.torch_dtype.itemsize
        source = min(part.holders, key=lambda rank: (load[rank], rank))
        load[source] += math.prod(box.shape) * itemsize

        def piece(box: Box) -> _Piece:
            scratch_bytes = _align(math.prod(box.shape) * itemsize)
            in_place = _is_contiguous(box.shape, slot.shape)
            # A receiver that is also the source has the box in its bucket, cast, before anything is sent.
            as_it_is = source in receivers and in_place
            as_it_is = as_it_is or (part.ready and _is_contiguous(box.shape, part.box.shape))
            return _Piece(
                slot, box, source, targets, 0 if as_it_is else scratch_bytes, 0 if in_place else scratch_bytes
            )

        whole = piece(box)
        if not whole.source_scratch_bytes and not whole.target_scratch_bytes:
            yield whole
            return
        for small in _split(box, max(budget_bytes // itemsize, 1)):
            yield piece(small)


def _as_it_lies(held: Held, piece: _Piece, device: torch.device) -> torch.Tensor:
    """The memory of a box that was said to be ready to be sent."""
    spec, memory = piece.slot.spec, held.memory
    if memory is None:
        raise ConfigError(f"{spec.name} is computed, which it was not when the exporter was prepared")
    outgoing = memory[slices(piece.box, held.box.offset)]
    if not _is_ready(outgoing, spec, device):
        raise ConfigError(
            f"{spec.name} is {outgoing.dtype} on {outgoing.device} with strides {outgoing.stride()}, "
            "which it was not when the exporter was prepared"
        )
    return outgoing


def _is_ready(tensor: torch.Tensor | None, spec: TensorSpec, device: torch.device) -> bool:
    """True if the tensor's memory can be sent as it is."""
    return (
        tensor is not None and tensor.is_contiguous() and tensor.dtype == spec.torch_dtype and tensor.device == device
    )


def _transfer_of(copy: _Copy, source: torch.Tensor, flat: Flat) -> Transfer:
    """A copy out of a tensor that is summed on its way."""
    part = source.detach().as_strided(copy.shape, copy.stride, int(source.storage_offset()) + copy.offset)
    target = flat.region(copy.dtype, copy.shape, copy.target_stride, copy.target_offset, as_bits=False)
    box = copy.box if copy.full_shape else None
    return Transfer(piece=Piece(tensor=part, full_shape=copy.full_shape, box=box), target=target, total=copy.slot)


class _Scratch:
    """One buffer for what cannot be sent or received in place, used anew for every wave."""

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        if device.type == "cpu" and size_bytes:
            # Mapped by hand, so that it is gone when this object is: malloc would keep it for later.
            self._data = torch.frombuffer(mmap.mmap(-1, size_bytes), dtype=torch.uint8)
        else:
            self._data = torch.empty(size_bytes, dtype=torch.uint8, device=device)
        self._taken_bytes = 0

    def reset(self) -> None:
        self._taken_bytes = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        start, size_bytes = self._taken_bytes, math.prod(shape) * dtype.itemsize
        self._taken_bytes += _align(size_bytes)
        return self._data[start : start + size_bytes].view(dtype).view(shape)


def _parts(spec: TensorSpec, held: Sequence[tuple[_Part, ...]]) -> list[_Shared]:
    """The distinct parts of a tensor, by their place in it.

    Raises:
        ConfigError: They do not cover the tensor exactly once.
    """
    holders: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
    ready: dict[tuple[tuple[int, ...], tuple[int, ...]], bool] = {}
    for rank, parts in enumerate(held):
        for part in parts:
            if math.prod(part.shape):
                key = (part.offset, part.shape)
                holders.setdefault(key, []).append(rank)
                ready[key] = ready.get(key, True) and part.ready
    volume = sum(math.prod(shape) for _, shape in holders)
    if volume != math.prod(spec.shape) or not (_is_grid(spec, list(holders)) or _are_apart(list(holders))):
        boxes = ", ".join(f"{list(shape)} at {list(offset)}" for offset, shape in sorted(holders))
        raise ConfigError(
            f"{spec.name} {list(spec.shape)}: the trainer ranks hold {boxes or 'nothing'}, "
            "which is not the whole tensor exactly once",
            hint="every rank of the model's mesh must take part in the update",
        )
    return [
        _Shared(Box(offset=offset, shape=shape), tuple(ranks), ready[offset, shape])
        for (offset, shape), ranks in sorted(holders.items())
    ]


_Corners = tuple[tuple[int, ...], tuple[int, ...]]


def _is_grid(spec: TensorSpec, boxes: Sequence[_Corners]) -> bool:
    """True if the intervals of each dimension tile it and there are as many boxes as combinations.

    So they are where dimensions were cut one by one.
    """
    count = 1
    for dim, extent in enumerate(spec.shape):
        end = 0
        intervals = sorted({(offset[dim], shape[dim]) for offset, shape in boxes})
        for start, length in intervals:
            if start != end:
                return False
            end = start + length
        if boxes and end != extent:
            return False
        count *= len(intervals)
    return count == len(boxes)


def _are_apart(boxes: Sequence[_Corners]) -> bool:
    """True if no two boxes overlap.  Where a tensor is put together from several, they need not be a grid."""
    return not any(
        all(a < b + n and b < a + m for a, m, b, n in zip(*first, *second, strict=True))
        for number, first in enumerate(boxes)
        for second in boxes[:number]
    )


def _difference(first: _Table, other: _Table) -> str:
    """One place where two models differ."""
    for mine, theirs in zip(first.specs, other.specs, strict=False):
        if mine != theirs:
            return f"{mine[0]} {mine[1]} {list(mine[2])} is {theirs[0]} {theirs[1]} {list(theirs[2])} there"
    return f"{len(first.specs)} tensors here, {len(other.specs)} there"


def _cut_rows(box: Box, slot: TensorSlot) -> Box | None:
    """What of a box travels in this slot."""
    if not box.shape:
        return box
    start = max(box.offset[0], slot.first_row)
    end = min(box.offset[0] + box.shape[0], slot.first_row + slot.num_rows)
    if start >= end:
        return None
    return Box(offset=(start, *box.offset[1:]), shape=(end - start, *box.shape[1:]))


def _region(bucket: Bucket, slot: TensorSlot, box: Box) -> torch.Tensor:
    """The place of a box in the bucket."""
    return bucket.view(slot)[slices(box, (slot.first_row, *(0 for _ in box.shape[1:])))]


def slices(box: Box, origin: tuple[int, ...]) -> tuple[slice, ...]:
    """The box as an index into a tensor whose first element is at ``origin``."""
    return tuple(
        slice(offset - zero, offset - zero + extent)
        for offset, extent, zero in zip(box.offset, box.shape, origin[: len(box.shape)], strict=True)
    )


def _contains(outer: Box, inner: Box) -> bool:
    return len(outer.shape) == len(inner.shape) and all(
        a <= b and b + n <= a + m
        for a, m, b, n in zip(outer.offset, outer.shape, inner.offset, inner.shape, strict=True)
    )


def _is_contiguous(shape: tuple[int, ...], within: tuple[int, ...]) -> bool:
    """True if a box of this shape lies in one run of a contiguous tensor of the other shape."""
    ones = next((dim for dim, extent in enumerate(shape) if extent != 1), len(shape))
    return shape[ones + 1 :] == within[ones + 1 :]


def _split(box: Box, max_elements: int) -> Iterator[Box]:
    """Boxes of at most so many elements that make up the box, in order."""
    if math.prod(box.shape) <= max_elements:
        yield box
        return
    dim = next(dim for dim, extent in enumerate(box.shape) if extent > 1)
    step = max(max_elements * box.shape[dim] // math.prod(box.shape), 1)
    for start in range(0, box.shape[dim], step):
        offset, shape = list(box.offset), list(box.shape)
        offset[dim] += start
        shape[dim] = min(step, box.shape[dim] - start)
        yield from _split(Box(offset=tuple(offset), shape=tuple(shape)), max_elements)


def _scratch_bytes(piece: _Piece, rank: int) -> int:
    if rank == piece.source:
        return piece.source_scratch_bytes
    return piece.target_scratch_bytes if rank in piece.targets else 0


def _align(size_bytes: int) -> int:
    return -(-size_bytes // _SCRATCH_ALIGNMENT_BYTES) * _SCRATCH_ALIGNMENT_BYTES
