"""The ranks of one reference engine as Ray actors.

Weight messages, the engine's own work and interrupts are three concurrency groups of an actor, as they are separate
threads in other executors.  Ray carries frames and reports an actor that is gone.  ``EnginePlace`` has the
Ray options of ``weightcast serve --executor ray``.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, OutOfMemoryError, RayActorError, RayError

from weightcast.comm.rendezvous import Rendezvous
from weightcast.errors import ConfigError, EngineFailure
from weightcast.ray.actors import NodePlace, method, place, remote, why_gone
from weightcast.ray.bundles import Bundles, Resource
from weightcast.ray.cluster import named_group, require_cluster
from weightcast.receiver import lost_ranks
from weightcast.receiver.executor import Executor, Worker, WorkerFactory
from weightcast.receiver.lost_ranks import FarRanks, answer_message, answer_work
from weightcast.rollout.worker import WorkerSettings, make_worker
from weightcast.wire.answers import RankAck
from weightcast.wire.blobs import SentBlobs
from weightcast.wire.codec import encode
from weightcast.wire.messages import Message

_START_S = 600.0
_STOP_S = 5.0


@remote(concurrency_groups={"work": 1, "messages": 1, "interrupts": 1})
class _EngineRank:
    """A worker that is called with frames.

    Each concurrency group has one thread.  The same thread builds the worker and runs its work, since the current CUDA
    device belongs to a thread.
    """

    def __init__(self) -> None:
        self._worker: Worker | None = None
        self._rank = 0
        self._sent = SentBlobs()

    @method(concurrency_group="work")
    def place(self) -> NodePlace:
        return place()

    @method(concurrency_group="work")
    def build(
        self, factory: WorkerFactory, rank: int, tp_size: int, rendezvous: str, settings: Mapping[str, Any]
    ) -> bytes:
        def make() -> bytes:
            self._rank = rank
            self._worker = factory(rank, tp_size, rendezvous, **settings)
            return b""

        return answer_work(make)

    @method(concurrency_group="work")
    def run(self, command: bytes) -> bytes:
        assert self._worker is not None
        return answer_work(functools.partial(self._worker.run, command))

    @method(concurrency_group="messages")
    def apply(self, frame: bytes) -> bytes:
        assert self._worker is not None
        return answer_message(self._worker, frame, rank=self._rank, sent=self._sent)

    @method(concurrency_group="interrupts")
    def interrupt(self, reason: str) -> None:
        if self._worker is not None:
            with suppress(RuntimeError, OSError):
                self._worker.interrupt(reason)

    @method(concurrency_group="interrupts")
    def close(self) -> None:
        if self._worker is not None:
            with suppress(RuntimeError, OSError):
                self._worker.interrupt("the engine is shutting down")
                self._worker.close()


class RayExecutor(FarRanks):
    """One actor for each rank; see ``receiver.executor.Executor``.

    The factory is called in the rank's process as ``factory(rank, tp_size, rendezvous, **settings)``, where
    ``rendezvous`` is ``host:port`` of a ``torch.distributed.TCPStore`` that this process serves.
    """

    def __init__(
        self,
        factory: WorkerFactory,
        tp_size: int,
        settings: Mapping[str, Any] | None = None,
        *,
        bundles: Bundles | None = None,
        resource: Resource = "CPU",
        run_timeout_s: float = 300.0,
        start_timeout_s: float = _START_S,
    ) -> None:
        """Starts the ranks and waits until each has built its worker.

        Args:
            factory: Function of a module, which Ray can import by name in another process.
            bundles: One bundle for each rank; None makes a placement group that ends with this executor.
            resource: Resource of a group that is made here, ``"CPU"`` or ``"GPU"``.

        Raises:
            ConfigError: There is no cluster, or it is too small.
            EngineFailure: A rank could not build its worker; the message has its words.
        """
        super().__init__()
        require_cluster()
        self._apply_lock, self._run_lock = threading.Lock(), threading.Lock()
        self.tp_size = tp_size
        self._run_timeout_s = run_timeout_s
        self._bundles = bundles or Bundles.create(tp_size, resource=resource)
        if len(self._bundles.indices) != tp_size:
            raise ConfigError(f"{len(self._bundles.indices)} bundles for {tp_size} ranks")
        self.places: tuple[NodePlace, ...] = ()
        self._actors: list[Any] = [
            _EngineRank.options(**self._bundles.options(index)).remote() for index in self._bundles.indices
        ]
        try:
            self.places = self._find_places(start_timeout_s)
            self._meeting = Rendezvous(host=ray.util.get_node_ip_address(), timeout_s=start_timeout_s)
            meet = f"{self._meeting.host}:{self._meeting.port}"
            building = [
                actor.build.remote(factory, rank, tp_size, meet, dict(settings or {}))
                for rank, actor in enumerate(self._actors)
            ]
            self._first(self._replies(building, start_timeout_s, "its start", work=True), "its start")
        except BaseException:
            self.close()
            raise

    def apply(self, message: Message, *, timeout_s: float) -> list[RankAck]:
        """Implements ``Executor.apply``."""
        with self._apply_lock:
            self._check()
            frame = self._encode(message)
            asked = [actor.apply.remote(frame) for actor in self._actors]

            def send_whole(rank: int) -> None:
                asked[rank] = self._actors[rank].apply.remote(encode(message))

            what = f"the answer to {type(message).__name__}"
            replies = self._replies(asked, timeout_s + lost_ranks.GRACE_S, what, send_whole=send_whole)
        return [self._decode(reply) for reply in replies]

    def run(self, command: bytes) -> bytes:
        """Implements ``Executor.run``."""
        with self._run_lock:
            self._check()
            asked = [actor.run.remote(command) for actor in self._actors]
            replies = self._replies(asked, self._run_timeout_s, "a step", work=True)
        return self._first(replies, "a step")

    def interrupt(self, reason: str) -> None:
        """Implements ``Executor.interrupt``."""
        if not self._closed:
            for actor in self._actors:
                actor.interrupt.remote(reason)

    def pids(self) -> Sequence[int]:
        """Returns the process id of each rank, on its node."""
        return tuple(place.pid for place in self.places)

    def close(self) -> None:
        """Implements ``Executor.close``.  Kills a rank that does not end by itself."""
        if self._closed:
            return
        self._closed = True
        if ray.is_initialized():
            ray.wait([actor.close.remote() for actor in self._actors], num_returns=self.tp_size, timeout=_STOP_S)
            for actor in self._actors:
                ray.kill(actor)
        self._bundles.close()

    def _find_places(self, timeout_s: float) -> tuple[NodePlace, ...]:
        deadline = time.monotonic() + timeout_s
        found: list[NodePlace] = []
        for rank, actor in enumerate(self._actors):
            try:
                found.append(ray.get(actor.place.remote(), timeout=max(0.0, deadline - time.monotonic())))
            except GetTimeoutError as error:
                raise EngineFailure(
                    f"rank {rank} was given no process within {timeout_s:g} s", ranks=[rank], hint="see `ray status`"
                ) from error
            except RayError as error:
                raise self._lost(rank, "its start", error) from error
        return tuple(found)

    def _replies(self, asked: list[Any], timeout_s: float, what: str, **settings: Any) -> list[bytes]:
        """As ``_gather``, with its settings; ``asked`` has the call of each rank, which may be replaced."""

        def receive(ranks: set[int], limit_s: float) -> dict[int, bytes]:
            rank_of = {asked[rank]: rank for rank in sorted(ranks)}
            ready, _ = ray.wait(list(rank_of), num_returns=1, timeout=limit_s)
            replies: dict[int, bytes] = {}
            for reference in ready:
                try:
                    replies[rank_of[reference]] = ray.get(reference)
                except RayError as error:
                    raise self._lost(rank_of[reference], what, error) from error
            return replies

        return self._gather(len(asked), receive, timeout_s, what, **settings)

    def _lost(self, rank: int, what: str, error: Exception) -> EngineFailure:
        where = f" (pid {self.places[rank].pid} on {self.places[rank].address})" if self.places else ""
        how = "is gone during" if isinstance(error, (RayActorError, OutOfMemoryError)) else "could not give"
        return self._break(f"rank {rank}{where} {how} {what}: {why_gone(error)}", [rank])


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlace:
    """The placement of one engine's ranks.

    Attributes:
        group: Name of the caller's placement group in ``namespace``; None makes a group.
        namespace: Ray namespace of that name; Ray finds names only in the namespace of the connection.
        indices: Bundle of each rank in that group; None takes bundles with enough resources, sorted by address.
    """

    group: str | None = None
    namespace: str | None = None
    indices: tuple[int, ...] | None = None

    def make_executor(self, settings: WorkerSettings, tp_size: int) -> Executor:
        """Starts the ranks.

        Raises:
            ConfigError: The cluster, the group or its bundles do not fit the request.
            EngineFailure: A rank could not start.
        """
        resource: Resource = "GPU" if settings.device.startswith("cuda") else "CPU"
        bundles = None
        if self.group is not None:
            bundles = Bundles.of(named_group(self.group), tp_size, indices=self.indices, resource=resource)
        return RayExecutor(make_worker, tp_size, {"settings": settings}, bundles=bundles, resource=resource)


def parse_place(group: str | None, indices: str | None) -> EnginePlace:
    """Parses ``NAMESPACE/NAME`` of a group and comma-separated numbers of its bundles.

    Raises:
        ConfigError: Bundles come without a group, a name without a namespace, or indices are not numbers.
    """
    if group is None and indices is None:
        return EnginePlace()
    if group is None:
        raise ConfigError(
            f"bundles {indices} need the placement group that they belong to",
            hint="add --placement-group NAMESPACE/NAME",
        )
    namespace, _, name = group.partition("/")
    if not namespace or not name:
        raise ConfigError(
            f"placement group {group!r} has no namespace, and Ray finds a name only in its namespace",
            hint="write --placement-group NAMESPACE/NAME",
        )
    try:
        chosen = None if indices is None else tuple(int(part) for part in indices.split(","))
    except ValueError:
        raise ConfigError(f"bundles {indices!r} are not numbers", hint="write --bundles 1,0") from None
    return EnginePlace(group=name, namespace=namespace, indices=chosen)
