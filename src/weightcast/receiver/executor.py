"""Sends a message to every rank of an engine and returns one answer for each rank.

``LocalExecutor`` has its one rank in this process; ``MpExecutor`` runs each rank in a process of its own; the one for
Ray is in ``weightcast.ray``.  Two lanes lead to a rank: one for weight messages, one for the engine's own work.  So an
engine generates while a new version arrives.
"""

from __future__ import annotations

import ctypes
import functools
import multiprocessing
import os
import queue
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

import msgspec

from weightcast.comm.update_group import Rendezvous
from weightcast.errors import EngineFailure, WeightcastError
from weightcast.wire.held import HeldTable
from weightcast.wire.messages import (
    Close,
    Commit,
    Message,
    Open,
    RankAck,
    Readback,
    Revert,
    decode,
    decode_rank_ack,
    encode,
)
from weightcast.wire.plans import UpdatePlan

_START_S = 600.0
_GRACE_S = 15.0  # a rank keeps its own deadlines; this much later the rank itself is given up
_LOOK_S = 1.0  # longest single wait for answers, short enough to notice that this process itself was stopped
_STOOD_STILL_S = 0.5  # a wait that ends this much too late: longer than a busy machine explains
_SEND_S = 15  # whole seconds; a rank reads its messages at once, unless it is stopped or stuck
_STOP_S = 5.0
_PR_SET_PDEATHSIG = 1

_APPLY, _INTERRUPT, _CLOSE, _NOTE = b"A", b"I", b"C", b"N"
_OK, _FAILED = b"+", b"-"


class Worker(Protocol):
    """The object in each rank's process that carries out messages and work."""

    def apply(self, message: Message) -> RankAck:
        """Carries out a weight message.  Called by one thread at a time, possibly while ``run`` runs."""
        ...

    def run(self, command: bytes) -> bytes:
        """Does the engine's own work; opaque here."""
        ...

    def interrupt(self, reason: str) -> None:
        """Ends a wait inside ``apply`` now.  Called from another thread."""
        ...

    def close(self) -> None:
        """Frees everything."""
        ...


class Executor(Protocol):
    """All ranks of one engine."""

    tp_size: int

    def apply(self, message: Message, *, timeout_s: float) -> list[RankAck]:
        """Runs the message on every rank at once.

        Raises:
            EngineFailure: A rank died or did not answer in time; it is named.
        """
        ...

    def run(self, command: bytes) -> bytes:
        """Runs the command on every rank at once and returns rank 0's answer.

        Raises:
            EngineFailure: A rank died, failed or did not answer in time; it is named.
        """
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
Receive = Callable[[set[int], float], dict[int, bytes]]


class FarRanks:
    """The part that executors with ranks in other processes share.  An executor that broke stays broken."""

    def __init__(self) -> None:
        self._broken: EngineFailure | None = None
        self._closed = False
        self._told: UpdatePlan | None = None  # the plan that every rank was sent last
        self._tables: dict[str, HeldTable] = {}  # of the ranks' parts, which stay the same

    def _encode(self, message: Message) -> bytes:
        """Encodes a message for the ranks.  Each keeps at least the plan that it was sent last."""
        if isinstance(message, Close | Commit | Revert | Readback):
            message = msgspec.structs.replace(message, known_tables=tuple(self._tables))
        if not isinstance(message, Open) or message.plan is None:
            return encode(message)
        known, self._told = self._told, message.plan
        return encode(message, named=message.plan == known)

    def _decode(self, reply: bytes) -> RankAck:
        """Decodes a rank's answer; its table of parts comes once."""
        return decode_rank_ack(reply, self._tables)

    def _check(self) -> None:
        if self._closed:
            raise EngineFailure("the engine is shutting down")
        if self._broken is not None:
            raise EngineFailure(str(self._broken), ranks=self._broken.ranks, hint=self._broken.hint)

    def _break(self, words: str, ranks: list[int]) -> EngineFailure:
        """Marks the executor as broken: a late answer would be taken for the answer to another message."""
        if self._broken is None:
            self._broken = EngineFailure(words, ranks=ranks, hint="restart the engine")
        return EngineFailure(words, ranks=ranks, hint="restart the engine")

    def _gather(self, count: int, receive: Receive, timeout_s: float, what: str, *, work: bool) -> list[bytes]:
        """Waits for one reply from each rank and returns them in order.

        On the work lane a failure is a reply too, unless the other ranks hang because of it.

        Args:
            count: Number of ranks.
            receive: Waits for any of the given ranks, up to a limit in seconds; raises for a lost rank.
            timeout_s: Deadline of the whole wait, in seconds.
            what: Name of the reply for the error, e.g. ``"a step"``.
            work: True on the work lane.
        """
        deadline = time.monotonic() + timeout_s
        replies: dict[int, bytes] = {}
        while len(replies) < count:
            waiting = {rank for rank in range(count) if rank not in replies}
            began = time.monotonic()
            limit_s = min(max(0.0, deadline - began), _LOOK_S)
            came = receive(waiting, limit_s)
            replies |= came
            now = time.monotonic()
            if not came and now - began > limit_s + _STOOD_STILL_S:
                # This process was stopped and continued.  Its ranks may have been stopped too and need a moment.
                deadline = max(deadline, now + _GRACE_S)
            elif not came and now >= deadline:
                for rank, words in _failures(replies).items() if work else ():
                    raise self._break(f"rank {rank} failed in {what}: {words}", [rank])
                late = sorted(waiting)
                raise self._break(f"rank {late[0]} did not give {what} within {timeout_s:g} s", late)
            if work and _failures(came):
                # The other ranks may wait for this one in a collective that it will never enter.
                deadline = min(deadline, time.monotonic() + _GRACE_S)
        return [replies[rank] for rank in range(count)]

    @staticmethod
    def _first(replies: list[bytes], what: str) -> bytes:
        """Rank 0's answer on the work lane; raises if any rank failed."""
        failed = _failures(dict(enumerate(replies)))
        for rank, words in failed.items():
            raise EngineFailure(f"rank {rank} failed in {what}: {words}", ranks=list(failed))
        return replies[0][1:]


