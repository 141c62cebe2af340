"""A trainer in processes of its own, with a checkpoint's weights, that may die or lie in the middle of an update.

With one rank it sends the checkpoint as it is.  With several each rank holds its rows of every tensor, in memory that
engines can map, as the ranks of a sharded trainer do.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from weightcast.comm.ipc import SharedBuffer, device_of
from weightcast.comm.ports import quiet_port
from weightcast.comm.trainer_group import TrainerGroup
from weightcast.config import Target
from weightcast.digest.source_sums import Taker
from weightcast.errors import ConfigError, WeightcastError
from weightcast.exporters.checkpoint import CheckpointExporter
from weightcast.exporters.state_dict import StateDictExporter
from weightcast.lab.connect import connect
from weightcast.protocols import BucketUse, Lying, PlannedBucket
from weightcast.report import UpdateReport
from weightcast.wire.layout import BucketLayout

Fate = Literal["whole", "dies", "lies"]
_ALIGN = 64  # bytes between the beginnings of two parts
_START_S = 60.0  # for the processes to start, beside the deadlines of the update
_STDERR = 2
_kept: list[SharedBuffer] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateJob:
    """One update by a trainer.

    Attributes:
        target: The engine.
        checkpoint: Folder of the weights.
        version: Version of the update.
        options: Further options of ``lab.connect``.
        place: UUID of the device of the weights, or ``cpu``.
        num_ranks: Number of trainer ranks.
        fate: ``dies``: a rank is killed in the middle of the update.  ``lies``: the bytes that engines get from a rank
            differ in one bit from those that it has summed.
        culprit: The rank whose fate that is.
    """

    target: Target
    checkpoint: str
    version: int
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    place: str = "cpu"
    num_ranks: int = 1
    fate: Fate = "whole"
    culprit: int = 0


@dataclass(frozen=True, slots=True)
class Ended:
    """How the update ended on one trainer rank.

    Attributes:
        how: ``done``, ``refused`` before anything moved, ``failed``, or ``killed``.
        words: The error; empty without one.
        report: The report, if there is one.
    """

    how: Literal["done", "refused", "failed", "killed"]
    words: str = ""
    report: UpdateReport | None = None


def altered(checkpoint: str, num_ranks: int) -> str:
    """Name of the tensor of which a lying rank hands out another bit: one of which every rank has rows."""
    with CheckpointExporter(checkpoint) as exporter:
        cut = [spec.name for spec in exporter.specs() if spec.shape and spec.shape[0] >= num_ranks]
    return cut[len(cut) // 2]


def run(job: UpdateJob, *, timeout_s: float) -> list[Ended]:
    """Runs a trainer to its end, and returns how it ended on each rank.

    Args:
        job: Its update.
        timeout_s: Deadline of the whole trainer, in seconds; whatever runs then is killed.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    address = f"tcp://127.0.0.1:{quiet_port()}"
    processes: list[Any] = []
    pipes: list[Connection] = []
    deadline = time.monotonic() + timeout_s + _START_S
    with tempfile.TemporaryDirectory(prefix="weightcast-conformance-") as folder:
        logs = [Path(folder, f"rank-{rank}.log") for rank in range(job.num_ranks)]
        try:
            for rank, log in enumerate(logs):
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_serve, args=(job, rank, address, theirs, str(log)), daemon=True)
                process.start()
                theirs.close()
                processes.append(process)
                pipes.append(ours)
            return [
                _answer(pipe, process, log, deadline) for pipe, process, log in zip(pipes, processes, logs, strict=True)
            ]
        finally:
            for process in processes:
                process.kill()
                process.join()


def _answer(pipe: Connection, process: Any, log: Path, deadline: float) -> Ended:
    if not pipe.poll(max(deadline - time.monotonic(), 0.0)):
        return Ended("failed", "it did not end in time")
    try:
        return pipe.recv()
    except EOFError:
        process.join()
        if process.exitcode == -signal.SIGKILL:
            return Ended("killed")
        return Ended("failed", f"it ended by itself: {log.read_text(errors='replace')[-300:]}")


def _serve(job: UpdateJob, rank: int, address: str, pipe: Connection, log: str) -> None:
    _let_nobody_inherit_files()
    with open(log, "wb") as file:
        os.dup2(file.fileno(), _STDERR)  # torch reports each lost connection with a stack
    torch.set_num_threads(1)
    logging.getLogger("weightcast").setLevel(logging.CRITICAL)  # the caller prints what matters
    try:
        if job.num_ranks > 1:
            dist.init_process_group("gloo", init_method=address, rank=rank, world_size=job.num_ranks)
            report = _update(job, _sharded(job, rank))
        else:
            report = _update(job, CheckpointExporter(job.checkpoint), advanced={"alone": True}, progress=_killer(job))
        pipe.send(Ended("done", report=report))
    except ConfigError as error:
        pipe.send(Ended("refused", f"{type(error).__name__}: {error}"))
    except WeightcastError as error:
        pipe.send(Ended("failed", f"{type(error).__name__}: {error}", getattr(error, "report", None)))
    pipe.close()
    os._exit(0)  # threads of a group that failed may wait for a rank that is gone


