"""Runs inference servers as processes of Ray actors: starts, checks, restarts them, puts them to sleep and wakes them.

An engine has one actor in each of its bundles, which reserves the place.  The first actor runs the server, on the GPUs
of all.  ``TrainWorkers`` sends weights.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import ray

from weightcast.config import Target
from weightcast.errors import ConfigError, EngineFailure, WeightcastError
from weightcast.ray.actors import NodePlace, collect
from weightcast.ray.bundles import Bundles
from weightcast.ray.cluster import require_cluster
from weightcast.ray.engine_kinds import EngineKind, wake_requests
from weightcast.ray.engine_slot import EngineSlot
from weightcast.report import UpdateReport

_POLL_S = 0.2
_GRACE_S = 10.0
_STOP_S = 20.0

RayEngineState = Literal["starting", "waiting", "serving", "dead"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHealth:
    """The state of one engine.

    Attributes:
        state: ``serving`` the current version, ``waiting`` for it (just restarted, or left out of an update), or
            ``dead``.
    """

    number: int
    url: str
    state: RayEngineState
    words: str = ""


class RayEngine:
    """An engine: its actors, its URL and its state."""

    def __init__(self, number: int, bundles: Bundles) -> None:
        self.number = number
        self.bundles = bundles
        self.slots: list[Any] = []
        self.url = ""
        self.state: RayEngineState = "dead"
        self.words = ""
        self.place: NodePlace | None = None

    @property
    def name(self) -> str:
        where = f" ({self.url}, pid {self.place.pid} on {self.place.address})" if self.place is not None else ""
        return f"engine {self.number}{where}"


class RolloutEngines:
    """Several engines of one kind.

    Attributes:
        version: Version of the last update that an engine serves; None before the first.
    """

    def __init__(
        self,
        kind: EngineKind,
        places: Sequence[Bundles],
        *,
        api_key: str | None = None,
        log_folder: Path | None = None,
        start_timeout_s: float = 600.0,
        health_timeout_s: float = 30.0,
    ) -> None:
        """Starts all engines and waits until they serve.

        Args:
            places: Bundles of each engine, one for each of its ranks, all on one node.
            api_key: API key of the engines, if their command line sets one.
            log_folder: Folder of ``engine-N.log`` on the engine's node; None keeps the last 4000 bytes in memory.
            start_timeout_s: Deadline for an engine to serve, in seconds.
            health_timeout_s: Deadline of a health check, in seconds; a silent engine is dead.

        Raises:
            ConfigError: There is no cluster or no engine, or an engine's bundles lie on several nodes.
            EngineFailure: An engine did not start to serve; the message has its last output.
        """
        require_cluster()
        if not places:
            raise ConfigError("no engine to start")
        self._kind = kind
        self._api_key = api_key
        self._log_folder = log_folder
        self._start_timeout_s = start_timeout_s
        self._health_timeout_s = health_timeout_s
        self._closed = False
        self._members = [RayEngine(number, bundles) for number, bundles in enumerate(places)]
        self.version: int | None = None
        try:
            self._start(self._members)
            self.admit_started()
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._members)

    @property
    def urls(self) -> tuple[str, ...]:
        """URLs of the engines that serve the current version, to which requests may go."""
        return tuple(member.url for member in self._members if member.state == "serving")

    @property
    def targets(self) -> tuple[Target, ...]:
        """The engines that are alive, for a ``WeightUpdater``."""
        return self._targets("serving", "waiting")

    @property
    def waiting(self) -> tuple[Target, ...]:
        """The engines that are alive and do not serve the current version."""
        return self._targets("waiting")

    def check(self) -> list[EngineHealth]:
        """Checks every engine.  Ends those that are dead, unhealthy or silent and drops them from ``urls``."""
        alive = self._in_state("starting", "waiting", "serving")
        asked = {member.number: member.slots[0].look.remote() for member in alive}
        timeout_s = self._health_timeout_s + _GRACE_S
        for member in alive:
            try:
                [look] = collect([asked[member.number]], names=[member.name], what="health", timeout_s=timeout_s)
                if not look.healthy:
                    self._bury(member, look.why)
            except WeightcastError as error:
                self._bury(member, str(error))
        return [
            EngineHealth(number=member.number, url=member.url, state=member.state, words=member.words)
            for member in self._members
        ]

    def restart_dead(self) -> list[int]:
        """Checks every engine and restarts the dead ones.  They get new URLs and serve nothing until an update.

        Returns:
            Numbers of the restarted engines.

        Raises:
            EngineFailure: An engine did not start to serve again.
        """
        self.check()
        dead = self._in_state("dead")
        self._start(dead)
        return [member.number for member in dead]

    def admit(self, report: UpdateReport | None) -> None:
        """Limits ``urls`` to the engines that serve an update's version; does nothing if ``report`` is None."""
        if report is None:
            return
        rows = {row.url: row for row in report.targets}
        moved = any(row.status == "serving" for row in report.targets)
        if moved:
            self.version = report.version
        for member in self._members:
            row = rows.get(member.url)
            if row is None or member.state == "dead":
                continue
            if row.status == "serving":
                member.state = "serving"
            elif (
                row.status in ("quarantined", "unknown") or moved
            ):  # an untouched engine serves an older version than the others
                member.state = "waiting"

    def admit_started(self) -> None:
        """Admits engines before the first update, with the weights that they were started with."""
        for member in self._in_state("waiting"):
            member.state = "serving"

    def sleep(self, *, timeout_s: float = 120.0) -> None:
        """Frees the accelerators of all engines, for a trainer on the same ones.

        Raises:
            ConfigError: This kind of engine cannot sleep.
            EngineFailure, TargetError: An engine refused or did not answer.
        """
        self._ask_all([(path, b"{}") for path in self._kind.sleep], "sleep", timeout_s)

    def wake(self, *, tags: Sequence[str] = (), timeout_s: float = 120.0) -> None:
        """Wakes all engines after ``sleep``.

        Args:
            tags: Memory to wake, by the engine's own names: ``weights`` before an update and ``kv_cache`` after it
                save the memory of the cache while the trainer still holds its own.  All of it without.
            timeout_s: Deadline of each engine, in seconds.

        Raises:
            ConfigError: This kind of engine cannot sleep, or takes no tags.
            EngineFailure, TargetError: An engine refused or did not answer.
        """
        self._ask_all(wake_requests(self._kind, tags), "wake up", timeout_s)

    def pids(self) -> tuple[int, ...]:
        """Returns the process id of each engine's actor, on its node."""
        return tuple(member.place.pid if member.place is not None else 0 for member in self._members)

    def close(self) -> None:
        """Ends every engine and everything that it has started; safe to call twice."""
        if self._closed:
            return
        self._closed = True
        if ray.is_initialized():
            self._end(self._members)
        for member in self._members:
            member.bundles.close()

    def __enter__(self) -> RolloutEngines:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _in_state(self, *states: RayEngineState) -> list[RayEngine]:
        return [member for member in self._members if member.state in states]

    def _targets(self, *states: RayEngineState) -> tuple[Target, ...]:
        members = self._in_state(*states)
        return tuple(Target(one.url, api_key=self._api_key, engine=self._kind.engine) for one in members)

    def _start(self, members: Sequence[RayEngine]) -> None:
        """Starts these engines side by side; they are ``waiting`` when this returns."""
        deadline = time.monotonic() + self._start_timeout_s
        for member in members:
            member.slots = [
                EngineSlot.options(**member.bundles.options(index)).remote() for index in member.bundles.indices
            ]
            member.state, member.words, member.place = "starting", "", None
        for member in members:
            self._launch(member, max(deadline - time.monotonic(), _GRACE_S))
        starting = list(members)
        while starting:
            starting = [member for member in starting if not self._has_started(member)]
            if starting and time.monotonic() > deadline:
                late = ", ".join(member.name for member in starting)
                raise EngineFailure(
                    f"{late} did not start to serve within {self._start_timeout_s:g} s",
                    ranks=[member.number for member in starting],
                )
            time.sleep(_POLL_S if starting else 0)

    def _launch(self, member: RayEngine, timeout_s: float) -> None:
        names = [f"{member.name} slot {slot}" for slot in range(len(member.slots))]
        asked = [slot.place.remote() for slot in member.slots]
        places: list[NodePlace] = collect(asked, names=names, what="place", timeout_s=timeout_s)
        nodes = sorted({found.address for found in places})
        if len(nodes) > 1:
            raise ConfigError(
                f"engine {member.number} was given bundles on {', '.join(nodes)}; a server is one process on one node",
                hint="give it bundles of one node, or a server that spreads its ranks itself (--executor ray)",
            )
        gpus = [gpu for found in places for gpu in found.gpus]
        log_file = None
        if self._log_folder is not None:
            self._log_folder.mkdir(parents=True, exist_ok=True)
            log_file = str(self._log_folder.absolute() / f"engine-{member.number}.log")
        start = member.slots[0].start.remote(
            self._kind, len(member.slots), gpus, self._api_key, log_file, self._health_timeout_s
        )
        [member.url] = collect([start], names=[member.name], what="start", timeout_s=timeout_s)
        member.place = places[0]

    def _has_started(self, member: RayEngine) -> bool:
        asked = member.slots[0].look.remote()
        [look] = collect([asked], names=[member.name], what="start", timeout_s=self._health_timeout_s + _GRACE_S)
        if look.exit_code is not None:
            raise EngineFailure(f"{member.name} did not start: {look.why}", ranks=[member.number])
        if look.healthy:
            member.state = "waiting"
        return bool(look.healthy)

    def _ask_all(self, requests: Sequence[tuple[str, bytes]], what: str, timeout_s: float) -> None:
        if not requests:
            raise ConfigError(f"engines of this kind cannot {what}")
        alive = self._in_state("starting", "waiting", "serving")
        asked = [member.slots[0].ask.remote(tuple(requests), timeout_s) for member in alive]
        collect(asked, names=[member.name for member in alive], what=what, timeout_s=timeout_s + _GRACE_S)

    def _bury(self, member: RayEngine, words: str) -> None:
        """Ends an engine, even one that merely does not answer: it must not come back with old weights."""
        member.state, member.words = "dead", words
        self._end([member])

    def _end(self, members: Sequence[RayEngine]) -> None:
        """Ends the servers before their actors, so that their memory is free when Ray reuses the bundles."""
        stopping = [member.slots[0].stop.remote() for member in members if member.slots]
        if stopping:
            ray.wait(stopping, num_returns=len(stopping), timeout=_STOP_S)
        for member in members:
            for slot in member.slots:
                ray.kill(slot)  # the supervisor sees the pipe close and ends a server that is still there
            member.slots = []
