"""SGLang's and LMDeploy's form of a bucket: tensors one after another, cut by a table.

The table is JSON for a bucket that comes in a group, and a pickle for one in shared memory.
"""

from __future__ import annotations

from typing import Any

from weightcast.comm.pickle_writer import integer, integers, listing, name, namespace, text
from weightcast.wire.layout import BucketLayout
from weightcast.wire.messages import Join

FLATTENED = "flattened_bucket"  # value of ``load_format``


def group_body(join: Join) -> dict[str, Any]:
    """Body of ``/init_weights_update_group``."""
    return {
        "master_address": join.host,
        "master_port": join.port,
        "rank_offset": join.first_rank,
        "world_size": join.world_size,
        "group_name": join.group,
        "backend": join.backend,
    }


def bucket_body(layout: BucketLayout, group: str) -> dict[str, Any]:
    """Fields of ``/update_weights_from_distributed``.  The engine cuts the bucket end to end in this order."""
    return {
        "names": [slot.spec.name for slot in layout.slots],
        "dtypes": [slot.spec.dtype for slot in layout.slots],
        "shapes": [slot.spec.shape for slot in layout.slots],
        "group_name": group,
        "load_format": FLATTENED,
    }


def metadata(layout: BucketLayout, *, first_byte: int = 0, unit_bytes: int = 1) -> bytes:
    """Opcodes of the pickled table: places and sizes of whole tensors, in units of ``unit_bytes``."""
    return listing(
        [
            namespace(
                [
                    ("name", text(slot.spec.name)),
                    ("shape", integers(slot.spec.shape)),
                    ("dtype", name("torch", slot.spec.dtype)),
                    ("start_idx", integer((first_byte + slot.offset_bytes) // unit_bytes)),
                    ("end_idx", integer((first_byte + slot.end_bytes) // unit_bytes)),
                    ("numel", integer(slot.size_bytes // unit_bytes)),
                ]
            )
            for slot in layout.slots
        ]
    )
