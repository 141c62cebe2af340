"""From buckets to parameters: replay the model's own copies, count what arrived, read back what is kept.

The model's ``load_weights`` is watched once (``recorder``); from then on an update replays its copies into
the waiting set (``staging``).  Sources that the model computes with stay with ``load_weights``: they go into the live
parameters directly, and their place cannot be read back.

It knows names, boxes and storage; sessions, groups and versions are the agent's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from weightcast.errors import ConfigError, Refused
from weightcast.receiver.coverage import uncovered
from weightcast.receiver.recorder import LoadWeights, record_routes
from weightcast.receiver.staging import Place, Staging
from weightcast.wire.bucket import Bucket
from weightcast.wire.bucket_sums import piece_of
from weightcast.wire.copies import Flat, bits, copy_all, flat_bytes
from weightcast.wire.digest import Box, Piece, RepeatedSums, as_unsigned
from weightcast.wire.layout import BucketLayout, TensorSlot, TensorSpec, dtype_name
from weightcast.wire.messages import Held
from weightcast.wire.routes import Route
from weightcast.wire.transfers import RepeatedTransfers, Transfer, can_transfer, transfers_on

Finisher = Callable[[], object]


def residents_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by name; those that are one and the same memory once."""
    transient = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in module._non_persistent_buffers_set  # pyright: ignore[reportPrivateUsage]  torch has no other way
    }
    found: dict[str, torch.Tensor] = dict(model.named_parameters())
    found.update((name, buffer) for name, buffer in model.named_buffers() if name not in transient)
    places: dict[tuple[object, ...], str] = {}
    return {name: tensor for name, tensor in found.items() if places.setdefault(_place(tensor, name), name) == name}


def _place(tensor: torch.Tensor, name: str) -> tuple[object, ...]:
    if not tensor.numel():
        return (name,)
    return tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


@dataclass(frozen=True, slots=True)
class _Copy:
    """A copy out of a bucket, in elements: from so far into the bucket to so far behind a parameter's first element."""

    parameter: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    source_stride: tuple[int, ...]
    source_offset: int


_Table = list[tuple[TensorSlot, list[_Copy]]]  # a layout's slots, and the copies out of each


@dataclass(frozen=True, slots=True)
class _Known:
    """What a layout asks for.  Numbers only: a view would keep memory alive that an engine gives back when it sleeps.

    Attributes:
        layout: Which.
        table: Its slots, and the copies out of each.
        unbroken: The copies that take a whole slot to adjacent elements, by the slot's first byte in the bucket.
        parameters: Whose copies they are, each once.
        rows: If every slot is a whole tensor that is copied or ignored, the rows of each by name; else empty.
    """

    layout: BucketLayout
    table: _Table
    unbroken: Mapping[int, tuple[TensorSlot, _Copy]]
    parameters: tuple[str, ...]
    rows: Mapping[str, int]


_MAX_PLACES = 16