class ConnectedRanks(FarRanks):
    """Ranks with a connection each.  ``serve_messages`` runs at its other end."""

    def __init__(self) -> None:
        super().__init__()
        self._control: list[Connection] = []
        self._apply_lock, self._send_lock = threading.Lock(), threading.Lock()

    def interrupt(self, reason: str) -> None:
        """As ``Executor.interrupt``."""
        self._shout(_INTERRUPT + reason.encode(errors="replace"))

    def _tell(self, message: Message, timeout_s: float, meanwhile: Callable[[], None] | None = None) -> list[RankAck]:
        """Sends the message to every rank and waits for the answers.

        Args:
            message: The message.
            timeout_s: The ranks' own deadline, in seconds.
            meanwhile: Called once every rank has the message, before the wait for their answers.
        """
        with self._apply_lock:
            self._check()
            with self._send_lock:
                self._send(self._control, _APPLY + self._encode(message))
            if meanwhile is not None:
                try:
                    meanwhile()
                except Exception as error:  # any error: the answers to this message will not be read
                    words = str(error) if isinstance(error, WeightcastError) else f"{type(error).__name__}: {error}"
                    raise self._break(words, list(range(len(self._control)))) from error
            what = f"the answer to {type(message).__name__}"
            replies = self._replies(self._control, timeout_s + _GRACE_S, what)
        return [self._decode(reply) for reply in replies]

    def _note(self, note: bytes) -> None:
        """Sends a note to every rank; it overtakes the message that the rank is carrying out."""
        self._shout(_NOTE + note)

    def _shout(self, frame: bytes) -> None:
        """Sends a frame to every rank, also after one that is gone."""
        with self._send_lock:
            for connection in self._control:
                with suppress(OSError, ValueError):
                    connection.send_bytes(frame)

    def _send(self, connections: list[Connection], payload: bytes) -> None:
        for rank, connection in enumerate(connections):
            try:
                connection.send_bytes(payload)
            except BlockingIOError as error:
                raise self._break(f"rank {rank} did not take a message within {_SEND_S} s", [rank]) from error
            except (OSError, ValueError) as error:
                raise self._lost(rank, f"a message to it: {error}") from error

    def _replies(
        self, connections: list[Connection], timeout_s: float, what: str, *, work: bool = False
    ) -> list[bytes]:
        """Waits for one frame from each rank."""

        def receive(ranks: set[int], limit_s: float) -> dict[int, bytes]:
            waiting = {connections[rank]: rank for rank in ranks}
            replies: dict[int, bytes] = {}
            for connection in wait(list(waiting), limit_s):
                rank = waiting[connection]  # type: ignore[index]
                try:
                    replies[rank] = connection.recv_bytes()  # type: ignore[union-attr]
                except (EOFError, OSError) as error:
                    raise self._lost(rank, what) from error
            return replies

        return self._gather(len(connections), receive, timeout_s, what, work=work)

    def _lost(self, rank: int, what: str) -> EngineFailure:
        return self._break(f"rank {rank} is gone during {what}", [rank])


