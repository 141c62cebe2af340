"""Runs inference servers as processes of Ray actors: starts, checks, restarts them, puts them to sleep and wakes them.

An engine has one actor in each of its bundles, which reserves the place.  The first actor runs the server, on the GPUs
of all.  This module knows which engines are alive and which serve the current version; ``TrainWorkers`` sends weights.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import ray

from weightcast.comm.http import Client
from weightcast.comm.ports import quiet_port
from weightcast.config import Target
from weightcast.errors import ConfigError, EngineFailure, WeightcastError
from weightcast.ray.actors import Place, collect, place, remote
from weightcast.ray.engine_kinds import EngineKind, wake_requests
from weightcast.ray.log_tail import Tail
from weightcast.ray.placement import Bundles, require_cluster
from weightcast.report import UpdateReport

_POLL_S = 0.2
_GRACE_S = 10.0
_STOP_S = 20.0
_DYING_S = 0.3
_TAIL_BYTES = 4000

State = Literal["starting", "waiting", "serving", "dead"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """One health check of an engine.

    Attributes:
        exit_code: Exit code of the server; None while it runs.
        healthy: Whether the health path answered 200.
        words: Reason why it did not, or the last output of the server.
    """

    exit_code: int | None
    healthy: bool
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHealth:
    """The state of one engine.

    Attributes:
        number: Number of the engine.
        url: URL of its server.
        state: ``serving`` the current version, ``waiting`` for it (just restarted, or left out of an update), or
            ``dead``.
        words: Reason of its death.
    """

    number: int
    url: str
    state: State
    words: str = ""


@remote
class _Slot:
    """Reserves one bundle of an engine; the engine's first slot also runs its server."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._client: Client | None = None
        self._health = ""
        self._log: IO[bytes] | None = None
        self._output: Tail | None = None  # used if there is no log file

    def place(self) -> Place:
        return place()

    def start(
        self, kind: EngineKind, tp: int, gpus: Sequence[str], api_key: str | None, log_file: str | None, look_s: float
    ) -> str:
        """Starts the server and returns its URL, which does not answer yet."""
        host = place().address
        port = quiet_port(host)
        words = {"{host}": host, "{port}": str(port), "{tp}": str(tp)}
        command = [_fill(part, words) for part in kind.command]
        env = dict(os.environ) | dict(kind.env)
        if gpus:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        self._log = Path(log_file).open("ab+") if log_file else None  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "weightcast.ray.engine_supervisor", *command],
            stdin=subprocess.PIPE,
            stdout=self._log or subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=env,
        )
        if self._process.stdout is not None:
            with self._process.stdout as pipe:
                self._output = Tail(pipe, num_bytes=_TAIL_BYTES)
        url = f"http://{host}:{port}"
        self._client = Client(Target(url, api_key=api_key), timeout_s=look_s)
        self._health = kind.health
        return url

    def look(self) -> Look:
        """Checks whether the server runs and answers."""
        assert self._process is not None
        assert self._client is not None
        words = ""
        if self._process.poll() is None:
            try:
                self._client.get_json(self._health)
            except WeightcastError as error:
                words = str(error)
                with suppress(subprocess.TimeoutExpired):  # a server that broke the connection may be about to end
                    self._process.wait(_DYING_S)
        code = self._process.poll()
        if code is not None:
            words = self._tail()
        return Look(exit_code=code, healthy=not words and code is None, words=words)

    def ask(self, requests: Sequence[tuple[str, bytes]], timeout_s: float) -> None:
        """Posts each body to its path in turn."""
        assert self._client is not None
        for path, body in requests:
            self._client.post_json(path, body, timeout_s=timeout_s)

    def stop(self) -> None:
        """Ends the server and waits until it is gone."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait()
        if self._client is not None:
            self._client.close()
        if self._log is not None:
            self._log.close()

    def _tail(self) -> str:
        if self._output is not None:
            return self._output.text(patience_s=_DYING_S)
        assert self._log is not None
        size = os.fstat(self._log.fileno()).st_size
        start = max(size - _TAIL_BYTES, 0)
        return os.pread(self._log.fileno(), _TAIL_BYTES, start).decode(errors="replace").strip()


class _Member:
    """One engine."""

    def __init__(self, number: int, bundles: Bundles) -> None:
        self.number = number
        self.bundles = bundles
        self.slots: list[Any] = []
        self.url = ""
        self.state: State = "dead"
        self.words = ""
        self.place: Place | None = None

    @property
    def name(self) -> str:
        where = f" ({self.url}, pid {self.place.pid} on {self.place.address})" if self.place is not None else ""
        return f"engine {self.number}{where}"


class RolloutEngines:
    """Several engines of one kind."""

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
            kind: Kind of the engines.
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
        self._members = [_Member(number, bundles) for number, bundles in enumerate(places)]
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
        alive = [member for member in self._members if member.state != "dead"]
        asked = {member.number: member.slots[0].look.remote() for member in alive}
        timeout_s = self._health_timeout_s + _GRACE_S
        for member in alive:
            try:
                [look] = collect([asked[member.number]], names=[member.name], what="health", timeout_s=timeout_s)
                if not look.healthy:
                    self._bury(member, _why(look))
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
        dead = [member for member in self._members if member.state == "dead"]
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
        for member in self._members:
            if member.state == "waiting":
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

    def _targets(self, *states: State) -> tuple[Target, ...]:
        return tuple(Target(member.url, api_key=self._api_key) for member in self._members if member.state in states)

    def _start(self, members: Sequence[_Member]) -> None:
        """Starts these engines side by side; they are ``waiting`` when this returns."""
        deadline = time.monotonic() + self._start_timeout_s
        for member in members:
            member.slots = [_Slot.options(**member.bundles.options(index)).remote() for index in member.bundles.indices]
            member.state, member.words, member.place = "starting", "", None
        for member in members:
            self._launch(member, max(deadline - time.monotonic(), _GRACE_S))
        starting = list(members)
        while starting:
            starting = [member for member in starting if not self._has_started(member)]
            if starting and time.monotonic() > deadline:
                late = ", ".join(member.name for member in starting)
                raise EngineFailure(
                    f"{late} did not start to serve within {self._start_timeout_s:g} s", ranks=_numbers(starting)
                )
            time.sleep(_POLL_S if starting else 0)

    def _launch(self, member: _Member, timeout_s: float) -> None:
        names = [f"{member.name} slot {slot}" for slot in range(len(member.slots))]
        asked = [slot.place.remote() for slot in member.slots]
        places: list[Place] = collect(asked, names=names, what="place", timeout_s=timeout_s)
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

    def _has_started(self, member: _Member) -> bool:
        asked = member.slots[0].look.remote()
        [look] = collect([asked], names=[member.name], what="start", timeout_s=self._health_timeout_s + _GRACE_S)
        if look.exit_code is not None:
            raise EngineFailure(f"{member.name} did not start: {_why(look)}", ranks=[member.number])
        if look.healthy:
            member.state = "waiting"
        return bool(look.healthy)

    def _ask_all(self, requests: Sequence[tuple[str, bytes]], what: str, timeout_s: float) -> None:
        if not requests:
            raise ConfigError(f"engines of this kind cannot {what}")
        alive = [member for member in self._members if member.state != "dead"]
        asked = [member.slots[0].ask.remote(tuple(requests), timeout_s) for member in alive]
        collect(asked, names=[member.name for member in alive], what=what, timeout_s=timeout_s + _GRACE_S)

    def _bury(self, member: _Member, words: str) -> None:
        """Ends an engine, even one that merely does not answer: it must not come back with old weights."""
        member.state, member.words = "dead", words
        self._end([member])

    def _end(self, members: Sequence[_Member]) -> None:
        """Ends the servers before their actors, so that their memory is free when Ray reuses the bundles."""
        stopping = [member.slots[0].stop.remote() for member in members if member.slots]
        if stopping:
            ray.wait(stopping, num_returns=len(stopping), timeout=_STOP_S)
        for member in members:
            for slot in member.slots:
                ray.kill(slot)  # the supervisor sees the pipe close and ends a server that is still there
            member.slots = []


def _why(look: Look) -> str:
    if look.exit_code is None:
        return look.words
    return f"it ended with exit code {look.exit_code}; its last output:\n{look.words}"


def _fill(part: str, words: dict[str, str]) -> str:
    for word, value in words.items():
        part = part.replace(word, value)
    return part


def _numbers(members: Sequence[_Member]) -> list[int]:
    return [member.number for member in members]
