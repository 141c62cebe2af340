"""One trainer rank's buckets: the plan of each, the buffers that they are filled into, and the handles to these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from weightcast.comm.shared_buckets import Shared, SharedSlot, make_slots
from weightcast.comm.trainer_group import TrainerGroup
from weightcast.digest.transfers import prepare_kernels
from weightcast.protocols import BucketUse, Exporter, Lying, PlannedBucket
from weightcast.transports.plan import UpdatePlan
from weightcast.update.bucket_memory import planned_bytes
from weightcast.update.finite import check_parts_finite
from weightcast.update.packs import Packs
from weightcast.update.served_parts import MappedShares, ServedParts
from weightcast.wire.blobs import hash_of
from weightcast.wire.bucket import Bucket
from weightcast.wire.bucket_sources import BucketPart, Pack
from weightcast.wire.layout import BucketLayout
from weightcast.wire.pieces import ALIGNMENT_BYTES, decode_wanted

NUM_SLOTS = 2
_encoder = msgspec.json.Encoder()


class RankBuckets:
    """The buckets of the updates to come, as one rank has them: all that it knows without asking another.

    Attributes:
        layouts: Those of all buckets.
        num_mapped: Number of layouts, the first ones, whose tensors engines read where the trainer keeps them.
        planned: The plan of each bucket.
        boxes: One ``encode_wanted`` for each kind of engine rank for which short runs are packed.
    """

    def __init__(
        self,
        exporter: Exporter,
        layouts: Sequence[BucketLayout],
        group: TrainerGroup,
        plan: UpdatePlan,
        *,
        num_mapped: int = 0,
        verifies: bool,
        check_finite: bool,
        earlier: RankBuckets | None = None,
    ) -> None:
        """Allocates nothing yet; the arguments are those of ``BucketStream``."""
        self.layouts = layouts
        self.num_mapped = num_mapped
        self._exporter = exporter
        self._group = group
        self._plan = plan
        self._use = BucketUse(
            receivers=plan.receivers,
            scattered=plan.scattered,
            reading_hosts=plan.reading_hosts,
            leg_hosts=plan.leg_hosts,
            sums=verifies,
        )
        self._verifies = verifies
        self._checks_finite = plan.scattered and check_finite
        self._slots: list[SharedSlot] = []
        self._mapped = MappedShares(exporter.device)
        self.boxes: tuple[bytes, ...] = ()
        self._names: tuple[str, ...] = ()
        self._packs = Packs(())
        same = earlier is not None and (earlier._use, earlier.num_mapped) == (self._use, num_mapped)
        self.plan(earlier.planned if same and earlier is not None and earlier.layouts == layouts else ())

    def plan(self, planned: Sequence[PlannedBucket] = ()) -> None:
        """Plans every bucket: at first, and whenever the model was looked at again.

        ``planned`` are the same buckets, if they are known from an earlier membership.
        """
        mapped, filled = self.layouts[: self.num_mapped], self.layouts[self.num_mapped :]
        plan, whole = self._exporter.plan, self._group.world_size == 1
        self.planned = planned or [
            *plan(mapped, self._group, replace(self._use, copies=False)),
            *plan(filled, self._group, self._use),
        ]
        self._served = [ServedParts(one, checks_finite=self._checks_finite, whole=whole) for one in self.planned]

    def prepare(self, *, size_bytes: int) -> None:
        """Works out the steps of every bucket, without reading or moving weights; they have so many bytes in all."""
        device = self._exporter.device
        if self._verifies or device.type == "cuda":  # where copies are launches of the same kernel
            prepare_kernels(device, size_bytes=size_bytes)
        for number, (planned, served) in enumerate(zip(self.planned, self._served, strict=True)):
            if self._verifies:
                planned.sum_places.prepare()
            if number < self.num_mapped:
                planned.prepare(None)
                continue
            served.prepare()
            slot = self.slot(number)
            planned.prepare(slot.data if slot is not None else None)

    # -- buffers

    @property
    def planned_bytes(self) -> int:
        """Extra memory of this rank at its peak, in bytes, as planned; 0 if that is not known."""
        layouts = self.layouts[self.num_mapped :]
        planned = planned_bytes(self._exporter, layouts, world_size=self._group.world_size)
        packs = max(map(self._pack_bytes, layouts), default=0)
        return planned + packs * min(NUM_SLOTS, len(layouts)) if planned else 0

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers that this rank holds at the moment."""
        return sum(slot.data.numel() for slot in self._slots)

    def make_slots(self) -> Sequence[SharedSlot] | None:
        """This rank's buffers, allocated unless they are there; None if it has none."""
        if self._group.rank not in self._use.receivers:
            return None
        layouts = self.layouts[self.num_mapped :]
        if layouts and not self._slots:
            size = max(layout.size_bytes + self._pack_bytes(layout) for layout in layouts)
            count = min(NUM_SLOTS, len(layouts))
            self._slots = make_slots(count, max(size, 1), self._exporter.device, self._plan.sharings)
        return self._slots

    def slot(self, index: int) -> SharedSlot | None:
        """The buffer of a bucket; None if this rank has none."""
        return self._slots[(index - self.num_mapped) % len(self._slots)] if self._slots else None

    def free(self) -> None:
        """Frees the buffers; safe to call twice."""
        for served in self._served:
            served.forget()
        for slot in self._slots:
            slot.close()
        self._slots.clear()

    def forget(self) -> None:
        """Forgets the handles to this rank's own memory."""
        self._mapped.forget()

    # -- what engines get of them

    @property
    def parts(self) -> list[tuple[BucketPart, ...]]:
        """This rank's parts of each bucket."""
        return [served.parts for served in self._served]

    def use_boxes(self, boxes: Sequence[bytes]) -> None:
        """Packs short runs from now on for engine ranks that read this rank's buffers; ``boxes`` as the attribute."""
        self.boxes = tuple(boxes)
        self._names = tuple(map(hash_of, boxes))
        self._packs = Packs([decode_wanted(one) for one in boxes], read=True)
        self.free()  # other packs may need larger buffers

    def ahead(self, number: int) -> Shared | None:
        """Handles to memory of a bucket that engines read where it lies, or to its buffer, before an update.

        There are none in it if they are not known yet.  None if this rank has no part; ConfigError as ``look``.
        """
        if number < self.num_mapped:
            return self._mapped.share(self._mapped.look(self.planned[number]))
        if "weightcast" not in self._plan.sharings:
            return Shared()
        self.make_slots()
        slot = self.slot(number)
        return slot.share(opens=0) if slot is not None else None

    def encoded_ahead(self, number: int, mine: Shared | None) -> bytes:
        """Encodes what ``ahead`` returned, with this rank's parts; empty for None."""
        served = self._served[number]
        return served.encoded(mine, served.parts if self._plan.scattered else ()) if mine is not None else b""

    def look(self) -> list[Lying]:
        """This rank's parts where they lie, of each bucket that engines read there.

        ConfigError if one cannot be read there, and NotFinite.
        """
        return [self._look_at(planned) for planned in self.planned[: self.num_mapped]]

    def _look_at(self, planned: PlannedBucket) -> Lying:
        lying = self._mapped.look(planned)
        if self._checks_finite:
            specs = [(planned.layout.slots[number].spec, view) for number, _, view in lying.views()]
            cast = {spec.name: spec.torch_dtype for spec, view in specs if spec.torch_dtype != view.dtype}
            check_parts_finite([(spec.name, view) for spec, view in specs], cast)
        return lying

    def share(self, lying: Lying) -> Shared:
        """Handles to memory of this rank that was looked at."""
        return self._mapped.share(lying)

    def handle(self, index: int, bucket: Bucket | None, slot: SharedSlot | None) -> bytes:
        """Looks at a filled bucket; returns the handle by which engines read it, encoded, and empty if they do not.

        NotFinite says that values of this rank's parts are not.
        """
        plan, served = self._plan, self._served[index]
        parts = served.look(bucket) if plan.scattered and bucket is not None else ()
        packs = self._pack(bucket, slot, parts)
        if slot is None or not (plan.sharings or plan.leg_hosts):
            return b""
        if plan.leg_hosts:
            # Engine ranks elsewhere get messages out of the same buffer.
            return _encoder.encode(msgspec.structs.replace(slot.share(opens=0), legs=served.legs))
        return served.encoded(slot.share(opens=plan.opens, ring_opens=plan.ring_opens), parts, packs)

    def _pack_bytes(self, layout: BucketLayout) -> int:
        """Bytes of a bucket's packs, and of the gap before them."""
        if not self.boxes:
            return 0
        return ALIGNMENT_BYTES + self._packs.plan(layout, self.planned[layout.index].serves).packed_bytes

    def _pack(self, bucket: Bucket | None, slot: SharedSlot | None, parts: tuple[BucketPart, ...]) -> tuple[Pack, ...]:
        """Puts short runs together behind the bucket, for engine ranks that read this rank's buffer."""
        if not self.boxes or bucket is None or slot is None or not parts:
            return ()
        layout = bucket.layout
        plan = self._packs.plan(layout, self.planned[layout.index].serves)
        first = -(-layout.size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self._packs.pack(bucket, plan, slot.data[first : first + plan.packed_bytes])
        return tuple(
            Pack(wanted=name, first_byte=first + start) for name, start in zip(self._names, plan.starts, strict=True)
        )
