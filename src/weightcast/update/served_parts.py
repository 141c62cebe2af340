"""The parts that engines get from this trainer rank: of its buckets, and of the memory where it keeps its weights."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cached_property

import msgspec
import torch

from weightcast.comm.shared_buckets import Shared
from weightcast.comm.tensor_memory import TensorMemory
from weightcast.comm.trainer_group import TrainerGroup
from weightcast.exporters.held_parts import region
from weightcast.protocols import Exporter, Lying, PlannedBucket
from weightcast.transports.plan import UpdatePlan
from weightcast.update.finite import FiniteCheck, check_parts_finite
from weightcast.wire.box import Box
from weightcast.wire.bucket import Bucket
from weightcast.wire.bucket_sources import BucketPart, MappedPart, Pack
from weightcast.wire.layout import MAX_BYTES, NAMES, BucketLayout, TensorSpec, plan_buckets

log = logging.getLogger("weightcast.update.mapped")
_encoder = msgspec.json.Encoder()
_names = msgspec.json.Decoder(list[str]).decode


class ServedParts:
    """This rank's parts of one bucket, in update after update.  They are described once."""

    def __init__(self, planned: PlannedBucket, *, checks_finite: bool, whole: bool) -> None:
        """Looks at nothing yet.

        ``checks_finite`` is True if values must be finite, and ``whole`` if this rank has all of the bucket.
        """
        self._planned = planned
        self._checks_parts = checks_finite and not whole
        self._wholes = FiniteCheck() if checks_finite and whole else None
        self._views: tuple[int, Sequence[tuple[str, torch.Tensor]]] = 0, ()  # in the buffer at this address
        self._sent: tuple[Shared, tuple[BucketPart, ...], tuple[Pack, ...], bytes] | None = None

    @cached_property
    def parts(self) -> tuple[BucketPart, ...]:
        """The parts in the form of the wire."""
        return _as_parts(self._planned.serves)

    @cached_property
    def legs(self) -> dict[str, tuple[BucketPart, ...]]:
        """The same for the engine ranks that read memory on each host."""
        return {host: _as_parts(own) for host, own in self._planned.serves_to.items()}

    def prepare(self) -> None:
        """Works out what ``look`` needs before there is a buffer."""
        if self._wholes is not None:
            self._wholes.prepare(self._planned.layout)

    def look(self, bucket: Bucket) -> tuple[BucketPart, ...]:
        """The parts of the filled bucket; raises ``NotFinite`` if they must be finite and are not."""
        if self._wholes is not None:
            self._wholes.check(bucket)
        elif self._checks_parts:
            check_parts_finite(self._views_in(bucket))
        return self.parts

    def encoded(self, shared: Shared, parts: tuple[BucketPart, ...], packs: tuple[Pack, ...] = ()) -> bytes:
        """The handle of the bucket and the parts in it; the same object as long as they stay the same."""
        if self._sent is None or self._sent[:3] != (shared, parts, packs):
            data = _encoder.encode(msgspec.structs.replace(shared, parts=parts, packs=packs))
            self._sent = shared, parts, packs, data
        return self._sent[3]

    def forget(self) -> None:
        """Lets go of the buffers."""
        self._views = 0, ()

    def _views_in(self, bucket: Bucket) -> Sequence[tuple[str, torch.Tensor]]:
        address = bucket.data.data_ptr()
        if self._views[0] != address:
            slots = bucket.layout.slots
            views = [(slots[part].spec.name, region(bucket, slots[part], box)) for part, box in self._planned.serves]
            self._views = address, views
        return self._views[1]


def _as_parts(served: Sequence[tuple[int, Box]]) -> tuple[BucketPart, ...]:
    return tuple(BucketPart(slot=number, offset=box.offset, shape=box.shape) for number, box in served)


class MappedShares:
    """Handles to this rank's memory.  They are made once, and again when a tensor has moved."""

    def __init__(self, device: torch.device) -> None:
        """Makes none yet; ``device`` is that of the weights."""
        self._device = device
        self._memory = TensorMemory()
        self._stamp: object = None
        self._shared = Shared()

    def look(self, planned: PlannedBucket) -> Lying:
        """The parts where they lie now; raises as ``PlannedBucket.own_memory``.

        On a GPU it waits for the work on the current stream, which may write them.
        """
        lying = planned.own_memory()
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
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
                dtype=NAMES[tensor.dtype],
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
    exporter: Exporter, group: TrainerGroup, specs: Sequence[TensorSpec], plan: UpdatePlan
) -> tuple[list[BucketLayout], int]:
    """Layouts of an update whose tensors engines read where they lie, and the number of these layouts.

    ``specs`` has them as they travel.  What engines read is one bucket without a buffer.  Tensors that a rank casts or
    computes when they are sent go by buckets in the same session.  Collective: every trainer rank gets the same.
    """
    packing = plan.packing
    mine = _encoder.encode(sorted(exporter.unmappable(group, specs, casts=plan.casts_in_place)))
    gathered = group.gather_bytes(mine)
    told = None if gathered is None else _encoder.encode(sorted({name for one in gathered for name in _names(one)}))
    others = frozenset(_names(group.broadcast_bytes(told)))
    if others and group.is_head:
        shown = ", ".join(sorted(others)[:4]) + (" and more" if len(others) > 4 else "")
        log.info("%d of %d tensors cannot be read where they lie and go by bucket: %s", len(others), len(specs), shown)
    in_place = [spec for spec in specs if spec.name not in others]
    rest = [spec for spec in specs if spec.name in others]
    layouts = plan_buckets(in_place, bucket_bytes=MAX_BYTES, packing=packing) if in_place else []
    buckets = plan_buckets(rest, bucket_bytes=plan.bucket_bytes, packing=packing) if rest else []
    moved = [msgspec.structs.replace(one, index=len(layouts) + one.index) for one in buckets]
    return [*layouts, *moved], len(layouts)