def limit_sends(connection: Connection) -> None:
    """Gives writes to a rank a deadline: a rank that is stopped reads nothing, and its pipe fills."""
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_S, 0))


def _failures(replies: dict[int, bytes]) -> dict[int, str]:
    return {rank: reply[1:].decode() for rank, reply in sorted(replies.items()) if reply[:1] == _FAILED}


def answer_work(do: Callable[[], bytes]) -> bytes:
    """A reply for the work lane: what ``do`` returns, or the error that it raises."""
    try:
        return _OK + do()
    except Exception as error:  # noqa: BLE001  the other end must hear it; the rank stays for the next command
        return _FAILED + f"{type(error).__name__}: {error}".encode()


def answer_message(worker: Messenger, frame: bytes, *, rank: int) -> bytes:
    """A reply for the message lane: the rank's ack, or the error that the worker raised."""
    known: tuple[str, ...] = ()
    try:
        message = decode(frame)
        known = message.known_tables if isinstance(message, Close | Commit | Revert | Readback) else ()
        ack = worker.apply(message)
    except Exception as error:  # noqa: BLE001  the other end waits for an answer, whatever it is
        ack = RankAck(rank=rank, ok=False, error=f"{type(error).__name__}: {error}")
    return encode(ack, known_tables=known)


class MpExecutor(ConnectedRanks):
    """One process for each rank.

    The factory is called in the rank's process as ``factory(rank, tp_size, rendezvous, **settings)``, where
    ``rendezvous`` is ``host:port`` of a ``torch.distributed.TCPStore`` that this process serves.
    """

    def __init__(
        self,
        factory: WorkerFactory,
        tp_size: int,
        settings: dict[str, Any] | None = None,
        *,
        run_timeout_s: float = 300.0,
        start_timeout_s: float = _START_S,
    ) -> None:
        """Start the ranks and wait until each has built its worker.

        Raises:
            EngineFailure: A rank could not build its worker; the text has its words.
        """
        super().__init__()
        self.tp_size = tp_size
        self._run_timeout_s = run_timeout_s
        self._meeting = Rendezvous(host="127.0.0.1", timeout_s=start_timeout_s)
        context = multiprocessing.get_context("spawn")
        self._work: list[Connection] = []
        self._processes: list[Any] = []
        self._run_lock = threading.Lock()
        for rank in range(tp_size):
            control, control_end = context.Pipe()
            work, work_end = context.Pipe()
            process = context.Process(
                target=_rank_main,
                args=(factory, rank, tp_size, f"127.0.0.1:{self._meeting.port}", settings or {}, control_end, work_end),
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
            self._first(self._replies(self._work, start_timeout_s, "its start", work=True), "its start")
        except EngineFailure:
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
        self._shout(_CLOSE)
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
    rendezvous: str,
    settings: dict[str, Any],
    control: Connection,
    work: Connection,
) -> None:
    """The process of one rank: work on the main thread, messages on a second, interrupts on a third."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the parent ends us in order
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


class Messenger(Protocol):
    """The part of ``Worker`` that the message lane needs."""

    def apply(self, message: Message) -> RankAck:
        """As ``Worker.apply``."""
        ...

    def interrupt(self, reason: str) -> None:
        """As ``Worker.interrupt``."""
        ...


def serve_messages(
    control: Connection, worker: Messenger, *, rank: int, on_note: Callable[[bytes], None] | None = None
) -> bool:
    """Answers weight messages that come over a connection, in order, while interrupts and notes overtake them.

    Args:
        control: Connection to the process that sends the messages.
        worker: Carries out the messages.
        rank: Number of this rank, for answers that the worker did not give.
        on_note: Called with the bytes of each note, on the thread that reads.

    Returns:
        True if the other end asked for the end, False if it is gone.
    """
    messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def answer() -> None:
        while (frame := messages.get()) is not None:
            reply = answer_message(worker, frame, rank=rank)
            with suppress(OSError, ValueError):
                control.send_bytes(reply)

    threading.Thread(target=answer, name="messages", daemon=True).start()
    try:
        while True:
            try:
                frame = control.recv_bytes()
            except (EOFError, OSError):
                return False
            if frame[:1] == _INTERRUPT:
                with suppress(RuntimeError, OSError):
                    worker.interrupt(frame[1:].decode())
            elif frame[:1] == _NOTE and on_note is not None:
                on_note(frame[1:])
            elif frame[:1] == _CLOSE:
                return True
            else:
                messages.put(frame[1:])
    finally:
        messages.put(None)


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the thread that started it ends, so that no orphan keeps a GPU."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
