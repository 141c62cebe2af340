"""One rank of the reference engine: model, cache and weight receiver in one process.

The executor calls it with the scheduler's commands and the trainer's messages.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from transformers import PretrainedConfig

from weightcast.comm.ipc import device_uuid, host_id, visible_gpus
from weightcast.comm.nccl import settings_here
from weightcast.digest.on_cpu import prepare
from weightcast.errors import ConfigError
from weightcast.receiver import WeightReceiver
from weightcast.receiver.beside_steps import OwnStream, share_interpreter
from weightcast.receiver.rank import StagingChoice
from weightcast.receiver.staging import StagingPlace, choose_place
from weightcast.rollout import commands
from weightcast.rollout.all_reduce import GroupReduce, SharedMemoryReduce, connect, exchange, join
from weightcast.rollout.checkpoint import parse_dtype, weight_files
from weightcast.wire.answers import RankAck
from weightcast.wire.engine_info import RankInfo
from weightcast.wire.layout import dtype_name
from weightcast.wire.messages import Message

_LEAST_FIRST: tuple[StagingPlace, ...] = ("none", "host", "device")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """Settings of every rank of one engine.

    Attributes:
        dtype: torch's name of the dtype of weights and cache, e.g. ``"bfloat16"``.
        device: ``"cpu"``, ``"cuda"`` (rank r takes visible GPU r) or ``"cuda:N"`` (rank r takes GPU N + r).
        own_gpu: Each rank sees only its own GPUs, so every rank takes the first one (or GPU N).
        sum_timeout_s: Deadline of a sum over the ranks, in seconds; only a lost rank comes near it.
    """

    model_dir: str
    dtype: str
    device: str
    max_batch: int
    max_len: int
    staging: StagingChoice = "auto"
    threads: int = 0
    own_gpu: bool = False
    sum_timeout_s: float = 120.0


class RolloutWorker:
    """One rank.  Two threads may call `run` and `apply` at once, but each of them only one thread at a time."""

    def __init__(self, settings: WorkerSettings, *, rank: int, tp_size: int, rendezvous: str) -> None:
        """Builds and loads this rank; returns when it can work.

        Args:
            rendezvous: ``host:port`` of the TCP store for the ranks' rendezvous; unused for one rank.

        Raises:
            ConfigError: The model cannot be served with these settings.
            EngineFailure: The rendezvous of the ranks failed.
        """
        cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(settings.threads or max(1, cores // tp_size))
        device = _device(settings.device, 0 if settings.own_gpu else rank)
        # Imported here because the process that starts the ranks imports this module too, and transformers'
        # modelling code takes seconds to import.
        from weightcast.rollout.model import build_model
        from weightcast.rollout.runner import Runner

        dtype = parse_dtype(settings.dtype)
        self._reduce: GroupReduce | SharedMemoryReduce | None = None
        mine = RankInfo(
            rank=rank,
            pid=0,  # the executor knows it
            device=device_uuid(device),
            host_id=host_id(),
            visible=visible_gpus() if device.type == "cuda" else (),
            nccl=settings_here(device),
        )
        self._ranks = [mine]
        store = None
        if tp_size > 1:
            store = connect(rendezvous, rank=rank, timeout_s=settings.sum_timeout_s)
            told = exchange(store, "description", msgspec.json.encode(mine).decode(), rank=rank, size=tp_size)
            self._ranks = [msgspec.json.decode(one, type=RankInfo) for one in told]
            self._reduce = join(store, rank=rank, size=tp_size, device=device, timeout_s=settings.sum_timeout_s)
        model = build_model(
            Path(settings.model_dir),
            tp_rank=rank,
            tp_size=tp_size,
            group=self._reduce,
            dtype=dtype,
            device=device,
            max_len=settings.max_len,
        )
        self._model = model
        self._runner = Runner(model, max_batch=settings.max_batch, max_len=settings.max_len, dtype=dtype, device=device)
        self._receiver = WeightReceiver(
            model,
            load_weights=model.load_weights,
            expected=model.expected_weights(),
            tp_rank=rank,
            tp_size=tp_size,
            device=device,
            staging=settings.staging,
            may_move=True,
        )
        self._stream = OwnStream(device)
        if device.type == "cuda":  # elsewhere it is the processor that threads share
            share_interpreter()
        if store is not None:
            # Each rank chose a place by its own free memory, and all must use the same one.  The engine pauses for a
            # whole update only if no rank stages: a single rank without staging would overwrite weights in use.
            self._stage_at_most(exchange(store, "staging", self._place, rank=rank, size=tp_size))

    def apply(self, message: Message) -> RankAck:
        """Passes a weight message to the receiver.  While weights switch, no step runs."""
        return self._stream.apply(self._receiver, message)

    def run(self, command: bytes) -> bytes:
        """Carries out one of the scheduler's commands."""
        decoded = commands.decode_command(command)
        if isinstance(decoded, commands.Describe):
            return commands.encode(self._describe())
        if isinstance(decoded, commands.Sleep):
            self._receiver.sleep()
        answer = self._runner.run(decoded)
        if isinstance(decoded, commands.Wake):
            self._receiver.wake()
        return commands.encode(answer)

    @property
    def _place(self) -> StagingPlace:
        return self._receiver.loader.staging.place

    def _stage_at_most(self, places: list[str]) -> None:
        """Stages in the place of the rank with the least memory."""
        least: StagingPlace = next(place for place in _LEAST_FIRST if place in places)
        if least != self._place:
            loader = self._receiver.loader
            loader.stage(choose_place(least, size_bytes=loader.size_bytes, device=self._receiver.device))

    def _describe(self) -> commands.Description:
        parameters = list(self._model.parameters())
        return commands.Description(
            ranks=self._ranks,
            staging=self._place,
            staging_bytes=self._receiver.loader.staging.size_bytes,
            specs=self._model.expected_weights(),
            dtype=dtype_name(parameters[0].dtype),
            cache_bytes=self._runner.cache_bytes,
        )

    def interrupt(self, reason: str) -> None:
        """Ends a wait for the trainer now."""
        self._receiver.interrupt(reason)

    def close(self) -> None:
        """Frees groups and shared memory; safe to call twice."""
        self._receiver.close()
        if self._reduce is not None:
            self._reduce.close()


def import_for_ranks(config: PretrainedConfig, folder: Path) -> None:
    """Imports everything that a rank on a CPU needs for this model, so that ranks forked from this process have it."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    from weightcast.rollout import runner

    _ = runner, MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]  # the mapping imports the model's module
    prepare(sum(file.stat().st_size for file in weight_files(folder) if file.is_file()))


def make_worker(rank: int, tp_size: int, rendezvous: str, *, settings: WorkerSettings) -> RolloutWorker:
    """Builds one rank; an executor calls it in the rank's process."""
    return RolloutWorker(settings, rank=rank, tp_size=tp_size, rendezvous=rendezvous)


def _device(name: str, rank: int) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"{name!r} is not a device", hint="use cpu, cuda or cuda:N") from error
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise ConfigError(f"the reference engine does not run on {device.type}", hint="use cpu, cuda or cuda:N")
    count = torch.cuda.device_count()
    index = (device.index or 0) + rank
    if index >= count:
        raise ConfigError(f"rank {rank} needs GPU {index}, and torch sees {count} GPUs")
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device
