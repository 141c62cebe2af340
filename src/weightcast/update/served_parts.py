"""The parts that engines get from this trainer rank: of its buckets, and of the memory where it keeps its weights."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import msgspec
import torch

from weightcast.comm.shared_buckets import Shared
from weightcast.comm.tensor_memory import TensorMemory
from weightcast.comm.trainer_group import TrainerGroup
from weightcast.exporters.held_parts import region
from weightcast.protocols import Exporter, Lying, Mappable, Scattering
from weightcast.update.finite import FiniteCheck, check_parts_finite
from weightcast.wire.box import Box
from weightcast.wire.bucket import Bucket
from weightcast.wire.bucket_sources import BucketPart, MappedPart
from weightcast.wire.layout import MAX_BYTES, BucketLayout, Packing, TensorSpec, plan_buckets

log = logging.getLogger("weightcast.update.mapped")
_encoder = msgspec.json.Encoder()
_names = msgspec.json.Decoder(list[str]).decode


@dataclass(frozen=True, slots=True)
class _Known:
    """Views of one bucket's parts in the buffer that it was filled into."""

    served: Sequence[tuple[int, Box]]
    address: int
    views: Sequence[tuple[str, torch.Tensor]]


class ServedParts:
    """The parts of one rank, in update after update.  They are described once, as long as they stay alike."""

    def __init__(self, exporter: Exporter, group: TrainerGroup, *, checks_finite: bool) -> None:
        """Looks at nothing yet; ``checks_finite`` is True if values must be finite."""
        self._exporter = exporter
        self._group = group
        self._checks_finite = checks_finite
        self._parts: dict[int, tuple[Sequence[tuple[int, Box]], tuple[BucketPart, ...]]] = {}
        self._legs: dict[int, tuple[object, dict[str, tuple[BucketPart, ...]]]] = {}
        self._known: dict[int, _Known] = {}
        self._wholes = FiniteCheck()

    def of(self, layout: BucketLayout) -> Sequence[tuple[int, Box]]:
        """Number of the slot and box of each part."""
        return cast(Scattering, self._exporter).serves(layout, self._group)

    def parts_of(self, layout: BucketLayout) -> tuple[BucketPart, ...]:
        """The parts in the form of the wire."""
        served, known = self.of(layout), self._parts.get(layout.index)
        if known is None or known[0] is not served:
            known = self._parts[layout.index] = served, _as_parts(served)
        return known[1]

    def legs(self, layout: BucketLayout) -> Mapping[str, Sequence[tuple[int, Box]]]:
        """As ``of``, for the engine ranks that read memory on each host."""
        return cast(Scattering, self._exporter).serves_to(layout, self._group)

    def legs_of(self, layout: BucketLayout) -> dict[str, tuple[BucketPart, ...]]:
        """The same in the form of the wire."""
        served, known = self.legs(layout), self._legs.get(layout.index)
        if known is None or known[0] is not served:
            known = self._legs[layout.index] = served, {host: _as_parts(own) for host, own in served.items()}
        return known[1]

    def prepare(self, layout: BucketLayout) -> None:
        """Works out what ``look`` needs before there is a buffer."""
        if self._checks_finite and self._group.world_size == 1:
            self._wholes.prepare(layout)

    def look(self, bucket: Bucket) -> tuple[BucketPart, ...]:
        """The parts of a filled bucket; raises ``NotFinite`` if they must be finite and are not."""
        if self._checks_finite and self._group.world_size == 1:  # then the bucket is whole
            self._wholes.check(bucket)
        elif self._checks_finite:
            check_parts_finite(self._views(bucket))
        return self.parts_of(bucket.layout)

    def forget(self) -> None:
        """Lets go of the buffers."""
        self._known.clear()

    def _views(self, bucket: Bucket) -> Sequence[tuple[str, torch.Tensor]]:
        index, served, address = bucket.layout.index, self.of(bucket.layout), bucket.data.data_ptr()
        known = self._known.get(index)
        if known is None or known.served is not served or known.address != address:
            slots = bucket.layout.slots
            views = [(slots[number].spec.name, region(bucket, slots[number], box)) for number, box in served]
            known = self._known[index] = _Known(served, address, views)
        return known.views


def _as_parts(served: Sequence[tuple[int, Box]]) -> tuple[BucketPart, ...]:
    return tuple(BucketPart(slot=number, offset=box.offset, shape=box.shape) for number, box in served)


class MappedShares:
    """Handles to this rank's memory.  They are made once, and again when a tensor has moved."""

    def __init__(self, exporter: Exporter, group: TrainerGroup) -> None:
        self._exporter = exporter
        self._group = group
        self._memory = TensorMemory()
        self._stamp: object = None
        self._shared = Shared()

    def look(self, layout: BucketLayout) -> Lying:
        """The parts where they lie now; raises as ``Mappable.own_memory``.

        On a GPU it waits for the work on the current stream, which may write them.
        """
        lying = cast(Mappable, self._exporter).own_memory(layout, self._group)
        if self._exporter.device.type == "cuda":
            torch.cuda.current_stream(self._exporter.device).synchronize()
        return lying

    def share(self, lying: Lying) -> Shared:
        """Handles to the parts, and the places of the parts; raises ``ConfigError`` if memory cannot be shared."""
        if self._stamp is not None and self._stamp == lying.stamp and self._memory.unchanged():
            return self._shared
        self._stamp = None
        views = lying.views()
        places = self._memory.locate([tensor for _, _, tensor in views])
        parts = tuple(
            MappedPart(
                slot=number,
                offset=box.offset,
                shape=box.shape,
                memory=memory,
                first_byte=first_byte,
                stride=tensor.stride(),
            )
            for (number, box, tensor), (memory, first_byte) in zip(views, places, strict=True)
        )
        self._shared = Shared(memories=tuple(self._memory.handles), mapped=parts)
        self._stamp = lying.stamp
        return self._shared

    def forget(self) -> None:
        """Drops all handles; engines must have unmapped the memory before it is freed."""
        self._memory.forget()
        self._stamp = None
        self._shared = Shared()


def layouts_in_place(
    exporter: Exporter, group: TrainerGroup, specs: Sequence[TensorSpec], packing: Packing, *, bucket_bytes: int
) -> tuple[list[BucketLayout], int]:
    """Layouts of an update whose tensors engines read where they lie, and the number of these layouts.

    What engines read is one bucket without a buffer.  Tensors that a rank casts or computes when they are sent go by
    buckets in the same session.  Collective: every trainer rank gets the same.
    """
    mine = _encoder.encode(sorted(cast(Mappable, exporter).unmappable(group)))
    gathered = group.gather_bytes(mine)
    told = None if gathered is None else _encoder.encode(sorted({name for one in gathered for name in _names(one)}))
    others = frozenset(_names(group.broadcast_bytes(told)))
    if others and group.is_head:
        shown = ", ".join(sorted(others)[:4]) + (" and more" if len(others) > 4 else "")
        log.info("%d of %d tensors cannot be read where they lie and go by bucket: %s", len(others), len(specs), shown)
    in_place = [spec for spec in specs if spec.name not in others]
    rest = [spec for spec in specs if spec.name in others]
    layouts = plan_buckets(in_place, bucket_bytes=MAX_BYTES, packing=packing) if in_place else []
    buckets = plan_buckets(rest, bucket_bytes=bucket_bytes, packing=packing) if rest else []
    moved = [msgspec.structs.replace(one, index=len(layouts) + one.index) for one in buckets]
    return [*layouts, *moved], len(layouts)
