"""Connects with what only tests and measurements choose.

with connect(model, urls, transport="direct", direct_by="messages") as updater:
    updater.update(version=1)
"""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

from weightcast.config import DirectBy
from weightcast.update.arguments import Model, Targets, UpdateOptions, config_of
from weightcast.update.head import Progress
from weightcast.update.updater import WeightUpdater


def connect(
    model: Model,
    targets: Targets,
    *,
    direct_by: DirectBy = "auto",
    progress: Progress | None = None,
    **options: Unpack[UpdateOptions],
) -> WeightUpdater:
    """As ``WeightUpdater.connect``.

    Args:
        direct_by: As ``UpdateConfig.direct_by``.
        progress: Callback on the head after each bucket, with bytes sent and bytes in all.  It may raise, which
            listeners may not, and may talk to engines.
    """
    config = replace(config_of(options), direct_by=direct_by)
    return WeightUpdater(model, targets, options, config, progress)
