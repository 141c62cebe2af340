"""A training job whose ranks are Ray actors, each with its end of a ``WeightUpdater``.

The caller provides the learner.  This module gives it a device and a process group, calls its methods on every rank,
and sends its weights to engines.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import ray
import torch
import torch.distributed as dist

from weightcast.comm.rendezvous import Rendezvous
from weightcast.config import Target
from weightcast.errors import ConfigError, TrainerRankFailed, UpdateFailed, WeightcastError
from weightcast.ray.actors import ActorsFailed, Place, collect, place, remote
from weightcast.ray.engines import RolloutEngines
from weightcast.ray.placement import Bundles, require_cluster
from weightcast.report import UpdateReport
from weightcast.update.updater import WeightUpdater

_STOP_S = 10.0


@remote
class _TrainRank:
    """One rank, on its actor's main thread."""

    def __init__(self, env: Mapping[str, str]) -> None:
        os.environ.update(env)
        self._learner: Any = None
        self._updater: WeightUpdater | None = None
        self._targets: tuple[Target, ...] = ()

    def place(self) -> Place:
        return place()

    def build(
        self, make: Callable[..., Any], rank: int, world_size: int, meet: str, timeout_s: float, settings: Any
    ) -> None:
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
        return getattr(self._learner, method)(*args, **settings)

    def send(self, targets: tuple[Target, ...], version: int, options: Mapping[str, Any]) -> UpdateReport:
        if self._updater is None:
            self._updater = WeightUpdater.connect(self._learner.model, targets, **options)
        elif targets != self._targets:
            self._updater.retarget(targets)
        self._targets = targets
        return self._updater.update(version=version)

    def catch_up(self, targets: tuple[Target, ...], version: int) -> UpdateReport | None:
        if self._updater is None:
            raise ConfigError(
                f"engines cannot catch up with version {version}: these trainers have not sent it, so their weights "
                "may differ from it",
                hint="call update() with a new version",
            )
        self._targets = targets
        return self._updater.retarget(targets, catch_up=True)

    def close(self) -> None:
        if self._updater is not None:
            self._updater.close()
        if dist.is_initialized():
            dist.destroy_process_group()


