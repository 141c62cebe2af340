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
# A bucket where the caller gives no size.  On a GPU that engines map, each bucket costs 1.2 ms of messages.
USUAL_BUCKET_BYTES = 512 << 20
_LARGEST_BUCKET_BYTES = 2 << 30
_BUCKETS_OF_A_RANK = 8
_SHARE_OF_FREE = 4
_SMALLEST_BUCKET_BYTES = 4096


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
    best = min(_bucket_within(ceiling_bytes, world_size, work_bytes), _whole_model(specs, packing))
    smallest, largest = _smallest_for(specs, packing)
    if best < smallest:
        needed = _needed_bytes(smallest, world_size, work_bytes)
        raise ConfigError(
            f"{largest} has {smallest} bytes, and a limit of {ceiling_bytes} bytes of extra memory "
            f"is too low for two buckets that hold it: {needed} bytes are needed",
            hint=f"allow {needed} bytes or more",
        )
    return best


def default_bucket_bytes(
    specs: Sequence[TensorSpec], *, packing: Packing, world_size: int, large: bool, free_bytes: int = 0
) -> int:
    """The size of a bucket where the caller gives none.

    It is 512 MiB.  Where larger buckets are faster, it is an eighth of the weights of one trainer rank, from 512 MiB to
    2 GiB.  Buckets and the scratch buffer of a gather take a quarter of the free memory at most.  A bucket always holds
    the largest tensor that may not be cut, and is not larger than the model.

    Args:
        specs: Every tensor that is sent.
        packing: Packing that the engines can read.
        world_size: Number of trainer ranks.
        large: True if larger buckets are faster: engines map them on GPUs.
        free_bytes: Memory that each trainer rank may still take, where it is smallest; 0 if that is not known.

    Raises:
        ConfigError: Two buckets that hold the largest tensor do not fit into the free memory.
    """
    size = USUAL_BUCKET_BYTES
    if large:
        part = total_bytes(specs) // (world_size * _BUCKETS_OF_A_RANK)
        size = min(max(part, USUAL_BUCKET_BYTES), _LARGEST_BUCKET_BYTES)
    smallest, largest = _smallest_for(specs, packing)
    if free_bytes:
        size = min(size, _bucket_within(free_bytes // _SHARE_OF_FREE, world_size, 0))
        if _needed_bytes(smallest, world_size, 0) > free_bytes:
            raise ConfigError(
                f"{largest} has {smallest} bytes, and {free_bytes} bytes of a trainer rank's GPU are free: too few for "
                "two buckets that hold it",
                hint="free memory of the trainer's GPUs before connect",
            )
    return max(min(max(size, smallest), _whole_model(specs, packing)), _SMALLEST_BUCKET_BYTES)


def _bucket_within(ceiling_bytes: int, world_size: int, work_bytes: int) -> int:
    """The largest bucket of which two, with the scratch buffer of a gather, keep under a limit; may be negative."""
    left_bytes = ceiling_bytes - work_bytes
    share = NUM_BUCKETS + (1 / world_size if world_size > 1 else 0)
    best = int(left_bytes / share)
    if _needed_bytes(best, world_size, work_bytes) > ceiling_bytes:  # the scratch buffer has its minimum size
        best = (left_bytes - MIN_SCRATCH_BYTES) // NUM_BUCKETS
    return best


def _whole_model(specs: Sequence[TensorSpec], packing: Packing) -> int:
    """A size above which larger buckets change nothing."""
    return total_bytes(specs) + packing.alignment_bytes * len(specs)


def _smallest_for(specs: Sequence[TensorSpec], packing: Packing) -> tuple[int, str]:
    """The smallest possible bucket, in bytes, and what needs it: a tensor, or a row of one that may be cut."""
    largest = max(specs, key=lambda spec: _smallest_bucket(spec, packing), default=None)
    if largest is None:
        return 0, ""
    part = "one row of " if packing.slices and largest.num_rows > 1 else ""
    return _smallest_bucket(largest, packing), part + largest.name


def _smallest_bucket(spec: TensorSpec, packing: Packing) -> int:
    return spec.row_bytes if packing.slices else spec.size_bytes


def _scratch_bytes(bucket_bytes: int, world_size: int) -> int:
    return max(bucket_bytes // world_size, MIN_SCRATCH_BYTES) if world_size > 1 else 0


def _needed_bytes(bucket_bytes: int, world_size: int, work_bytes: int) -> int:
    return NUM_BUCKETS * bucket_bytes + _scratch_bytes(bucket_bytes, world_size) + work_bytes
