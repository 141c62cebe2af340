"""One rank of a sharded trainer in a fault test: it runs several updates and reports how each one ended."""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.faults.weights import Weights
from tests.helpers.harness import ToyTrainer, map_other_memory, num_fds, share_memory
from weightcast import Target, WeightUpdater
from weightcast.comm.trainer_group import TrainerGroup
from weightcast.digest.sent import SentDigests
from weightcast.errors import WeightcastError
from weightcast.exporters.held_parts import region
from weightcast.lab.connect import connect as connect_in_lab
from weightcast.update.served_parts import ServedParts
from weightcast.wire.bucket import Bucket


class Flip(NamedTuple):
    """One bit of the first update is another.

    Attributes:
        where: ``memory``: a bucket after the head has digested it.  ``direct``: a part of the head's that engines read,
            and which is summed otherwise.  ``gather``: a shard that the head has received from another rank.
            ``replica``: a parameter of which rank 1 has a copy.
        index: Of the bucket, or of the first one in which the head receives anything after it.
    """

    where: str
    index: int


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
    targets: list[Target], weights: Weights, versions: list[int], options: dict[str, Any], flip: Flip | None
) -> tuple[list[Told], int]:
    """Connect and update to each version.

    Args:
        targets: The engines.
        weights: Of a version.
        versions: One update each.
        options: For ``connect``.
        flip: Which bit is another in the first update; None for none.

    Returns:
        How each update ended, and the number of open files at the end.
    """
    model = ToyTrainer(weights(versions[0]))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sharded = flip is None or flip.where != "replica"
    buffer = None  # engines read it only as long as this rank holds it
    if options.get("keep_mapped"):
        buffer = share_memory(model, mesh, [Shard(0) if sharded else Replicate()])
    elif sharded:
        fully_shard(model, mesh=mesh)
    told: list[Told] = []
    dist.barrier()  # a busy machine starts ranks seconds apart; deadlines count from here
    restore = _FLIPS[flip.where](flip.index) if flip is not None and dist.get_rank() == 0 else None
    try:
        started = time.monotonic()
        with connect_in_lab(model, targets, **options) as updater:
            for version in versions:
                _set_weights(model, weights(version))
                if flip is not None and flip.where == "replica" and dist.get_rank() == 1 and not told:
                    first = next(model.parameters()).data
                    local = first.to_local() if isinstance(first, DTensor) else first
                    local.view(-1).view(torch.uint8)[1] ^= 1
                started = time.monotonic()
                told.append(_update(updater, version, started))
                if restore is not None:
                    restore()
    except WeightcastError as error:
        told.append(Told(version=0, seconds=time.monotonic() - started, words=f"{type(error).__name__}: {error}"))
    del model
    gc.collect()  # the traceback of a failed update keeps its objects alive
    if buffer is not None:
        buffer.close()
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
            mine = weights[name]
            if isinstance(parameter, DTensor):
                mine = distribute_tensor(mine, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.copy_(mine)


def _flip_bucket(index: int) -> Callable[[], None]:
    add = SentDigests.add

    def digest_then_flip(self: SentDigests, bucket: Bucket) -> None:
        add(self, bucket)
        if bucket.layout.index == index:
            bucket.data[bucket.layout.slots[0].offset_bytes + 1] ^= 1

    SentDigests.add = digest_then_flip  # type: ignore[method-assign]

    def restore() -> None:
        SentDigests.add = add  # type: ignore[method-assign]

    return restore


def _flip_received(index: int) -> Callable[[], None]:
    move, done = TrainerGroup.move, list[int]()

    def move_then_flip(self: TrainerGroup, sends: Any, receives: Any, *, what: str) -> None:
        move(self, sends, receives, what=what)
        bucket = re.fullmatch(r"its part of bucket (\d+)", what)
        if bucket is not None and int(bucket[1]) >= index and receives and not done:
            receives[0].data.view(-1).view(torch.uint8)[1] ^= 1
            done.append(1)

    TrainerGroup.move = move_then_flip  # type: ignore[method-assign]

    def restore() -> None:
        TrainerGroup.move = move  # type: ignore[method-assign]

    return restore


def _flip_part(index: int) -> Callable[[], None]:
    look, done = ServedParts.look, list[int]()

    def look_then_flip(self: ServedParts, bucket: Bucket) -> Any:
        found = look(self, bucket)
        if bucket.layout.index >= index and found and not done:
            region(bucket, bucket.layout.slots[found[0].slot], found[0].box).view(torch.uint8)[..., 0].bitwise_xor_(1)
            done.append(1)
        return found

    ServedParts.look = look_then_flip  # type: ignore[method-assign]
    unmap = map_other_memory(lambda: not done)

    def restore() -> None:
        done.append(1)
        ServedParts.look = look  # type: ignore[method-assign]
        unmap()

    return restore


_FLIPS: dict[str, Callable[[int], Callable[[], None] | None]] = {
    "memory": _flip_bucket,
    "direct": _flip_part,
    "gather": _flip_received,
    "replica": lambda _: None,
}
