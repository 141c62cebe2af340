"""The store at which the members of an update group meet, and the keys in it."""

from __future__ import annotations

import ipaddress
import socket
import time
from datetime import timedelta

import torch.distributed as dist

from weightcast.errors import WeightcastError

_FIRST_TRY_S = 6.0  # longer than the 5 s for which torch waits for a name server that does not answer
_LEAST_S = 0.05


class GroupFailed(WeightcastError):
    """The group cannot be used any more: a peer died, or the group was aborted."""


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
                f"the rendezvous cannot listen at {host}: {first_line(error)}",
                hint="set rendezvous_host to an address of this host",
            ) from error
        self.port: int = self._store.port

    @property
    def store(self) -> dist.TCPStore:
        """The store; GroupFailed once closed.  It listens while anything refers to it: callers should not keep it."""
        if self._store is None:
            raise GroupFailed("the rendezvous of the group was closed")
        return self._store

    def visit(self) -> dist.TCPStore:
        """Opens a connection to the store.  ``close`` ends every wait on it, also those inside torch.

        Raises:
            RuntimeError: The rendezvous was closed.
        """
        try:
            return connect_to_store(self.host, self.port, self._timeout.total_seconds())
        except OSError as error:
            raise RuntimeError(f"the rendezvous at {self.host}:{self.port} was closed: {error}") from error

    def absent(self, token: str, world_size: int) -> list[int]:
        """Returns the ranks, other than the head, that have not come to the rendezvous with this token.

        It opens a connection of its own, because a thread inside torch may hold the other.

        Raises:
            GroupFailed: The store does not answer.
        """
        try:
            place = with_token(self.visit(), token)
            return [rank for rank in range(1, world_size) if not place.check([here(rank, world_size)])]
        except RuntimeError as error:
            raise GroupFailed(f"cannot ask the rendezvous which ranks are absent: {first_line(error)}") from error

    def close(self) -> None:
        """Stops listening, which ends the waits of all members there.  Safe to call twice."""
        self._store = None


def connect_to_store(host: str, port: int, timeout_s: float) -> dist.TCPStore:
    """Connects to a store.  Torch would retry a refused connection for the whole timeout.

    So a plain connection is tried first.  The head may close its store right after that, because of another engine:
    torch gets short tries, and before each of them the plain connection must succeed again.

    Raises:
        OSError, RuntimeError, ValueError: Nothing listens, or the store does not answer in time.
    """
    deadline = time.monotonic() + timeout_s
    try_s = _FIRST_TRY_S
    while True:
        left_s = deadline - time.monotonic()
        socket.create_connection((host, port), timeout=max(left_s, _LEAST_S)).close()
        try:
            limit = timedelta(seconds=min(try_s, max(left_s, _LEAST_S)))
            store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)
        except RuntimeError:
            if time.monotonic() >= deadline:
                raise
            try_s *= 2
            continue
        store.set_timeout(timedelta(seconds=timeout_s))
        return store


def with_token(store: dist.Store, token: str) -> dist.Store:
    """The part of a store that belongs to one group."""
    return dist.PrefixStore(f"weightcast/{token}", store)


def relay_of(rank: int) -> str:
    """Key of a member's place in its chain."""
    return f"relay/{rank}"


def here(rank: int, world_size: int) -> str:
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


def first_line(error: BaseException) -> str:
    """An error's first line, without the traces that torch adds."""
    return str(error).split("\n", 1)[0][:300]
