"""The process group of one update: the trainer's head, or all trainer ranks, and every engine rank.

The group has a store of its own, so it neither touches nor needs the default group of either side.

Every wait has a deadline of ours, and the backend's own timeout lies far beyond it.  By default torch's watchdog ends
the whole process when an NCCL operation fails or passes that timeout, so these groups have none (``comm.watchdog``).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Literal

import msgspec
import torch
import torch.distributed as dist

from weightcast.comm import told_words
from weightcast.comm.group_moves import Move, Relay, Tags, call_apart, chains, hang_up, start_apart, start_moves
from weightcast.comm.ipc import route_to
from weightcast.comm.rendezvous import (
    AbortNotice,
    GroupFailed,
    connect_to_store,
    first_line,
    here,
    relay_of,
    with_token,
)
from weightcast.comm.watchdog import groups_that_end_nothing
from weightcast.errors import ConfigError, DeadlineExceeded, WeightcastError
from weightcast.runtime import blocking_threads
from weightcast.runtime.deadline import Backoff

BackendName = Literal["nccl", "gloo"]
WHERE_TO_LOOK = (
    "check that every engine can reach the trainer's address and port, and that the interfaces agree "
    "(GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)"
)
_NEVER = timedelta(days=1)
_FIRST_POLL_S = 5e-5
_LONGEST_POLL_S = 1e-2
_CANCEL_POLL_S = 0.05
# After the deadline, to learn who is missing: on a busy machine the store takes its time.  A stopped one never answers.
_LEAST_NAMING_S, _MOST_NAMING_S = 1.0, 5.0
_relay = msgspec.json.Decoder(Relay)


def local_address_towards(host: str, port: int) -> str:
    """This host's address on the route to another host; GroupFailed if there is none."""
    try:
        return route_to(host, port)[0]
    except OSError as error:
        raise GroupFailed(f"no route to {host}: {error}") from error


def backend_for(device: torch.device) -> BackendName:
    """Returns ``nccl`` for CUDA tensors and ``gloo`` for host tensors."""
    return "nccl" if device.type == "cuda" else "gloo"


