"""Updates all targets in one transaction.

Every trainer rank has a ``WeightUpdater`` and calls its methods in step.  Rank 0, the *head*, talks to the engines and
decides (``update/head.py``).  The other ranks contribute their shards and receive the result.  So every rank returns
the same report or raises the same error.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, TypeVar, Unpack

from weightcast.comm.trainer_group import TrainerGroup
from weightcast.config import Target, UpdateConfig, check_version
from weightcast.errors import ConfigError
from weightcast.report import UpdateReport, count_of
from weightcast.runtime.gc_pause import gc_paused
from weightcast.transports.health import TargetHealth
from weightcast.update.arguments import (
    Model,
    Targets,
    UpdateOptions,
    config_of,
    listeners_of,
    signature_of_connect,
    source_of,
    targets_of,
)
from weightcast.update.attempts import Attempts, SentBuckets
from weightcast.update.fleet import Fleet
from weightcast.update.head import Progress
from weightcast.update.pending import PendingUpdate
from weightcast.update.trainer_ranks import TrainerRanks
from weightcast.update.watched import Connecting, WatchedUpdate, tell_targets
from weightcast.watch.listeners import Events

_Result = TypeVar("_Result")
_Function = TypeVar("_Function", bound=Callable[..., Any])


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


class WeightUpdater:
    """Keeps rollout engines at the trainer's weights.  ``connect`` makes one; it is a context manager."""

    def __init__(
        self,
        model: Model,
        targets: Targets,
        options: UpdateOptions,
        config: UpdateConfig,
        progress: Progress | None = None,
    ) -> None:
        self._config = config
        self._closed = False
        self._call: _Call | None = None
        self._pending: PendingUpdate | None = None
        self._calling = threading.Lock()
        with gc_paused(), Connecting() as connecting, ExitStack() as rest:
            known = targets_of(targets)
            self._exporter, release, adapter = source_of(model, options, config.wire_dtype)
            rest.callback(release)
            listeners = listeners_of(options.get("on_event"))
            device = self._exporter.device
            connecting.now("the trainer ranks form their group")
            connect = TrainerGroup if config.alone else TrainerGroup.connect
            group = connect(device=device, timeout_s=config.timeout_s)
            rest.callback(group.close)
            if not group.is_head:
                connecting.silence()
            self._ranks = TrainerRanks(group, timeout_s=config.timeout_s)
            with self._ranks.hear_of_errors():
                self._events = Events(listeners, rank=group.rank)
                rest.callback(self._events.close)
                specs = tuple(self._exporter.specs())
                self._fleet = Fleet(
                    self._exporter,
                    specs,
                    known,
                    config,
                    self._ranks,
                    self._events,
                    adapter=adapter,
                    progress=progress,
                )
                rest.callback(self._fleet.close)
                self._attempts = Attempts(self._exporter, self._fleet, self._ranks, self._events)
                connecting.now(f"the trainer ranks agree which of them holds which part of {len(specs)} tensors")
                self._exporter.prepare(group)
                connecting.now(
                    f"{count_of(len(known), 'engine')} are asked, and both sides work out the updates to come"
                )
                self._fleet.choose()
                tell_targets(self._events, self.health)
            self._rest = rest.pop_all()  # what ``close`` closes, in reverse order; each even if another one fails

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
        return cls(model, targets, options, config_of(options))

    @property
    def transport(self) -> str:
        """Name of the transport, as the caller asked or as ``"auto"`` chose: ``"ipc"``, ``"broadcast"`` and so on.

        Where ``"auto"`` reaches targets in different ways, the names are joined: ``"ipc+broadcast"``.
        """
        return self._fleet.plan.transport

    @property
    def bucket_bytes(self) -> int:
        """Size of a bucket in bytes, as the caller gave it or as ``connect`` chose it."""
        return self._fleet.plan.bucket_bytes

    @property
    def cells(self) -> tuple[tuple[str, ...], ...]:
        """URLs of the engines in each cell, as planned; empty if the transport makes no process group.

        A cell is one process group.  An engine that fails ends its own group only.  An attempt that is repeated makes
        the groups of all cells anew.
        """
        return self._fleet.plan.cells

    @property
    def served(self) -> int | None:
        """Highest version that the targets serve, as of the last connect or update; None if no target knows its own."""
        return self._fleet.served

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
            self._fleet.begin(number, counts_on=version is None)
            return self._attempts.run()

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
                self._fleet.begin(number, counts_on=version is None)
                return self._attempts.run_until_sent()

            sent = watch.run(send)

            def finish() -> UpdateReport:
                if isinstance(sent, UpdateReport):
                    return sent
                return self._tells_others(partial(watch.run, partial(self._attempts.finish, sent)))

            self._pending = PendingUpdate(finish, self._exporter.device)
            return self._pending

        return self._run("start()", start)

    def _number(self, version: int | None) -> int:
        """The version of the next update, or the least that it may have."""
        if version is None:
            return (self._fleet.served or 0) + 1
        check_version("version", version)
        return version

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
        try:
            self._fleet.retarget(known)
        finally:
            tell_targets(self._events, self.health)
        if not catch_up:
            return None
        head = self._fleet.head
        if not self._ranks.hear_or_raise(head.begin_catch_up()).again:
            return None
        return self._watch(head.run.version).run(self._attempts.run)

    def release(self) -> None:
        """Makes engines unmap the trainer's memory.  Collective: every trainer rank calls it, between two updates.

        Call it before weights are freed, offloaded or moved.  The next update maps them again.  An engine that does not
        answer is noted in its next report.
        """
        self._check_open()
        self._run("release()", self._fleet.release)

    def health(self) -> tuple[TargetHealth, ...]:
        """Returns the recorded health of each target.  Not collective; it sends nothing.

        Returns:
            On the head, a row for each target, in order.  On other ranks, an empty tuple.
        """
        return self._fleet.health()

    def close(self) -> None:
        """Closes groups, buffers and connections, here and in the engines.  Safe to call twice.

        Raises:
            ConfigError: Another thread is in a call of this updater.
        """
        if not self._closed:
            self._alone("close()", self._close)

    def _close(self) -> None:
        self._closed = True
        self._rest.close()

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
            with self._ranks.hear_of_errors():
                return call()
        except BaseException as error:
            if not isinstance(error, Exception):
                self._fleet.interrupted(error)
            raise

    def _watch(self, version: int) -> WatchedUpdate:
        fleet = self._fleet
        return WatchedUpdate(
            self._events,
            version=version,
            transport=self.transport,
            targets=fleet.head.urls,
            health=self.health,
            report=lambda: fleet.head.report(),  # another one may take its place
        )

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError("this updater is closed")
