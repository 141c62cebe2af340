"""Reads memory of other processes, on any host, through NIXL.  The owner's end is ``comm/remote_memory.py``.

NIXL takes RDMA where there are NICs for it, else shared memory or TCP.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from weightcast.comm.nixl import let_go, make_agent, this_process, words_of
from weightcast.comm.remote_memory import PAGE_BYTES, TOKEN_BYTES, round_up
from weightcast.errors import Refused, WeightcastError
from weightcast.runtime import blocking_threads
from weightcast.runtime.streams import on_stream_of_caller, wait_for_streams
from weightcast.wire.bucket_sources import RemoteMemory
from weightcast.wire.pieces import Runs

log = logging.getLogger("weightcast.comm")

_LOCAL = "NIXL_INIT_AGENT"
_POLL_S = 0.0002
_LINGER_S = 0.05
_WAIT_S = 0.02
_REACH = (
    "name NICs that reach each other on both sides (UCX_NET_DEVICES), open the firewall between the hosts, or use "
    'transport="direct"'
)


class RemoteReadFailed(WeightcastError):
    """Memory of another process could not be read through NIXL."""


@dataclass(frozen=True, slots=True)
class Pull:
    """Bytes that are read from one process.

    A read is prepared once for its ``key``.  ``runs`` has the first byte in the reader's memory, and the runs in the
    buffer that follow each other there; the same object stands for the same runs.
    """

    key: Hashable
    memory: RemoteMemory
    runs: Sequence[tuple[int, Runs]]


class RemoteReader:
    """Reads memory of other processes into memory of its own device, which is registered once and grows if it must.

    NIXL's calls may block, so each read has a thread.  A read that does not end in time is left behind with its memory,
    into which a NIC may still write, and the next read begins with new memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._session: _ReadSession | None = None

    @property
    def prepared(self) -> int:
        """Number of reads that were prepared since memory was registered."""
        return 0 if self._session is None else self._session.num_prepared

    def read(
        self, pulls: Sequence[Pull], size_bytes: int, *, what: str, timeout_s: float, interrupted: Callable[[], bool]
    ) -> torch.Tensor:
        """Reads ``size_bytes``, gaps included; returns them as flat uint8 on the device, valid until the next read.

        On a GPU it first waits for the current stream, which may still use what was read before.

        There is at most one pull for each key.  It raises Refused if it was interrupted, and RemoteReadFailed if NIXL
        is missing or failed, the owner cannot be reached, or the deadline has passed.
        """
        session = self._session = self._session or _ReadSession(self._device)
        task = _Task()
        carry_out = on_stream_of_caller(self._device, lambda: session.carry_out(pulls, size_bytes, task))
        blocking_threads.start(carry_out, name="weightcast-rdma", give_up=task.abandoned.set)
        deadline = time.monotonic() + timeout_s
        while not task.ended.wait(_WAIT_S):
            stopped, late = interrupted(), time.monotonic() > deadline
            if stopped or late:
                self._session = None
                task.abandoned.set()
                if stopped:
                    raise Refused("interrupted")
                raise RemoteReadFailed(
                    f"{this_process()} waited {timeout_s:g} s while {task.doing} for {what}", hint=_REACH
                ) from None
        if task.error is not None:
            self._session = None
            raise RemoteReadFailed(
                f"{this_process()} failed while {task.doing} for {what}: {words_of(task.error)}",
                hint=getattr(task.error, "hint", None) or _REACH,
            ) from task.error
        return session.data[:size_bytes]

    def close(self) -> None:
        """Forgets all other processes and frees the memory; safe to call twice."""
        session, self._session = self._session, None
        if session is not None:
            let_go(session.close, session)


@dataclass(slots=True)
class _Task:
    doing: str = "starting NIXL"
    error: BaseException | None = None
    ended: threading.Event = field(default_factory=threading.Event)
    abandoned: threading.Event = field(default_factory=threading.Event)


