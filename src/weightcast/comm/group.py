"""A process group across two worlds: the trainer's head and every engine rank.

Built from a store of its own, so neither side's default group is touched or even needed.  It knows ranks
and bytes; engines, sessions and buckets are other people's business.

Every wait has a deadline of ours.  The backend's own timeout is set far beyond it: NCCL's watchdog ends the
whole process when *its* timeout passes, which would take an engine down with a dead trainer.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from weightcast.comm import left_behind
from weightcast.comm.polling import Looks
from weightcast.errors import ConfigError, DeadlineExceeded, WeightcastError

BackendName = Literal["nccl", "gloo"]
WHERE_TO_LOOK = (
    "check that every engine can reach the trainer's address and port, and that the interfaces agree "
    "(GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)"
)
_NEVER = timedelta(days=1)
_FIRST_POLL_S = 5e-5
_LONGEST_MEETING_POLL_S = 1e-2
_CANCEL_POLL_S = 0.05
_HANG_UP_TAG = 1 << 30


class GroupFailed(WeightcastError):
    """The group cannot be used any more: a peer died, or somebody aborted it."""


def local_address_towards(host: str, port: int) -> str:
    """Address of this host on the route to another one; no packet is sent.

    Raises:
        GroupFailed: The name does not resolve, or there is no route.
    """
    try:
        family, _, _, _, there = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(there)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise GroupFailed(f"no route to {host}: {error}") from error


def backend_for(device: torch.device) -> BackendName:
    """``nccl`` for CUDA tensors, ``gloo`` for host tensors."""
    return "nccl" if device.type == "cuda" else "gloo"


class Rendezvous:
    """Where the members of a group meet: a store that the head listens on."""

    def __init__(self, *, host: str, timeout_s: float) -> None:
        """Listen on a free port of this address, of all interfaces if it is a name.

        Args:
            host: Address, or name, under which engines can reach this process.
            timeout_s: Deadline of each operation on the store, in seconds.

        Raises:
            GroupFailed: The address is not this host's.
        """
        self.host = host
        self._timeout = timedelta(seconds=timeout_s)
        try:
            listener = _listener(host)
            self._store: dist.TCPStore | None = dist.TCPStore(
                host,
                listener.getsockname()[1] if listener is not None else 0,
                is_master=True,
                wait_for_workers=False,
                timeout=self._timeout,
                use_libuv=True,
                master_listen_fd=listener.detach() if listener is not None else None,
            )
        except (OSError, RuntimeError, ValueError) as error:
            raise GroupFailed(
                f"cannot listen at {host}: {_first_line(error)}",
                hint="is it an address of this host? (rendezvous_host)",
            ) from error
        self.port: int = self._store.port

    @property
    def store(self) -> dist.TCPStore:
        """The store.  It listens as long as anybody holds it, so whoever may have to give it up asks anew each time.

        Raises:
            GroupFailed: It was closed.
        """
        if self._store is None:
            raise GroupFailed("nobody listens any more where the group was to meet")
        return self._store

    def visit(self) -> dist.TCPStore:
        """A connection to the store: ``close`` ends every wait on it, also those deep inside torch.

        Raises:
            RuntimeError: It was closed.
        """
        return dist.TCPStore(self.host, self.port, is_master=False, wait_for_workers=False, timeout=self._timeout)

    def absent(self, token: str, world_size: int) -> list[int]:
        """Ranks that have not come to where the group with this token meets; the head's is not looked for.

        Over a connection of its own: whoever meets may be inside torch, holding another.

        Raises:
            GroupFailed: The store does not answer.
        """
        try:
            place = _meeting_place(self.visit(), token)
            return [rank for rank in range(1, world_size) if not place.check([_here(rank, world_size)])]
        except RuntimeError as error:
            raise GroupFailed(f"cannot ask who has come: {_first_line(error)}") from error

    def close(self) -> None:
        """Stop listening: members that wait there for others hear of it.  Safe to call twice."""
        self._store = None


class WorldGroup:
    """One member's end of the group.

    Thread rule: one thread at a time starts a broadcast, the same order on every member; whoever started it finishes
    it.  ``abort`` may come from any thread.
    """

    def __init__(
        self,
        *,
        store: dist.Store | Callable[[], dist.Store],
        name: str,
        token: str,
        rank: int,
        world_size: int,
        device: torch.device,
        address: str,
        timeout_s: float,
        cancelled: threading.Event | None = None,
        meeting: Literal["weightcast", "torch"] = "weightcast",
    ) -> None:
        """Meet the others.  Returns when all are there and a first byte has gone round.

        Args:
            store: Where they meet, or what connects to it.
            name: For errors, and for those who know several groups.
            token: Prefix of the store's keys.
            rank: This member's rank.
            world_size: How many members there are.
            device: Where the tensors are.
            address: Of this process, on the way to the others.
            timeout_s: Deadline for meeting, in seconds.
            cancelled: Set by another thread to give the meeting up.
            meeting: ``torch`` for members that know nothing of us and make the group as ``torch.distributed`` does, at
                ``tcp://host:port`` with the group's name as prefix.  Then nothing is sent round: with nccl, who is not
                there shows at the first broadcast only.

        Raises:
            DeadlineExceeded: Somebody did not come in time.
            GroupFailed: Somebody came and died, or the meeting was cancelled.
        """
        self.name = name
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self._aborted = threading.Event()
        self._why = ""
        # Creating a gloo group, and the first collective of an nccl one, block inside torch without a deadline that we
        # control; so they run on a thread that can be left behind.  It waits for the others in small steps first, so
        # that one who does not come leaves nobody inside torch.
        self._group: Any = None
        made: list[BaseException | None] = []
        done = threading.Event()
        deadline = time.monotonic() + timeout_s

        def make() -> None:
            try:
                base = store if isinstance(store, dist.Store) else store()
                if meeting == "torch":
                    prefixed = _as_torch_does(base, name, device)
                else:
                    prefixed = _meeting_place(base, token)
                    self._meet(prefixed, deadline, timeout_s)
                self._group = group = _new_group(prefixed, rank, world_size, device, address, timeout_s)
                if self._aborted.is_set():  # given up meanwhile, by somebody who saw no group yet
                    self._hang_up(group)
                if meeting == "weightcast":
                    hello = torch.zeros(1, dtype=torch.uint8, device=device)
                    self._finish(self._start(hello), "the first byte", timeout_s)
                made.append(None)
            except (RuntimeError, ValueError, WeightcastError) as error:
                made.append(error.with_traceback(None))  # its frames hold the store, which would go on listening
            finally:
                done.set()

        left_behind.start(make, name=f"weightcast-join-{name}", give_up=lambda: self.abort("the interpreter ends here"))
        while not done.wait(_CANCEL_POLL_S):
            if cancelled is not None and cancelled.is_set():
                self.abort("cancelled")
                raise GroupFailed(f"group {name}: the meeting was cancelled")
            if time.monotonic() > deadline + _CANCEL_POLL_S:  # the thread knows who is missing; let it say so
                break
        if not made:
            self.abort("the others did not come in time")
            raise self._too_late(timeout_s, f"all {world_size} members to meet")
        if made[0] is not None:
            self.abort(str(made[0]))
            if isinstance(made[0], WeightcastError):
                raise made[0]
            raise GroupFailed(f"group {name}: could not meet: {made[0]}") from made[0]

    @staticmethod
    def join(
        *,
        host: str,
        port: int,
        name: str,
        token: str,
        rank: int,
        world_size: int,
        device: torch.device,
        timeout_s: float,
        cancelled: threading.Event | None = None,
    ) -> WorldGroup:
        """Connect to a head's ``Rendezvous`` and meet the others.

        Raises:
            DeadlineExceeded, GroupFailed: As the constructor; also when nothing listens at host and port.
        """

        def connect() -> dist.Store:
            try:
                # Torch would go on trying for the whole timeout, whatever the answer.
                socket.create_connection((host, port), timeout=timeout_s).close()
                return dist.TCPStore(
                    host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
                )
            except (OSError, RuntimeError, ValueError) as error:
                raise GroupFailed(
                    f"group {name}: nothing to meet at {host}:{port}: {_first_line(error)}",
                    hint=f"open TCP {port} from here to {host}, or pass an address that this host can reach",
                ) from error

        return WorldGroup(
            store=connect,
            name=name,
            token=token,
            rank=rank,
            world_size=world_size,
            device=device,
            address=local_address_towards(host, port),
            timeout_s=timeout_s,
            cancelled=cancelled,
        )

    @property
    def alive(self) -> bool:
        """False after an abort."""
        return not self._aborted.is_set()

    def start_broadcast(self, data: torch.Tensor) -> Any:
        """Enter the broadcast of flat uint8 ``data`` from rank 0; returns a handle for ``finish``."""
        return self._start(data)

    def finish(self, work: Any, *, what: str, timeout_s: float, poll: Callable[[], None] | None = None) -> None:
        """Wait for a broadcast.  After it, ``data`` is complete on this rank, not merely enqueued.

        Args:
            work: From ``start_broadcast``.
            what: For the error, e.g. ``"bucket 3"``.
            timeout_s: Deadline in seconds.
            poll: Called between looks; may raise to give up (a peer was seen to refuse).

        Raises:
            DeadlineExceeded: The deadline passed; the group is unusable now.
            GroupFailed: A peer died or the group was aborted.
        """
        self._finish(work, what, timeout_s, poll)

    def broadcast(self, data: torch.Tensor, *, what: str, timeout_s: float) -> None:
        """``start_broadcast`` and ``finish`` in one."""
        self.finish(self.start_broadcast(data), what=what, timeout_s=timeout_s)

    def abort(self, why: str) -> None:
        """Make every wait end now, here and at every other member.  Safe to call twice and from any thread."""
        if self._aborted.is_set():
            return
        self._why = why
        self._aborted.set()
        group = self._group
        if group is not None:
            self._hang_up(group)

    def close(self) -> None:
        """Let go of the group; safe to call twice."""
        self.abort("closed")
        self._group = None

    def _meet(self, store: dist.Store, deadline: float, timeout_s: float) -> None:
        """Return when every member is at the store."""
        store.set(_here(self.rank, self.world_size), "1")
        others = {rank: _here(rank, self.world_size) for rank in range(self.world_size) if rank != self.rank}
        pause_s = _FIRST_POLL_S
        while others and not store.check(list(others.values())):
            if self._aborted.is_set():
                raise GroupFailed(f"group {self.name}: {self._why}")
            if time.monotonic() > deadline:
                missing = [rank for rank, key in others.items() if not store.check([key])]
                raise self._too_late(timeout_s, f"all {self.world_size} members to meet; missing {missing}")
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, _LONGEST_MEETING_POLL_S)

    def _too_late(self, timeout_s: float, waiting_for: str) -> DeadlineExceeded:
        return DeadlineExceeded(
            who=f"group {self.name}",
            waiting_for=waiting_for,
            timeout_s=timeout_s,
            hint=WHERE_TO_LOOK,
        )

    def _hang_up(self, group: Any) -> None:
        with suppress(RuntimeError):  # what fails while hanging up has hung up
            group.abort()
        if self.device.type == "cuda":
            return
        # Gloo's own abort ends no wait, and destroying a group waits for those under way.  A receive that times out
        # closes every connection of the group, which ends the waits of this process and of its peers.
        for peer in range(self.world_size):
            if peer != self.rank:
                with suppress(RuntimeError):
                    nothing = torch.empty(1, dtype=torch.uint8)
                    group.recv([nothing], peer, _HANG_UP_TAG).wait(timedelta(milliseconds=1))

    def _check(self) -> Any:
        group = self._group
        if self._aborted.is_set() or group is None:
            raise GroupFailed(f"group {self.name}: {self._why or 'not there'}")
        return group

    def _start(self, data: torch.Tensor) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        group = self._check()
        try:
            return group.broadcast([data], options)
        except RuntimeError as error:
            raise GroupFailed(f"group {self.name}: {_first_line(error)}") from error

    def _finish(self, work: Any, what: str, timeout_s: float, poll: Callable[[], None] | None = None) -> None:
        deadline = time.monotonic() + timeout_s
        looks = Looks()
        while not work.is_completed():
            if poll is not None:
                poll()
            self._check()
            if time.monotonic() > deadline:
                self.abort(f"waited {timeout_s:g} s for {what}")
                raise DeadlineExceeded(who=f"group {self.name}", waiting_for=what, timeout_s=timeout_s)
            looks.sleep()
        self._check()
        try:
            work.wait()
        except RuntimeError as error:
            self.abort(_first_line(error))
            raise GroupFailed(f"group {self.name}: {_first_line(error)}") from error


def _meeting_place(store: dist.Store, token: str) -> dist.Store:
    return dist.PrefixStore(f"weightcast/{token}", store)


def _here(rank: int, world_size: int) -> str:
    """Who expects another number of members has not come to this meeting: inside torch all would wait for all."""
    return f"here/{rank}/{world_size}"


def _listener(host: str) -> socket.socket | None:
    """Where a store is to listen, so that it does so on one interface; torch's own choice is all of them.

    None for a name: what it means here (often 127.0.1.1) need not be what it means to the engines.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    return socket.create_server((host, 0), family=socket.AF_INET if address.version == 4 else socket.AF_INET6)


