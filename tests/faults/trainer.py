"""What each rank of a sharded trainer does while faults strike: update, again and again, and tell how it went."""

from __future__ import annotations

import gc
import time
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from tests.faults.weights import Weights
from tests.harness import ToyTrainer, num_fds
from weightcast import Target, WeightUpdater, head
from weightcast.errors import WeightcastError
from weightcast.wire.bucket import Bucket


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """How one update ended on one trainer rank.

    Attributes:
        version: What to.
        seconds: How long it took.
        status: By target, in order: ``serving``, ``untouched``, ``quarantined``; empty if there was no report.
        words: The error, or the targets' messages.
    """

    version: int
    seconds: float
    status: tuple[str, ...] = ()
    words: str = ""


def update(
    targets: list[Target], weights: Weights, versions: list[int], options: dict[str, Any], flip: int | None
) -> tuple[list[Told], int]:
    """Connect and update to each version.

    Args:
        targets: The engines.
        weights: Of a version.
        versions: One update each.
        options: For ``connect``.
        flip: In the first update, one bit of this bucket changes after it was digested.

    Returns:
        How each update ended, and the number of open files at the end.
    """
    model = ToyTrainer(weights(versions[0]))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    told: list[Told] = []
    dist.barrier()  # a busy machine starts ranks seconds apart; deadlines are for what comes now
    restore = _flip(flip) if flip is not None and dist.get_rank() == 0 else None
    try:
        started = time.monotonic()
        with WeightUpdater.connect(model, targets, **options) as updater:
            for version in versions:
                _set_weights(model, weights(version))
                started = time.monotonic()
                told.append(_update(updater, version, started))
                if restore is not None:
                    restore()
    except WeightcastError as error:
        told.append(Told(version=0, seconds=time.monotonic() - started, words=f"{type(error).__name__}: {error}"))
    gc.collect()  # what failed is held by its own traceback
    return told, num_fds("self")


def _update(updater: WeightUpdater, version: int, started: float) -> Told:
    try:
        report = updater.update(version=version)
        words = ""
    except WeightcastError as error:
        report = getattr(error, "report", None)
        words = f"{type(error).__name__}: {error}"
    rows = report.targets if report is not None else ()
    return Told(
        version=version,
        seconds=time.monotonic() - started,
        status=tuple(row.status for row in rows),
        words=words or "; ".join(row.message for row in rows if row.message),
    )


def _set_weights(model: torch.nn.Module, weights: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mine = distribute_tensor(weights[name], parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.copy_(mine)


def _flip(index: int) -> Any:
    add = head.SentDigests.add

    def digest_then_flip(self: head.SentDigests, bucket: Bucket) -> None:
        add(self, bucket)
        if bucket.layout.index == index:
            bucket.data[bucket.layout.slots[0].offset_bytes + 1] ^= 1

    head.SentDigests.add = digest_then_flip  # type: ignore[method-assign]

    def restore() -> None:
        head.SentDigests.add = add  # type: ignore[method-assign]

    return restore