@dataclass(slots=True)
class _PreparedRead:
    """A read that can be repeated; the two lists live as long as it does."""

    pull: Pull
    transfer: Any
    lists: tuple[Any, Any]


class _ReadSession:
    """One NIXL agent with its memory.  Only one thread at a time uses it."""

    def __init__(self, device: torch.device) -> None:
        self.data = torch.empty(0, dtype=torch.uint8, device=device)
        self.num_prepared = 0
        self._agent: Any = None
        self._registered: Any = None
        self._peers: dict[str, RemoteMemory] = {}
        self._prepared: dict[Hashable, _PreparedRead] = {}
        self._under_way: list[Any] = []

    def carry_out(self, pulls: Sequence[Pull], size_bytes: int, task: _Task) -> None:
        """Reads, and says so in ``task``.  After a failure it waits until nothing writes into the memory."""
        try:
            self._reserve(size_bytes)
            for pull in pulls:
                self._meet(pull.memory, task)
            self._read_all(pulls, task)
        except BaseException as error:  # noqa: BLE001  the caller raises it
            task.error = error
        task.ended.set()
        if task.error is not None:
            self._linger()
            # The error's frames refer to transfers, and so to the agent with its memory and files.
            traceback.clear_frames(task.error.__traceback__)

    def close(self) -> None:
        """Releases everything that NIXL keeps, also where NIXL fails at a part of it, and then raises."""
        agent, prepared, peers = self._agent, list(self._prepared.values()), list(self._peers)
        registered, self._registered, self._agent = self._registered, None, None
        self._prepared.clear()
        self._peers.clear()
        self.data = self.data.new_empty(0)
        with ExitStack() as releases:  # from the last to the first, each of them whatever the others raise
            if registered is not None:
                releases.callback(agent.deregister_memory, registered)
            for name in peers:
                releases.callback(agent.remove_remote_agent, name)
            for one in prepared:
                releases.callback(_release, one)

    def _reserve(self, size_bytes: int) -> None:
        device = self.data.device
        wait_for_streams(device)  # for who uses the memory, and so that UCX finds the GPU in use on this thread
        if self._agent is None:
            _, self._agent = make_agent()
        if self.data.numel() >= size_bytes + PAGE_BYTES:
            return
        for one in self._prepared.values():
            _release(one)
        self._prepared.clear()
        if self._registered is not None:
            self._agent.deregister_memory(self._registered)
            self._registered = None
        self.data = torch.empty(0, dtype=torch.uint8, device=device)  # the old memory goes before the new comes
        self.data = torch.empty(round_up(size_bytes) + PAGE_BYTES, dtype=torch.uint8, device=device)
        wait_for_streams(device)  # the allocator may give memory that the stream still uses, and NIXL does not queue
        self._registered = self._agent.register_memory(self.data)

    def _meet(self, memory: RemoteMemory, task: _Task) -> None:
        """Connects to the owner of memory that is new, and reads the token with which the memory begins."""
        task.doing = f"connecting to {memory.owner}"
        known = self._peers.get(memory.agent)
        if known is not None:
            if (known.metadata, known.address, known.token) != (memory.metadata, memory.address, memory.token):
                raise RemoteReadFailed(f"{memory.owner} tells another address under the same name")
            return
        name: Any = self._agent.add_remote_agent(memory.metadata)
        name = name.decode() if isinstance(name, bytes) else str(name)
        if name != memory.agent:
            raise RemoteReadFailed(f"the addresses of {memory.owner} belong to {name!r}, not to {memory.agent!r}")
        self._peers[name] = memory
        self._agent.make_connection(name)
        first = self.data.numel() - PAGE_BYTES  # no read goes there
        token = Pull(None, memory, [(first, Runs(-memory.first_byte, TOKEN_BYTES, TOKEN_BYTES, 1))])
        one = self._prepare(token)
        self._post(one.transfer)
        self._wait(task)
        _release(one)
        if bytes(self.data[first : first + TOKEN_BYTES].cpu().numpy()) != memory.token:
            raise RemoteReadFailed(f"{memory.owner} has other memory than it told at {memory.address:#x}")

    def _read_all(self, pulls: Sequence[Pull], task: _Task) -> None:
        for pull in pulls:
            task.doing = f"reading from {pull.memory.owner}"
            one = self._prepared.get(pull.key)
            if one is None or one.pull.runs is not pull.runs or one.pull.memory != pull.memory:
                if one is not None:
                    del self._prepared[pull.key]
                    _release(one)
                one = self._prepared[pull.key] = self._prepare(pull)
                self.num_prepared += 1
            self._post(one.transfer)
        task.doing = "reading from " + ", ".join(dict.fromkeys(pull.memory.owner for pull in pulls))
        self._wait(task)

    def _prepare(self, pull: Pull) -> _PreparedRead:
        here, there = self.data.data_ptr(), pull.memory.address + pull.memory.first_byte
        mine, theirs = self.data.get_device() if self.data.is_cuda else None, pull.memory.gpu
        local = [(here + first, runs.size_bytes, mine or 0, runs.size_bytes, runs.number) for first, runs in pull.runs]
        remote = [
            (there + runs.first_byte, runs.size_bytes, theirs or 0, runs.stride_bytes, runs.number)
            for _, runs in pull.runs
        ]
        lists = (
            self._agent.prep_xfer_dlist(_LOCAL, _table(local), _kind_of(mine)),
            self._agent.prep_xfer_dlist(pull.memory.agent, _table(remote), _kind_of(theirs)),
        )
        every = torch.arange(sum(runs.number for _, runs in pull.runs), dtype=torch.int32).numpy()
        return _PreparedRead(pull, self._agent.make_prepped_xfer("READ", lists[0], every, lists[1], every), lists)

    def _post(self, transfer: Any) -> None:
        self._under_way.append(transfer)
        try:
            state = self._agent.transfer(transfer)
        except BaseException:
            self._under_way.remove(transfer)
            raise
        if state != "PROC":
            self._under_way.remove(transfer)
            _check(state)

    def _wait(self, task: _Task) -> None:
        while self._under_way:
            if task.abandoned.is_set():
                raise RemoteReadFailed("the read was given up")
            transfer = self._under_way[-1]
            try:
                state = self._agent.check_xfer_state(transfer)
            except BaseException:
                self._under_way.pop()
                raise
            if state == "PROC":
                time.sleep(_POLL_S)
                continue
            self._under_way.pop()
            _check(state)

    def _linger(self) -> None:
        """Waits until no read is under way: memory that is freed before would be written to by a NIC."""
        while self._under_way:
            try:
                if self._agent.check_xfer_state(self._under_way[-1]) != "PROC":
                    self._under_way.pop()
                    continue
            except Exception as error:  # noqa: BLE001  the read was given up, and this is how it ended
                log.debug("a read that was given up ended: %s", words_of(error))
                self._under_way.pop()
                continue
            time.sleep(_LINGER_S)
        try:
            self.close()
        except Exception as error:  # noqa: BLE001  the failure that led here was raised
            log.debug("NIXL did not release what a failed read had used: %s", words_of(error))


def _check(state: str) -> None:
    if state != "DONE":
        raise RemoteReadFailed(f"NIXL says {state}")


def _release(one: _PreparedRead) -> None:
    one.transfer.release()
    for prepared in one.lists:
        prepared.release()


def _kind_of(gpu: int | None) -> str:
    """NIXL's word for memory of the host, or of a GPU."""
    return "DRAM" if gpu is None else "VRAM"


def _table(rows: Sequence[tuple[int, int, int, int, int]]) -> Any:
    """Rows of address, size, device, stride and count, in NIXL's form."""
    array: Any = torch.tensor(rows, dtype=torch.int64).reshape(-1, 5).numpy()
    return array.view("uint64")