def _first_line(error: BaseException) -> str:
    return str(error).split("\n", 1)[0][:300]


def _as_torch_does(store: dist.Store, name: str, device: torch.device) -> dist.Store:
    """The store under the prefixes that ``torch.distributed`` puts before a named group's keys.

    Source: the engines' ``init_custom_process_group`` (``PrefixStore`` of the name), and torch's own
    ``_new_process_group_helper`` inside it (the name once more, then the kind of device).
    """
    for prefix in (name, f"{name}/", f"{device.type}/"):
        store = dist.PrefixStore(prefix, store)
    return store


def _new_group(
    store: dist.Store, rank: int, world_size: int, device: torch.device, address: str, timeout_s: float
) -> Any:
    backends: Any = dist
    if device.type == "cuda":
        if not dist.is_nccl_available():
            raise ConfigError("this torch has no nccl", hint="use --via ipc, or an engine on the CPU")
        torch.cuda.set_device(device)
        options = backends.ProcessGroupNCCL.Options()
        options._timeout = _NEVER
        return backends.ProcessGroupNCCL(store, rank, world_size, options)
    options = backends.ProcessGroupGloo._Options()
    # Gloo's own timeout bounds the connecting too, and a gloo wait that we gave up must end some day.
    options._timeout = timedelta(seconds=timeout_s)
    options._threads = 2
    if "GLOO_SOCKET_IFNAME" in os.environ:
        options._devices = [backends.ProcessGroupGloo.create_default_device()]
    else:
        # Gloo's default is the interface that the host's name resolves to, which need not reach the other side.
        options._devices = [backends.ProcessGroupGloo.create_device(hostname=address)]
    return backends.ProcessGroupGloo(store, rank, world_size, options)
