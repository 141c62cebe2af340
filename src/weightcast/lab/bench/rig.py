"""Trainer and engine processes that stay alive while update methods take turns in them.

A *method* has two halves, one for each kind of process, which the child finds by name: ``module:Class``. The rig starts
the processes once, so that every method runs in the same processes with the same weights. The rig also keeps the time:
a turn starts when the first trainer process is told to start. It ends when the last engine process reports that its
live parameters are complete and its device is synchronised.

If a process misses its deadline, the turn has failed and all processes are killed.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import time
import traceback
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import nn

from weightcast.errors import WeightcastError
from weightcast.lab.bench.decoding import Decoding
from weightcast.lab.bench.peak import Peak, held_bytes
from weightcast.lab.bench.raw import Pipe, RawGroup, stamp, store_for, synchronize
from weightcast.lab.bench.shapes import ModelShape, model_shape
from weightcast.lab.bench.stacks import StackSampler
from weightcast.lab.bench.synthetic import Engine, Pattern, key_of, nested
from weightcast.runtime.gc_pause import spare_what_lives

Placement = Literal["colocated", "disaggregated"]


class MeasuringFailed(WeightcastError):
    """A measured process failed or hung; all processes were killed."""


class WrongWeights(MeasuringFailed):
    """An engine kept other weights than were sent; the processes still run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Processes and devices of a case.

    Attributes:
        model: Name of a model shape.
        placement: ``colocated``: engine i on trainer i's device. ``disaggregated``: on devices of their own.
        trainers: Number of trainer processes; the weights are sharded over them by rows.
        engines: Number of engine processes; each keeps the whole model.
        device: ``cpu`` or ``cuda``.
        threads: Number of torch threads in each process on a CPU.
        generate: True if engines generate all the time, so that a stall is measured and not only computed.
    """

    model: str
    placement: Placement
    trainers: int
    engines: int
    device: Literal["cpu", "cuda"]
    threads: int = 1
    generate: bool = False

    def device_of(self, role: str, rank: int) -> torch.device:
        """Returns the device of one process."""
        if self.device == "cpu":
            return torch.device("cpu")
        first = self.trainers if role == "engine" and self.placement == "disaggregated" else 0
        return torch.device("cuda", first + rank)


@dataclass(slots=True, kw_only=True)
class Side:
    """The process that a half runs in.

    Attributes:
        layout: Processes and devices of the case.
        rank: Rank among the processes of the same role.
        device: Device of this process.
        shape: Names and shapes of the model.
        pipes: Pipes to the processes of the other role, by rank.
        store_port: Port of the store for the rendezvous of groups.
        serial: Number of preparations so far, the same in all processes.
    """

    layout: Layout
    rank: int
    device: torch.device
    shape: ModelShape
    pipes: list[Pipe]
    store_port: int
    serial: int = 0
    counts: dict[str, int] = field(default_factory=dict[str, int])

    def group(self, name: str, *, rank: int, size: int) -> RawGroup:
        """Makes a plain torch group."""
        # No name is used twice: the store keeps the addresses of an earlier group's members.
        name = f"{name}/{self.serial}"
        return RawGroup(port=self.store_port, name=name, rank=rank, size=size, device=self.device)

    def count(self, what: str, number: int = 1) -> None:
        """Adds to a count in the result."""
        self.counts[what] = self.counts.get(what, 0) + number


@dataclass(slots=True, kw_only=True)
class TrainerSide(Side):
    """A trainer process: ``model`` has the checkpoint's names; DTensors if there is more than one trainer."""

    model: nn.Module
    version: int = 0


@dataclass(slots=True, kw_only=True)
class EngineSide(Side):
    """An engine process: ``engine`` has the live parameters, ``decoding`` generates with them meanwhile."""

    engine: Engine
    decoding: Decoding


