"""Buckets over checkpoint-engine's wire, which LMDeploy (with any executor) and SGLang understand.

An engine is told, in one request that it answers only at the end, a ZeroMQ address for each of its GPUs.  There each
of its ranks gets a storage to map, then one table of tensors after the other, each answered when it was loaded, and
then twice nothing: to unmap, and to finish.  The messages are pickles, and are made nowhere but here; the answers are
text.  Everything goes through memory of this host.

Each engine has a thread here.  A ZeroMQ socket is not a file that the event loop can watch: its descriptor tells of
changes and not of readiness, and a send or a receive may clear it.  The engines share this host, so they are few.
"""

from __future__ import annotations

import re
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from weightcast.comm import event_loop, pickle_writer
from weightcast.comm.owned_folder import OwnedFolder, remove_abandoned
from weightcast.comm.pickle_writer import integer, integers, listing, mapping, text
from weightcast.comm.shared_buckets import Shared, TorchMemory, memory_of_ranks
from weightcast.comm.torch_reductions import reduced_storage
from weightcast.errors import ConfigError, TargetLost, TargetRejected, WeightcastError
from weightcast.transports.blame import raise_together
from weightcast.transports.handles import handles_for
from weightcast.transports.link import Link
from weightcast.transports.pump import Pumped, ThreadPump
from weightcast.transports.spec import TransportSpec
from weightcast.wire.answers import Ack
from weightcast.wire.bucket import Bucket
from weightcast.wire.layout import BucketLayout

_POLL_MS = 20
_FAREWELL_S = 10.0
_WHOLE_UPDATE_S = 86400.0  # of the request that lasts as long as the update; each step has a deadline of its own
_NOTHING = pickle_writer.pickled(pickle_writer.NONE)
_SOCKETS = re.compile(r"weightcast-sockets-[0-9a-f]{16}")
_MAX_PATH = 100  # of a socket's name, in bytes; the kernel's limit is 107


class CheckpointEngineCarrier(Pumped):
    """Same host, any executor.  Engines are told where to ask with the first bucket."""

    name = "checkpoint-engine"

    def __init__(self, links: Sequence[Link], *, timeout_s: float) -> None:
        """Nothing is sent yet; raises ConfigError if pyzmq is not installed, or there is no place for sockets."""
        super().__init__(ThreadPump(self._send_one))
        zmq = _zmq()
        self._folder = _folder_for_sockets()
        self._context = zmq.Context()
        self._feeds = [Feed(link, self._context, folder=self._folder.path, timeout_s=timeout_s) for link in links]
        self._pool = ThreadPoolExecutor(max_workers=max(1, len(links)), thread_name_prefix="weightcast-feed")

    def drain(self) -> None:
        """As ``Carrier.drain``; engines unmap and finish."""
        super().drain()
        self._each(lambda feed: feed.finish())

    def abort(self, reason: str) -> None:
        """As ``Carrier.abort``."""
        for feed in self._feeds:
            feed.give_up()
        self.settle()
        self._each(lambda feed: feed.part(reason))

    def _end(self) -> None:
        self.abort("closed")
        super()._end()
        self._pool.shutdown(wait=True)
        self._context.term()
        self._folder.remove()

    def _send_one(self, bucket: Bucket, shared: tuple[Shared, ...]) -> None:
        self._each(lambda feed: feed.take(bucket.layout, handles_for(feed.link, shared)))

    def _each(self, do: Callable[[Feed], None]) -> None:
        raise_together([future.exception() for future in [self._pool.submit(do, feed) for feed in self._feeds]])


