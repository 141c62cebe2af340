"""A trainer that is killed after its first bucket: ``python -m weightcast.lab.conformance.doomed``.

It reads its settings from stdin.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any, cast

import msgspec

from weightcast.config import Target
from weightcast.exporters.checkpoint import CheckpointExporter
from weightcast.update.updater import WeightUpdater


class Doom(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the trainer; the fields are those of ``WeightUpdater.connect``."""

    target: Target
    checkpoint: str
    transport: str
    bucket_bytes: int
    timeout_s: float
    version: int


def main() -> None:
    """Begins an update and kills this process when the first bucket was sent."""
    doom = msgspec.json.decode(sys.stdin.buffer.read(), type=Doom)

    def die(done: int, _: int) -> None:
        if done:
            os.kill(os.getpid(), signal.SIGKILL)

    updater = WeightUpdater.connect(
        CheckpointExporter(doom.checkpoint),
        [doom.target],
        transport=cast("Any", doom.transport),
        bucket_bytes=doom.bucket_bytes,
        timeout_s=doom.timeout_s,
        progress=die,
        alone=True,
    )
    updater.update(version=doom.version)


if __name__ == "__main__":
    main()
