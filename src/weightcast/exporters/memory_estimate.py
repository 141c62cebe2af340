"""Estimates the memory that an update takes on a trainer rank beside the model, before anything is allocated.

``bucket_bytes_for`` is the inverse: the largest bucket that a ceiling of extra memory allows.  The estimate counts the
buckets and the gatherer's scratch buffer, not the interpreter's own few MiB.
"""

from __future__ import annotations

from collections.abc import Sequence

from weightcast.errors import ConfigError
from weightcast.exporters.gather_plan import MIN_SCRATCH_BYTES
from weightcast.exporters.lora import CHUNK_ELEMENTS
from weightcast.wire.layout import Packing, TensorSpec, plan_buckets, total_bytes

NUM_BUCKETS = 2
# Computing values on the way takes four float32 numbers for each element of a chunk.
COMPUTED_BYTES = 16 * CHUNK_ELEMENTS


def peak_bytes(
    specs: Sequence[TensorSpec], *, bucket_bytes: int, packing: Packing, world_size: int, computed: bool = False
) -> int:
    """Peak extra memory, in bytes, of a trainer rank with buckets: two buckets and the scratch buffer of a gather.

    Args:
        specs: Every tensor that is sent.
        bucket_bytes: Largest size of a bucket.
        packing: Packing that the engines can read.
        world_size: Number of trainer ranks.
        computed: Values are quantised or adapters merged on the way.  The bytes of the adapters are not counted.

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
        specs: Every tensor that is sent.
        ceiling_bytes: Extra memory that a rank may take.
        packing: Packing that the engines can read.
        world_size: Number of trainer ranks.
        computed: The same as for ``peak_bytes``.

    Raises:
        ConfigError: The ceiling is too low for the largest tensor, or for its largest row where the packing may cut
            tensors.  The text names the tensor and the bytes that it needs.
    """
    if not specs:
        raise ConfigError("there is nothing to send")
    left_bytes = ceiling_bytes - (COMPUTED_BYTES if computed else 0)
    share = NUM_BUCKETS + (1 / world_size if world_size > 1 else 0)
    best = int(left_bytes / share)
    if _needed_bytes(best, world_size, computed) > ceiling_bytes:  # the scratch buffer has its minimum size
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