class Feed:
    """One engine during one update: a socket for each of its ranks, and the request that it answers last.

    Thread rule: one thread at a time, but for ``give_up``.
    """

    def __init__(self, link: Link, context: Any, *, folder: Path, timeout_s: float) -> None:
        self.link = link
        self._context = context
        self._folder = folder
        self._timeout_s = timeout_s
        self._sockets: list[Any] = []
        self._owed: set[int] = set()  # ranks that have not answered the last message
        self._answer: Future[Ack] | None = None
        self._given_up = threading.Event()

    def take(self, layout: BucketLayout, shared: Sequence[Shared]) -> None:
        """Hands over a bucket; returns when every rank has loaded it, or raises TargetRejected or TargetLost."""
        what = f"bucket {layout.index}"
        memories = memory_of_ranks(self.link.info, [item.ring for item in shared])
        if not self._sockets:
            self._begin(memories, what)
        first = memories[0].first_byte
        with self.link.session.moves():
            self._ask(pickle_writer.pickled(table(layout, first)), what)
        self.link.session.took_over()

    def finish(self) -> None:
        """No more buckets: unmap, finish, and the engine's own word that all is well.  Raises as ``take``."""
        if not self._sockets:
            return
        self._ask(_NOTHING, "letting go of the buffer")
        self._ask(_NOTHING, "finishing the update")
        self._wait(lambda: self._answer is None or self._answer.done(), "the end of the update")
        self._look_for_refusal()
        self._hang_up()

    def give_up(self) -> None:
        """Makes a waiting thread raise at once; safe from any thread."""
        self._given_up.set()

    def part(self, reason: str) -> None:
        """End the conversation so that no rank waits for more; safe to call twice."""
        farewell = pickle_writer.pickled(
            pickle_writer.call(pickle_writer.name("builtins", "RuntimeError"), text(reason[:4096]))
        )
        deadline = time.monotonic() + _FAREWELL_S
        waiting = set(range(len(self._sockets)))
        while waiting and time.monotonic() < deadline and not self._ended():
            for rank in sorted(waiting):
                # A rank that owes an answer cannot be told before it has given it.
                if rank in self._owed and self._sockets[rank].poll(_POLL_MS, _zmq().POLLIN):
                    self._sockets[rank].recv()
                    self._owed.discard(rank)
                if rank not in self._owed and self._sockets[rank].poll(_POLL_MS, _zmq().POLLOUT):
                    self._sockets[rank].send(farewell)
                    waiting.discard(rank)
        self._hang_up(linger_ms=1000)
        self._given_up.clear()

    def _begin(self, memories: Sequence[TorchMemory], what: str) -> None:
        zmq = _zmq()
        token = secrets.token_hex(4)
        addresses: dict[str, str] = {}
        for rank, memory in zip(self.link.info.ranks, memories, strict=True):
            # A path in a folder of this user's, not an abstract name: any user of the host could connect to that one.
            address = f"ipc://{self._folder}/{token}-{rank.rank}"
            socket = self._context.socket(zmq.REQ)
            socket.bind(address)
            self._sockets.append(socket)
            addresses[f"GPU-{memory.device if rank.device == 'cuda' else rank.device}"] = address
        self.link.touch()
        steps = self.link.adapter.handles(addresses)
        (self._answer,) = event_loop.submit([self.link.ask("handles", steps, timeout_s=_WHOLE_UPDATE_S)])
        handles = [pickle_writer.pickled(reduced_storage(memory, "uint8")) for memory in memories]
        self._tell(handles, what)

    def _ask(self, message: bytes, what: str) -> None:
        self._tell([message] * len(self._sockets), what)

    def _tell(self, messages: Sequence[bytes], what: str) -> None:
        """The same step on every rank: they may wait for each other in it."""
        zmq = _zmq()
        for socket, message in zip(self._sockets, messages, strict=True):
            self._wait(lambda socket=socket: bool(socket.poll(_POLL_MS, zmq.POLLOUT)), what)
            socket.send(message)
        self._owed = set(range(len(self._sockets)))
        for rank, socket in enumerate(self._sockets):
            self._wait(lambda socket=socket: bool(socket.poll(_POLL_MS, zmq.POLLIN)), what)
            words = socket.recv().decode(errors="replace").strip()
            self._owed.discard(rank)
            if words:
                raise TargetRejected(
                    f"{self.link.url} refused {what} after {self.link.session.sent} buckets: rank {rank}: "
                    f"{words.splitlines()[-1][:2000]}",
                    url=self.link.url,
                    half_updated=True,
                )

    def _wait(self, ready: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + self._timeout_s
        while not ready():
            self._look_for_refusal()
            if self._given_up.is_set():
                raise TargetLost(f"{self.link.url}: given up at {what}", url=self.link.url, half_updated=True)
            if time.monotonic() > deadline:
                self.link.session.overdue = True
                raise TargetLost(
                    f"{self.link.url}: no answer to {what} within {self._timeout_s:g} s",
                    url=self.link.url,
                    half_updated=True,
                    hint=f"the engine must run as this user, or root, and see the sockets in {self._folder} "
                    "(TMPDIR chooses the folder)",
                )
            time.sleep(0.0005)

    def _ended(self) -> bool:
        return self._answer is not None and self._answer.done()

    def _look_for_refusal(self) -> None:
        if not self._ended():
            return
        assert self._answer is not None
        error = self._answer.exception()
        if isinstance(error, WeightcastError):
            status = error.status if isinstance(error, TargetRejected) else None
            kind = TargetRejected if status is not None else TargetLost
            raise kind(
                f"{self.link.url} ended the update after {self.link.session.sent} buckets: {error}",
                url=self.link.url,
                half_updated=True,
                hint=error.hint,
            )
        if error is not None:
            raise error

    def _hang_up(self, *, linger_ms: int = 0) -> None:
        for socket in self._sockets:
            with suppress(_zmq().ZMQError):
                socket.close(linger_ms)
        self._sockets.clear()
        self._owed.clear()
        self._answer = None


def _folder_for_sockets() -> OwnedFolder:
    root = Path(tempfile.gettempdir())
    path = root / f"weightcast-sockets-{secrets.token_hex(8)}"
    if len(f"{path}/{secrets.token_hex(4)}-{1 << 20}".encode()) > _MAX_PATH:
        raise ConfigError(f"{root}: its name is too long for sockets", hint="set TMPDIR to a shorter one")
    try:
        remove_abandoned(root, _SOCKETS)
        return OwnedFolder(path)
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror or error}", hint="sockets go into the folder for temporary files: TMPDIR"
        ) from error


def table(layout: BucketLayout, first_byte: int) -> bytes:
    """The table of a bucket's tensors for checkpoint-engine's receiver; offsets count from the storage's start.

    It raises ConfigError for a tensor that is cut, which the receiver could not put together.
    """
    entries: list[bytes] = []
    for slot in layout.slots:
        if not slot.whole:
            raise ConfigError(
                f"bucket {layout.index} has a part of {slot.spec.name}; checkpoint-engine takes whole ones"
            )
        entries.append(
            mapping(
                [
                    ("name", text(slot.spec.name)),
                    ("shape", integers(slot.spec.shape)),
                    ("dtype", pickle_writer.name("torch", slot.spec.dtype)),
                    ("offset", integer(first_byte + slot.offset_bytes)),
                ]
            )
        )
    return listing(entries)


def _zmq() -> Any:
    try:
        import zmq
    except ImportError:
        raise ConfigError(
            "checkpoint-engine's wire needs pyzmq, which is not installed",
            hint="pip install 'weightcast[checkpoint-engine]'",
        ) from None
    return zmq


SPEC = TransportSpec(
    name="checkpoint-engine",
    carriers=("buffer",),
    reach="head",
    sharing="ring",
    build=lambda links, _plan, sender: CheckpointEngineCarrier(links, timeout_s=sender.config.timeout_s),
)
