"""One engine rank: the only place that knows what a message means.

``WeightReceiver`` sits beside a model and answers messages.  It can be embedded in any engine that has the model in
its process: give it the model, the model's ``load_weights`` and what must be done after new weights are in.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal, assert_never

import torch
from torch import nn

from weightcast.comm.collector import collector_still
from weightcast.comm.group import GroupFailed
from weightcast.comm.memory import PeakMemory
from weightcast.errors import ConfigError, DeadlineExceeded, Refused
from weightcast.receiver.loader import Finisher, Loader, residents_of
from weightcast.receiver.recorder import LoadWeights
from weightcast.receiver.sources.broadcast import BroadcastSource
from weightcast.receiver.sources.ipc import SharedMemorySource
from weightcast.receiver.staging import choose_place
from weightcast.wire.bucket import Bucket
from weightcast.wire.bucket_sums import RepeatedTotals, sums_of_slots
from weightcast.wire.digest import RepeatedSums, sha256_digest
from weightcast.wire.layout import BucketLayout, TensorSpec
from weightcast.wire.messages import (
    Abort,
    Announce,
    Close,
    Commit,
    IpcSource,
    Join,
    Leave,
    Message,
    Open,
    Owner,
    RankAck,
    Readback,
)

StagingChoice = Literal["auto", "device", "host", "none"]
Check = Callable[[], object]


class WeightReceiver:
    """Receives updates for one rank's model.

    Thread rule: ``apply`` is called by one thread at a time; ``interrupt`` by any other.
    """

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
        draft: nn.Module | None = None,
        staging: StagingChoice = "auto",
        residents: Mapping[str, torch.Tensor] | None = None,
        checks: Sequence[Check] = (),
        keep_storage: bool = False,
    ) -> None:
        """Learn the model's loader and make room for a second version.

        Args:
            model: This rank's part of the model.
            load_weights: Takes ``(name, tensor)`` pairs of whole tensors and keeps this rank's slices.
            expected: Every tensor of a full update, whole; None takes the model's own parameters and buffers.
            tp_rank: This rank.
            tp_size: How many there are.
            device: Where the parameters live.
            finishers: Called once after new weights are live (rebuild captured graphs, say).
            draft: A draft model beside it; its parameters are reported as not updated.
            staging: Where a new version waits for its commit; ``auto`` takes the device, else the host, else nothing.
            residents: What ``load_weights`` writes, where that is not what the model computes with; see ``Loader``.
            checks: Called before what is kept is read back; one raises if the model computes with something else.
            keep_storage: A commit leaves parameters at their addresses; see ``Staging``.

        Raises:
            ConfigError: The staging asked for is not possible, or the loader writes a parameter twice.
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
            model, load_weights=load_weights, expected=expected, finishers=finishers, residents=residents
        )
        self._checks = tuple(checks)
        place = "none" if staging == "auto" and not self.loader.can_stage else staging
        place = choose_place(place, size_bytes=self.loader.size_bytes, device=self.device)
        self.loader.stage(place, keep_storage=keep_storage)
        self._draft = tuple(f"draft.{name}" for name, _ in draft.named_parameters()) if draft is not None else ()
        self._memory = SharedMemorySource(self.device)
        self._interrupted = threading.Event()
        self._broadcast = BroadcastSource(self.device, self._interrupted)
        self._open: Open | None = None
        self._owner: Owner | None = None
        self._committed = ""
        self._asleep = False
        self._received: list[tuple[BucketLayout, torch.Tensor]] = []
        self._repeated = RepeatedSums()
        self._totals = RepeatedTotals()
        self._hashed: dict[str, str] = {}
        self._peak: PeakMemory | None = None
        self._measuring = False
        self._load_s = self._verify_s = 0.0

    def apply(self, message: Message) -> RankAck:
        """Do what the message asks; never raises for what the world did, the answer says it."""
        self._load_s = self._verify_s = 0.0
        try:
            with collector_still():
                return self._apply(message)
        except Refused as error:
            return self._ack(ok=False, refused=True, error=_text(error))
        except (GroupFailed, DeadlineExceeded) as error:
            return self._ack(ok=False, group_failed=True, error=_text(error))
        except Exception as error:  # noqa: BLE001  the model's loader and its finishers are other people's code
            return self._ack(ok=False, error=_text(error))

    def interrupt(self, reason: str) -> None:
        """End a wait for the trainer now; the message that waits is answered with a failure."""
        self._interrupted.set()
        self._broadcast.interrupt(reason)

    def sleep(self) -> None:
        """Give back device memory that only updates need, and refuse them until ``wake``.  Between updates only."""
        self._asleep = True
        self._committed = ""
        self.loader.staging.free()

    def wake(self) -> None:
        """Undo ``sleep``, after the weights are back on their device."""
        self.loader.staging.allocate()
        self._asleep = False

    def close(self) -> None:
        """Let go of groups, mapped memory and the device's second set of weights; safe to call twice."""
        self._memory.close()
        self._broadcast.close()
        self.loader.staging.free()

    def _apply(self, message: Message) -> RankAck:
        match message:
            case Open():
                return self._begin(message)
            case Join():
                self._broadcast.join(message, rank=self.rank)
                return self._ack()
            case Leave():
                if message.group is not None:
                    self._broadcast.leave(message.group)
                self._unmap()
                self._broadcast.trim()
                return self._ack()
            case Announce():
                return self._take(message)
            case Close():
                return self._count(message)
            case Commit():
                return self._commit(message)
            case Abort():
                return self._abort(message)
            case Readback():
                for check in self._checks:
                    check()
                return self._ack(held=True)
            case _:
                assert_never(message)

    def _begin(self, message: Open) -> RankAck:
        if self._asleep:
            raise Refused("the engine is asleep", hint="POST /wake first")
        self.loader.check(message.specs)
        self._end()
        self.loader.begin()
        if message.owner != self._owner:
            self._unmap()  # of a trainer that may be dead: what is mapped here is not freed there
            self._owner = message.owner
        self._open = message
        self._committed = ""
        self._interrupted.clear()
        self._peak = PeakMemory(self.device).__enter__()
        self._measuring = True
        return self._ack()

    def _take(self, message: Announce) -> RankAck:
        session = self._session(message.session)
        started = time.monotonic()
        if isinstance(message.source, IpcSource):
            bucket = self._memory.read(message.layout, message.source.handles)
        else:
            bucket = self._read(message.layout, message.source.group, session)
        if self._interrupted.is_set():
            raise Refused("interrupted")
        arrived = time.monotonic()
        sums = self.loader.load(bucket)
        loaded = time.monotonic()
        if session.verify != "none":
            self._digest(replace(bucket, sums=sums), session)
        digested = time.monotonic()
        if isinstance(message.source, IpcSource):
            # The trainer may overwrite its buffer as soon as it has our answer.
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()
        else:
            self._broadcast.release(bucket)
        self._verify_s = digested - loaded
        self._load_s = loaded - arrived
        if self.device.type == "cuda":
            self._load_s += time.monotonic() - digested + arrived - started
        return self._ack()

    def _read(self, layout: BucketLayout, group: str, session: Open) -> Bucket:
        """A bucket that is broadcast: straight to where its tensors belong, or into a buffer while the one before it is
        loaded.  Only what was announced has a place, so the next one waits where it could have one."""
        runs, next_runs = (*session.bucket_runs[layout.index : layout.index + 2], (), ())[:2]
        places = {} if self._broadcast.entered else self.loader.places(layout, runs)
        try:
            return self._broadcast.read(
                layout,
                group,
                timeout_s=session.timeout_s,
                runs=runs,
                next_runs=() if self.loader.may_place(layout.index + 1, next_runs) else next_runs,
                places=places,
            )
        except Refused:
            raise  # before anything was entered
        except BaseException:
            if places:
                self.loader.abandon()
            raise

    def _digest(self, bucket: Bucket, session: Open) -> None:
        """Sums are on their way to the host after this; to wait for them would stop the stream for every bucket."""
        if session.digest == "sha256":
            self._hashed |= {slot.spec.name: sha256_digest(view) for slot, view in bucket.views() if slot.whole}
        if session.digest != "sha256" or not all(slot.whole for slot in bucket.layout.slots):
            self._received.append((bucket.layout, _to_host(sums_of_slots(bucket, self._repeated))))

    def _count(self, message: Close) -> RankAck:
        session = self._session(message.session)
        missing = self.loader.missing(session.specs)
        if missing:
            return self._ack(ok=False, missing=tuple(missing), error=f"{len(missing)} tensors did not arrive whole")
        started = time.monotonic()
        if self._received and self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        received = self._arrived() if message.by_name else {}
        of_all = "" if message.by_name else self._totals.totals(self._received).of_all()
        self._verify_s = time.monotonic() - started
        return self._ack(received=received, received_all=of_all)

    def _arrived(self) -> dict[str, str]:
        """The digest of each tensor that has arrived, by name."""
        return self._totals.totals(self._received).by_name() | self._hashed

    def _commit(self, message: Commit) -> RankAck:
        session = self._session(message.session)
        if self.loader.missing(session.specs):
            raise Refused("not everything has arrived")
        if self._committed == session.session:
            raise Refused("this session was committed before")
        started = time.monotonic()
        self._committed = session.session  # from here on an abort has something to undo
        self.loader.commit()
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        self._load_s = time.monotonic() - started
        self._measured()
        received = self._arrived() if message.as_received and self.rank == 0 else {}  # all ranks have said the same
        return self._ack(held=session.verify in ("resident", "behaviour"), received=received)

    def _abort(self, message: Abort) -> RankAck:
        self._interrupted.clear()
        if self._open is None or self._open.session != message.session:
            return self._ack()
        if self._committed == message.session and self.loader.staging.staged:
            self._committed = ""
            self.loader.commit()  # flips back; the finishers run for the old weights again
        touched = self.loader.touched
        self._end()
        # The trainer may be dead: its memory would live as long as the mapping does.
        self._unmap()
        self._broadcast.trim()
        return self._ack(touched=touched)

    def _end(self) -> None:
        self._open = None
        self._broadcast.expect_nothing()
        self._received.clear()
        self._hashed.clear()
        self._measured()

    def _unmap(self) -> None:
        if self.device.type == "cuda":
            # A bucket that failed half way may have left work on the stream that reads it.
            torch.cuda.current_stream(self.device).synchronize()
        self._memory.close()

    def _measured(self) -> None:
        """The measurement is over; its result stays."""
        if self._peak is not None and self._measuring:
            self._measuring = False
            self._peak.__exit__(None, None, None)

    def _session(self, session: str) -> Open:
        if self._open is None or self._open.session != session:
            raise Refused("no such session here; it was never opened, or it was ended")
        return self._open

    def _ack(
        self,
        *,
        ok: bool = True,
        error: str = "",
        refused: bool = False,
        group_failed: bool = False,
        touched: bool = False,
        missing: tuple[str, ...] = (),
        received: dict[str, str] | None = None,
        received_all: str = "",
        held: bool = False,
    ) -> RankAck:
        kept = ()
        if held:
            started = time.monotonic()
            kept = tuple(self.loader.held())
            self._verify_s += time.monotonic() - started
        return RankAck(
            rank=self.rank,
            ok=ok,
            error=error,
            refused=refused,
            group_failed=group_failed,
            touched=touched or self.loader.touched,
            missing=missing,
            not_updated=(*self.loader.not_updated, *self._draft),
            received_all=received_all,
            received=received or {},
            held=kept,
            unproven=tuple(sorted(self.loader.computed)),
            load_s=self._load_s,
            verify_s=self._verify_s,
            peak_extra_bytes=self._peak.extra_bytes if self._peak is not None else 0,
        )


def _to_host(sums: torch.Tensor) -> torch.Tensor:
    """Good once the current stream has come so far.  One by one, while buckets come: at Close everybody waits."""
    if sums.device.type != "cuda":
        return sums
    return torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True).copy_(sums, non_blocking=True)


def _text(error: BaseException) -> str:
    hint = getattr(error, "hint", None)
    first = str(error).strip().split("\n", 1)[0] or type(error).__name__
    return f"{first} ({hint})" if hint else first
