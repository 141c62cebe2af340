"""Chooses the size of an update's buckets, within the caller's limit of extra memory and the memory that is free."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from weightcast.config import UpdateConfig
from weightcast.errors import ConfigError
from weightcast.exporters.memory_estimate import WORK_BYTES, bucket_bytes_for, default_bucket_bytes, peak_bytes_of
from weightcast.protocols import Exporter
from weightcast.report import format_bytes
from weightcast.wire.layout import BucketLayout, Packing, TensorSpec, total_bytes

log = logging.getLogger("weightcast.update.bucket_memory")


def choose_bucket_bytes(
    config: UpdateConfig,
    exporter: Exporter,
    specs: Sequence[TensorSpec],
    *,
    packing: Packing,
    world_size: int,
    large: bool = False,
    free_bytes: int = 0,
) -> int:
    """Returns the size of a bucket: the caller's or the default, within ``max_extra_bytes``.

    ``large`` and ``free_bytes`` are those of ``default_bucket_bytes``.  It raises ConfigError if the limit or the free
    memory is too low, or the exporter does not know the memory that it takes.
    """
    limit, size = config.max_extra_bytes, config.bucket_bytes
    if size is None:
        size = default_bucket_bytes(specs, packing=packing, world_size=world_size, large=large, free_bytes=free_bytes)
        free = f", {format_bytes(free_bytes)} free on a trainer GPU" if free_bytes else ""
        log.info("buckets of %s for %s%s", format_bytes(size), format_bytes(total_bytes(specs)), free)
    if limit is None or not specs:
        return size
    computing = exporter.computing_bytes()
    if computing is None:
        raise ConfigError(
            f"max_extra_bytes={limit}: {type(exporter).__name__} does not know the memory that it takes here",
            hint="leave out max_extra_bytes, and bound the buckets with bucket_bytes",
        )
    try:
        most = bucket_bytes_for(
            specs, ceiling_bytes=limit, packing=packing, world_size=world_size, work_bytes=WORK_BYTES + computing
        )
    except ConfigError as error:
        raise ConfigError(f"max_extra_bytes={limit}: {error.args[0]}", hint=error.hint) from None
    return min(size, most)


def free_bytes_of(device: torch.device) -> int:
    """Bytes of a GPU that this process may still allocate, with those its allocator keeps idle; 0 for a CPU."""
    if device.type != "cuda":
        return 0
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return free_bytes + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def planned_bytes(exporter: Exporter, layouts: Sequence[BucketLayout], *, world_size: int) -> int:
    """Extra memory of a trainer rank, in bytes, with these buckets; 0 if the exporter does not know its own part."""
    computing = exporter.computing_bytes()
    if computing is None:
        return 0
    return peak_bytes_of(layouts, world_size=world_size, work_bytes=WORK_BYTES + computing)


def check_planned_bytes(config: UpdateConfig, planned: int) -> None:
    """Refuses, with ConfigError, a model that changed so that buckets no longer fit the limit; 0 is an unknown size."""
    limit = config.max_extra_bytes
    if limit is not None and not 0 < planned <= limit:
        raise ConfigError(
            f"max_extra_bytes={limit}: the model has changed since it was connected, and an update would take "
            f"{format_bytes(planned) if planned else 'an unknown amount'} of extra memory now. Nothing has been sent",
            hint="undo the change before the update, or close this updater and connect again",
        )
