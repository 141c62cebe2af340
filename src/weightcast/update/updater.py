"""Updates all targets in one transaction.

Every trainer rank has a ``WeightUpdater`` and calls its methods in step.  Rank 0, the *head*, talks to the engines and
decides (``update/head.py``).  The other ranks contribute their shards and receive the result.  So every rank returns
the same report or raises the same error.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, TypeVar, Unpack

import msgspec

from weightcast.comm.ipc import device_uuid
from weightcast.comm.nccl import settings_here
from weightcast.comm.trainer_group import TrainerGroup
from weightcast.config import Target, UpdateConfig, check_version
from weightcast.errors import ConfigError, WeightcastError
from weightcast.protocols import Exporter
from weightcast.report import UpdateReport, count_of
from weightcast.runtime.gc_pause import gc_paused
from weightcast.transports.health import TargetHealth
from weightcast.transports.plan import UpdatePlan
from weightcast.update.arguments import (
    Model,
    Targets,
    UpdateOptions,
    adapter_of,
    config_of,
    exporter_of,
    listeners_of,
    signature_of_connect,
    targets_of,
    with_draft,
)
from weightcast.update.attempts import Attempts, SentBuckets
from weightcast.update.bucket_memory import check_planned_bytes, free_bytes_of
from weightcast.update.bucket_stream import BucketStream
from weightcast.update.choose import Planner
from weightcast.update.finite import checks_finite
from weightcast.update.follower import Follower
from weightcast.update.head import Head, Progress
from weightcast.update.messages import AttemptResult, Failure, RankDevice, least_free_bytes
from weightcast.update.pending import PendingUpdate
from weightcast.update.recognise import recognise_on_loop
from weightcast.update.roster import Roster
from weightcast.update.served_parts import layouts_in_place
from weightcast.update.trainer_ranks import TrainerRanks
from weightcast.update.watched import Connecting, WatchedUpdate, tell_targets
from weightcast.watch.listeners import Events, Listener
from weightcast.wire.adapters import AdapterRequest
from weightcast.wire.layout import BucketLayout, plan_buckets

log = logging.getLogger("weightcast.update")
_Result = TypeVar("_Result")
_Function = TypeVar("_Function", bound=Callable[..., Any])
_LOOK_AGAIN, _CHOOSE_AGAIN = 1, 2  # what a trainer rank wants before the next call


@dataclass(slots=True, eq=False)
class _Call:
    """A call of one thread, such as ``update()``, until it is over."""

    name: str
    thread: str
    over: bool = False


def _shows_options(connect: _Function) -> _Function:
    """Tells ``help()`` and notebooks the names and defaults of the options."""
    connect.__signature__ = signature_of_connect()  # type: ignore[attr-defined]
    return connect


# Over 350 lines: every call of a trainer is one of its methods, and all of them share the group, head and stream.
class WeightUpdater:
    """Keeps rollout engines at the trainer's weights.  ``connect`` makes one; it is a context manager."""

    def __init__(
        self,
        exporter: Exporter,
        targets: Sequence[Target],
        config: UpdateConfig,
        progress: Progress | None = None,
        listeners: Sequence[Listener] = (),
        *,
        adapter: AdapterRequest | None = None,
        connecting: Connecting | None = None,
    ) -> None:
        self._exporter = exporter
        self._recognise = partial(recognise_on_loop, adapter=adapter)
        self._config = config
        self._progress = progress
        self._targets = tuple(targets)
        connecting = connecting if connecting is not None else Connecting()
        connecting.now("the trainer ranks form their group")
        if config.alone:
            self._group = TrainerGroup(device=exporter.device, timeout_s=config.timeout_s)
        else:
            self._group = TrainerGroup.connect(exporter.device, timeout_s=config.timeout_s)
        if not self._group.is_head:
            connecting.silence()
        self._ranks = TrainerRanks(self._group, timeout_s=config.timeout_s)
        self._head: Follower = Follower()
        self._stream: BucketStream | None = None
        self._roster: Roster | None = None
        self._closed = False
        self._call: _Call | None = None
        self._pending: PendingUpdate | None = None
        self._calling = threading.Lock()
        self._settled = False  # True while the head, the stream and the choice are those of all ranks, and whole
        self._heard: WeightcastError | None = None  # the last error that all ranks have heard from the head
        self._served: int | None = None
        self._release: Callable[[], None] | None = None  # closes an exporter that ``connect`` has made
        self._looks_again = False  # True while ranks may plan for different models
        self._plan = UpdatePlan()
        self._events = Events()
        try:
            self._events = Events(listeners, rank=self._group.rank)
            self._specs = tuple(exporter.specs())
            self._attempts = Attempts(exporter, self._group, self._ranks, self._events)
            connecting.now(f"the trainer ranks agree which of them holds which part of {len(self._specs)} tensors")
            exporter.prepare(self._group)
            connecting.now(f"{count_of(len(targets), 'engine')} are asked, and both sides work out the updates to come")
            self._choose()
            tell_targets(self._events, self.health)
        except BaseException as error:
            self._end_waits_of_others(error)
            self._head.close()
            if self._roster is not None:
                self._roster.close()
            if self._stream is not None:
                self._stream.close()
            self._group.close()
            self._events.close()
            raise

    @classmethod
    @_shows_options
    def connect(cls, model: Model, targets: Targets, **options: Unpack[UpdateOptions]) -> Self:
        """Connects to the engines and checks that an update can work.  Collective: every trainer rank calls it.

        Args:
            model: A plain or FSDP2 module, a ``state_dict`` with a checkpoint's names, the path of a safetensors
                checkpoint, or any ``Exporter``.
            targets: The engines, or one engine, as ``Target`` or URL.
            **options: Described by ``weightcast.UpdateOptions``.

        Raises:
            ConfigError: The options cannot work.  Nothing has moved.
            TargetUnreachable, TargetRejected: An engine does not answer, or refuses.
            TrainerRankFailed: Another trainer rank did not take part.
        """
        return cls._connect(model, targets, options, config_of(options))

    @classmethod
    def _connect(
        cls,
        model: Model,
        targets: Targets,
        options: UpdateOptions,
        config: UpdateConfig,
        progress: Progress | None = None,
    ) -> Self:
        """As ``connect``, for ``lab.connect`` too, which has more to say about the config."""
        with gc_paused(), Connecting() as connecting:
            known = targets_of(targets)
            request = None
            adapter, draft = options.get("adapter"), options.get("draft")
            if adapter is not None and draft is not None:
                raise ConfigError("an adapter has no draft", hint="give connect adapter= or draft=")
            if adapter is not None:
                exporter, release, request = adapter_of(model, adapter, config.wire_dtype)
            else:
                exporter, release = exporter_of(model, config.wire_dtype)
                if draft is not None:
                    exporter, release = with_draft(exporter, release, draft, config.wire_dtype)
            try:
                updater = cls(
                    exporter,
                    known,
                    config,
                    progress,
                    listeners_of(options.get("on_event")),
                    adapter=request,
                    connecting=connecting,
                )
            except BaseException:
                release()
                raise
            updater._release = release
            return updater

    @property
    def transport(self) -> str:
        """Name of the transport, as the caller asked or as ``"auto"`` chose: ``"ipc"``, ``"broadcast"`` and so on.

        Where ``"auto"`` reaches targets in different ways, the names are joined: ``"ipc+broadcast"``.
        """
        return self._plan.transport

    @property
    def bucket_bytes(self) -> int:
        """Size of a bucket in bytes, as the caller gave it or as ``connect`` chose it."""
        return self._plan.bucket_bytes

    @property
    def cells(self) -> tuple[tuple[str, ...], ...]:
        """URLs of the engines in each cell, as planned; empty if the transport makes no process group.

        A cell is one process group.  An engine that fails ends its own group only.  An attempt that is repeated makes
        the groups of all cells anew.
        """
        return self._plan.cells

    @property
    def served(self) -> int | None:
        """Highest version that the targets serve, as of the last connect or update; None if no target knows its own."""
        return self._served

    def update(self, *, version: int | None = None) -> UpdateReport:
        """Sends the current weights to every target.  Collective: every trainer rank calls it.

        Whatever an update raises has ``report``, which says what each target serves now; on other ranks than the head
        only if the head could tell them.  After an interrupt (Ctrl-C) the next call works out again what it needs.

        Args:
            version: The weight version, which counts up.  Engines that may have switched to it in an earlier update
                must have got the same weights.  None takes the next number that no target serves and no update tried.

        Returns:
            The report, the same on every rank; the head's has the timeline as well.

        Raises:
            UpdateFailed: A target failed (``on_failure="raise"``), or all did.  Targets that had switched were
                switched back if they could be.
            ConfigError: The update cannot work as asked: another thread is in a call of this updater, the version is
                too low, too high or that of other weights, or the model is not what ``connect`` planned for and cannot
                be sent as it is now, which names what has changed.  No engine has switched.
            TrainerRankFailed: Another trainer rank failed; the engines keep the weights that they serve.  If the
                engines had switched, the head raises ``UpdateFailed`` instead.  The next call makes the ranks' group
                again.
        """
        self._check_open()
        number = self._number(version)

        def update() -> UpdateReport:
            self._begin(number, counts_on=version is None)
            report = self._transact()
            assert isinstance(report, UpdateReport)
            return report

        return self._run("update()", lambda: self._watch(number).run(update))

    def start(self, version: int | None = None) -> PendingUpdate:
        """Sends the current weights to every target, and returns when they may change again.  Collective.

        It is the first part of ``update``: every engine has taken every byte.  The engines prove and switch while the
        trainer computes, and ``PendingUpdate.wait`` returns the report.  Any other call of this updater waits for the
        end first.

        Args:
            version: As for ``update``.

        Raises:
            UpdateFailed, ConfigError, TrainerRankFailed: As ``update``.  An engine that fails until this returns is
                handled as by ``update``.  Later on nothing can be sent again, since the weights may be others: then no
                engine switches that has not yet, and ``wait`` raises UpdateFailed.
            ConfigError: With ``verify="behaviour"``, whose forward pass needs the weights that were sent.
        """
        self._check_open()
        number = self._number(version)
        if self._config.verify == "behaviour":
            raise ConfigError(
                'verify="behaviour" compares with a forward pass of the weights that were sent, '
                "which may change after start()",
                hint='call update(), or connect with verify="resident"',
            )

        def start() -> PendingUpdate:
            watch = self._watch(number)

            def send() -> SentBuckets | UpdateReport:
                self._begin(number, counts_on=version is None)
                return self._transact(until_sent=True)

            sent = watch.run(send)
            finish: Callable[[], UpdateReport]
            if isinstance(sent, SentBuckets):
                finish = partial(self._tells_others, lambda: watch.run(lambda: self._finish(sent)))
            else:
                finish = lambda: sent  # noqa: E731
            self._pending = PendingUpdate(finish, self._exporter.device)
            return self._pending

        return self._run("start()", start)

    def _number(self, version: int | None) -> int:
        """The version of the next update, or the least that it may have."""
        if version is None:
            return (self._served or 0) + 1
        check_version("version", version)
        return version

    def _begin(self, number: int, *, counts_on: bool) -> None:
        """Begins an update, when every rank has come.  Collective."""
        self._head.begin(number, counts_on=counts_on)
        if not self._enter():
            self._choose_anew()
            self._head.begin(number, counts_on=counts_on)

    def retarget(self, targets: Targets, *, catch_up: bool = False) -> UpdateReport | None:
        """Replaces the targets.  Collective: every trainer rank calls it.

        Targets that stay are not disturbed.  A new target becomes active with its first full update.

        Args:
            targets: The engines from now on.
            catch_up: True updates the targets that do not serve the current version; the others get no new version.
                The weights must still be those of the last update.  Their digest is compared before any target
                switches.  If they have changed since, ``copy_from_peer`` brings an engine to the version.

        Returns:
            With ``catch_up``, the report on the targets that were updated; None if there were none.

        Raises:
            ConfigError, TargetUnreachable, TargetRejected: As ``connect``; the old targets stay, also after an
                interrupt.
            ConfigError: The weights have changed since the last update, or no digest can tell.  The new targets stay.
                Targets that do not serve the current version wait for the next update.
            UpdateFailed: As ``update``, for the targets that were to catch up.
        """
        self._check_open()
        if catch_up not in (False, True):
            raise ConfigError(
                f"catch_up={catch_up!r} is unknown",
                hint="choose False or True; copy_from_peer(TARGET, PEERS) and `weightcast catch-up` copy from engines",
            )
        known = targets_of(targets)
        return self._run("retarget()", lambda: self._retarget(known, catch_up))

    def _retarget(self, known: Sequence[Target], catch_up: bool) -> UpdateReport | None:
        before, plan = self._targets, self._plan
        try:
            self._enter()
            self._targets = tuple(known)
            with gc_paused():
                self._choose(leaving=before)
        except BaseException:
            self._targets, self._plan = before, plan
            if not self._settled:
                self._head.close()  # while it still knows the clients of the new targets
            raise
        finally:
            if self._roster is not None:
                self._roster.set_members(self._targets)
            tell_targets(self._events, self.health)
        if not catch_up:
            return None
        result = self._ranks.hear(self._head.begin_catch_up())
        if result.failure is not None:
            raise self._all_heard(result.failure.rebuild())
        if not result.again:
            return None

        report = self._watch(self._head.version).run(self._transact)
        assert isinstance(report, UpdateReport)
        return report

    def release(self) -> None:
        """Makes engines unmap the trainer's memory.  Collective: every trainer rank calls it, between two updates.

        Call it before weights are freed, offloaded or moved.  The next update maps them again.  An engine that does not
        answer is noted in its next report.
        """
        self._check_open()
        self._run("release()", self._let_go)

    def _let_go(self) -> None:
        self._enter(looks=False)  # it needs no weights
        self._head.release()
        if self._stream is not None:
            self._stream.buckets.forget()
        self._ranks.hear(AttemptResult())

    def health(self) -> tuple[TargetHealth, ...]:
        """Returns the recorded health of each target.  Not collective; it sends nothing.

        Returns:
            On the head, a row for each target, in order.  On other ranks, an empty tuple.
        """
        return self._roster.health() if self._roster is not None else ()

    def close(self) -> None:
        """Closes groups, buffers and connections, here and in the engines.  Safe to call twice.

        Raises:
            ConfigError: Another thread is in a call of this updater.
        """
        if not self._closed:
            self._alone("close()", self._close)

    def _close(self) -> None:
        self._closed = True
        with ExitStack() as rest:  # in reverse order; each runs even if another one fails
            rest.callback(self._events.close)
            if self._release is not None:
                rest.callback(self._release)
            rest.callback(self._group.close)
            if self._stream is not None:
                rest.callback(self._stream.close)
            if self._roster is not None:
                rest.callback(self._roster.close)
            rest.callback(self._head.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _alone(self, name: str, do: Callable[[], _Result]) -> _Result:
        """Does something that no other call may disturb, or ConfigError names the call that goes on."""
        mine = _Call(name, threading.current_thread().name)
        try:
            with self._calling:
                other = self._call
                if other is None or other.over:
                    self._call = other = mine
            if other is not mine:
                raise ConfigError(
                    f"{name} was called in thread {mine.thread}, and {other.name} still runs in thread {other.thread}: "
                    "an updater does one thing at a time",
                    hint="call the methods of an updater from one thread, or wait for the other one",
                )
            if self._pending is not None:
                self._pending.settle()
            return do()
        finally:
            mine.over = True  # nothing that an interrupt could keep from happening

    def _run(self, name: str, call: Callable[[], _Result]) -> _Result:
        """Runs a collective call.  If it fails for a reason of this rank, the other ranks hear of it at once."""

        return self._alone(name, lambda: self._tells_others(call))

    def _tells_others(self, call: Callable[[], _Result]) -> _Result:
        try:
            return call()
        except BaseException as error:
            if not isinstance(error, Exception):
                self._settled = False  # it may have come anywhere, so nothing is sure to be whole
            self._end_waits_of_others(error)
            raise

    def _all_heard(self, error: WeightcastError) -> WeightcastError:
        """Notes that every rank raises this error, so that none waits for another."""
        self._heard = error
        return error

    def _end_waits_of_others(self, error: BaseException) -> None:
        if error is not self._heard and self._group.world_size > 1:
            self._group.abort(f"{type(error).__name__}: {error}".rstrip(": "))

    def _watch(self, version: int) -> WatchedUpdate:
        return WatchedUpdate(
            self._events,
            version=version,
            transport=self.transport,
            targets=self._head.urls,
            health=self.health,
            report=lambda: self._head.report(),  # another one may take its place
        )

    def _enter(self, *, looks: bool = True) -> bool:
        """Waits for the other ranks and, if it ``looks``, plans again for a model that has changed.  Collective.

        Returns False on every rank if the choices of the head must be made again, because a call was broken off.
        """
        looks_again = looks and (self._looks_again or self._exporter.changed())
        flags = self._ranks.enter(flags=(_LOOK_AGAIN if looks_again else 0) | (0 if self._settled else _CHOOSE_AGAIN))
        if flags & _LOOK_AGAIN:
            self._look_again()
        return not flags & _CHOOSE_AGAIN

    def _look_again(self) -> None:
        self._looks_again, problem = True, None
        try:
            self._exporter.look_again()
            if self._stream is not None:
                check_planned_bytes(self._config, self._stream.buckets.planned_bytes)
        except WeightcastError as error:
            problem = error
        failure = self._ranks.agree(problem)
        if failure is not None:
            raise self._all_heard(failure)
        self._exporter.prepare(self._group)
        if self._stream is not None:
            self._stream.plan_buckets()
        self._looks_again = False
        log.info("the model is made in another way than before, so its tensors were looked at again")

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError("this updater is closed")

    def _choose_anew(self) -> None:
        """Makes the head's choices again after a call that was broken off; a failure has the update's report."""
        before = self._head
        try:
            with gc_paused():
                self._choose()
        except WeightcastError as error:
            if error is not self._heard:
                raise
            result = self._ranks.hear(before.fail(error))
            assert result.failure is not None
            raise self._all_heard(result.failure.rebuild(result.report)) from error

    def _choose(self, *, leaving: Sequence[Target] = ()) -> None:
        """Makes the head's choices, which every rank hears.  If it is broken off later on, nothing is settled."""
        device = self._exporter.device
        held = self._stream.buckets.buffer_bytes if self._stream is not None else 0  # freed before others are allocated
        free_bytes = free_bytes_of(device) + held
        seat = RankDevice(device_uuid(device), free_bytes, settings_here(device))
        places = self._group.gather_bytes(msgspec.json.encode(seat))
        result, follower, layouts = AttemptResult(), Follower(), list[BucketLayout]()
        if self._group.is_head:
            assert places is not None
            seats = [msgspec.json.decode(place, type=RankDevice) for place in places]
            try:
                if self._roster is None:
                    self._roster = Roster(
                        self._targets,
                        timeout_s=self._config.timeout_s,
                        recognise=self._recognise,
                        events=self._events,
                    )
                else:
                    self._roster.set_members(self._targets, leaving=leaving)
                follower = head = Head(
                    self._targets, self._roster, self._planner(seats), self._events, progress=self._progress
                )
                result = head.choose()
                self._roster.check_one_engine_each()
                assert result.plan is not None
                layouts = self._layouts_for(result.plan)
            except WeightcastError as error:
                result = AttemptResult(failure=Failure.of(error))
        result = self._ranks.hear(result)
        if result.failure is not None:
            raise self._all_heard(result.failure.rebuild())
        assert result.plan is not None
        self._settled = False
        # Engines unmap the buffers that are freed next, and map the new ones after that.
        self._head.close(self._roster.links if self._roster is not None else ())
        self._head, self._served = follower, result.served
        self._prepare(self._use(result.plan, layouts))
        self._settled = True

    def _planner(self, seats: Sequence[RankDevice]) -> Planner:
        return Planner(
            config=self._config,
            exporter=self._exporter,
            specs=self._specs,
            places=tuple(seat.device for seat in seats),
            hosts=tuple(self._group.hosts) if self._group.world_size > 1 else (),
            nccl=tuple(seat.nccl for seat in seats),
            free_bytes=least_free_bytes(seats),
        )

    def _prepare(self, stream: BucketStream) -> None:
        """Works out on both sides what the first update would otherwise have to find out.  Collective."""
        shared = stream.share_ahead()
        plan = stream.plan()
        self._head.prepare(plan, shared)
        stream.prepare()
        result = self._ranks.hear(self._head.check_prepared())
        if result.failure is not None:
            raise self._all_heard(result.failure.rebuild())
        self._head.meet_ahead()

    def _use(self, plan: UpdatePlan, layouts: Sequence[BucketLayout] = ()) -> BucketStream:
        """Makes the stream of buckets for the head's plan, with layouts that are known already.  Collective."""
        earlier = self._stream
        if earlier is not None:
            earlier.close()  # other targets and transports may need other buffers
        self._plan = plan
        self._head.use(plan)
        num_mapped = 0
        if plan.mapped:
            travelling = plan.travelling(self._specs)
            layouts, num_mapped = layouts_in_place(self._exporter, self._group, travelling, plan)
        layouts = layouts or self._layouts_for(plan)
        self._stream = BucketStream(
            self._exporter,
            layouts,
            self._group,
            plan,
            self._head,
            specs=plan.travelling(self._specs),
            num_mapped=num_mapped,
            verifies=self._config.verify != "none",
            check_finite=checks_finite(self._config, self._exporter.device),
            wait_s=self._ranks.wait_s,
            timeout_s=self._config.timeout_s,
            events=self._events,
            earlier=earlier,
        )
        return self._stream

    def _layouts_for(self, plan: UpdatePlan) -> list[BucketLayout]:
        return plan_buckets(plan.travelling(self._specs), bucket_bytes=plan.bucket_bytes, packing=plan.packing)

    def _transact(self, *, until_sent: bool = False) -> UpdateReport | SentBuckets:
        """Runs the update that the head has begun, to its end or until every engine has taken every bucket."""
        while True:
            assert self._stream is not None
            sent = self._attempts.send(self._head, self._stream)
            if isinstance(sent, SentBuckets) and until_sent and self._attempts.taken(self._head):
                return sent
            result = self._attempts.finish(sent, self._head, self._stream) if isinstance(sent, SentBuckets) else sent
            if result.plan is not None:
                self._settled, began = False, time.monotonic()
                self._use(result.plan)  # a transport gave way
                self._settled = True
                self._head.add_phase("recover", time.monotonic() - began)
            elif not result.again:
                return self._ended(result)

    def _finish(self, sent: SentBuckets) -> UpdateReport:
        """Ends an update in which every engine has taken every bucket, while the weights change."""
        assert self._stream is not None
        return self._ended(self._attempts.finish(sent, self._head, self._stream, repeats=False))

    def _ended(self, result: AttemptResult) -> UpdateReport:
        if result.report is not None:
            known = [row.version_after for row in result.report.targets if row.version_after is not None]
            self._served = max(known, default=self._served)
        if result.failure is not None:
            raise self._all_heard(result.failure.rebuild(result.report))
        assert result.report is not None
        return result.report
