"""Inference servers as processes of Ray actors: started, looked after, restarted, put to sleep and woken.

An engine has one actor in each of its bundles, which holds the place; the first runs the server, on the GPUs of all.
Who is alive and who serves which version is decided here; weights are sent by ``TrainWorkers``.  It does not know
what a kind of engine is called: see ``kinds``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
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
from weightcast.ray.kinds import EngineKind
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
    """What an engine's actor sees.

    Attributes:
        exit_code: Of its process; None while that runs.
        healthy: Its health path answered 200 just now.
        words: Why not, or the end of what the process said.
    """

    exit_code: int | None
    healthy: bool
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHealth:
    """One engine, as of now.

    Attributes:
        number: Which.
        url: Where it listens.
        state: ``serving`` the current version, ``waiting`` for it (just restarted, or left out of an update), or
            ``dead``.
        words: Why it is dead.
    """

    number: int
    url: str
    state: State
    words: str = ""


@remote
class _Slot:
    """Holds one bundle of an engine; the first of an engine also runs its server."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._client: Client | None = None
        self._health = ""
        self._log: IO[bytes] | None = None

    def place(self) -> Place:
        return place()

    def start(
        self, kind: EngineKind, tp: int, gpus: Sequence[str], api_key: str | None, log_file: str | None, look_s: float
    ) -> str:
        """The server's URL; it does not answer yet."""
        host = place().address
        port = quiet_port(host)
        words = {"{host}": host, "{port}": str(port), "{tp}": str(tp)}
        command = [_fill(part, words) for part in kind.command]
        env = dict(os.environ) | dict(kind.env)
        if gpus:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        self._log = Path(log_file).open("ab+") if log_file else tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "weightcast.ray.keeper", *command],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            env=env,
        )
        url = f"http://{host}:{port}"
        self._client = Client(Target(url, api_key=api_key), timeout_s=look_s)
        self._health = kind.health
        return url

    def look(self) -> Look:
        """Whether the server runs and answers."""
        assert self._process is not None
        assert self._client is not None
        words = ""
        if self._process.poll() is None:
            try:
                self._client.get_json(self._health)
            except WeightcastError as error:
                words = str(error)
                with suppress(subprocess.TimeoutExpired):  # who broke the connection may be about to be gone
                    self._process.wait(_DYING_S)
        code = self._process.poll()
        if code is not None:
            words = self._tail()
        return Look(exit_code=code, healthy=not words and code is None, words=words)

    def ask(self, paths: Sequence[str], timeout_s: float) -> None:
        """POST to each path in turn."""
        assert self._client is not None
        for path in paths:
            self._client.post_json(path, b"{}", timeout_s=timeout_s)

    def stop(self) -> None:
        """End the server; returns when it is gone."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait()
        if self._client is not None:
            self._client.close()
        if self._log is not None:
            self._log.close()

    def _tail(self) -> str:
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
        """Start them all and wait until they serve.

        Args:
            kind: How an engine is run.
            places: Bundles of each engine, one for each of its ranks, all on one node.
            api_key: What the engines ask for, if the command line says so.
            log_folder: Where ``engine-N.log`` goes, on the engine's node; None keeps it until the engine ends.
            start_timeout_s: Deadline for an engine to serve, in seconds.
            health_timeout_s: An engine that says nothing for so long is dead, in seconds.

        Raises:
            ConfigError: No cluster, no engine, or an engine's bundles lie on several nodes.
            EngineFailure: One did not come to serve; the text has the end of what it said.
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
        """The engines that serve the current version: where requests may go."""
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
        """Look at every engine.  One that is dead, unwell or silent is ended, and in ``urls`` no longer."""
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
        """Look at every engine and start the dead again.  They wait for weights, under a new URL, and serve nobody.

        Returns:
            Numbers of the engines that were started.

        Raises:
            EngineFailure: One did not come to serve again.
        """
        self.check()
        dead = [member for member in self._members if member.state == "dead"]
        self._start(dead)
        return [member.number for member in dead]

    def admit(self, report: UpdateReport | None) -> None:
        """After an update: whoever serves its version is in ``urls``, and nobody else; None if nothing was updated."""
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
            elif row.status == "quarantined" or moved:  # who was left untouched serves what the others do no longer
                member.state = "waiting"

    def admit_started(self) -> None:
        """Before the first update: engines serve the weights that they were started with."""
        for member in self._members:
            if member.state == "waiting":
                member.state = "serving"

    def sleep(self, *, timeout_s: float = 120.0) -> None:
        """Free the accelerators of all engines, for a trainer on the same ones.

        Raises:
            ConfigError: This kind of engine cannot.
            EngineFailure, TargetError: An engine refused or did not answer.
        """
        self._ask_all(self._kind.sleep, "sleep", timeout_s)

    def wake(self, *, timeout_s: float = 120.0) -> None:
        """Undo ``sleep``."""
        self._ask_all(self._kind.wake, "wake up", timeout_s)

    def pids(self) -> tuple[int, ...]:
        """Process id of each engine's actor, on its node."""
        return tuple(member.place.pid if member.place is not None else 0 for member in self._members)

    def close(self) -> None:
        """End every engine and everything that it started; safe to call twice."""
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
        """Start these side by side; they are ``waiting`` when this returns."""
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
                raise EngineFailure(f"{late}: not serving after {self._start_timeout_s:g} s", ranks=_numbers(starting))
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

    def _ask_all(self, paths: Sequence[str], what: str, timeout_s: float) -> None:
        if not paths:
            raise ConfigError(f"engines of this kind cannot {what}")
        alive = [member for member in self._members if member.state != "dead"]
        asked = [member.slots[0].ask.remote(tuple(paths), timeout_s) for member in alive]
        collect(asked, names=[member.name for member in alive], what=what, timeout_s=timeout_s + _GRACE_S)

    def _bury(self, member: _Member, words: str) -> None:
        """A server that does not answer is ended too: it must not come back with old weights."""
        member.state, member.words = "dead", words
        self._end([member])

    def _end(self, members: Sequence[_Member]) -> None:
        """Servers first: what comes into their place shall find its memory free."""
        stopping = [member.slots[0].stop.remote() for member in members if member.slots]
        if stopping:
            ray.wait(stopping, num_returns=len(stopping), timeout=_STOP_S)
        for member in members:
            for slot in member.slots:
                ray.kill(slot)  # its keeper sees the pipe close, and ends a server that is still there
            member.slots = []


def _why(look: Look) -> str:
    if look.exit_code is None:
        return look.words
    return f"it ended with exit code {look.exit_code}; the end of what it said:\n{look.words}"


def _fill(part: str, words: dict[str, str]) -> str:
    for word, value in words.items():
        part = part.replace(word, value)
    return part


def _numbers(members: Sequence[_Member]) -> list[int]:
    return [member.number for member in members]
