"""A training job whose ranks are Ray actors; the caller provides the learner."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray

from weightcast.comm.rendezvous import Rendezvous
from weightcast.config import Target
from weightcast.errors import ConfigError, TrainerRankFailed, WeightcastError
from weightcast.ray.actors import ActorsFailed, NodePlace, collect
from weightcast.ray.bundles import Bundles
from weightcast.ray.cluster import require_cluster
from weightcast.ray.engine_kinds import EngineKind
from weightcast.ray.engines import RolloutEngines
from weightcast.ray.train_rank import TrainRank
from weightcast.report import UpdateReport
from weightcast.update.arguments import UpdateOptions, config_of

_STOP_S = 10.0


class TrainWorkers:
    """The ranks of one training job."""

    def __init__(
        self,
        make: Callable[..., Any],
        bundles: Bundles,
        settings: Mapping[str, Any] | None = None,
        *,
        update: UpdateOptions | None = None,
        env: Mapping[str, str] | None = None,
        engines: EngineKind | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        """Starts the ranks, makes their process group, and builds a learner on each.

        Args:
            make: Function that every rank calls, in a process group, as ``make(device, **settings)``.  It returns the
                learner, whose attribute ``model`` goes to ``WeightUpdater.connect``.
            settings: Keyword arguments of ``make``.
            update: Keyword arguments of ``WeightUpdater.connect``: transport, bucket_bytes, pause, ...
            env: Environment of the ranks, e.g. ``{"OMP_NUM_THREADS": "1"}``.
            engines: Kind of the engines, whose settings of NCCL the ranks get, unless ``env`` has others.
            timeout_s: Deadline of the start, and of every call that sets none, in seconds.

        Raises:
            ConfigError: There is no cluster.
            TrainerRankFailed: A rank could not start; the message names it and has its words.
        """
        require_cluster()
        self._bundles = bundles
        self._options: UpdateOptions = {**(update or {})}
        config_of(self._options)  # before anything starts
        self._timeout_s = timeout_s
        self._broken = ""
        self._closed = False
        self.places: tuple[NodePlace, ...] = ()
        environment = {**(engines.trainer_env if engines is not None else {}), **(env or {})}
        self._actors: list[Any] = [
            TrainRank.options(**bundles.options(index)).remote(environment) for index in bundles.indices
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
            targets = tuple(Target(one) if isinstance(one, str) else one for one in engines)
            return self._send(targets, version, timeout_s)
        engines.restart_dead()
        try:
            report = self._send(engines.targets, version, timeout_s)
        except WeightcastError as error:
            engines.admit(error.report)
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
            engines.admit(error.report)
            raise
        report: UpdateReport | None = found[0]
        engines.admit(report)
        return report

    def release(self, *, timeout_s: float | None = None) -> None:
        """Makes engines unmap the ranks' memory, as ``WeightUpdater.release``; the next ``update`` maps it again.

        Call it before the learner frees, offloads or moves weights that were sent with ``keep_mapped=True``.  Before
        the first update it does nothing.

        Raises:
            TrainerRankFailed: A rank failed, died or did not answer in time.
        """
        asked = [actor.release.remote() for actor in self._actors]
        self._collect(asked, "release", timeout_s or self._timeout_s)

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