class Half(Protocol):
    """One side of a method; ``prepare`` runs before its turns and ``close`` after them."""

    def prepare(self) -> None:
        """Makes groups, buffers and registrations, once."""
        ...

    def update(self, version: int) -> dict[str, float] | None:
        """Runs one turn and returns figures for the result, if any.

        An engine's half may return ``usable_at`` (seconds of ``time.monotonic``) if its weights were complete earlier.
        """
        ...

    def close(self) -> None:
        """Releases everything."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A way of updating, or a limit.

    Attributes:
        name: Name in tables.
        trainer: ``module:Class`` of the trainer's half.
        engine: ``module:Class`` of the engine's half.
        options: Keyword arguments of both halves.
        emulated: Parts that are our code and not the named project's own.
        writes: False for limits, which move bytes and change no weights.
        pauses: True if the rig must pause the engines during the whole turn.
    """

    name: str
    trainer: str
    engine: str
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    emulated: tuple[str, ...] = ()
    writes: bool = True
    pauses: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Times of one turn.

    Attributes:
        usable_s: Seconds until the last engine's live parameters were complete.
        returned_s: Seconds until the last trainer process returned.
        stall_s: Longest time in which an engine generated nothing, in seconds.
        extra: Figures that the halves returned; the largest over the processes.
    """

    usable_s: float
    returned_s: float
    stall_s: float
    extra: dict[str, float]


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
                    target=_work, args=(role, rank, layout, self._store.port, theirs, ends), daemon=False
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
        started = time.monotonic()
        self._prepared += 1
        self._ask("note", method.name, timeout_s=timeout_s)
        self._ask("prepare", method, self._prepared, timeout_s=timeout_s)
        return time.monotonic() - started

    def held(self, method: Method, *, timeout_s: float = 60.0) -> dict[str, int]:
        """Returns the memory that a method keeps between turns, in bytes: the maximum over the processes of a role."""
        return {
            f"{role}_held_bytes": max(self._ask("held", method.name, only=role, timeout_s=timeout_s))
            for role in ("trainer", "engine")
        }

    def drop(self, method: Method, *, timeout_s: float = 60.0) -> None:
        """Closes the halves of a method."""
        self._ask("drop", method.name, timeout_s=timeout_s)

    def turn(
        self, method: Method, *, timeout_s: float, watch: bool = False, profile: bool = False
    ) -> tuple[Turn, dict[str, Any]]:
        """Runs one turn: new weights on the trainers, poison on the engines, one update, and a check of every bit.

        Args:
            method: Method to run.
            timeout_s: Deadline of each step, in seconds.
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
        if method.writes:
            for rank, wrong in enumerate(self._ask("check", version, only="engine", timeout_s=timeout_s)):
                if wrong:
                    raise WrongWeights(
                        f"{method.name}: engine {rank} keeps {len(wrong)} wrong tensors: {', '.join(wrong[:4])}"
                    )
        started = min(answer["started"] for answer in trainers)
        extra: dict[str, float] = {}
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


