"""Reaches our receiver in each rank process of an engine from its API server: a Unix socket for each rank on its host.

Ranks on other hosts come over authenticated TCP (``other_hosts.py``).
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Sequence
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

import msgspec
import torch

from weightcast.comm import nixl
from weightcast.comm.authenticated import AuthenticatedConnection
from weightcast.comm.ipc import device_uuid, host_id, visible_gpus
from weightcast.comm.nccl import settings_here
from weightcast.errors import EngineFailure, some
from weightcast.plugins.other_hosts import Reception
from weightcast.receiver.engine_state import EngineFacts
from weightcast.receiver.loader import Loader
from weightcast.receiver.lost_ranks import Messenger
from weightcast.receiver.rank_connections import ConnectedRanks, Connection, limit_sends, serve_messages
from weightcast.receiver.staging import StagingPlace
from weightcast.wire.answers import RankAck
from weightcast.wire.codec import encode
from weightcast.wire.engine_info import RankInfo
from weightcast.wire.layout import TensorSpec
from weightcast.wire.messages import Abort, Commit, Message, Open, Revert

log = logging.getLogger("weightcast.plugins")

_GREETING_S = 30.0
# The first frame of a rank's answer to a message that switches weights.
READY, NOTHING = b"ready", b"nothing"
# The notes that follow.
GO, CANCEL = b"go", b"cancel"


class Hello(RankInfo, frozen=True, kw_only=True):
    """The first frame from a rank; ``rank`` is its number in the engine's own order.

    Attributes:
        specs: Every tensor of a full update, with the dtype that this rank keeps.
        places: Names of the tensors that this rank keeps a part of, or computes with.
        staging_note: The reason why the staging set is not on the device; empty if it is.
        reads_shares: True if this rank can take its own share of a bucket alone, for ``direct``.
        reads_remote: True if it can read memory of other hosts through NIXL.
    """

    staging: StagingPlace
    staging_bytes: int
    specs: tuple[TensorSpec, ...]
    places: tuple[str, ...]
    staging_note: str = ""
    reads_shares: bool = False
    reads_remote: bool = False


def socket_path(folder: str, rank: int) -> str:
    """Returns the path of the Unix socket where a rank listens."""
    return str(Path(folder) / f"rank-{rank}")


def switch_of(message: Message, committed: str) -> tuple[bool, str]:
    """Returns whether a message switches weights, so that it must be carried out while the engine generates nothing.

    That is so for a commit, a revert, and the abort of the ``committed`` session.  The second value is the session
    that counts as committed afterwards; empty for none.  The API server and the ranks must agree, so both call this.
    """
    if isinstance(message, Commit):
        return True, message.session
    if isinstance(message, Abort) and message.session == committed:
        return True, ""
    return isinstance(message, Revert), committed


class SwitchExecutor(ConnectedRanks):
    """The executor in an engine's API server.  No rank switches weights before all have said that they can.

    The ranks switch between two steps, in a call of the engine or at a mark that travels with the engine's own work.

    Attributes:
        opened: Session that was opened last; None before the first.
    """

    def __init__(self, world_size: int, folder: str, reception: Reception | None = None) -> None:
        """Connects to ranks that listen in the folder or come to the reception; ``EngineFailure`` without one."""
        super().__init__()
        self._committed = ""
        self.opened: Open | None = None
        self.tp_size = world_size
        self.hellos: list[Hello] = []
        come: dict[int, AuthenticatedConnection] = {}
        try:
            far = [rank for rank in range(world_size) if not Path(socket_path(folder, rank)).exists()]
            come = reception.wait_for(far, _GREETING_S) if reception is not None else {}
            for rank in range(world_size):
                self._control.append(_connect(folder, rank) if rank not in come else come.pop(rank))
            for connection in self._control:
                limit_sends(connection)
            greetings = self._replies(self._control, _GREETING_S, "its greeting")
            self.hellos = [msgspec.json.decode(greeting, type=Hello) for greeting in greetings]
        except BaseException:
            for connection in come.values():
                connection.close()
            self.close()
            raise

    def apply(self, message: Message, *, timeout_s: float) -> list[RankAck]:
        """Implements ``Executor.apply``."""
        if isinstance(message, Open):
            self.opened = message
        switches, self._committed = switch_of(message, self._committed)
        if not switches:
            return self._tell(message, timeout_s)
        return self._tell(message, timeout_s, lambda: self._agree(message, timeout_s))

    def why_not_now(self, timeout_s: float) -> str:
        """Called when all ranks are ready.  The reason why none of them may switch; empty if they may."""
        return ""

    def after_decision(self, message: Message, timeout_s: float) -> None:
        """Called once the ranks have been told to switch, because of this message."""

    def run(self, command: bytes) -> bytes:
        """Refuses: the engine generates by itself."""
        raise EngineFailure("the engine does not generate through this executor")

    def pids(self) -> Sequence[int]:
        """Returns the process id of each rank."""
        return tuple(hello.pid for hello in self.hellos)

    def close(self) -> None:
        """Closes the connections; the engine ends its ranks itself."""
        self._closed = True
        with self._send_lock:
            for connection in self._control:
                connection.close()

    def rank_infos(self) -> tuple[RankInfo, ...]:
        """The ranks as ``EngineInfo`` describes them; each with its host if they are on several."""
        on_one: dict[str, Any] = {"host_id": "", "host": ""} if self.host_id else {}
        told = ({name: getattr(hello, name) for name in RankInfo.__struct_fields__} for hello in self.hellos)
        return tuple(RankInfo(**(rank | on_one)) for rank in told)

    @property
    def host_id(self) -> str:
        """Boot id of the host of all ranks; empty if they are on several, so that no trainer shares memory with all."""
        found = {hello.host_id for hello in self.hellos} - {""}
        return host_id() if not found else found.pop() if len(found) == 1 else ""

    def far_rank_lost(self, words: str) -> None:
        """Called when the connection to a rank on another host has ended; the engine itself may not notice."""

    def staging(self) -> StagingPlace:
        """The place that every rank can stage in: the worst one that a rank has."""
        places = {hello.staging for hello in self.hellos}
        return "none" if "none" in places else "host" if "host" in places else "device"

    def _agree(self, message: Message, timeout_s: float) -> None:
        """Waits until each rank has said whether it has something to switch; then lets all of them do so, or none."""
        try:
            said = self._replies(self._control, timeout_s, "its readiness to switch")
        except BaseException:
            self._note(CANCEL)
            raise
        ready = [frame == READY for frame in said]
        # A rank that refuses a commit has nothing to switch, and then nobody switches.  A rank may well have nothing to
        # take back.
        go = all(ready) if isinstance(message, Commit) else any(ready)
        why = self.why_not_now(timeout_s) if go else "not all ranks were ready to switch weights"
        self._note(CANCEL + why.encode() if why else GO)
        if not why:
            self.after_decision(message, timeout_s)

    def _lost(self, rank: int, what: str) -> EngineFailure:
        process = ""
        if self.hellos:
            hello = self.hellos[rank]
            process = f" (pid {hello.pid} on host {hello.host})" if self.host_id == "" else f" (pid {hello.pid})"
        words = f"rank {rank}{process} is gone during {what}"
        if isinstance(self._control[rank], AuthenticatedConnection):
            self.far_rank_lost(words)
        return self._break(words, [rank])


def _connect(folder: str, rank: int) -> Connection:
    try:
        return Client(socket_path(folder, rank), family="AF_UNIX")
    except OSError as error:
        raise EngineFailure(f"rank {rank} does not listen on this host: {error}", ranks=[rank]) from error


def hello_of(loader: Loader, *, rank: int, device: torch.device, places: Sequence[str], staging_note: str) -> Hello:
    """The greeting of a rank whose receiver has this loader."""
    return Hello(
        rank=rank,
        pid=os.getpid(),
        device=device_uuid(device),
        staging=loader.staging.place,
        staging_bytes=loader.staging.size_bytes,
        specs=tuple(loader.expected.values()),
        places=tuple(places),
        staging_note=staging_note,
        host=socket.gethostname(),
        host_id=host_id(),
        reads_shares=not loader.copies,  # nobody compares what must be equal if each rank reads its own share
        reads_remote=not nixl.missing(),
        visible=visible_gpus() if device.type == "cuda" else (),
        nccl=settings_here(device),
    )


def serve_api_server(
    listener: Listener | None,
    worker: Messenger,
    greeting: Callable[[], Hello],
    *,
    device: torch.device,
    connection: Connection | None = None,
    on_note: Callable[[bytes], None] | None = None,
    on_connection: Callable[[Connection], None] | None = None,
) -> None:
    """Serves one API server after the other until the listener is closed.  Runs on a thread of its own in a rank.

    Args:
        listener: Socket of this rank; None serves the one connection alone.
        device: Device of the model, which becomes the thread's own.
        on_note: Called with each note, which overtakes messages; see ``serve_messages``.
        on_connection: Called with each new connection after the greeting.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    while True:
        if connection is None:
            if listener is None:
                return
            try:
                connection = listener.accept()
            except (OSError, EOFError):
                return  # closed
        with connection:
            hello = greeting()
            try:
                connection.send_bytes(encode(hello))
            except OSError as error:
                log.error("the API server went away: %s", error)
            else:
                if on_connection is not None:
                    on_connection(connection)
                serve_messages(connection, worker, rank=hello.rank, on_note=on_note)
                worker.interrupt("the API server is gone")
        connection = None


