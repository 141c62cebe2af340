"""Digests of the weights that were sent.

Trainer ranks sum what they hold (``digest/source_sums.py``), and what engine ranks have copied must add up to those
sums.  The head sums its bucket as well where that is needed: for tensors that no rank sums at their source, for engines
that cannot say what they received, and for engines that keep another dtype.  The two sums are then compared here.

A digest is taken in the dtype that travels, and in each other dtype that an engine keeps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import msgspec
import torch

from weightcast.digest.bucket_sums import NOTHING, PlanSums, Totals, sums_of_slots
from weightcast.digest.copies import copy_all
from weightcast.digest.definition import add_partial, as_unsigned, finish, model_digest
from weightcast.digest.source_sums import Mismatch
from weightcast.errors import TrainerMismatch, some
from weightcast.runtime.free_memory import Scratch
from weightcast.wire.bucket import Bucket
from weightcast.wire.layout import MAX_GAP_BYTES, BucketLayout, TensorSlot, TensorSpec

_CAST_BYTES = 16 << 20


def casts_of(specs: Iterable[TensorSpec], kept: Iterable[Sequence[TensorSpec]]) -> dict[str, set[str]]:
    """The dtypes in which engines keep a tensor, other than the one in which it travels, by its name.

    ``kept`` has the tensors of each engine, with the dtypes that it keeps.  Engines of one kind have one table, which
    is read once.
    """
    sent = {spec.name: spec.dtype for spec in specs}
    found: dict[str, set[str]] = {}
    for table in {id(table): table for table in kept}.values():
        for spec in table:
            if spec.dtype != sent.get(spec.name, spec.dtype):
                found.setdefault(spec.name, set()).add(spec.dtype)
    return found


class CastSums:
    """Sums of tensors in the other dtypes that engines keep, with what is worked out once for all updates of a plan.

    The tensors of a bucket are cast together, some MiB at a time, so that the copy stays below the memory ceiling.
    """

    def __init__(self, dtypes: Mapping[str, Collection[str]] | None = None) -> None:
        """Takes ``casts_of``."""
        self.dtypes = dtypes or {}
        self._known: dict[int, tuple[BucketLayout, list[_CastPart], PlanSums]] = {}

    def __bool__(self) -> bool:
        return bool(self.dtypes)

    def prepare(self, layouts: Iterable[BucketLayout], device: torch.device) -> None:
        """Works out the sums of buckets on a device."""
        for layout in layouts:
            self._of(layout)[1].prepare(device)

    def of(self, bucket: Bucket, scratch: Scratch) -> Iterator[tuple[Sequence[TensorSlot], torch.Tensor]]:
        """Casts and sums a bucket, part after part.

        Yields:
            The slots of a part, of which each has the dtype of a cast, and their sums: int64 ``[slots]`` on the device.
        """
        parts, sums = self._of(bucket.layout)
        for part in parts:
            memory = scratch.buffer(part.layout.size_bytes, bucket.data.device)
            goal = Bucket(part.layout, memory[: part.layout.size_bytes])
            copy_all([run.target.of(goal.data) for run in part.runs], [run.source.of(bucket.data) for run in part.runs])
            yield part.layout.slots, sums.of(goal)

    def _of(self, layout: BucketLayout) -> tuple[list[_CastPart], PlanSums]:
        known = self._known.get(layout.index)
        if known is None or known[0] is not layout:
            parts = list(_cast_parts(layout, self.dtypes))
            known = self._known[layout.index] = layout, parts, PlanSums([part.layout for part in parts])
        return known[1:]


class _TypedSpan(NamedTuple):
    """Elements of a buffer: bytes from ``start`` to ``end``, read as a dtype."""

    start: int
    end: int
    dtype: torch.dtype

    def of(self, data: torch.Tensor) -> torch.Tensor:
        return data[self.start : self.end].view(self.dtype)


class _CastRun(NamedTuple):
    """A span of a bucket that is cast in one go.  It may have gaps between tensors, whose bytes mean nothing."""

    source: _TypedSpan
    target: _TypedSpan


class _CastPart(NamedTuple):
    """Tensors of a bucket, or rows of them, that are cast together.

    Attributes:
        layout: Where the cast values lie in a buffer.
        runs: The copies that cast them.
    """

    layout: BucketLayout
    runs: list[_CastRun]


def _cast_parts(layout: BucketLayout, dtypes: Mapping[str, Collection[str]]) -> Iterator[_CastPart]:
    slots: list[TensorSlot] = []
    runs: list[_CastRun] = []
    number = 0
    for slot, spec, row, rows in _rows_to_cast(layout, dtypes):
        own, kept = slot.spec.torch_dtype, spec.torch_dtype
        size_bytes, start = rows * spec.row_bytes, slot.offset_bytes + row * slot.spec.row_bytes
        last = runs[-1] if runs else None
        gap = start - last.source.end if last is not None else 0
        joins = last is not None and (own, kept) == (last.source.dtype, last.target.dtype)
        joins = joins and 0 <= gap <= MAX_GAP_BYTES and gap % own.itemsize == 0
        end = last.target.end if last is not None else 0
        first = end + gap // own.itemsize * kept.itemsize if joins else -(-end // kept.itemsize) * kept.itemsize
        if slots and first + size_bytes > _CAST_BYTES:
            yield _CastPart(BucketLayout(index=number, slots=tuple(slots), size_bytes=end), runs)
            slots, runs, number, first, joins = [], [], number + 1, 0, False
        source = _TypedSpan(start, start + rows * slot.spec.row_bytes, own)
        target = _TypedSpan(first, first + size_bytes, kept)
        if joins:
            before = runs.pop()
            source, target = source._replace(start=before.source.start), target._replace(start=before.target.start)
        runs.append(_CastRun(source, target))
        slots.append(TensorSlot(spec=spec, offset_bytes=first, first_row=slot.first_row + row, num_rows=rows))
    if slots:
        size_bytes = runs[-1].target.end
        yield _CastPart(BucketLayout(index=number, slots=tuple(slots), size_bytes=size_bytes), runs)


def _rows_to_cast(
    layout: BucketLayout, dtypes: Mapping[str, Collection[str]]
) -> Iterator[tuple[TensorSlot, TensorSpec, int, int]]:
    """A slot, the tensor in another dtype, and the first row and number of rows of the slot that are cast together."""
    for dtype in sorted({dtype for slot in layout.slots for dtype in dtypes.get(slot.spec.name, ())}):
        for slot in layout.slots:
            if dtype in dtypes.get(slot.spec.name, ()):
                spec = msgspec.structs.replace(slot.spec, dtype=dtype)
                step = max(1, _CAST_BYTES // max(1, spec.row_bytes))
                for row in range(0, max(slot.num_rows, 1), step):
                    yield slot, spec, row, min(step, slot.num_rows - row)


class Sent:
    """Digests of the weights that were sent.

    Digests of single tensors are made when they are first asked for: in the normal case after engines have switched.
    ``cast`` has those in other dtypes that engines keep, by name and dtype.
    """

    def __init__(
        self,
        totals: Totals = NOTHING,
        *,
        cast: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        """Takes the digests, empty if no proof was asked for."""
        self._totals = totals
        self.cast = cast or {}
        self._lock = threading.Lock()
        self._known: list[tuple[Sequence[TensorSpec], str, str]] = []

    def __bool__(self) -> bool:
        return bool(self._totals)

    def changed_from(self, other: Sent) -> float | None:
        """The share of the bytes that changed since another update, as ``Totals.changed_from``."""
        return self._totals.changed_from(other._totals)

    @cached_property
    def digest(self) -> str:
        """Model digest of everything, as engines receive it."""
        return self._totals.model_digest()

    def digest_kept(self, specs: Sequence[TensorSpec]) -> str:
        """Model digest of what an engine must keep, as ``kept``; thread-safe, and worked out once for alike engines."""
        return self._once(
            "kept", specs, lambda: model_digest(self.kept(specs)) if self.cast else self._totals.digest_of(specs, ())
        )

    def digest_arrived(self, specs: Sequence[TensorSpec]) -> str:
        """Model digest of those of an engine's tensors that were sent, as ``digest_kept``."""
        return self._once(
            "sent",
            specs,
            lambda: model_digest(self.arrived(specs)) if self.cast else self._totals.digest_of_sent(specs),
        )

    def _once(self, kind: str, specs: Sequence[TensorSpec], make: Callable[[], str]) -> str:
        with self._lock:
            for same, known, digest in self._known:
                if same is specs and known == kind:
                    return digest
            digest = make()
            self._known.append((specs, kind, digest))
            return digest

    @cached_property
    def received(self) -> dict[str, str]:
        """Digest of each tensor as engines receive it, by name."""
        return self._totals.by_name()

    def arrived(self, specs: Sequence[TensorSpec]) -> dict[str, str]:
        """As ``kept``, of those that were sent."""
        return self.kept([spec for spec in specs if spec.name in self.received])

    def kept(self, specs: Sequence[TensorSpec]) -> dict[str, str]:
        """Digest of each tensor as an engine must keep it, by name, in its dtypes; not to be written to."""
        if not self.cast and self.received.keys() == {spec.name for spec in specs}:
            return self.received
        return {spec.name: self.cast.get(spec.name, {}).get(spec.dtype) or self.received[spec.name] for spec in specs}