def _work(role: str, rank: int, layout: Layout, store_port: int, driver: Connection, ends: list[Connection]) -> None:
    device = layout.device_of(role, rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(layout.threads)
    try:
        worker = _Worker(role, rank, layout, device, store_port, ends)
        spare_what_lives()  # servers do the same
        while True:
            command, *arguments = driver.recv()
            answer = getattr(worker, f"do_{command}")(driver, *arguments)
            driver.send((True, answer))
            if command == "end":
                break
    except (EOFError, BrokenPipeError):
        pass  # the driver has died
    except BaseException as error:  # noqa: BLE001  whatever it was, the driver says it; nobody reads this process
        last = traceback.extract_tb(error.__traceback__)[-1]
        with suppress(OSError):
            driver.send((False, f"{type(error).__name__}: {error} ({os.path.basename(last.filename)}:{last.lineno})"))
    # Groups of failed methods may hold threads inside torch, which would keep this process alive.
    os._exit(0)


class _Worker:
    def __init__(
        self, role: str, rank: int, layout: Layout, device: torch.device, store_port: int, ends: list[Connection]
    ) -> None:
        shape = model_shape(layout.model)
        self._pattern = Pattern(device)
        self._halves: dict[str, Half] = {}
        self._before: dict[str, int] = {}
        common: dict[str, Any] = dict(
            layout=layout,
            rank=rank,
            device=device,
            shape=shape,
            pipes=[Pipe(end) for end in ends],
            store_port=store_port,
        )
        if role == "engine":
            engine = Engine(shape, device)
            decoding = Decoding(engine, enabled=layout.generate)
            self._side: Side = EngineSide(**common, engine=engine, decoding=decoding)
        else:
            self._local: list[tuple[torch.Tensor, int]] = []
            _start_trainers(rank, layout, store_port)
            self._side = TrainerSide(**common, model=self._make_model(shape, layout, rank, device))

    def do_hello(self, driver: Connection) -> None:
        synchronize(self._side.device)

    def do_note(self, driver: Connection, name: str) -> None:
        self._before[name] = held_bytes(self._side.device)  # no process has begun to prepare yet

    def do_prepare(self, driver: Connection, method: Method, serial: int) -> None:
        self._side.serial = serial
        path = method.engine if isinstance(self._side, EngineSide) else method.trainer
        module, _, name = path.partition(":")
        half: Half = getattr(importlib.import_module(module), name)(self._side, **method.options)
        half.prepare()
        synchronize(self._side.device)
        self._halves[method.name] = half

    def do_held(self, driver: Connection, name: str) -> int:
        return max(0, held_bytes(self._side.device) - self._before[name])

    def do_drop(self, driver: Connection, name: str) -> None:
        half = self._halves.pop(name, None)
        if half is not None:
            half.close()
        del half
        gc.collect()  # a server and its receiver form a reference cycle that holds gigabytes
        if self._side.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def do_fill(self, driver: Connection, version: int) -> None:
        side = self._side
        if isinstance(side, EngineSide):
            side.engine.poison(self._pattern, version)
        else:
            self._pattern.fill_all(
                (tensor, key_of(version, number), first_word) for number, (tensor, first_word) in enumerate(self._local)
            )
        synchronize(side.device)

    def do_check(self, driver: Connection, version: int) -> list[str]:
        assert isinstance(self._side, EngineSide)
        return self._side.engine.wrong(self._pattern, version)

    def do_update(
        self, driver: Connection, name: str, version: int, pauses: bool, watch: bool, profile: bool
    ) -> dict[str, Any]:
        side, half = self._side, self._halves[name]
        watched: dict[str, int] = {}
        peak = Peak(side.device) if watch else None
        engine = side if isinstance(side, EngineSide) else None
        before = dict(side.counts)
        pipes = [(pipe.messages, pipe.sent_bytes) for pipe in side.pipes]
        if peak is not None:
            peak.start()
        if engine is not None:
            engine.decoding.start()
            if pauses:
                engine.decoding.pause()
            driver.send((True, None))
        started, busy = time.monotonic(), time.process_time()
        sampler = StackSampler()
        with sampler if profile else nullcontext():
            extra = half.update(version) or {}
            ended = stamp(side.device)
        # CPU time of all threads: it shows the cost of an update even on a busy machine.
        extra["engine_cpu_s" if engine is not None else "trainer_cpu_s"] = time.process_time() - busy
        stall_s = 0.0
        if engine is not None:
            if pauses:
                engine.decoding.resume()
            stall_s = engine.decoding.stop()
        if peak is not None:
            watched |= peak.stop()
            watched |= {key: value - before.get(key, 0) for key, value in side.counts.items()}
            for pipe, (messages, sent) in zip(side.pipes, pipes, strict=True):
                watched["messages"] = watched.get("messages", 0) + pipe.messages - messages
                watched["metadata_bytes"] = watched.get("metadata_bytes", 0) + pipe.sent_bytes - sent
        return {
            "started": started,
            "ended": ended,
            "usable_at": extra.pop("usable_at", ended),
            "stall_s": stall_s,
            "extra": extra,
            "watched": watched,
            "stacks": sampler.table() if profile else {},
        }

    def do_end(self, driver: Connection) -> None:
        for half in self._halves.values():
            half.close()
        self._halves.clear()

    def _make_model(self, shape: ModelShape, layout: Layout, rank: int, device: torch.device) -> nn.Module:
        """Makes a model with the checkpoint's names, sharded by rows over the trainers as FSDP2 does."""
        parameters: dict[str, nn.Parameter] = {}
        mesh = None
        if layout.trainers > 1:
            from torch.distributed.device_mesh import init_device_mesh

            mesh = init_device_mesh(layout.device, (layout.trainers,))
        for place in shape.places:
            rows = place.shape[0]
            first, count = 0, rows
            if mesh is not None:
                step = -(-rows // layout.trainers)
                first = min(rank * step, rows)
                count = min(step, rows - first)
            local = torch.zeros((count, *place.shape[1:]), dtype=torch.bfloat16, device=device)
            row_words = local[0].numel() if count else 0
            self._local.append((local, first * row_words))
            value: torch.Tensor = local
            if mesh is not None:
                from torch.distributed.tensor import DTensor, Shard

                stride = torch.empty(place.shape, device="meta").stride()
                value = DTensor.from_local(
                    local, mesh, [Shard(0)], run_check=False, shape=torch.Size(place.shape), stride=stride
                )
            parameters[place.name] = nn.Parameter(value, requires_grad=False)
        return nested(parameters)


def _start_trainers(rank: int, layout: Layout, store_port: int) -> None:
    """Makes the default group of the trainer ranks, as every training job does."""
    store = dist.TCPStore("127.0.0.1", store_port, is_master=False, wait_for_workers=False)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if layout.device == "cuda" else "gloo",
        store=dist.PrefixStore("trainers", store),
        rank=rank,
        world_size=layout.trainers,
        device_id=layout.device_of("trainer", rank) if layout.device == "cuda" else None,
    )