def tables_of(hellos: Sequence[Hello]) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Divides the tensors of the checkpoint into those that some rank keeps and those that no rank keeps.

    A tensor that is kept has the dtype of a rank that keeps a part of it.
    """
    known: dict[str, TensorSpec] = {}
    placed: set[str] = set()
    for hello in hellos:
        places = set(hello.places)
        known.update({spec.name: spec for spec in hello.specs if spec.name not in known or spec.name in places})
        placed |= places
    kept = tuple(spec for name, spec in known.items() if name in placed)
    return kept, tuple(spec for name, spec in known.items() if name not in placed)


def notes_of(hellos: Sequence[Hello], optional: Sequence[TensorSpec]) -> list[str]:
    """Notes for the user: where updates are staged if not on the device, and which tensors no rank keeps."""
    notes = [*dict.fromkeys(hello.staging_note for hello in hellos if hello.staging_note)]
    if len({hello.host_id for hello in hellos}) > 1:
        places = ", ".join(f"rank {hello.rank} on {hello.host}" for hello in hellos)
        notes.append(f"ranks on several hosts: {places}")
    if optional:
        named = some([spec.name for spec in optional])
        notes.append(f"{len(optional)} tensors of the checkpoint are not kept by this engine: {named}")
    return notes


def engine_facts(executor: SwitchExecutor, *, notes: Sequence[str] = (), **fields: Any) -> EngineFacts:
    """The description of an engine, from the greetings of its ranks.  Logs the notes for the user."""
    hellos = executor.hellos
    specs, optional = tables_of(hellos)
    notes = [*notes_of(hellos, optional), *notes]
    for note in notes:
        log.info("%s", note)
    return EngineFacts(
        host_id=executor.host_id,
        ranks=executor.rank_infos(),
        staging=executor.staging(),
        staging_bytes=max(hello.staging_bytes for hello in hellos),
        specs=specs,
        optional=optional,
        reads_remote=all(hello.reads_remote for hello in hellos),
        note="; ".join(notes),
        **fields,
    )


def transports_of(hellos: Sequence[Hello]) -> tuple[str, ...]:
    """The transports by which all ranks can be updated."""
    return ("ipc", "direct", "broadcast") if all(hello.reads_shares for hello in hellos) else ("ipc", "broadcast")
