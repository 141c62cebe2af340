"""One engine rank: the only place that knows what a message means.

``WeightReceiver`` sits beside a model and answers messages.  It can be embedded in any engine that has the model in
its process: give it the model, the model's ``load_weights`` and what must be done after new weights are in.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, assert_never

import torch
from torch import nn

from weightcast.comm.ipc import MappingFailed
from weightcast.comm.remote_reads import RemoteReadFailed
from weightcast.comm.update_group import GroupFailed
from weightcast.digest.transfers import prepare_kernels
from weightcast.errors import ConfigError, DeadlineExceeded, EngineFailure, Refused
from weightcast.receiver.loader import READ_BACK, Finisher, Loader, residents_of
from weightcast.receiver.offer import check_copies
from weightcast.receiver.recorder import LoadWeights
from weightcast.receiver.resident_chunks import ResidentChunks
from weightcast.receiver.shares import Shares
from weightcast.receiver.sources.broadcast import GroupSource
from weightcast.receiver.sources.ipc import SharedMemorySource
from weightcast.receiver.sources.peer import PeerSource
from weightcast.receiver.staging import StagingPlace, choose_place
from weightcast.runtime.gc_pause import gc_paused
from weightcast.runtime.peak_memory import PeakMemory
from weightcast.runtime.streams import wait_for_streams
from weightcast.watch.events import Step
from weightcast.wire.answers import RankAck
from weightcast.wire.bucket_sources import ByRankSource, LegsSource
from weightcast.wire.held import NOTHING_HELD, HeldSums
from weightcast.wire.layout import TensorSpec
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

StagingChoice = Literal["auto", "device", "host", "none"]


# Over 350 lines: each message is one method, and all of them read and change the state of the open session.
class WeightReceiver:
    """Receives updates for one rank's model.  One thread at a time calls ``apply``, any other ``interrupt``."""

    def __init__(
        self,
        model: nn.Module,
        *,
        load_weights: LoadWeights,
        expected: Sequence[TensorSpec] | None = None,
        tp_rank: int = 0,
        tp_size: int = 1,
        device: torch.device | str = "cpu",
        finishers: Sequence[Finisher] = (),
        staging: StagingChoice = "auto",
        residents: Mapping[str, torch.Tensor] | None = None,
        checks: Sequence[Callable[[], object]] = (),
        before_commit: Sequence[Finisher] = (),
        keep_storage: bool = False,
        may_move: bool = False,
        between_steps: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        """Learns the model's loader and allocates the staging set.

        Args:
            load_weights: Takes ``(name, tensor)`` pairs of whole tensors and keeps this rank's slices.
            expected: Every tensor of a full update, whole; None takes the model's own parameters and buffers.
            finishers: Called once after new weights are live (rebuild captured graphs, say).
            staging: Place of the staging set; ``auto`` takes the device, else the host, else nothing.
            residents: Tensors that ``load_weights`` writes, for an engine that packs its weights; see ``Loader``.
            checks: Called before weights are read back; each raises if the model computes with other memory.
            before_commit: Called once all weights of an update wait in the staging set, while the engine goes on, for
                what finishers then need not do.  Not called where none wait, or the model computes some at the commit.
            keep_storage: A commit leaves parameters at their addresses on a CPU too; see ``StagingSet``.
            may_move: Parameters may get other addresses once, here, so that a commit on a GPU copies nothing; see
                ``StagingSet``.
            between_steps: Runs what it is given while the engine generates nothing, and returns when it is done; for an
                engine that generates while messages are answered.  It gets the exchange of weights and the finishers.

        Raises:
            ConfigError: The staging asked for is not possible, or the loader cannot be watched or writes a parameter
                twice.
        """
        self.rank = tp_rank
        self.tp_size = tp_size
        self.device = torch.device(device)
        if str(self.device) == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device())
        if expected is None:
            if tp_size > 1:
                raise ConfigError("a tensor-parallel rank must be told which whole tensors to expect")
            expected = [TensorSpec.of(name, tensor) for name, tensor in residents_of(model).items()]
        self.loader = Loader(
            model,
            load_weights=load_weights,
            expected=expected,
            finishers=finishers,
            residents=residents,
        )
        self._checks = tuple(checks)
        self._before_commit = tuple(before_commit)
        self._between_steps = between_steps if between_steps is not None else _at_once
        why = self.loader.unstaged_because(keep_storage=keep_storage)
        place = "none" if staging == "auto" and why else staging
        place = choose_place(place, size_bytes=self.loader.size_bytes, device=self.device)
        self.staging_note = _staging_note(place, why, self.loader.size_bytes) if staging == "auto" else ""
        self.loader.stage(place, keep_storage=keep_storage, may_move=may_move)
        prepare_kernels(self.device)
        self._memory = SharedMemorySource(self.device)
        self._interrupted = threading.Event()
        self._broadcast = GroupSource(self.device, self._interrupted)
        self._shares = Shares(self.loader, self._memory, self._broadcast, self.device)
        self._peer = PeerSource()
        self._chunks: ResidentChunks | None = None  # of the session that fetches
        self._given: tuple[object, ResidentChunks] | None = None  # of the live weights, and where they lay
        self._open: Open | None = None
        self._owner: Owner | None = None
        self._committed = ""
        self._asleep = ""
        self._set_aside: dict[str, torch.Tensor] = {}
        self._peak: PeakMemory | None = None
        self._measuring = False
        self._load_s = self._verify_s = 0.0
        self._steps: list[Step] = []

    def apply(self, message: Message) -> RankAck:
        """Carries out a message.  A failure is in the answer; nothing is raised."""
        self._load_s = self._verify_s = 0.0
        self._steps.clear()
        try:
            with gc_paused():
                return self._apply(message)
        except Refused as error:
            return self._ack(ok=False, refused=True, error=_text(error))
        except (GroupFailed, DeadlineExceeded) as error:
            return self._ack(ok=False, cause="group", error=_text(error))
        except (MappingFailed, RemoteReadFailed) as error:
            return self._ack(ok=False, cause="mapping", error=_text(error))
        except Exception as error:  # noqa: BLE001  the model's loader and its finishers are other people's code
            return self._ack(ok=False, error=_text(error))

    def interrupt(self, reason: str) -> None:
        """Ends a wait for the trainer now; the message that waits is answered with a failure."""
        self._interrupted.set()
        self._broadcast.interrupt(reason)

    def sleep(self, *, discard: bool = False, lets_go: bool = False, hint: str = "POST /wake first") -> None:
        """Frees device memory that only updates need, and refuses updates and read-backs until ``wake``.

        ``discard`` is for an engine that drops its weights: parameters that no full update writes are then kept on the
        host.  ``lets_go`` is for one that calls the staging set's ``let_go`` next: unless they are discarded, the
        parameters that were moved are kept on the host.  ``hint`` is the advice in refusals.  It raises ``Refused``
        while an update is under way.
        """
        if self._open is not None and self._committed != self._open.session:
            raise Refused("an update is under way, which writes into the memory that sleep gives back")
        if lets_go and not discard:
            self.loader.staging.store()
        if discard:
            live = self.loader.residents
            self._set_aside = {name: live[name].detach().to("cpu", copy=True) for name in self.loader.partly_written()}
        self._asleep = hint
        self._open = None
        self._committed = ""
        self._trim()
        if discard:
            self.loader.forget()
        self.loader.known = None
        self.loader.staging.free()

    def wake(self) -> None:
        """Undoes ``sleep``, once the weights (or their memory) are back on their device."""
        self.loader.staging.restore()
        for name, values in self._set_aside.items():
            self.loader.residents[name].detach().copy_(values)
        self._set_aside.clear()
        self.loader.staging.allocate()
        self._asleep = ""

    def forget(self) -> None:
        """Called when someone else has written the weights: what is known of them, and the way back, count no more."""
        self._open = None
        self._committed = ""
        self.loader.forget()

    def close(self) -> None:
        """Frees groups, mapped memory and the staging set on the device; safe to call twice."""
        self._shares.unmap()
        self._broadcast.close()
        self._peer.close()
        self.loader.staging.free()

    def _apply(self, message: Message) -> RankAck:
        match message:
            case Open():
                return self._begin(message)
            case Prepare():
                return self._prepare(message)
            case Join():
                if message.members and self.rank not in message.members:
                    return self._ack()
                if not message.session:
                    self._interrupted.clear()  # by the end of an update that is over
                place = message.members.index(self.rank) if message.members else self.rank
                self._broadcast.join(message, rank=place, tells=self._shares.wanted() if message.wants else None)
                return self._ack()
            case Leave():
                if message.group is not None:
                    self._broadcast.leave(message.group)
                self._unmap()
                self._trim()
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
        if self._asleep:
            raise Refused("the engine is asleep", hint=self._asleep)

    def _prepare(self, message: Prepare) -> RankAck:
        """Works out an update to come; the answer has the parts that its proof will sum."""
        self._check_awake()
        if self._open is not None and self._committed != self._open.session:
            raise Refused("an update is under way")
        self.loader.check(message.plan.specs)
        if message.sources:
            self._take_owner(message.owner)
        written = self.loader.prepare(message)
        for layout, source in zip(message.plan.layouts, message.sources, strict=False):
            self._shares.prepare(layout, source)
        return self._ack(held=written)

    def _begin(self, message: Open) -> RankAck:
        self._check_awake()
        self.loader.check(message.specs)
        self._end()
        self.loader.begin(message.plan, proves=message.verify in READ_BACK)
        self._shares.begin()
        self._take_owner(message.owner)
        self._open = message
        self._committed = ""
        self._interrupted.clear()
        # Later on, the engine would have to fault in again what it keeps in its heap from update to update.
        self._peak = PeakMemory(self.device, trim=self._peak is None).__enter__()
        self._measuring = True
        return self._ack()

    def _take_owner(self, owner: Owner | None) -> None:
        if owner != self._owner:
            self._unmap()  # another trainer, perhaps dead, cannot free memory that is mapped here
            self._owner = owner

    def _take(self, message: Announce) -> RankAck:
        session = self._session(message.session)
        source = (
            message.source.of(self.rank) if isinstance(message.source, ByRankSource | LegsSource) else message.source
        )
        for layout in message.layouts:
            started = time.monotonic()
            arrived = self._shares.take(layout, source, session, interrupted=self._interrupted.is_set)
            loaded = time.monotonic()
            self._load_s += loaded - arrived
            self._steps += [
                Step("wire", self.rank, started, arrived, layout.index),
                Step("load", self.rank, arrived, loaded, layout.index),
            ]
        return self._ack()

    def _fetch(self, message: Fetch) -> RankAck:
        """Copies one chunk from the same rank of a peer."""
        session = self._session(message.session)
        if self._chunks is None:
            self._chunks = self.loader.chunks(self.tp_size)
        chunks = self._chunks
        count = self.loader.count_chunks(chunks)
        if message.index < count:
            started = time.monotonic()
            data = self._peer.read(message, rank=self.rank, layout=chunks.layout, timeout_s=session.timeout_s)
            if self._interrupted.is_set():
                raise Refused("interrupted")
            self._did("wire", started)
            started = time.monotonic()
            self.loader.take_chunk(message.index, data, chunks)
            wait_for_streams(self.device)
            self._load_s = self._did("load", started)
        return self._ack(chunks=count)

    def _read_chunk(self, message: ReadChunk) -> RankAck:
        """Gives a chunk of the live weights to the same rank of another engine."""
        self._check_awake()
        if message.rank != self.rank:
            return self._ack()
        self.loader.staging.look(forms=True)
        form = self.loader.staging.form
        if self._given is None or self._given[0] is not form:
            self._given = form, self.loader.chunks(self.tp_size)
        chunks = self._given[1]
        if chunks.layout != message.layout:
            raise Refused(
                f"rank {self.rank} keeps its parameters in another layout than the engine that asks",
                hint="copy between engines of one kind and version, started on the same model with the same sizes",
            )
        return self._ack(part=self.loader.read_chunk(message.index, chunks))

    def _count(self, message: Close) -> RankAck:
        session = self._session(message.session)
        missing = self.loader.missing(session.specs)
        if missing:
            return self._ack(ok=False, missing=tuple(missing), error=f"{len(missing)} tensors did not arrive whole")
        self._check_range()
        started = time.monotonic()
        # The commit may run on another thread, whose stream does not wait for this one's copies.
        wait_for_streams(self.device)
        if self.loader.copies:
            check_copies(self.loader.copier.arrived(), self.loader.copies)
        if self.loader.staging.staged and not self.loader.computed:
            for prepare in self._before_commit:
                prepare()
            if self._before_commit:
                self._load_s = self._did("load", started)
                started = time.monotonic()
        if session.verify in READ_BACK:
            self.loader.know()  # the engine generates meanwhile; at the switch it would wait
        written = self.loader.written() if session.verify != "none" else NOTHING_HELD
        self._verify_s = self._did("verify", started)
        return self._ack(held=written, taken=self._shares.taken)

    def _check_range(self) -> None:
        """Fails for values that the model's float16 made infinite."""
        overflowed = self.loader.copier.overflowed()
        if overflowed:
            raise EngineFailure(
                f"{', '.join(overflowed[:4])} has values beyond float16's 65504, and the model keeps float16",
                hint="serve the model in bfloat16",
            )

    def _commit(self, message: Commit) -> RankAck:
        session = self._session(message.session)
        if self.loader.missing(session.specs):
            raise Refused("not everything has arrived")
        self._check_range()
        if self._committed == session.session:
            raise Refused("this session was committed before")
        started = time.monotonic()
        self._between_steps(self._switch)
        wait_for_streams(self.device)
        self._load_s = self._did("switch", started)
        self._measured()
        return self._ack(reads=session.verify in READ_BACK)

    def _switch(self) -> None:
        if self._open is not None:
            self._committed = self._open.session  # from here on an abort has something to undo
        self.loader.commit()

    def _revert(self, message: Revert) -> RankAck:
        if self._committed != message.session or not self.loader.staging.staged:
            raise Refused("the weights before that session are not kept here any more")
        self._committed = ""
        started = time.monotonic()
        self._between_steps(self.loader.undo)
        wait_for_streams(self.device)
        self._did("switch", started)
        self._open = None  # it is over, and no update is under way
        return self._ack(reads=True)

    def _abort(self, message: Abort) -> RankAck:
        self._interrupted.clear()
        if self._open is None or self._open.session != message.session:
            return self._ack()
        problem = ""
        if self._committed == message.session and self.loader.staging.staged:
            self._committed = ""
            try:
                self._between_steps(self.loader.undo)
                wait_for_streams(self.device)
            except Exception as error:  # noqa: BLE001  finishers are other people's code
                problem = f"the old version could not be switched back: {_text(error)}"
        touched = self.loader.touched or bool(problem)
        self._end()
        # The trainer may be dead: its memory would live as long as the mapping does.
        self._unmap()
        self._trim()
        return self._ack(ok=not problem, error=problem, touched=touched)

    def _end(self) -> None:
        self._open = None
        self._broadcast.expect_nothing()
        self._peer.close()
        self._chunks = None
        self._measured()

    def _unmap(self) -> None:
        # A bucket that failed half way may have left work on the streams that read it.
        wait_for_streams(self.device, *self._memory.devices)
        self._shares.unmap()

    def _trim(self) -> None:
        self._broadcast.trim()
        self._shares.trim()

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
            held = self.loader.held()
            self._verify_s += self._did("verify", started)
        return RankAck(
            rank=self.rank,
            touched=touched or self.loader.touched,
            not_updated=self.loader.not_updated,
            load_s=self._load_s,
            verify_s=self._verify_s,
            peak_extra_bytes=self._peak.extra_bytes if self._peak is not None else 0,
            steps=tuple(self._steps),
            **held.fields,
            **more,
        )

    def _did(self, phase: str, began: float) -> float:
        """Notes a step that ends now; returns its seconds."""
        self._steps.append(Step(phase, self.rank, began, time.monotonic()))
        return self._steps[-1].seconds


def _at_once(do: Callable[[], None]) -> None:
    do()


def _staging_note(place: StagingPlace, why: str, size_bytes: int) -> str:
    """The reason why a new version does not wait on the device; empty if it does."""
    if place == "device":
        return ""
    where = "in host memory" if place == "host" else "nowhere: an update that fails half way quarantines the engine"
    return f"a new version waits {where}; {why or f'{size_bytes} bytes for it are not free on the device'}"


def _text(error: BaseException) -> str:
    hint = getattr(error, "hint", None)
    first = str(error).strip().split("\n", 1)[0] or type(error).__name__
    return f"{first} ({hint})" if hint else first