class SentDigests:
    """Digests of one update.  Sums stay on the device until ``finish``."""

    def __init__(
        self,
        casts: CastSums | None = None,
        *,
        sums: PlanSums | None = None,
        unsummed: Collection[str] = (),
        every: bool = True,
    ) -> None:
        """Starts without any bucket; ``sums`` are those of a plan.

        ``unsummed`` names tensors that no trainer rank sums at their source.  Without ``every``, only buckets with such
        tensors or casts are summed.
        """
        self._casts = casts or CastSums()
        self._unsummed = frozenset(unsummed)
        self._every = every
        self._sums: list[tuple[BucketLayout, torch.Tensor | None]] = []
        self._cast: list[tuple[Sequence[TensorSlot], torch.Tensor]] = []
        self._plan_sums = sums or PlanSums()
        self._lying: dict[int, Bucket] = {}
        self._scratch = Scratch()

    def add(self, bucket: Bucket) -> None:
        """Digests a filled bucket, as far as that is needed."""
        self._lying[bucket.data.data_ptr()] = bucket
        needed = self._every or any(
            slot.spec.name in self._unsummed or slot.spec.name in self._casts.dtypes
            for slot in (bucket.layout.slots if self._unsummed or self._casts else ())
        )
        # On a CPU the sums on the way are of the source, which was read once to be copied and once to be summed.
        found = replace(bucket, sums=None) if needed and bucket.data.device.type == "cpu" else bucket
        sums = self._plan_sums.of(found) if needed else bucket.sums
        self._sums.append((bucket.layout, sums))
        if self._casts:
            self._cast += self._casts.of(bucket, self._scratch)

    def expect(self, layouts: Sequence[BucketLayout]) -> None:
        """Takes buckets that are whole nowhere, in the place of ``add``: trainer ranks' own sums are all there is."""
        self._sums += ((layout, None) for layout in layouts)

    def finish(
        self, sources: Sequence[torch.Tensor] = (), buckets: Mapping[int, Sequence[torch.Tensor]] | None = None
    ) -> Sent:
        """Waits for the sums and compares them; TrainerMismatch if buckets differ from what ranks hold.

        ``sources`` are the sums of what the trainer ranks hold, int64 ``[slots]`` on the CPU for each bucket, in order;
        empty if no rank has taken any.  ``buckets`` are those of each bucket's slots that other ranks took of their own
        buckets, by rank.
        """
        taken = [sums for _, sums in self._sums if sums is not None]
        values = iter(torch.cat(taken).cpu().split([len(sums) for sums in taken]) if taken else ())
        totals_of: list[tuple[BucketLayout, torch.Tensor]] = []
        names: list[str] = []
        for number, (layout, sums) in enumerate(self._sums):
            found = next(values) if sums is not None else torch.zeros(len(layout.slots), dtype=torch.int64)
            held = self._held(layout, sources[number], found) if sources else found
            if sums is not None:
                names += _differing(layout, held, found)
            totals_of.append((layout, held))
        if names:
            raise gathered_otherwise(list(dict.fromkeys(names)), "the bucket of trainer rank 0")
        for rank, found_there in (buckets or {}).items():
            for (layout, expected), sums in zip(totals_of, found_there, strict=True):
                names += _differing(layout, expected, sums)
            if names:
                raise gathered_otherwise(list(dict.fromkeys(names)), f"the bucket of trainer rank {rank}")
        sent = self._plan_sums.totals(totals_of)
        totals: dict[TensorSpec, int] = {}
        values = torch.cat([sums for _, sums in self._cast]).tolist() if self._cast else []
        slots = (slot for slots, _ in self._cast for slot in slots)
        for slot, value in zip(slots, values, strict=True):
            totals[slot.spec] = add_partial(totals.get(slot.spec, 0), as_unsigned(value))
        cast: dict[str, dict[str, str]] = {}
        for spec, total in totals.items():
            cast.setdefault(spec.name, {})[spec.dtype] = finish(total, dtype=spec.torch_dtype, shape=spec.shape)
        return Sent(sent, cast=cast)

    def lying_otherwise(self, names: Collection[str], sources: Sequence[torch.Tensor]) -> list[str]:
        """Names of tensors whose bytes in the trainer's last buffers now differ from what the ranks hold."""
        found: list[str] = []
        for number, (layout, _) in enumerate(self._sums):
            for bucket in self._lying.values():
                if bucket.layout is layout and sources and any(slot.spec.name in names for slot in layout.slots):
                    sums = sums_of_slots(replace(bucket, sums=None)).cpu()
                    found += _differing(layout, self._held(layout, sources[number], sums), sums)
        return [name for name in dict.fromkeys(found) if name in names]

    def _held(self, layout: BucketLayout, sources: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
        """The sums that a bucket must have: of slots that no rank sums at their source, those ``found`` in it."""
        if not self._unsummed:
            return sources
        unsummed = torch.tensor([slot.spec.name in self._unsummed for slot in layout.slots])
        return torch.where(unsummed, found, sources)

    def release(self) -> None:
        """Drops the references to the buffers."""
        self._lying.clear()
        self._scratch.free()


def _differing(layout: BucketLayout, held: torch.Tensor, sums: torch.Tensor) -> list[str]:
    """Names of the slots whose bytes in a bucket have other sums than the ranks hold."""
    wrong = (held != sums).nonzero()[:, 0].tolist()
    return [layout.slots[number].spec.name for number in wrong]


def replicas_differ(wrong: Sequence[Mismatch]) -> TrainerMismatch:
    """The error for sums of the trainer ranks that differ; no engine was told to switch."""
    if not wrong:
        return TrainerMismatch(
            "the trainer ranks' comparison of replicas failed, and no tensor differs; no engine was told to switch",
            names=(),
            ranks=(),
            hint="a bit flipped in the comparison, or the model of a rank has changed since connect(); update again",
        )
    shown = some([str(one) for one in wrong], 6, joint="; ")
    names = list(dict.fromkeys(mismatch.name for mismatch in wrong))
    ranks = sorted({rank for mismatch in wrong for group in mismatch.ranks for rank in group})
    if any(mismatch.gathered for mismatch in wrong):
        return TrainerMismatch(
            f"the gather of adapters among trainer ranks is at fault: {shown}; no engine was told to switch",
            names=names,
            ranks=ranks,
            hint="a bit flipped between two trainer ranks; update again",
        )
    return TrainerMismatch(
        f"replicas on the trainer have diverged: {shown}; no engine was told to switch",
        names=names,
        ranks=ranks,
        hint="make the ranks' weights equal again (broadcast them from one rank, or load a checkpoint), then update",
    )


def gathered_otherwise(names: Sequence[str], where: str) -> TrainerMismatch:
    """The error for bytes that changed on the trainer's side; no engine was told to switch.

    ``where`` is the place with the changed bytes, as the subject of a sentence.
    """
    return TrainerMismatch(
        f"{where} has other bytes than the trainer ranks hold, in {some(names, 6)}: the gather among trainer ranks, "
        "or the buffer that it fills, is at fault; no engine was told to switch",
        names=names,
        ranks=(),
        hint="a bit flipped between two trainer ranks or in the sender's buffer; update again, and look at the host's "
        "memory and links if it comes back",
    )
