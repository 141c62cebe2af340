"""The process group of one update: the trainer's head and every engine rank.

The group has a store of its own, so it neither touches nor needs the default group of either side.

Every wait has a deadline of ours, and the backend's own timeout lies far beyond it.  By default torch's watchdog ends
the whole process when an NCCL operation fails or passes that timeout; ``comm.watchdog`` prevents that.
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

from weightcast.comm.watchdog import groups_that_end_nothing
from weightcast.errors import ConfigError, DeadlineExceeded, WeightcastError
from weightcast.runtime import blocking_threads
from weightcast.runtime.backoff import Backoff

BackendName = Literal["nccl", "gloo"]
WHERE_TO_LOOK = (
    "check that every engine can reach the trainer's address and port, and that the interfaces agree "
    "(GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)"
)
_NEVER = timedelta(days=1)
_FIRST_POLL_S = 5e-5
_LONGEST_POLL_S = 1e-2
_CANCEL_POLL_S = 0.05
_HANG_UP_TAG = 1 << 30


class GroupFailed(WeightcastError):
    """The group cannot be used any more: a peer died, or the group was aborted."""


def local_address_towards(host: str, port: int) -> str:
    """Returns this host's address on the route to another host.  Sends no packet.

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
    """Returns ``nccl`` for CUDA tensors and ``gloo`` for host tensors."""
    return "nccl" if device.type == "cuda" else "gloo"


