"""Sends a message to every rank of an engine and returns one answer for each rank.

Two lanes lead to a rank: one for weight messages, one for the engine's own work.  So an engine generates while a new
version arrives.  The executor for Ray is in ``weightcast.ray``.
"""

from __future__ import annotations

import ctypes
import functools
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, Protocol

from weightcast.comm.rendezvous import Rendezvous
from weightcast.errors import EngineFailure, WeightcastError
from weightcast.receiver.lost_ranks import Messenger, answer_work
from weightcast.receiver.rank_connections import CLOSE, ConnectedRanks, limit_sends, serve_messages
from weightcast.wire.answers import RankAck
from weightcast.wire.messages import Message

_START_S = 600.0
_STOP_S = 5.0
_PR_SET_PDEATHSIG = 1


class Worker(Messenger, Protocol):
    """The object in each rank's process that carries out messages and work."""

    def run(self, command: bytes) -> bytes:
        """Does the engine's own work, possibly while a message is carried out; opaque here."""
        ...

    def close(self) -> None:
        """Frees everything."""
        ...


class Executor(Protocol):
    """All ranks of one engine."""

    tp_size: int

    def apply(self, message: Message, *, timeout_s: float) -> list[RankAck]:
        """Runs a message on every rank at once; raises ``EngineFailure``, naming the rank, if one is dead or late."""
        ...

    def run(self, command: bytes) -> bytes:
        """Runs a command on every rank at once and returns rank 0's answer; ``EngineFailure`` as ``apply``."""
        ...

    def interrupt(self, reason: str) -> None:
        """Ends every wait inside ``apply`` now; it then answers with failures."""
        ...

    def pids(self) -> Sequence[int]:
        """Process id of each rank."""
        ...

    def close(self) -> None:
        """Ends every rank; safe to call twice."""
        ...


class LocalExecutor:
    """One rank, in this process."""

    def __init__(self, worker: Worker) -> None:
        self.tp_size = 1
        self._worker = worker
        self._closed = False

    def apply(self, message: Message, *, timeout_s: float) -> list[RankAck]:
        """As ``Executor.apply``; the worker keeps the deadline."""
        return [self._worker.apply(message)]

    def run(self, command: bytes) -> bytes:
        """As ``Executor.run``."""
        return self._worker.run(command)

    def interrupt(self, reason: str) -> None:
        """As ``Executor.interrupt``."""
        self._worker.interrupt(reason)

    def pids(self) -> Sequence[int]:
        """This process."""
        return (os.getpid(),)

    def close(self) -> None:
        """As ``Executor.close``."""
        if not self._closed:
            self._closed = True
            self._worker.close()


WorkerFactory = Callable[..., Worker]


class MpExecutor(ConnectedRanks):
    """One process for each rank.

    The factory is called in the rank's process as ``factory(rank, tp_size, rendezvous, **settings)``, where
    ``rendezvous`` is ``host:port`` of a ``torch.distributed.TCPStore`` that this process serves.

    Ranks for CPUs are forked from this process, so that they need not import torch and the model's code again.  Ranks
    for GPUs start Python, since CUDA does not work in a forked process that has touched it.
    """

    def __init__(
        self,
        factory: WorkerFactory,
        tp_size: int,
        settings: dict[str, Any] | None = None,
        *,
        run_timeout_s: float = 300.0,
        start_timeout_s: float = _START_S,
        fork: bool = False,
    ) -> None:
        """Starts the ranks and waits until each has built its worker; EngineFailure, in its words, if one cannot.

        ``fork`` forks them if no other Python thread runs here; the caller knows that CUDA is not used.
        """
        super().__init__()
        self.tp_size = tp_size
        self._run_timeout_s = run_timeout_s
        # A lock that another thread holds at the fork is never released in the child.
        fork = fork and threading.active_count() == 1
        context = multiprocessing.get_context("fork") if fork else multiprocessing.get_context("spawn")
        self._work: list[Connection] = []
        self._processes: list[Any] = []
        self._run_lock = threading.Lock()
        for rank in range(tp_size):
            control, control_end = context.Pipe()
            work, work_end = context.Pipe()
            parents_ends = [*self._control, *self._work, control, work] if fork else []
            process = context.Process(
                target=_rank_main,
                args=(factory, rank, tp_size, settings or {}, control_end, work_end, parents_ends),
                name=f"weightcast-rank-{rank}",
                daemon=True,
            )
            process.start()
            control_end.close()
            work_end.close()
            for connection in (control, work):
                limit_sends(connection)
            self._control.append(control)
            self._work.append(work)
            self._processes.append(process)
        try:
            self._meeting = Rendezvous(host="127.0.0.1", timeout_s=start_timeout_s)  # after the forks: it has a thread
            self._send(self._work, f"127.0.0.1:{self._meeting.port}".encode())
            self._first(self._replies(self._work, start_timeout_s, "its start", work=True), "its start")
        except WeightcastError:
            self.close()
            raise

    def apply(self, message: Message, *, timeout_s: float) -> list[RankAck]:
        """As ``Executor.apply``."""
        return self._tell(message, timeout_s)

    def run(self, command: bytes) -> bytes:
        """As ``Executor.run``."""
        with self._run_lock:
            self._check()
            self._send(self._work, command)
            replies = self._replies(self._work, self._run_timeout_s, "a step", work=True)
        return self._first(replies, "a step")

    def pids(self) -> Sequence[int]:
        """Process id of each rank."""
        return tuple(process.pid or 0 for process in self._processes)

    def close(self) -> None:
        """As ``Executor.close``.  A rank that does not end by itself is killed."""
        if self._closed:
            return
        self._closed = True
        self._shout(CLOSE)
        deadline = time.monotonic() + _STOP_S
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join(_STOP_S)
            process.close()
        for connection in (*self._control, *self._work):
            connection.close()

    def _lost(self, rank: int, what: str) -> EngineFailure:
        process = self._processes[rank]
        process.join(1.0)
        code = process.exitcode
        how = "is gone" if code is None else f"was killed by signal {-code}" if code < 0 else f"exited with {code}"
        return self._break(f"rank {rank} (pid {process.pid}) {how} during {what}", [rank])


def _rank_main(
    factory: WorkerFactory,
    rank: int,
    tp_size: int,
    settings: dict[str, Any],
    control: Connection,
    work: Connection,
    parents_ends: Sequence[Connection],
) -> None:
    """The process of one rank: work on the main thread, messages on a second, interrupts on a third."""
    die_with_parent()
    for connection in parents_ends:  # a rank that keeps the parent's end would not notice that the parent is gone
        connection.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the parent ends us in order
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a forked rank has its parent's handler
    try:
        rendezvous = work.recv_bytes().decode()
    except (EOFError, OSError):
        os._exit(1)
    made: list[Worker] = []

    def build() -> bytes:
        made.append(factory(rank, tp_size, rendezvous, **settings))
        return b""

    work.send_bytes(answer_work(build))
    if not made:
        return
    [worker] = made

    def obey() -> None:
        asked = serve_messages(control, worker, rank=rank)
        if asked:
            with suppress(RuntimeError, OSError):
                worker.interrupt("the engine is shutting down")
                worker.close()
        os._exit(0 if asked else 1)  # the parent is gone; threads of gloo and nccl may be in a wait that nothing ends

    threading.Thread(target=obey, name="control", daemon=True).start()
    while True:
        try:
            command = work.recv_bytes()
        except (EOFError, OSError):
            os._exit(1)
        work.send_bytes(answer_work(functools.partial(worker.run, command)))


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the thread that started it ends, so that no orphan keeps a GPU."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
