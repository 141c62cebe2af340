"""One trainer rank's own memory, as engine ranks of this host read it: ``direct`` with ``keep_mapped``."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import cast

import msgspec
import torch

from weightcast.comm.shared_buckets import Shared
from weightcast.comm.tensor_memory import TensorMemory
from weightcast.comm.trainer_group import TrainerGroup
from weightcast.protocols import Exporter, Lying, Mappable
from weightcast.wire.bucket_sources import MappedPart
from weightcast.wire.layout import MAX_BYTES, BucketLayout, Packing, TensorSpec, plan_buckets

log = logging.getLogger("weightcast.update.mapped")


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


_encoder = msgspec.json.Encoder()
_names = msgspec.json.Decoder(list[str]).decode
