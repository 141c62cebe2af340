"""One rank of a training job as a Ray actor: its process group, its learner and its end of a ``WeightUpdater``."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from weightcast.config import Target
from weightcast.errors import ConfigError
from weightcast.ray.actors import NodePlace, place, remote
from weightcast.report import UpdateReport
from weightcast.update.arguments import UpdateOptions
from weightcast.update.updater import WeightUpdater


@remote
class TrainRank:
    """A rank of a training job, on its actor's main thread."""

    def __init__(self, env: Mapping[str, str]) -> None:
        os.environ.update(env)
        self._learner: Any = None
        self._updater: WeightUpdater | None = None
        self._targets: tuple[Target, ...] = ()

    def place(self) -> NodePlace:
        """Returns the place of this actor."""
        return place()

    def build(
        self, make: Callable[..., Any], rank: int, world_size: int, meet: str, timeout_s: float, settings: Any
    ) -> None:
        """Joins the trainers' process group, which meets at ``meet`` (``host:port``), and builds the learner."""
        host, _, port = meet.rpartition(":")
        local_rank = 0  # Ray shows an actor its own GPUs and no others
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        os.environ.update(zip(names, map(str, (rank, world_size, local_rank, host, port)), strict=True))
        gpu = bool(place().gpus)
        if gpu:
            torch.cuda.set_device(0)
        limit = timedelta(seconds=timeout_s)
        store = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=limit)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if gpu else "gloo",
            store=dist.PrefixStore("weightcast-train", store),
            rank=rank,
            world_size=world_size,
            timeout=limit,
        )
        self._learner = make(torch.device("cuda", 0) if gpu else torch.device("cpu"), **settings)

    def call(self, method: str, args: tuple[Any, ...], settings: Mapping[str, Any]) -> Any:
        """Calls a method of the learner."""
        return getattr(self._learner, method)(*args, **settings)

    def send(self, targets: tuple[Target, ...], version: int, options: UpdateOptions) -> UpdateReport:
        """Sends the learner's weights to these engines."""
        if self._updater is None:
            self._updater = WeightUpdater.connect(self._learner.model, targets, **options)
        elif targets != self._targets:
            self._updater.retarget(targets)
        self._targets = targets
        return self._updater.update(version=version)

    def catch_up(self, targets: tuple[Target, ...], version: int) -> UpdateReport | None:
        """Gives engines that are behind the version that was sent last."""
        if self._updater is None:
            raise ConfigError(
                f"engines cannot catch up with version {version}: these trainers have not sent it, so their weights "
                "may differ from it",
                hint="call update() with a new version",
            )
        self._targets = targets
        return self._updater.retarget(targets, catch_up=True)

    def release(self) -> None:
        """Makes engines unmap this rank's memory."""
        if self._updater is not None:
            self._updater.release()

    def close(self) -> None:
        """Leaves the engines and the process group."""
        if self._updater is not None:
            self._updater.close()
        if dist.is_initialized():
            dist.destroy_process_group()
