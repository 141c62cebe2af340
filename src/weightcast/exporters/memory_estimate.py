"""Estimates the memory that an update takes on a trainer rank beside the model, before anything is allocated.

``connect``, ``weightcast plan`` and ``weightcast doctor`` all take their number from here.
"""

from __future__ import annotations

from collections.abc import Sequence

from weightcast.errors import ConfigError
from weightcast.exporters.gather_plan import MIN_SCRATCH_BYTES
from weightcast.exporters.lora import CHUNK_ELEMENTS
from weightcast.wire.layout import BucketLayout, Packing, TensorSpec, plan_buckets, total_bytes

NUM_BUCKETS = 2
# Computing values on the way takes four float32 numbers for each element of a chunk.
COMPUTED_BYTES = 16 * CHUNK_ELEMENTS
# Sums take blocks of 2 MiB and 16 MiB for each of two casts.  Messages, tables and the heap's own gaps take the rest.
WORK_BYTES = 64 << 20


def peak_bytes(
    specs: Sequence[TensorSpec], *, bucket_bytes: int, packing: Packing, world_size: int, work_bytes: int = WORK_BYTES
) -> int:
    """Peak extra memory of a trainer rank with buckets, in bytes: ``peak_bytes_of`` the buckets of these tensors.

    Raises:
        ConfigError: A tensor does not fit into a bucket.
    """
    layouts = plan_buckets(specs, bucket_bytes=bucket_bytes, packing=packing)
    return peak_bytes_of(layouts, world_size=world_size, work_bytes=work_bytes)


def peak_bytes_of(layouts: Sequence[BucketLayout], *, world_size: int, work_bytes: int = WORK_BYTES) -> int:
    """Peak extra memory of a trainer rank, in bytes: two buckets, the scratch buffer of a gather, and ``work_bytes``.

    ``work_bytes`` needs to contain what computing values takes (``COMPUTED_BYTES`` and adapters).
    """
    largest = max((layout.size_bytes for layout in layouts), default=0)
    scratch = _scratch_bytes(largest, world_size) if layouts else 0
    return min(NUM_BUCKETS, len(layouts)) * largest + scratch + work_bytes


def bucket_bytes_for(
    specs: Sequence[TensorSpec],
    *,
    ceiling_bytes: int,
    packing: Packing,
    world_size: int,
    work_bytes: int = WORK_BYTES,
) -> int:
    """The largest ``bucket_bytes`` that keeps a trainer rank under a limit of extra memory.

    Args:
        specs: Every tensor that is sent.
        ceiling_bytes: Extra memory that a rank may take.
        packing: Packing that the engines can read.
        world_size: Number of trainer ranks.
        work_bytes: As for ``peak_bytes_of``.

    Raises:
        ConfigError: The limit is too low for the largest tensor, or for its largest row where the packing may cut
            tensors.  The text names the tensor and the bytes that it needs.
    """
    if not specs:
        raise ConfigError("there is nothing to send")
    left_bytes = ceiling_bytes - work_bytes
    share = NUM_BUCKETS + (1 / world_size if world_size > 1 else 0)
    best = int(left_bytes / share)
    if _needed_bytes(best, world_size, work_bytes) > ceiling_bytes:  # the scratch buffer has its minimum size
        best = (left_bytes - MIN_SCRATCH_BYTES) // NUM_BUCKETS
    # Buckets larger than the whole model change nothing.
    best = min(best, total_bytes(specs) + packing.alignment_bytes * len(specs))
    largest = max(specs, key=lambda spec: _smallest_bucket(spec, packing))
    smallest = _smallest_bucket(largest, packing)
    if best < smallest:
        part = "one row of " if packing.slices and largest.num_rows > 1 else ""
        needed = _needed_bytes(smallest, world_size, work_bytes)
        raise ConfigError(
            f"{part}{largest.name} has {smallest} bytes, and a limit of {ceiling_bytes} bytes of extra memory "
            f"is too low for two buckets that hold it: {needed} bytes are needed",
            hint=f"allow {needed} bytes or more",
        )
    return best


def _smallest_bucket(spec: TensorSpec, packing: Packing) -> int:
    return spec.row_bytes if packing.slices else spec.size_bytes


def _scratch_bytes(bucket_bytes: int, world_size: int) -> int:
    return max(bucket_bytes // world_size, MIN_SCRATCH_BYTES) if world_size > 1 else 0


def _needed_bytes(bucket_bytes: int, world_size: int, work_bytes: int) -> int:
    return NUM_BUCKETS * bucket_bytes + _scratch_bytes(bucket_bytes, world_size) + work_bytes