class UpdateGroup:
    """One member's end of the group.  Any thread may call ``abort``.

    One thread at a time starts a broadcast, in the same order on every member, and the same thread finishes it.
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
        tells: bytes | None = None,
        relays: bool = False,
    ) -> None:
        """Meets the other members.  Returns when all are there and a first byte was broadcast.

        Args:
            meeting: ``torch`` for members without weightcast, which make the group as ``torch.distributed`` does, at
                ``tcp://host:port`` with the group's name as prefix.  Then no first byte is broadcast: with nccl, an
                absent member shows only at the first broadcast.
            tells: Bytes for members that tell nothing themselves (empty bytes).  These read them with ``told``, and
                hear of aborts through the store, since not every two of them exchange messages.  None in a group in
                which nobody tells anything.  On GPUs all members hear of aborts so: NCCL does not notice that a peer in
                the same machine has aborted.
            relays: True if the head says afterwards, with ``set_relays``, where this engine rank stands in its chain.

        It raises DeadlineExceeded if a member did not come in time, and GroupFailed if one died or it was
        ``cancelled``.
        """
        self.name = name
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self._aborted = threading.Event()
        self._why = ""
        self.relay = Relay()
        self._store: dist.Store | None = None
        self._notice: AbortNotice | None = None
        self._timeout_s = timeout_s
        self._tags = Tags()
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
                    prefixed = with_token(base, token)
                    if tells is not None:
                        told_words.tell(prefixed, rank, tells)
                        self._store = None if tells else prefixed
                    if tells == b"" or device.type == "cuda":
                        self._notice = AbortNotice(prefixed)
                    self._meet(prefixed, deadline, timeout_s)
                    if tells is not None and rank == 0:
                        told_words.publish(prefixed, world_size)  # before the first byte, for which the others wait
                self._group = group = _new_group(prefixed, rank, world_size, device, address, timeout_s)
                if self._aborted.is_set():  # that abort found no group yet
                    _hang_up(group, device)
                if meeting == "weightcast":
                    hello = torch.zeros(1, dtype=torch.uint8, device=device)
                    self.finish(self.start_broadcast(hello), what="the first byte", timeout_s=timeout_s)
                if relays:
                    self.relay = _relay.decode(prefixed.get(relay_of(rank)))
                made.append(None)
            except (RuntimeError, ValueError, WeightcastError) as error:
                made.append(error.with_traceback(None))  # its frames refer to the store, which would keep listening
            finally:
                done.set()

        blocking_threads.start(
            make, name=f"weightcast-join-{name}", give_up=lambda: self.abort("the interpreter ends here")
        )
        naming_s = min(max(timeout_s / 4, _LEAST_NAMING_S), _MOST_NAMING_S)
        while not done.wait(_CANCEL_POLL_S):
            if cancelled is not None and cancelled.is_set():
                self.abort("cancelled")
                raise GroupFailed(f"group {name}: the rendezvous was cancelled")
            self._look_for_abort()  # NCCL waits for a member that died while it connects, and looks at no clock
            if time.monotonic() > deadline + naming_s:
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
    def join(*, host: str, port: int, name: str, timeout_s: float, **rest: Any) -> UpdateGroup:
        """Joins at a head's ``Rendezvous``; raises as the constructor, also when nothing listens at host and port.

        ``rest`` are other arguments of the constructor.
        """

        def connect() -> dist.Store:
            try:
                return connect_to_store(host, port, timeout_s)
            except (OSError, RuntimeError, ValueError) as error:
                raise GroupFailed(
                    f"group {name}: cannot reach the rendezvous at {host}:{port}: {first_line(error)}",
                    hint=f"open TCP {port} from here to {host}, or pass an address that this host can reach",
                ) from error

        address = local_address_towards(host, port)
        return UpdateGroup(store=connect, name=name, address=address, timeout_s=timeout_s, **rest)

    @property
    def alive(self) -> bool:
        """False after an abort."""
        return not self._aborted.is_set()

    def start_broadcast(self, data: torch.Tensor, *, patience_s: float | None = None) -> Any:
        """Enters the broadcast of flat uint8 ``data`` from rank 0 and returns a handle for ``finish``.

        ``patience_s`` limits the time from now until it is complete, in seconds, for a broadcast that is entered long
        before rank 0 may enter it.  None takes the deadline of the rendezvous.  Only gloo keeps such a limit.
        """
        options = dist.BroadcastOptions()
        options.rootRank = 0
        if patience_s is not None and self.device.type == "cpu":
            options.timeout = timedelta(seconds=patience_s)
        group = self._check()
        try:
            return group.broadcast([data], options)
        except RuntimeError as error:
            raise GroupFailed(f"group {self.name}: {first_line(error)}") from error

    def finish(self, work: Any, *, what: str, timeout_s: float, poll: Callable[[], None] | None = None) -> None:
        """Waits for a broadcast.  After it, ``data`` is complete on this rank, not merely enqueued.

        Errors name the data by ``what``; ``poll`` is called meanwhile and may raise.  DeadlineExceeded leaves the group
        unusable; GroupFailed says that a peer died or the group was aborted.
        """
        deadline = time.monotonic() + timeout_s
        backoff = Backoff()
        while not work.is_completed():
            if poll is not None:
                poll()
            self._check()
            self._look_for_abort()
            if time.monotonic() > deadline:
                raise self._waited(timeout_s, what)
            backoff.sleep()
        self._check()
        try:
            work.wait()
        except RuntimeError as error:
            self.abort(first_line(error))
            raise GroupFailed(f"group {self.name}: {first_line(error)}") from error

    def broadcast(self, data: torch.Tensor, *, what: str, timeout_s: float) -> None:
        """Calls ``start_broadcast`` and ``finish``."""
        self.finish(self.start_broadcast(data), what=what, timeout_s=timeout_s)

    def told(self, ranks: Iterable[int]) -> Sequence[bytes]:
        """Returns these members' words in order, equal ones as one object; GroupFailed if the rendezvous was closed."""
        self._check()
        assert self._store is not None
        try:
            return told_words.read(self._store, ranks)
        except (RuntimeError, ValueError) as error:
            raise GroupFailed(f"group {self.name}: {first_line(error)}") from error

    def set_relays(self, first_rank: int) -> None:
        """Tells every engine rank, from ``first_rank`` on, its place in its chain; only the head may."""
        places = chains(self.told(range(first_rank, self.world_size)), first_rank)
        assert self._store is not None
        try:
            for rank, place in enumerate(places, first_rank):
                self._store.set(relay_of(rank), msgspec.json.encode(place).decode())
        except RuntimeError as error:
            raise GroupFailed(f"group {self.name}: {first_line(error)}") from error

    def start_moves(self, sends: Sequence[Move], receives: Sequence[Move] = ()) -> list[Any]:
        """Starts messages to and from other members; returns handles for ``finish_moves``, whose errors it raises."""
        group = self._check()
        deadline = time.monotonic() + self._timeout_s

        def look() -> None:
            self._check()
            self._look_for_abort()
            if time.monotonic() > deadline:
                raise self._waited(self._timeout_s, "a connection to another member")

        try:
            if self.device.type == "cuda":
                return start_apart(group, self.device, sends, receives, self._tags, look)
            return start_moves(group, self.device, sends, receives, self._tags)
        except RuntimeError as error:
            self._check()  # an abort is the better reason
            raise GroupFailed(f"group {self.name}: {first_line(error)}") from error

    def finish_moves(self, works: Sequence[Any], *, what: str, timeout_s: float) -> None:
        """Waits for messages, whose memory may then be written or read again; raises as ``finish``."""
        if self.device.type == "cuda":
            for work in works:
                self.finish(work, what=what, timeout_s=timeout_s)
            return
        deadline = time.monotonic() + timeout_s

        def wait() -> list[Any]:
            # A message of gloo says that it is complete only to those who wait for it.
            for work in works:
                work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
            return []

        try:
            if self._notice is None:
                wait()
            else:
                call_apart(wait, self._look_for_abort)
        except RuntimeError as error:
            self._check()
            if time.monotonic() > deadline:
                raise self._waited(timeout_s, what) from error
            self.abort(first_line(error))
            raise GroupFailed(f"group {self.name}: {first_line(error)}") from error
        self._check()

    def abort(self, why: str) -> None:
        """Ends every wait now, here and at every other member.  Safe to call twice and from any thread."""
        if self._aborted.is_set():
            return
        self._why = why
        self._aborted.set()
        if self._notice is not None and self._group is not None:
            self._notice.tell(why)
        group = self._group
        if group is not None:
            _hang_up(group, self.device)

    def close(self) -> None:
        """Releases the group; safe to call twice."""
        self.abort("closed")
        self._group = self._store = self._notice = None

    def _meet(self, store: dist.Store, deadline: float, timeout_s: float) -> None:
        """Waits until every member is at the store.  The cost for a member does not grow with their number.

        Each member counts once; the one that makes the number full sets the key that all of them wait for.
        """
        go = f"go/{self.world_size}"
        if store.add(here(self.rank, self.world_size), 1) == 1:
            arrived = store.add(f"arrived/{self.world_size}", 1)
            if arrived == self.world_size:
                store.set(go, "1")
        pause_s = _FIRST_POLL_S
        while not store.check([go]):
            if self._aborted.is_set():
                raise GroupFailed(f"group {self.name}: {self._why}")
            if time.monotonic() > deadline:
                others = (rank for rank in range(self.world_size) if rank != self.rank)
                missing = [rank for rank in others if not store.check([here(rank, self.world_size)])]
                raise self._too_late(timeout_s, f"the rendezvous of all {self.world_size} members; missing {missing}")
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, _LONGEST_POLL_S)

    def _too_late(self, timeout_s: float, waiting_for: str) -> DeadlineExceeded:
        return DeadlineExceeded(
            who=f"group {self.name}", waiting_for=waiting_for, timeout_s=timeout_s, hint=WHERE_TO_LOOK
        )

    def _waited(self, timeout_s: float, what: str) -> DeadlineExceeded:
        """Aborts after a wait; returns the error."""
        self.abort(f"waited {timeout_s:g} s for {what}")
        return DeadlineExceeded(who=f"group {self.name}", waiting_for=what, timeout_s=timeout_s)

    def _look_for_abort(self) -> None:
        """Aborts if another member has, as far as the store has said."""
        why = self._notice.heard() if self._notice is not None and self._group is not None else ""
        if why:
            self.abort(why)
            raise GroupFailed(f"group {self.name}: {why}")

    def _check(self) -> Any:
        group = self._group
        if self._aborted.is_set() or group is None:
            raise GroupFailed(f"group {self.name}: {self._why or 'it does not exist yet'}")
        return group


def _hang_up(group: Any, device: torch.device) -> None:
    """Ends every wait in a process group of torch, here and at the other members."""
    with suppress(RuntimeError):  # a group that fails to abort has ended its waits
        group.abort()
    if device.type != "cuda":
        hang_up(group)


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
        with groups_that_end_nothing(watched=False):
            return backends.ProcessGroupNCCL(store, rank, world_size, options)
    options = backends.ProcessGroupGloo._Options()
    # Gloo's own timeout bounds connecting too, and it ends waits that we have left behind.
    options._timeout = timedelta(seconds=timeout_s)
    options._threads = 2
    # Gloo's default device reads no variable.  It has the address that the host's name resolves to, which need not
    # reach the other side; if the name does not resolve, that is loopback.
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]  # every member needs the same number of them
    where = {"interface": interface} if interface else {"hostname": address}
    options._devices = [backends.ProcessGroupGloo.create_device(**where)]
    return backends.ProcessGroupGloo(store, rank, world_size, options)