def _let_nobody_inherit_files() -> None:
    """Keeps this process's open files from those that it starts.

    torch starts a manager of shared memory, which lives as long as an engine maps some.  It would keep the end of the
    pipe by which the caller hears that a rank was killed, and that by which the fork server hears that it may end.
    """
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > _STDERR:
            with suppress(OSError):  # of the list itself
                os.set_inheritable(number, False)


def _update(job: UpdateJob, model: Any, **more: Any) -> UpdateReport:
    with connect(model, [job.target], **job.options, **more) as updater:
        return updater.update(version=job.version)


def _killer(job: UpdateJob) -> Any:
    def after_a_bucket(done: int, _: int) -> None:
        if done and job.fate == "dies":
            os.kill(os.getpid(), signal.SIGKILL)

    return after_a_bucket


def _sharded(job: UpdateJob, rank: int) -> StateDictExporter:
    device = device_of(job.place) or torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    mesh = init_device_mesh(device.type, (job.num_ranks,))
    weights = _rows(job, mesh, device)
    if rank == job.culprit and job.fate == "dies":
        return _Dying(weights)
    if job.fate != "lies":
        return StateDictExporter(weights)
    others = _rows(job, mesh, device)
    if rank == job.culprit:
        lie = others[altered(job.checkpoint, job.num_ranks)]
        lie.to_local().view(-1).view(torch.uint8)[0] ^= 1
    return _BitFlipExporter(weights, others)


def _rows(job: UpdateJob, mesh: DeviceMesh, device: torch.device) -> dict[str, DTensor]:
    """The weights, each cut into rows among all ranks, in memory that engines can map."""
    placed: dict[str, DTensor] = {}
    with CheckpointExporter(job.checkpoint) as exporter:
        for name, tensor in exporter.tensors():
            place = Shard(0) if tensor.dim() else Replicate()
            placed[name] = distribute_tensor(tensor, mesh, [place], src_data_rank=None)
    sizes = [-(-whole.to_local().nbytes // _ALIGN) * _ALIGN for whole in placed.values()]
    buffer = SharedBuffer(max(1, sum(sizes)), device)
    _kept.append(buffer)  # as long as engines may read it
    for (name, whole), room in zip(placed.items(), buffer.data[: sum(sizes)].split(sizes), strict=True):
        rows = whole.to_local()
        here = room[: rows.nbytes].view(rows.dtype).view(rows.shape).copy_(rows)
        placed[name] = DTensor.from_local(
            here, mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
        )
    return placed


class _Dying(StateDictExporter):
    """Its process is killed in the middle of an update: at its second bucket, or while engines read its memory."""

    def plan(self, layouts: Sequence[BucketLayout], group: TrainerGroup, use: BucketUse) -> Sequence[PlannedBucket]:
        return [_DyingBucket(bucket, group, number) for number, bucket in enumerate(super().plan(layouts, group, use))]


class _BitFlipExporter(StateDictExporter):
    """Sums one set of weights, and hands out another, as if bits had flipped on their way."""

    def __init__(self, summed: Mapping[str, torch.Tensor], handed: Mapping[str, torch.Tensor]) -> None:
        super().__init__(summed)
        self._handed = StateDictExporter(handed)

    def prepare(self, group: TrainerGroup) -> None:
        super().prepare(group)
        self._handed.prepare(group)

    def plan(self, layouts: Sequence[BucketLayout], group: TrainerGroup, use: BucketUse) -> Sequence[PlannedBucket]:
        pairs = zip(super().plan(layouts, group, use), self._handed.plan(layouts, group, use), strict=True)
        return [_LyingBucket(summed, group, handed) for summed, handed in pairs]


class _Wrapped(PlannedBucket):
    """Another bucket, to which something happens."""

    def __init__(self, inner: PlannedBucket, group: TrainerGroup) -> None:
        super().__init__(inner.layout, group)
        self.serves, self.serves_to = inner.serves, inner.serves_to
        self.sum_places = inner.sum_places
        self._inner = inner

    def fill(self, data: torch.Tensor | None, taker: Taker | None = None) -> torch.Tensor | None:
        return self._inner.fill(data, taker)

    def own_memory(self) -> Lying:
        return self._inner.own_memory()

    def sum_own(self, taker: Taker) -> None:
        self._inner.sum_own(taker)


class _DyingBucket(_Wrapped):
    def __init__(self, inner: PlannedBucket, group: TrainerGroup, number: int) -> None:
        super().__init__(inner, group)
        self._number = number

    def fill(self, data: torch.Tensor | None, taker: Taker | None = None) -> torch.Tensor | None:
        sums = super().fill(data, taker)
        if self._number:
            os.kill(os.getpid(), signal.SIGKILL)
        return sums

    def sum_own(self, taker: Taker) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class _LyingBucket(_Wrapped):
    def __init__(self, inner: PlannedBucket, group: TrainerGroup, handed: PlannedBucket) -> None:
        super().__init__(inner, group)
        self._handed = handed

    def fill(self, data: torch.Tensor | None, taker: Taker | None = None) -> torch.Tensor | None:
        sums = super().fill(data, taker)
        self._handed.fill(data)
        return sums

    def own_memory(self) -> Lying:
        return self._handed.own_memory()
