"""The store at which the members of an update group meet, the keys in it, and the invitation to it."""

from __future__ import annotations

import ipaddress
import socket
import time
from concurrent.futures import Future, wait
from contextlib import suppress
from datetime import timedelta

import msgspec
import torch.distributed as dist

from weightcast.errors import WeightcastError
from weightcast.runtime import blocking_threads

_FIRST_TRY_S = 6.0  # longer than the 5 s for which torch waits for a name server that does not answer
_LEAST_S = 0.05
_ABORTED = "aborted"
_THREAD = "weightcast-abort-notice"
_POLL_S = 0.05
_TELL_S = 1.0  # for the store to take the word


class GroupFailed(WeightcastError):
    """The group cannot be used any more: a peer died, or the group was aborted."""


class Rendezvous:
    """The key-value store at which the members of a group meet; the head serves it."""

    def __init__(self, *, host: str, timeout_s: float) -> None:
        """Listens on a free port of an address under which engines reach this process; a name listens on all.

        ``timeout_s`` limits each operation on the store.  It raises GroupFailed if the address is not this host's.
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
                hint='name an address of this host: advanced={"rendezvous_host": ADDRESS}, '
                "--advanced rendezvous_host=ADDRESS",
            ) from error
        self.port: int = self._store.port

    @property
    def store(self) -> dist.TCPStore:
        """The store; GroupFailed once closed.  It listens while anything refers to it: callers should not keep it."""
        if self._store is None:
            raise GroupFailed("the rendezvous of the group was closed")
        return self._store

    def visit(self) -> dist.TCPStore:
        """Opens a connection to the store, on which ``close`` ends every wait; RuntimeError if it was closed."""
        try:
            return connect_to_store(self.host, self.port, self._timeout.total_seconds())
        except OSError as error:
            raise RuntimeError(f"the rendezvous at {self.host}:{self.port} was closed: {error}") from error

    def absent(self, token: str, world_size: int) -> list[int]:
        """The ranks, but the head, that have not come with this token; GroupFailed if the store does not answer.

        It opens a connection of its own, because a thread inside torch may hold the other.
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
    """Connects to a store; raises OSError, RuntimeError or ValueError without an answer in time.

    Torch would retry a refused connection for the whole timeout, so a plain one is tried first.  The head may close its
    store right after that, because of another engine: torch gets short tries, and before each of them the plain
    connection must succeed again.
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


class AbortNotice:
    """Tells the members that exchange no messages with this one of an abort, and hears of theirs.

    A store whose process is stopped never answers, and torch waits for it without a deadline.  So threads ask it, one
    at a time, and one without an answer is left behind.
    """

    def __init__(self, store: dist.Store) -> None:
        """``store`` is the part of the store that belongs to the group."""
        self._store = store
        self._asked: Future[str] | None = None
        self._asked_at = 0.0

    def heard(self) -> str:
        """Returns why another member has aborted, as far as the store has said; empty if it has not.  Never waits."""
        if self._asked is not None:
            if not self._asked.done():
                return ""
            why = self._asked.result()
            if why:
                return why
        now = time.monotonic()
        if now - self._asked_at >= _POLL_S:
            self._asked_at = now
            self._asked = blocking_threads.call(self._ask, name=_THREAD)
        return ""

    def tell(self, why: str) -> None:
        """Tells the other members; waits for the store, but no longer than two seconds."""
        if self._asked is not None and wait([self._asked], _TELL_S).not_done:
            return
        wait([blocking_threads.call(lambda: self._set(why), name=_THREAD)], _TELL_S)

    def _ask(self) -> str:
        try:
            return self._store.get(_ABORTED).decode() if self._store.check([_ABORTED]) else ""
        except RuntimeError as error:
            return f"the rendezvous is gone: {first_line(error)}"

    def _set(self, why: str) -> str:
        with suppress(RuntimeError):  # a store that is gone tells the others as much
            self._store.set(_ABORTED, why)
        return why


class Invited(msgspec.Struct, frozen=True, kw_only=True):
    """The rendezvous of a group; trainer ranks keep their own numbers in it, and engine ranks follow.

    ``token`` is the prefix of the keys in the head's store, which listens at ``host`` and ``port``.  ``reads``
    names for each engine rank the host whose trainer ranks' memory it reads, so that these send it nothing; it is empty
    for a rank that gets all in messages, and there are no entries if all do.
    """

    group: str
    host: str
    port: int
    token: str
    world_size: int
    reads: tuple[str, ...] = ()
