"""Makes the buckets of an update keep to the caller's limit of extra memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from weightcast.config import UpdateConfig
from weightcast.errors import ConfigError
from weightcast.exporters.memory_estimate import WORK_BYTES, bucket_bytes_for, peak_bytes_of
from weightcast.protocols import Budgeted, Exporter
from weightcast.wire.layout import BucketLayout, Packing, TensorSpec


def within_limit(
    config: UpdateConfig, exporter: Exporter, specs: Sequence[TensorSpec], *, packing: Packing, world_size: int
) -> UpdateConfig:
    """Returns the settings with buckets that keep to ``max_extra_bytes``.

    Raises:
        ConfigError: The limit is too low, or the exporter does not know the memory that it takes.
    """
    limit = config.max_extra_bytes
    if limit is None or not specs:
        return config
    computing = exporter.computing_bytes() if isinstance(exporter, Budgeted) else None
    if computing is None:
        raise ConfigError(
            f"max_extra_bytes={limit}: {type(exporter).__name__} does not know the memory that it takes here",
            hint="leave out max_extra_bytes, and bound the buckets with bucket_bytes",
        )
    try:
        most = bucket_bytes_for(
            specs,
            ceiling_bytes=limit,
            packing=packing,
            world_size=world_size,
            work_bytes=WORK_BYTES + computing,
        )
    except ConfigError as error:
        raise ConfigError(f"max_extra_bytes={limit}: {error.args[0]}", hint=error.hint) from None
    return replace(config, bucket_bytes=min(config.bucket_bytes, most))


def planned_bytes(exporter: Exporter, layouts: Sequence[BucketLayout], *, world_size: int) -> int:
    """Extra memory of a trainer rank, in bytes, with these buckets; 0 if the exporter does not know its own part."""
    computing = exporter.computing_bytes() if isinstance(exporter, Budgeted) else None
    if computing is None:
        return 0
    return peak_bytes_of(layouts, world_size=world_size, work_bytes=WORK_BYTES + computing)