class Rendezvous:
    """The key-value store at which the members of a group meet; the head serves it."""

    def __init__(self, *, host: str, timeout_s: float) -> None:
        """Listens on a free port of this address; a name listens on all interfaces.

        Args:
            host: Address, or name, under which engines can reach this process.
            timeout_s: Deadline of each operation on the store, in seconds.

        Raises:
            GroupFailed: The address does not belong to this host.
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
                f"the rendezvous cannot listen at {host}: {_first_line(error)}",
                hint="set rendezvous_host to an address of this host",
            ) from error
        self.port: int = self._store.port

    @property
    def store(self) -> dist.TCPStore:
        """The store.  It listens while anything refers to it, so callers should not keep it.

        Raises:
            GroupFailed: The rendezvous was closed.
        """
        if self._store is None:
            raise GroupFailed("the rendezvous of the group was closed")
        return self._store

    def visit(self) -> dist.TCPStore:
        """Opens a connection to the store.  ``close`` ends every wait on it, also those inside torch.

        Raises:
            RuntimeError: The rendezvous was closed.
        """
        return dist.TCPStore(self.host, self.port, is_master=False, wait_for_workers=False, timeout=self._timeout)

    def absent(self, token: str, world_size: int) -> list[int]:
        """Returns the ranks, other than the head, that have not come to the rendezvous with this token.

        It opens a connection of its own, because a thread inside torch may hold the other.

        Raises:
            GroupFailed: The store does not answer.
        """
        try:
            place = _with_token(self.visit(), token)
            return [rank for rank in range(1, world_size) if not place.check([_here(rank, world_size)])]
        except RuntimeError as error:
            raise GroupFailed(f"cannot ask the rendezvous which ranks are absent: {_first_line(error)}") from error

    def close(self) -> None:
        """Stops listening, which ends the waits of all members there.  Safe to call twice."""
        self._store = None


class UpdateGroup:
    """One member's end of the group.

    One thread at a time starts a broadcast, in the same order on every member, and the same thread finishes it.
    Any thread may call ``abort``.
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
        """Meets the other members.  Returns when all are there and a first byte was broadcast.

        Args:
            store: The store of the rendezvous, or a function that connects to it.
            name: Name of the group, for errors.
            token: Prefix of the store's keys.
            rank: This member's rank.
            world_size: Number of members.
            device: Device of the tensors.
            address: Address of this process on the route to the others.
            timeout_s: Deadline of the rendezvous, in seconds.
            cancelled: Event by which another thread cancels the rendezvous.
            meeting: ``torch`` for members without weightcast, which make the group as ``torch.distributed`` does, at
                ``tcp://host:port`` with the group's name as prefix.  Then no first byte is broadcast: with nccl, an
                absent member shows only at the first broadcast.

        Raises:
            DeadlineExceeded: A member did not come in time.
            GroupFailed: A member died, or the rendezvous was cancelled.
        """
        self.name = name
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self._aborted = threading.Event()
        self._why = ""
        # Creating a gloo group, and the first collective of an nccl one, block inside torch with no deadline that we
        # control.  So they run on a thread that can be left behind.  That thread first waits for the others in small
        # steps, so an absent member leaves no thread inside torch.
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
                    prefixed = _with_token(base, token)
                    self._meet(prefixed, deadline, timeout_s)
                self._group = group = _new_group(prefixed, rank, world_size, device, address, timeout_s)
                if self._aborted.is_set():  # that abort found no group yet
                    self._hang_up(group)
                if meeting == "weightcast":
                    hello = torch.zeros(1, dtype=torch.uint8, device=device)
                    self._finish(self._start(hello), "the first byte", timeout_s)
                made.append(None)
            except (RuntimeError, ValueError, WeightcastError) as error:
                made.append(error.with_traceback(None))  # its frames refer to the store, which would keep listening
            finally:
                done.set()

        blocking_threads.start(
            make, name=f"weightcast-join-{name}", give_up=lambda: self.abort("the interpreter ends here")
        )
        while not done.wait(_CANCEL_POLL_S):
            if cancelled is not None and cancelled.is_set():
                self.abort("cancelled")
                raise GroupFailed(f"group {name}: the rendezvous was cancelled")
            if time.monotonic() > deadline + _CANCEL_POLL_S:  # the thread knows who is missing; let it say so
                break
        if not made:
            self.abort("the others did not come in time")
            raise self._too_late(timeout_s, f"the rendezvous of all {world_size} members")
        if made[0] is not None:
            self.abort(str(made[0]))
            if isinstance(made[0], WeightcastError):
                raise made[0]
            raise GroupFailed(f"group {name}: the rendezvous failed: {made[0]}") from made[0]

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
    ) -> UpdateGroup:
        """Connects to a head's ``Rendezvous`` and meets the other members.

        Raises:
            DeadlineExceeded, GroupFailed: As the constructor; also when nothing listens at host and port.
        """

        def connect() -> dist.Store:
            try:
                # Torch would retry a refused connection for the whole timeout.
                socket.create_connection((host, port), timeout=timeout_s).close()
                return dist.TCPStore(
                    host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
                )
            except (OSError, RuntimeError, ValueError) as error:
                raise GroupFailed(
                    f"group {name}: cannot reach the rendezvous at {host}:{port}: {_first_line(error)}",
                    hint=f"open TCP {port} from here to {host}, or pass an address that this host can reach",
                ) from error

        return UpdateGroup(
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
        """Enters the broadcast of flat uint8 ``data`` from rank 0 and returns a handle for ``finish``."""
        return self._start(data)

    def finish(self, work: Any, *, what: str, timeout_s: float, poll: Callable[[], None] | None = None) -> None:
        """Waits for a broadcast.  After it, ``data`` is complete on this rank, not merely enqueued.

        Args:
            work: Handle from ``start_broadcast``.
            what: Name of the data, for the error, e.g. ``"bucket 3"``.
            timeout_s: Deadline in seconds.
            poll: Function that is called while waiting; it may raise to end the wait.

        Raises:
            DeadlineExceeded: The deadline passed; the group is unusable now.
            GroupFailed: A peer died or the group was aborted.
        """
        self._finish(work, what, timeout_s, poll)

    def broadcast(self, data: torch.Tensor, *, what: str, timeout_s: float) -> None:
        """Calls ``start_broadcast`` and ``finish``."""
        self.finish(self.start_broadcast(data), what=what, timeout_s=timeout_s)

    def abort(self, why: str) -> None:
        """Ends every wait now, here and at every other member.  Safe to call twice and from any thread."""
        if self._aborted.is_set():
            return
        self._why = why
        self._aborted.set()
        group = self._group
        if group is not None:
            self._hang_up(group)

    def close(self) -> None:
        """Releases the group; safe to call twice."""
        self.abort("closed")
        self._group = None

    def _meet(self, store: dist.Store, deadline: float, timeout_s: float) -> None:
        """Waits until every member is at the store.  The cost for a member does not grow with their number.

        Each member counts once; the one that makes the number full sets the key that all of them wait for.
        """
        go = f"go/{self.world_size}"
        if store.add(_here(self.rank, self.world_size), 1) == 1:
            arrived = store.add(f"arrived/{self.world_size}", 1)
            if arrived == self.world_size:
                store.set(go, "1")
        pause_s = _FIRST_POLL_S
        while not store.check([go]):
            if self._aborted.is_set():
                raise GroupFailed(f"group {self.name}: {self._why}")
            if time.monotonic() > deadline:
                others = (rank for rank in range(self.world_size) if rank != self.rank)
                missing = [rank for rank in others if not store.check([_here(rank, self.world_size)])]
                raise self._too_late(timeout_s, f"the rendezvous of all {self.world_size} members; missing {missing}")
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, _LONGEST_POLL_S)

    def _too_late(self, timeout_s: float, waiting_for: str) -> DeadlineExceeded:
        return DeadlineExceeded(
            who=f"group {self.name}",
            waiting_for=waiting_for,
            timeout_s=timeout_s,
            hint=WHERE_TO_LOOK,
        )

    def _hang_up(self, group: Any) -> None:
        with suppress(RuntimeError):  # a group that fails to abort has ended its waits
            group.abort()
        if self.device.type == "cuda":
            return
        # Gloo's own abort ends no wait, and destroying a group waits for operations under way.  A receive that times
        # out closes every connection of the group, which ends the waits of this process and of its peers.
        for peer in range(self.world_size):
            if peer != self.rank:
                with suppress(RuntimeError):
                    nothing = torch.empty(1, dtype=torch.uint8)
                    group.recv([nothing], peer, _HANG_UP_TAG).wait(timedelta(milliseconds=1))

    def _check(self) -> Any:
        group = self._group
        if self._aborted.is_set() or group is None:
            raise GroupFailed(f"group {self.name}: {self._why or 'it does not exist yet'}")
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
        backoff = Backoff()
        while not work.is_completed():
            if poll is not None:
                poll()
            self._check()
            if time.monotonic() > deadline:
                self.abort(f"waited {timeout_s:g} s for {what}")
                raise DeadlineExceeded(who=f"group {self.name}", waiting_for=what, timeout_s=timeout_s)
            backoff.sleep()
        self._check()
        try:
            work.wait()
        except RuntimeError as error:
            self.abort(_first_line(error))
            raise GroupFailed(f"group {self.name}: {_first_line(error)}") from error


