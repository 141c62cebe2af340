"""One rank's updates, message by message: what each changes in its weights, its memory and its groups."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, assert_never

import torch

from weightcast.errors import EngineFailure, Refused
from weightcast.receiver.loader import READ_BACK, Loader
from weightcast.receiver.offer import check_copies
from weightcast.receiver.peer_copies import PeerCopies
from weightcast.receiver.resident_versions import Finisher
from weightcast.receiver.shares import Shares
from weightcast.receiver.sources.broadcast import GroupSource
from weightcast.receiver.sources.ipc import SharedMemorySource
from weightcast.runtime.peak_memory import PeakMemory
from weightcast.runtime.streams import wait_for_streams
from weightcast.watch.events import Step
from weightcast.wire.answers import RankAck
from weightcast.wire.bucket_sources import ByRankSource, LegsSource
from weightcast.wire.held import NOTHING_HELD, HeldSums
from weightcast.wire.messages import (
    Abort,
    Announce,
    Close,
    Commit,
    Fetch,
    Join,
    Leave,
    Message,
    Open,
    Owner,
    Prepare,
    Readback,
    ReadChunk,
    Revert,
    TellBoxes,
)


class RankUpdates:
    """One rank's updates.  One thread at a time calls all methods but ``interrupt``.

    Attributes:
        asleep: Advice in the refusals of a rank that sleeps; empty while it is awake.
    """

    def __init__(
        self,
        loader: Loader,
        *,
        rank: int,
        tp_size: int,
        device: torch.device,
        checks: Sequence[Callable[[], object]],
        before_commit: Sequence[Finisher],
        between_steps: Callable[[Callable[[], None]], None],
    ) -> None:
        """The arguments are those of ``WeightReceiver``."""
        self.asleep = ""
        self._loader = loader
        self._rank, self._device = rank, device
        self._checks, self._before_commit, self._between_steps = tuple(checks), tuple(before_commit), between_steps
        self._memory = SharedMemorySource(device)
        self._interrupted = threading.Event()
        self._broadcast = GroupSource(device, self._interrupted)
        self._shares = Shares(loader, self._memory, self._broadcast, device)
        self._peers = PeerCopies(loader, rank=rank, tp_size=tp_size)
        self._open: Open | None = None
        self._owner: Owner | None = None
        self._committed = ""
        self._peak: PeakMemory | None = None
        self._measuring = False
        self._load_s = self._verify_s = 0.0
        self._steps: list[Step] = []

    @property
    def under_way(self) -> bool:
        """True from an update's ``Open`` until its commit or its end."""
        return self._open is not None and self._committed != self._open.session

    def failed(self, error: Exception, **more: Any) -> RankAck:
        """The answer to the message that was carried out last, and raised."""
        return self._ack(ok=False, error=_text(error), **more)

    def interrupt(self, reason: str) -> None:
        """Ends a wait for the trainer now; the message that waits fails."""
        self._interrupted.set()
        self._broadcast.interrupt(reason)

    def forget(self) -> None:
        """Ends an update whose weights, or those before them, are not here any more."""
        self._open = None
        self._committed = ""

    def trim(self) -> None:
        """Frees device memory that only updates need."""
        self._broadcast.trim()
        self._shares.trim()

    def close(self) -> None:
        """Frees groups and mapped memory; safe to call twice."""
        self._shares.unmap()
        self._broadcast.close()
        self._peers.end()

    def apply(self, message: Message) -> RankAck:
        """Carries out a message; ``failed`` answers for one that raises."""
        self._load_s = self._verify_s = 0.0
        self._steps.clear()
        match message:
            case Open():
                return self._begin(message)
            case Prepare():
                return self._prepare(message)
            case Join():
                if message.members and self._rank not in message.members:
                    return self._ack()
                if not message.session:
                    self._interrupted.clear()  # by the end of an update that is over
                place = message.members.index(self._rank) if message.members else self._rank
                self._broadcast.join(message, rank=place, tells=self._shares.wanted() if message.wants else None)
                return self._ack()
            case Leave():
                if message.group is not None:
                    self._broadcast.leave(message.group)
                self._unmap()
                self.trim()
                return self._ack()
            case Announce():
                return self._take(message)
            case Close():
                return self._count(message)
            case Commit():
                return self._commit(message)
            case Revert():
                return self._revert(message)
            case Abort():
                return self._abort(message)
            case Readback():
                self._check_awake()
                for check in self._checks:
                    check()
                return self._ack(reads=True)
            case Fetch():
                return self._fetch(message)
            case ReadChunk():
                return self._read_chunk(message)
            case TellBoxes():
                return self._ack(part=self._shares.wanted())
            case _:
                assert_never(message)

    def _check_awake(self) -> None:
        if self.asleep:
            raise Refused("the engine is asleep", hint=self.asleep)

    def _prepare(self, message: Prepare) -> RankAck:
        """Works out an update to come; the answer has the parts that its proof will sum."""
        self._check_awake()
        if self.under_way:
            raise Refused("an update is under way")
        self._loader.check(message.plan.specs)
        if message.sources:
            self._take_owner(message.owner)
        written = self._loader.prepare(message)
        for layout, source in zip(message.plan.layouts, message.sources, strict=False):
            self._shares.prepare(layout, source)
        return self._ack(held=written)

    def _begin(self, message: Open) -> RankAck:
        self._check_awake()
        self._loader.check(message.specs)
        self._end()
        self._loader.begin(message.plan, proves=message.verify in READ_BACK)
        self._shares.begin()
        self._take_owner(message.owner)
        self._open = message
        self._committed = ""
        self._interrupted.clear()
        # Later on, the engine would have to fault in again what it keeps in its heap from update to update.
        self._peak = PeakMemory(self._device, trim=self._peak is None).__enter__()
        self._measuring = True
        return self._ack()

    def _take_owner(self, owner: Owner | None) -> None:
        if owner != self._owner:
            self._unmap()  # another trainer, perhaps dead, cannot free memory that is mapped here
            self._owner = owner

    def _take(self, message: Announce) -> RankAck:
        session = self._session(message.session)
        source = (
            message.source.of(self._rank) if isinstance(message.source, ByRankSource | LegsSource) else message.source
        )
        for layout in message.layouts:
            started = time.monotonic()
            arrived = self._shares.take(layout, source, session, interrupted=self._interrupted.is_set)
            loaded = time.monotonic()
            self._load_s += loaded - arrived
            self._steps += [
                Step("wire", self._rank, started, arrived, layout.index),
                Step("load", self._rank, arrived, loaded, layout.index),
            ]
        return self._ack()

    def _fetch(self, message: Fetch) -> RankAck:
        """Copies one chunk from the same rank of a peer."""
        session = self._session(message.session)
        if message.index < self._peers.total():
            started = time.monotonic()
            data = self._peers.read(message, timeout_s=session.timeout_s)
            if self._interrupted.is_set():
                raise Refused("interrupted")
            self._did("wire", started)
            started = time.monotonic()
            self._peers.take(message.index, data)
            wait_for_streams(self._device)
            self._load_s = self._did("load", started)
        return self._ack(chunks=self._peers.total())

    def _read_chunk(self, message: ReadChunk) -> RankAck:
        """Gives a chunk of the live weights to the same rank of another engine."""
        self._check_awake()
        return self._ack(part=self._peers.give(message)) if message.rank == self._rank else self._ack()

    def _count(self, message: Close) -> RankAck:
        session = self._session(message.session)
        missing = self._missing(session)
        if missing:
            return self._ack(ok=False, missing=tuple(missing), error=f"{len(missing)} tensors did not arrive whole")
        self._check_range()
        started = time.monotonic()
        # The commit may run on another thread, whose stream does not wait for this one's copies.
        wait_for_streams(self._device)
        if self._loader.copies:
            check_copies(self._loader.copier.arrived(), self._loader.copies)
        if self._loader.staging.staged and not self._loader.computed:
            for prepare in self._before_commit:
                prepare()
            if self._before_commit:
                self._load_s = self._did("load", started)
                started = time.monotonic()
        if session.verify in READ_BACK:
            self._loader.live.know()  # the engine generates meanwhile; at the switch it would wait
        written = NOTHING_HELD
        if session.verify != "none":
            written = self._loader.waiting() if self._peers.taken else self._loader.written()
        self._verify_s = self._did("verify", started)
        return self._ack(held=written, taken=self._shares.taken)

    def _missing(self, session: Open) -> list[str]:
        return self._peers.missing() if self._peers.taken else self._loader.missing(session.specs)

    def _check_range(self) -> None:
        """Fails for values that the model's float16 made infinite."""
        overflowed = self._loader.copier.overflowed()
        if overflowed:
            raise EngineFailure(
                f"{', '.join(overflowed[:4])} has values beyond float16's 65504, and the model keeps float16",
                hint="serve the model in bfloat16",
            )

    def _commit(self, message: Commit) -> RankAck:
        session = self._session(message.session)
        if self._missing(session):
            raise Refused("not everything has arrived")
        self._check_range()
        if self._committed == session.session:
            raise Refused("this session was committed before")
        started = time.monotonic()
        self._between_steps(self._switch)
        wait_for_streams(self._device)
        self._load_s = self._did("switch", started)
        self._measured()
        return self._ack(reads=session.verify in READ_BACK)

    def _switch(self) -> None:
        if self._open is not None:
            self._committed = self._open.session  # from here on an abort has something to undo
        self._loader.live.commit()

    def _revert(self, message: Revert) -> RankAck:
        if self._committed != message.session or not self._loader.staging.staged:
            raise Refused("the weights before that session are not kept here any more")
        self._committed = ""
        started = time.monotonic()
        self._between_steps(self._loader.live.undo)
        wait_for_streams(self._device)
        self._did("switch", started)
        self._open = None  # it is over, and no update is under way
        return self._ack(reads=True)

    def _abort(self, message: Abort) -> RankAck:
        self._interrupted.clear()
        if self._open is None or self._open.session != message.session:
            return self._ack()
        problem = ""
        if self._committed == message.session and self._loader.staging.staged:
            self._committed = ""
            try:
                self._between_steps(self._loader.live.undo)
                wait_for_streams(self._device)
            except Exception as error:  # noqa: BLE001  finishers are other people's code
                problem = f"the old version could not be switched back: {_text(error)}"
        touched = self._loader.touched or bool(problem)
        self._end()
        # The trainer may be dead: its memory would live as long as the mapping does.
        self._unmap()
        self.trim()
        return self._ack(ok=not problem, error=problem, touched=touched)

    def _end(self) -> None:
        self._open = None
        self._broadcast.expect_nothing()
        self._peers.end()
        self._measured()

    def _unmap(self) -> None:
        # A bucket that failed half way may have left work on the streams that read it.
        wait_for_streams(self._device, *self._memory.devices)
        self._shares.unmap()

    def _measured(self) -> None:
        if self._peak is not None and self._measuring:
            self._measuring = False
            self._peak.__exit__(None, None, None)

    def _session(self, session: str) -> Open:
        if self._open is None or self._open.session != session:
            raise Refused("no such session here; it was never opened, or it was ended")
        return self._open

    def _ack(
        self, *, reads: bool = False, held: HeldSums = NOTHING_HELD, touched: bool = False, **more: Any
    ) -> RankAck:
        """An answer with the costs so far; ``reads`` reads the live weights back for it."""
        if reads:
            started = time.monotonic()
            held = self._loader.live.held()
            self._verify_s += self._did("verify", started)
        return RankAck(
            rank=self._rank,
            touched=touched or self._loader.touched,
            not_updated=self._loader.not_updated,
            load_s=self._load_s,
            verify_s=self._verify_s,
            peak_extra_bytes=self._peak.extra_bytes if self._peak is not None else 0,
            steps=tuple(self._steps),
            **held.fields,
            **more,
        )

    def _did(self, phase: str, began: float) -> float:
        """Notes a step that ends now; returns its seconds."""
        self._steps.append(Step(phase, self._rank, began, time.monotonic()))
        return self._steps[-1].seconds


def _text(error: BaseException) -> str:
    hint = getattr(error, "hint", None)
    first = str(error).strip().split("\n", 1)[0] or type(error).__name__
    return f"{first} ({hint})" if hint else first
