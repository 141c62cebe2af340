"""Trainer and engine processes that stay alive while update methods take turns in them.

A *method* has two halves, one for each kind of process, which the child finds by name: ``module:Class``. The rig starts
the processes once, so that every method runs in the same processes with the same weights. The rig also keeps the time:
a turn starts when the first trainer process is told to start. It ends when the last engine process reports that its
live parameters are complete and its device is synchronised.

If a process misses its deadline, the turn has failed and all processes are killed.
"""

from __future__ import annotations

import multiprocessing
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from weightcast.lab.bench.methods import Layout, MeasuringFailed, Method, Turn, WrongWeights
from weightcast.lab.bench.raw import store_for
from weightcast.lab.bench.rig_process import serve_rig

ROLES = ("trainer", "engine")


class Rig:
    """The measured processes; a context manager."""

    def __init__(self, layout: Layout, *, start_s: float = 300.0) -> None:
        self.layout = layout
        self.version = 0
        self._prepared = 0
        self._store = store_for(layout.trainers + layout.engines)
        context = multiprocessing.get_context("spawn")
        mesh = [[context.Pipe() for _ in range(layout.engines)] for _ in range(layout.trainers)]
        self._processes: list[tuple[str, int, BaseProcess, Connection]] = []
        for role, count in (("engine", layout.engines), ("trainer", layout.trainers)):
            for rank in range(count):
                mine, theirs = context.Pipe()
                ends = [row[rank][1] for row in mesh] if role == "engine" else [pair[0] for pair in mesh[rank]]
                process = context.Process(
                    target=serve_rig, args=(role, rank, layout, self._store.port, theirs, ends), daemon=False
                )
                process.start()
                theirs.close()
                self._processes.append((role, rank, process, mine))
        try:
            self._ask("hello", timeout_s=start_s)
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def prepare(self, method: Method, *, timeout_s: float) -> float:
        """Makes and prepares the halves of a method; returns the seconds that it took."""
        return self._prepare(method, timeout_s, profile=False)[0]

    def prepare_profiled(self, method: Method, *, timeout_s: float) -> tuple[float, dict[str, Any]]:
        """As ``prepare``; also returns ``trainer`` and ``engine``, the tables of a process of each role."""
        return self._prepare(method, timeout_s, profile=True)

    def _prepare(self, method: Method, timeout_s: float, *, profile: bool) -> tuple[float, dict[str, Any]]:
        started = time.monotonic()
        self._prepared += 1
        self._ask("note", method.name, timeout_s=timeout_s)
        stacks: dict[str, Any] = {}
        for answer in self._ask("prepare", method, self._prepared, profile, timeout_s=timeout_s):
            stacks |= answer
        return time.monotonic() - started, stacks

    def held(self, method: Method, *, timeout_s: float = 60.0) -> dict[str, int]:
        """Returns the memory that a method keeps between turns, in bytes: the maximum over the processes of a role."""
        return {
            f"{role}_held_bytes": max(self._ask("held", method.name, only=role, timeout_s=timeout_s)) for role in ROLES
        }

    def drop(self, method: Method, *, timeout_s: float = 60.0) -> None:
        """Closes the halves of a method."""
        self._ask("drop", method.name, timeout_s=timeout_s)

    def turn(
        self, method: Method, *, timeout_s: float, watch: bool = False, profile: bool = False
    ) -> tuple[Turn, dict[str, Any]]:
        """Runs one turn: new weights on the trainers, poison on the engines, one update, and a check of every bit.

        Args:
            watch: Also measure memory and count launches, which makes the times of this turn useless.
            profile: Also sample stacks; see ``StackSampler.table``.

        Returns:
            Times of the turn, and the watched figures.  With ``profile``, also ``trainer`` and ``engine``, the tables
            of the first process of each role.

        Raises:
            MeasuringFailed: A process failed or hung.
            WrongWeights: An engine keeps other weights than were sent.
        """
        self.version += 1
        version = self.version
        if method.writes:
            self._ask("fill", version, timeout_s=timeout_s)
        self._tell("engine", "update", method.name, version, method.pauses, watch, profile)
        self._hear("engine", timeout_s)  # the engines are ready
        self._tell("trainer", "update", method.name, version, method.pauses, watch, profile)
        trainers = self._hear("trainer", timeout_s)
        engines = self._hear("engine", timeout_s)
        # Not before the trainers have returned: an engine reads its weights back after they are usable.
        extra = {f"{role}_cpu_s": max(self._ask("spent", only=role, timeout_s=timeout_s)) for role in ROLES}
        if method.writes:
            for rank, wrong in enumerate(self._ask("check", version, only="engine", timeout_s=timeout_s)):
                if wrong:
                    raise WrongWeights(
                        f"{method.name}: engine {rank} keeps {len(wrong)} wrong tensors: {', '.join(wrong[:4])}"
                    )
        started = min(answer["started"] for answer in trainers)
        watched: dict[str, Any] = {}
        for role, answers in (("trainer", trainers), ("engine", engines)):
            if profile:
                watched[role] = answers[0]["stacks"]
            for answer in answers:
                for key, value in answer["extra"].items():
                    extra[key] = max(extra.get(key, value), value)
                for key, value in answer["watched"].items():
                    watched[f"{role}_{key}"] = max(watched.get(f"{role}_{key}", 0), value)
        return (
            Turn(
                usable_s=max(answer["usable_at"] for answer in engines) - started,
                returned_s=max(answer["ended"] for answer in trainers) - started,
                stall_s=max(answer["stall_s"] for answer in engines),
                extra={key: value for key, value in extra.items() if key != "usable_at"},
            ),
            watched,
        )

    def close(self) -> None:
        """Ends the processes, and kills those that do not end."""
        with suppress(MeasuringFailed):
            self._ask("end", timeout_s=30.0)
        for _, _, process, _ in self._processes:
            process.join(10.0)
        self.kill()

    def kill(self) -> None:
        """Kills the processes."""
        for _, _, process, connection in self._processes:
            if process.is_alive():
                process.kill()
            process.join(10.0)
            connection.close()
        self._processes.clear()

    def _ask(self, *command: Any, only: str = "", timeout_s: float) -> list[Any]:
        self._tell(only, *command)
        return self._hear(only, timeout_s)

    def _tell(self, only: str, *command: Any) -> None:
        for role, rank, _, connection in self._processes:
            if not only or role == only:
                try:
                    connection.send(command)
                except OSError:
                    self.kill()
                    raise MeasuringFailed(f"{role} process {rank} has died") from None

    def _hear(self, only: str, timeout_s: float) -> list[Any]:
        deadline = time.monotonic() + timeout_s
        answers: list[Any] = []
        waiting = [item for item in self._processes if not only or item[0] == only]
        failed = ""
        while waiting and not failed:
            for item in list(waiting):
                role, rank, _, connection = item
                if connection.poll(0.0005):
                    try:
                        ok, value = connection.recv()
                    except (EOFError, OSError):
                        ok, value = False, "the process died"
                    if not ok:
                        failed = f"{role} process {rank}: {value}"
                        break
                    answers.append((role, rank, value))
                    waiting.remove(item)
            if time.monotonic() > deadline:
                role, rank = waiting[0][:2] if waiting else ("?", 0)
                failed = failed or f"{role} process {rank} did not answer within {timeout_s:g} s"
        if failed:
            self.kill()
            raise MeasuringFailed(failed)
        return [value for _, _, value in sorted(answers, key=lambda answer: answer[:2])]