def _with_token(store: dist.Store, token: str) -> dist.Store:
    return dist.PrefixStore(f"weightcast/{token}", store)


def _here(rank: int, world_size: int) -> str:
    """Key of a member.  It has the world size: members that expect another number would block each other in torch."""
    return f"here/{rank}/{world_size}"


def _listener(host: str) -> socket.socket | None:
    """Opens a socket on one interface for a store, which would else listen on all.

    Returns None for a name, because it may resolve here (often to 127.0.1.1) otherwise than at the engines.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    return socket.create_server((host, 0), family=socket.AF_INET if address.version == 4 else socket.AF_INET6)


def _first_line(error: BaseException) -> str:
    return str(error).split("\n", 1)[0][:300]


def _as_torch_does(store: dist.Store, name: str, device: torch.device) -> dist.Store:
    """Puts the prefixes before a store's keys that ``torch.distributed`` uses for a named group.

    Source: the engines' ``init_custom_process_group`` (``PrefixStore`` of the name), and torch's own
    ``_new_process_group_helper`` inside it (the name once more, then the device type).
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
            raise ConfigError("this build of torch has no NCCL", hint="use --via ipc, or an engine on the CPU")
        torch.cuda.set_device(device)
        options = backends.ProcessGroupNCCL.Options()
        options._timeout = _NEVER
        with groups_that_end_nothing():
            return backends.ProcessGroupNCCL(store, rank, world_size, options)
    options = backends.ProcessGroupGloo._Options()
    # Gloo's own timeout bounds connecting too, and it ends waits that we have left behind.
    options._timeout = timedelta(seconds=timeout_s)
    options._threads = 2
    if "GLOO_SOCKET_IFNAME" in os.environ:
        options._devices = [backends.ProcessGroupGloo.create_default_device()]
    else:
        # Gloo's default is the interface that the host's name resolves to, which need not reach the other side.
        options._devices = [backends.ProcessGroupGloo.create_device(hostname=address)]
    return backends.ProcessGroupGloo(store, rank, world_size, options)