class Loader:
    """Loads the buckets of one update into one rank's model."""

    def __init__(
        self,
        model: nn.Module,
        *,
        load_weights: LoadWeights,
        expected: Sequence[TensorSpec],
        finishers: Sequence[Finisher] = (),
        residents: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Watch ``load_weights`` once; nothing is changed.

        Args:
            model: This rank's model.
            load_weights: Takes ``(name, tensor)`` pairs of whole tensors.
            expected: Every tensor of a full update, whole.
            finishers: Run once after new weights are live.
            residents: What ``load_weights`` writes, by name, where that is not what the model computes with (an engine
                that packs its weights); the finishers bring it there.  None takes the model's parameters and buffers.

        Raises:
            ConfigError: The loader writes a parameter twice, or puts another in its place.
        """
        self.expected = {spec.name: spec for spec in expected}
        self.residents = dict(residents) if residents is not None else residents_of(model)
        self._load_weights = load_weights
        self._finishers = tuple(finishers)
        recording = record_routes(load_weights, list(expected), self.residents)
        if residents is None:
            _check_in_place(self.residents, residents_of(model))
        self.routes: Mapping[str, list[Route]] = recording.routes
        self.computed = frozenset(recording.computed)
        self.why_computed: Mapping[str, str] = recording.why
        routes = [route for found in recording.routes.values() for route in found]
        unwritten = [
            name for name in uncovered(routes, self.residents, recording.filled) if name not in recording.written
        ]
        self.not_updated = () if recording.opaque else tuple(unwritten)
        self._routed = {route.parameter for route in routes}
        self._shared = _sharing(model)
        self.staging = Staging(self.residents, "none")
        self._repeated = RepeatedSums()
        self._arrived: dict[str, int] = {}
        self._whole: dict[str, torch.Tensor] = {}
        self._known: dict[int, _Known] = {}
        self._abandoned = False
        self._transfers = RepeatedTransfers()
        self._places: dict[object, int] = {}  # where the parameters of a bucket lie; a number is a better key
        self._rests: dict[object, list[tuple[TensorSlot, _Copy]]] = {}  # what of a place is no transfer
        # Of the tables that were announced last; the same ones in every update.
        self._fits: Sequence[TensorSpec] | None = None
        self._all_rows: tuple[Sequence[TensorSpec], dict[str, int]] | None = None
        self._kept: tuple[object, list[TensorSpec]] | None = None
        self.touched = False

    @property
    def can_stage(self) -> bool:
        """False if some weights only the model's own code can place (it writes into live parameters), or if
        parameters share memory, which an exchange of one would tear apart."""
        return not self.computed and not self._shared

    @property
    def size_bytes(self) -> int:
        """Bytes of one set of parameters and buffers on this rank."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.residents.values())

    def stage(self, place: Place, *, keep_storage: bool = False) -> None:
        """Choose where a new version waits; ``keep_storage``: see ``Staging``."""
        if place != "none" and not self.can_stage:
            why = next((f"{name}: {words}" for name, words in self.why_computed.items()), self._shared)
            raise ConfigError(f"this model's weights cannot be staged: {why}", hint="use staging none")
        # What no route writes has no second version: it stays where it is.
        written = {name: tensor for name, tensor in self.residents.items() if name in self._routed}
        self.staging = Staging(written if place != "none" else self.residents, place, keep_storage=keep_storage)

    def check(self, specs: Sequence[TensorSpec]) -> None:
        """Do these tensors make a full update of this model?

        Raises:
            Refused: Something is missing, unknown, of another shape or of another family of dtypes; all are named.
        """
        if specs is self._fits:
            return
        offered = {spec.name: spec for spec in specs}
        problems: list[str] = []
        if len(offered) != len(specs):
            problems.append("a name is announced twice")
        missing = [name for name in self.expected if name not in offered]
        unknown = [name for name in offered if name not in self.expected]
        if missing:
            problems.append(f"missing {_some(missing)}")
        if unknown:
            problems.append(f"unknown to this model: {_some(unknown)}")
        for name, spec in offered.items():
            want = self.expected.get(name)
            if want is None:
                continue
            if want.shape != spec.shape:
                problems.append(f"{name} has shape {spec.shape}, the model's has {want.shape}")
            elif want.torch_dtype.is_floating_point != spec.torch_dtype.is_floating_point:
                problems.append(f"{name} is {spec.dtype}, the model's is {want.dtype}")
        if problems:
            shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
            raise Refused(f"these weights do not fit the model: {shown}", hint="is it a checkpoint of this model?")
        self._fits = specs

    def begin(self) -> None:
        """Forget what an earlier update left."""
        if self._abandoned:
            self.staging.allocate()
            self._abandoned = False
        self._arrived.clear()
        self._whole.clear()
        if len(self._places) > _MAX_PLACES * len(self._known):  # an engine that moves its weights again and again
            self._transfers = RepeatedTransfers()
            self._places.clear()
            self._rests.clear()
        self.touched = False

    def places(self, layout: BucketLayout, runs: Sequence[int]) -> dict[str, torch.Tensor]:
        """Where slots of the bucket that comes next belong, for those that can come straight there: ``Bucket.lent``.

        With a model on the host and a waiting set: slots that are a run of their own, kept whole, in their order and
        dtype.  Whoever writes to a place and gives up half way calls ``abandon``.

        Args:
            layout: Of the bucket.
            runs: In runs of so many bytes it comes.

        Raises:
            Refused: As ``load``.
        """
        places: dict[str, torch.Tensor] = {}
        for slot, copy in self._straight(self._know(layout), runs):
            self._check_turn(slot)  # before anything is overwritten
            places[slot.spec.name] = flat_bytes(self._target(copy))
        return places

    def may_place(self, index: int, runs: Sequence[int]) -> bool:
        """True if ``places`` for the bucket with this number, not announced yet, will probably not be empty."""
        known = self._known.get(index)
        if known is None:
            return self.staging.staged and len(runs) > 1
        return any(True for _ in self._straight(known, runs))

    def abandon(self) -> None:
        """What writes to ``places`` was given up and may go on for a while: this update is over, and the next one
        gets another waiting set."""
        self.staging.abandon()
        self._abandoned = True

    def load(self, bucket: Bucket) -> torch.Tensor | None:
        """Copy the bucket's tensors where they belong.  Enqueued on the current stream of a GPU, done on a CPU.

        Args:
            bucket: With slots lent if they have come straight to their ``places``.

        Returns:
            ``Bucket.sums`` of what was read, where they were taken on the way.

        Raises:
            Refused: Rows arrive out of order or twice, a tensor was not announced, or the update was abandoned.
        """
        known = self._know(bucket.layout)
        table = known.table
        self._take_over(bucket, known)
        self.touched = self.touched or (not self.staging.staged and any(copies for _, copies in table))
        if transfers_on(bucket.data.device):
            return self._copy_and_sum(bucket, known)
        lent = bucket.lent
        self._copy(bucket, [(slot, copy) for slot, copies in table if slot.spec.name not in lent for copy in copies])
        return None

    def _straight(self, known: _Known, runs: Sequence[int]) -> Iterator[tuple[TensorSlot, _Copy]]:
        """The slots that can come straight to where they belong."""
        start = 0
        for size_bytes in runs if self.staging.staged else ():
            slot, copy = known.unbroken.get(start, (None, None))
            start += size_bytes
            if slot is None or copy is None or slot.end_bytes != start:
                continue
            # Not the waiting one: that of a model on a GPU may be in host memory, where no bucket comes.
            live = self.staging.live(copy.parameter)
            if live.device.type == "cpu" and live.dtype == slot.spec.torch_dtype:
                yield slot, copy

    def _take_over(self, bucket: Bucket, known: _Known) -> None:
        """Everything but the copies."""
        if known.rows and not self._abandoned and self._arrived.keys().isdisjoint(known.rows):
            self._arrived.update(known.rows)  # at once: there may be thousands
            return
        for slot, _ in known.table:
            self._check_turn(slot)
            self._arrived[slot.spec.name] = slot.first_row + slot.num_rows
            if slot.spec.name in self.computed:
                self._hand_over(slot, bucket.view(slot))

    def _check_turn(self, slot: TensorSlot) -> None:
        if self._abandoned:
            raise Refused("a bucket of this update was given up half way", hint="open another session")
        arrived = self._arrived.get(slot.spec.name)
        if slot.first_row != (arrived or 0) or (slot.whole and arrived is not None):
            raise Refused(f"{slot.spec.name}: rows from {slot.first_row} arrived after {arrived or 0} rows")

    def _copy(self, bucket: Bucket, copies: Sequence[tuple[TensorSlot, _Copy]]) -> None:
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        flat = Flat(bucket.data)
        waiting: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # by parameter, as it is and as bits
        for slot, copy in copies:
            if copy.parameter not in waiting:
                whole = self.staging.target(copy.parameter).detach()
                waiting[copy.parameter] = whole, bits(whole)
            target, as_bits = waiting[copy.parameter]
            dtype = slot.spec.torch_dtype
            same = target.dtype == dtype
            target = as_bits if same else target
            targets.append(target.as_strided(copy.shape, copy.stride, target.storage_offset() + copy.offset))
            sources.append(flat.region(dtype, copy.shape, copy.source_stride, copy.source_offset, as_bits=same))
        copy_all(targets, sources)

    def _copy_and_sum(self, bucket: Bucket, known: _Known) -> torch.Tensor:
        """One launch for all but what has to be cast or comes from another device."""
        targets = list(map(self.staging.target, known.parameters))
        now = (
            bucket.layout.index,
            tuple(map(torch.Tensor.data_ptr, targets)),
            tuple(target.dtype for target in targets),
        )
        place = bucket.data.data_ptr(), self._places.setdefault(now, len(self._places))

        def transfers() -> list[Transfer]:
            found, rest = self._transfers_of(bucket, known.table)
            self._rests[place] = rest
            return found

        sums = self._transfers.run(place, bucket.layout, bucket.data.device, len(known.table), transfers)
        self._copy(bucket, self._rests[place])
        return sums

    def _transfers_of(self, bucket: Bucket, table: _Table) -> tuple[list[Transfer], list[tuple[TensorSlot, _Copy]]]:
        """What a bucket asks for, and those of its copies that cannot be made so.

        A slot that one copy takes whole is summed on its way; of the others everything is summed, kept here or not.
        """
        flat = Flat(bucket.data)
        transfers: list[Transfer] = []
        rest: list[tuple[TensorSlot, _Copy]] = []
        for number, (slot, copies) in enumerate(table):
            whole = Transfer(piece=piece_of(slot, bucket.view(slot), slot.first_row), total=number)
            if len(copies) == 1 and copies[0].shape == slot.shape:
                both = replace(whole, target=self._target(copies[0]))
                if can_transfer(both):
                    transfers.append(both)
                    continue
            transfers.append(whole)
            for copy in copies:
                part = flat.region(
                    slot.spec.torch_dtype, copy.shape, copy.source_stride, copy.source_offset, as_bits=False
                )
                transfer = Transfer(piece=Piece(tensor=part, full_shape=copy.shape), target=self._target(copy))
                if can_transfer(transfer):
                    transfers.append(transfer)
                else:
                    rest.append((slot, copy))
        return transfers, rest

    def _target(self, copy: _Copy) -> torch.Tensor:
        whole = self.staging.target(copy.parameter).detach()
        return whole.as_strided(copy.shape, copy.stride, whole.storage_offset() + copy.offset)

    def missing(self, specs: Sequence[TensorSpec]) -> list[str]:
        """Announced tensors that have not arrived, or not all of them."""
        if self._all_rows is None or self._all_rows[0] is not specs:
            self._all_rows = specs, {spec.name: spec.num_rows for spec in specs}
        rows = self._all_rows[1]
        return [] if self._arrived == rows else [name for name in rows if self._arrived.get(name, -1) != rows[name]]

    def commit(self) -> None:
        """Make the new version live and run the finishers, each once."""
        self.staging.flip()
        self.finish()

    def finish(self) -> None:
        """Run the finishers: captured graphs, packed weights, whatever depends on parameters."""
        for finisher in self._finishers:
            finisher()

    def held(self) -> list[Held]:
        """Digest what is live, in terms of the source tensors."""
        routes = [route for found in self.routes.values() for route in found]
        if not routes:
            return []
        live = {name: self.staging.live(name) for name in self._routed}

        def pieces() -> list[Piece]:
            return [
                Piece(
                    tensor=_region(live[route.parameter], route),
                    full_shape=self.expected[route.source].shape,
                    box=Box(offset=route.box_offset, shape=route.box_shape),
                )
                for route in routes
            ]

        # A parameter may get other memory at any time, and has two in turn where a second set is kept.
        where = tuple(tensor.data_ptr() for tensor in live.values())
        how = tuple((tensor.dtype, tensor.stride()) for tensor in live.values())
        sums = self._repeated.sums(where, how, next(iter(live.values())).device, pieces)
        if self._kept is None or self._kept[0] != how:  # while the device sums
            dtypes = {name: dtype_name(tensor.dtype) for name, tensor in live.items()}
            specs = [
                TensorSpec(name=route.source, dtype=dtypes[route.parameter], shape=self.expected[route.source].shape)
                for route in routes
            ]
            self._kept = how, specs
        return [
            Held(spec=spec, box_offset=route.box_offset, box_shape=route.box_shape, total=as_unsigned(total))
            for route, spec, total in zip(routes, self._kept[1], sums.tolist(), strict=True)
        ]

    def _know(self, layout: BucketLayout) -> _Known:
        """What a layout asks for, worked out when it first comes."""
        known = self._known.get(layout.index)
        if known is None or known.layout != layout:
            table = [
                (slot, [copy for route in self.routes.get(slot.spec.name, ()) if (copy := _copy_of(route, slot))])
                for slot in layout.slots
            ]
            unbroken = {slot.offset_bytes: (slot, copies[0]) for slot, copies in table if _is_unbroken(slot, copies)}
            rows = {slot.spec.name: slot.num_rows for slot in layout.slots if slot.whole}
            if len(rows) != len(table) or not self.computed.isdisjoint(rows):
                rows = {}
            parameters = tuple(dict.fromkeys(copy.parameter for _, copies in table for copy in copies))
            known = self._known[layout.index] = _Known(layout, table, unbroken, parameters, rows)
        return known

    def _hand_over(self, slot: TensorSlot, view: torch.Tensor) -> None:
        """Give a whole tensor to the model's own loader, put together first if it came in rows."""
        name = slot.spec.name
        if not slot.whole:
            whole = self._whole.setdefault(name, torch.empty(slot.spec.shape, dtype=view.dtype, device=view.device))
            whole.narrow(0, slot.first_row, slot.num_rows).copy_(view)
            if self._arrived[name] < slot.spec.num_rows:
                return
            view = self._whole.pop(name)
        self.touched = True
        with torch.no_grad():
            self._load_weights([(name, view)])


def _check_in_place(before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in before.items():
        if after.get(name) is not tensor:
            raise ConfigError(
                f"load_weights puts another parameter in the place of {name} instead of writing into it",
                hint="use param.data.copy_(weight), so that what holds the parameter sees the new values",
            )


def _sharing(model: nn.Module) -> str:
    """Which two of a model's tensors share memory, in words; empty if none do."""
    owner: dict[int, str] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.numel():
            first = owner.setdefault(tensor.untyped_storage().data_ptr(), name)
            if first != name:
                return f"{first} and {name} share memory"
    return ""


def _region(tensor: torch.Tensor, route: Route) -> torch.Tensor:
    region = route.region
    return tensor.detach().as_strided(region.shape, region.stride, tensor.storage_offset() + region.offset)


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    stride: list[int] = []
    step = 1
    for size in reversed(shape):
        stride.append(step)
        step *= size
    return tuple(reversed(stride))


def _copy_of(route: Route, slot: TensorSlot) -> _Copy | None:
    """The part of a route that lies in the slot's rows; None if none does."""
    region, stride = route.region, _contiguous(slot.shape)
    start = slot.offset_bytes // slot.spec.torch_dtype.itemsize
    if not slot.spec.shape:
        return _Copy(route.parameter, region.shape, region.stride, region.offset, stride, start)
    first = max(route.box_offset[0], slot.first_row)
    last = min(route.box_offset[0] + route.box_shape[0], slot.first_row + slot.num_rows)
    if last <= first:
        return None
    begin = (first - slot.first_row, *route.box_offset[1:])
    return _Copy(
        parameter=route.parameter,
        shape=(last - first, *route.box_shape[1:]),
        stride=region.stride,
        offset=region.offset + (first - route.box_offset[0]) * region.stride[0],
        source_stride=stride,
        source_offset=start + sum(at * step for at, step in zip(begin, stride, strict=True)),
    )


def _is_unbroken(slot: TensorSlot, copies: Sequence[_Copy]) -> bool:
    """True if one copy, the only one, takes all of the slot to adjacent elements in the slot's order."""
    if len(copies) != 1 or not slot.size_bytes:
        return False
    copy = copies[0]
    return copy.shape == slot.shape and copy.stride == _contiguous(copy.shape)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
