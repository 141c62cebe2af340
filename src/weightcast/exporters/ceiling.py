"""How much memory an update takes on a trainer rank beside the model, before anything is allocated.

The arithmetic of what the gatherer and the buckets do, and its inverse: the largest bucket that a ceiling allows.
Counts what grows with the model or the bucket; an interpreter's own few MiB are not in it.
"""

from __future__ import annotations

from collections.abc import Sequence

from weightcast.errors import ConfigError
from weightcast.exporters.gather import MIN_SCRATCH_BYTES
from weightcast.exporters.lora import CHUNK_ELEMENTS
from weightcast.wire.layout import Packing, TensorSpec, plan_buckets, total_bytes

NUM_BUCKETS = 2
# Where values are computed on the way: four float32 numbers for each element that is computed at once.
COMPUTED_BYTES = 16 * CHUNK_ELEMENTS


def peak_bytes(
    specs: Sequence[TensorSpec], *, bucket_bytes: int, packing: Packing, world_size: int, computed: bool = False
) -> int:
    """Most extra memory of a trainer rank that has buckets: two of them, and the scratch buffer of a gather.

    Args:
        specs: What travels.
        bucket_bytes: No bucket is larger.
        packing: What the engines can read.
        world_size: Trainer ranks.
        computed: Values are computed on the way: quantised, or adapters merged (whose own bytes come on top).

    Raises:
        ConfigError: A tensor does not fit into a bucket.
    """
    layouts = plan_buckets(specs, bucket_bytes=bucket_bytes, packing=packing)
    largest = max((layout.size_bytes for layout in layouts), default=0)
    return min(NUM_BUCKETS, len(layouts)) * largest + _scratch_bytes(largest, world_size, computed)


def _scratch_bytes(bucket_bytes: int, world_size: int, computed: bool) -> int:
    scratch = max(bucket_bytes // world_size, MIN_SCRATCH_BYTES) if world_size > 1 else 0
    return scratch + (COMPUTED_BYTES if computed else 0)


def bucket_bytes_for(
    specs: Sequence[TensorSpec], *, ceiling_bytes: int, packing: Packing, world_size: int, computed: bool = False
) -> int:
    """The largest ``bucket_bytes`` that keeps a trainer rank under a ceiling of extra memory.

    Args:
        specs: What travels.
        ceiling_bytes: Extra memory that a rank may take.
        packing: What the engines can read.
        world_size: Trainer ranks.
        computed: As in ``peak_bytes``.

    Raises:
        ConfigError: No bucket is small enough: the largest tensor, or the largest row where tensors may be cut, needs
            more.  The text says which tensor and how much it needs.
    """
    if not specs:
        raise ConfigError("there is nothing to send")
    left_bytes = ceiling_bytes - (COMPUTED_BYTES if computed else 0)
    share = NUM_BUCKETS + (1 / world_size if world_size > 1 else 0)
    best = int(left_bytes / share)
    if _needed_bytes(best, world_size, computed) > ceiling_bytes:  # the scratch buffer is at its least
        best = (left_bytes - MIN_SCRATCH_BYTES) // NUM_BUCKETS
    # Buckets larger than the whole model change nothing.
    best = min(best, total_bytes(specs) + packing.alignment_bytes * len(specs))
    largest = max(specs, key=lambda spec: _smallest_bucket(spec, packing))
    smallest = _smallest_bucket(largest, packing)
    if best < smallest:
        part = "one row of " if packing.slices and largest.num_rows > 1 else ""
        needed = _needed_bytes(smallest, world_size, computed)
        raise ConfigError(
            f"{part}{largest.name} has {smallest} bytes, and a ceiling of {ceiling_bytes} bytes of extra memory "
            f"is too low for two buckets that hold it: {needed} bytes are needed",
            hint=f"allow {needed} bytes or more",
        )
    return best


def _smallest_bucket(spec: TensorSpec, packing: Packing) -> int:
    return spec.row_bytes if packing.slices else spec.size_bytes


def _needed_bytes(bucket_bytes: int, world_size: int, computed: bool) -> int:
    return NUM_BUCKETS * bucket_bytes + _scratch_bytes(bucket_bytes, world_size, computed)