class TrainWorkers:
    """The ranks of one training job.

    Attributes:
        places: Place of each rank.
    """

    def __init__(
        self,
        make: Callable[..., Any],
        bundles: Bundles,
        settings: Mapping[str, Any] | None = None,
        *,
        update: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        """Starts the ranks, makes their process group, and builds a learner on each.

        Args:
            make: Function that every rank calls, in a process group, as ``make(device, **settings)``.  It returns the
                learner, whose attribute ``model`` goes to ``WeightUpdater.connect``.
            bundles: Bundles of the ranks, one for each.
            settings: Keyword arguments of ``make``.
            update: Keyword arguments of ``WeightUpdater.connect``: transport, bucket_bytes, pause, ...
            env: Environment of the ranks, e.g. ``{"OMP_NUM_THREADS": "1"}``.
            timeout_s: Deadline of the start, and of every call that sets none, in seconds.

        Raises:
            ConfigError: There is no cluster.
            TrainerRankFailed: A rank could not start; the message names it and has its words.
        """
        require_cluster()
        self._bundles = bundles
        self._options = dict(update or {})
        self._timeout_s = timeout_s
        self._broken = ""
        self._closed = False
        self.places: tuple[Place, ...] = ()
        self._actors: list[Any] = [
            _TrainRank.options(**bundles.options(index)).remote(dict(env or {})) for index in bundles.indices
        ]
        self._names = [f"trainer rank {rank}" for rank in range(len(self._actors))]
        try:
            self.places = tuple(self._collect([actor.place.remote() for actor in self._actors], "start", timeout_s))
            self._names = [f"trainer rank {rank} (pid {at.pid} on {at.address})" for rank, at in enumerate(self.places)]
            self._meeting = Rendezvous(host=ray.util.get_node_ip_address(), timeout_s=timeout_s)
            meet = f"{self._meeting.host}:{self._meeting.port}"
            building = [
                actor.build.remote(make, rank, len(self._actors), meet, timeout_s, dict(settings or {}))
                for rank, actor in enumerate(self._actors)
            ]
            self._collect(building, "start", timeout_s)
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._actors)

    def call(self, method: str, *args: Any, timeout_s: float | None = None, **settings: Any) -> list[Any]:
        """Calls a method of the learner on every rank at once.

        Returns:
            The results, in order of rank.

        Raises:
            TrainerRankFailed: Some ranks failed, died or did not answer in time; the message names them.
        """
        asked = [actor.call.remote(method, args, settings) for actor in self._actors]
        return self._collect(asked, method, timeout_s or self._timeout_s)

    def update(
        self, engines: RolloutEngines | Sequence[Target | str], *, version: int, timeout_s: float | None = None
    ) -> UpdateReport:
        """Sends the learner's weights to every engine.

        Dead engines of a ``RolloutEngines`` are restarted first.  Every engine that serves this version after the
        update is in its ``urls``.

        Raises:
            UpdateFailed, TargetError, ConfigError: As ``WeightUpdater.connect`` and ``update``.
            EngineFailure: A dead engine cannot be restarted.
            TrainerRankFailed: A rank failed, died or did not answer in time.
        """
        if not isinstance(engines, RolloutEngines):
            return self._send(tuple(_target(target) for target in engines), version, timeout_s)
        engines.restart_dead()
        try:
            report = self._send(engines.targets, version, timeout_s)
        except WeightcastError as error:
            engines.admit(error.report if isinstance(error, UpdateFailed) else None)
            raise
        engines.admit(report)
        return report

    def recover(self, engines: RolloutEngines, *, timeout_s: float | None = None) -> UpdateReport | None:
        """Restarts dead engines and gives them the version that the others serve.

        The others serve meanwhile.  The learner must still have the weights of that version: call this method before
        the next optimiser step, or let the next ``update`` restart the engines.

        Returns:
            The report for the restarted engines; None if all were alive.

        Raises:
            ConfigError: The weights have changed since that version was sent, or no digest can tell.  No engine has
                switched, and the restarted engines wait for the next ``update``.
            UpdateFailed, TargetError, EngineFailure, TrainerRankFailed: As ``update``.
        """
        engines.restart_dead()
        if not engines.waiting:
            return None
        if engines.version is None:  # before the first update all serve the weights that they were started with
            engines.admit_started()
            return None
        asked = [actor.catch_up.remote(engines.targets, engines.version) for actor in self._actors]
        try:
            found = self._collect(asked, f"recovery at version {engines.version}", timeout_s or self._timeout_s)
        except WeightcastError as error:
            engines.admit(error.report if isinstance(error, UpdateFailed) else None)
            raise
        report: UpdateReport | None = found[0]
        engines.admit(report)
        return report

    def close(self) -> None:
        """Ends every rank and removes the placement group if it is owned; safe to call twice."""
        if self._closed:
            return
        self._closed = True
        if ray.is_initialized():
            if not self._broken:
                ray.wait(
                    [actor.close.remote() for actor in self._actors], num_returns=len(self._actors), timeout=_STOP_S
                )
            for actor in self._actors:
                ray.kill(actor)
        self._bundles.close()

    def __enter__(self) -> TrainWorkers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send(self, targets: tuple[Target, ...], version: int, timeout_s: float | None) -> UpdateReport:
        asked = [actor.send.remote(targets, version, self._options) for actor in self._actors]
        return self._collect(asked, f"update to version {version}", timeout_s or self._timeout_s)[0]

    def _collect(self, asked: list[Any], what: str, timeout_s: float) -> list[Any]:
        if self._closed:
            raise ConfigError("these trainer ranks were closed")
        if self._broken:
            raise TrainerRankFailed(self._broken, hint="start the trainers again")
        try:
            return collect(asked, names=self._names, what=what, timeout_s=timeout_s)
        except ActorsFailed as error:
            if error.gone:
                self._broken = str(error)
            raise TrainerRankFailed(str(error), hint="start the trainers again" if error.gone else None) from error


def _target(target: Target | str) -> Target:
    return Target(target) if isinstance(target, str) else target
