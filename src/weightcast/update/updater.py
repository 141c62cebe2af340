"""Updates all targets in one transaction.

Every trainer rank has a ``WeightUpdater`` and calls its methods in step.  Rank 0, the *head*, talks to the engines and
decides (``update/head.py``).  The other ranks contribute their shards and receive the result.  So every rank returns
the same report or raises the same error.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain, islice
from typing import Self, TypeVar, cast

import msgspec
import torch

from weightcast.comm.ipc import device_uuid
from weightcast.comm.shared_buckets import Shared, SharedSlot, make_slots
from weightcast.comm.trainer_group import TrainerGroup
from weightcast.config import (
    DigestKind,
    DiskReaders,
    OnFailure,
    PauseMode,
    Target,
    TransportName,
    UpdateConfig,
    VerifyLevel,
)
from weightcast.digest.bucket_sums import sums_of_slots
from weightcast.digest.definition import RepeatedSums
from weightcast.digest.source_sums import Folded, SourceSums
from weightcast.errors import ConfigError, TrainerRankFailed, UpdateFailed, WeightcastError
from weightcast.exporters import sum_messages
from weightcast.exporters.bucketize import bucketize
from weightcast.fleet.health import TargetHealth
from weightcast.fleet.roster import Roster
from weightcast.protocols import Exporter, Lender, Scorer
from weightcast.report import UpdateReport
from weightcast.runtime.gc_pause import gc_paused
from weightcast.runtime.peak_memory import PeakMemory
from weightcast.update.arguments import Model, Targets, bytes_of, dtype_name_of, exporter_of, targets_of
from weightcast.update.head import FOLLOW_DEADLINES, Head
from weightcast.update.messages import AttemptResult, Choice, Failure
from weightcast.update.recognise import recognise
from weightcast.wire.bucket import Bucket, run_sizes
from weightcast.wire.layout import BucketLayout, plan_buckets, total_bytes

Progress = Callable[[int, int], None]
_Message = TypeVar("_Message", Choice, AttemptResult)

_NUM_SLOTS = 2
_PROBE_TOKENS = tuple(range(5, 37))
_shared = msgspec.json.Decoder(Shared)


class WeightUpdater:
    """Keeps rollout engines at the trainer's weights.  ``connect`` makes one; it is a context manager."""

    def __init__(
        self, exporter: Exporter, targets: Sequence[Target], config: UpdateConfig, progress: Progress | None = None
    ) -> None:
        self._exporter = exporter
        self._config = config
        self._progress = progress
        self._targets = tuple(targets)
        self._group = TrainerGroup.connect(exporter.device, timeout_s=config.timeout_s)
        self._slots: list[SharedSlot] = []
        self._layouts: list[BucketLayout] = []
        self._head: Head | None = None
        self._roster: Roster | None = None
        self._closed = False
        self._served: int | None = None
        self._release: Callable[[], None] | None = None  # closes an exporter that ``connect`` has made
        self._chosen = Choice()
        self._bucket_sums = RepeatedSums()
        try:
            self._specs = tuple(exporter.specs())
            exporter.prepare(self._group)
            self._choose()
        except BaseException:
            if self._roster is not None:
                self._roster.close()
            self._group.close()
            raise

    @classmethod
    def connect(
        cls,
        model: Model,
        targets: Targets,
        *,
        transport: TransportName = "auto",
        bucket_bytes: int | str = 512 << 20,
        pause: PauseMode = "abort",
        verify: VerifyLevel = "resident",
        digest: DigestKind = "fast",
        timeout_s: float = 120.0,
        on_failure: OnFailure = "raise",
        wire_dtype: torch.dtype | str | None = None,
        check_finite: bool | None = None,
        require: VerifyLevel = "none",
        first_version: int | None = None,
        allow_older: bool = False,
        behaviour_tolerance: float = 0.1,
        min_proven_share: float = 1.0,
        rendezvous_host: str | None = None,
        disk_folder: str | None = None,
        disk_readers: DiskReaders = "user",
        progress: Progress | None = None,
    ) -> Self:
        """Connects to the engines and checks that an update can work.  Collective: every trainer rank calls it.

        ``UpdateConfig`` describes the options that are not listed here.

        Args:
            model: A plain or FSDP2 module, a ``state_dict`` with a checkpoint's names, the path of a safetensors
                checkpoint, or any ``Exporter``.
            targets: The engines, or one engine, as ``Target`` or URL.
            bucket_bytes: Bytes of one bucket, or text (``"512MiB"``).
            wire_dtype: A torch dtype, or its name (``"bf16"``).
            progress: Callback on the head after each bucket, with bytes sent and bytes in all.

        Raises:
            ConfigError: The options cannot work.  Nothing has moved.
            TargetUnreachable, TargetRejected: An engine does not answer, or refuses.
            TrainerRankFailed: Another trainer rank did not take part.
        """
        config = UpdateConfig(
            transport=transport,
            bucket_bytes=bytes_of("bucket_bytes", bucket_bytes),
            pause=pause,
            verify=verify,
            digest=digest,
            timeout_s=timeout_s,
            on_failure=on_failure,
            wire_dtype=dtype_name_of("wire_dtype", wire_dtype) if wire_dtype is not None else None,
            check_finite=check_finite,
            require=require,
            first_version=first_version,
            allow_older=allow_older,
            behaviour_tolerance=behaviour_tolerance,
            min_proven_share=min_proven_share,
            rendezvous_host=rendezvous_host,
            disk_folder=disk_folder,
            disk_readers=disk_readers,
        )
        known = targets_of(targets)
        exporter, release = exporter_of(model, config.wire_dtype)
        try:
            updater = cls(exporter, known, config, progress)
        except BaseException:
            release()
            raise
        updater._release = release
        return updater

    @property
    def transport(self) -> str:
        """Name of the transport, as the caller asked or as ``"auto"`` chose: ``"ipc"``, ``"broadcast"`` and so on."""
        return self._chosen.transport

    @property
    def served(self) -> int | None:
        """Highest version that the targets serve, as of the last connect or update; None if no target knows its own."""
        return self._served

    def update(self, *, version: int | None = None) -> UpdateReport:
        """Sends the current weights to every target.  Collective: every trainer rank calls it.

        Args:
            version: The weight version, which counts up; None takes the next after the highest that the targets serve.

        Returns:
            The report, the same on every rank.

        Raises:
            UpdateFailed: A target failed (``on_failure="raise"``), or all did.  Targets that had switched were
                switched back if they could be.  ``report`` says what each target serves now.
            ConfigError, TargetUnreachable, TargetRejected, TargetsFailed: The update failed before anything moved.
            TrainerRankFailed: Another trainer rank failed; the engines keep the weights that they serve.  If the
                engines had switched, the head raises ``UpdateFailed`` instead.  The next call makes the ranks' group
                again.
        """
        self._check_open()
        if version is None:
            version = (self._served or 0) + 1
        if isinstance(version, bool) or version < 0:
            raise ConfigError(f"version={version!r}: a version is a whole number from 0")
        self._enter()
        if self._head is not None:
            self._head.begin(version)
        return self._transact(version)

    def retarget(self, targets: Targets, *, catch_up: bool = False) -> UpdateReport | None:
        """Replaces the targets.  Collective: every trainer rank calls it.

        Targets that stay are not disturbed.  A new target becomes active with its first full update.

        Args:
            targets: The engines from now on.
            catch_up: True updates the targets that do not serve the current version; the others get no new version.
                The weights must still be those of the last update.  Their digest is compared before any target
                switches.

        Returns:
            With ``catch_up``, the report on the targets that were updated; None if there were none.

        Raises:
            ConfigError, TargetUnreachable, TargetRejected: As ``connect``; the old targets stay.
            ConfigError: The weights have changed since the last update, or no digest can tell.  The new targets stay.
                Targets that do not serve the current version wait for the next update.
            UpdateFailed: As ``update``, for the targets that were to catch up.
        """
        self._check_open()
        known = targets_of(targets)
        self._enter()
        before, head = self._targets, self._head
        self._targets = known
        try:
            self._choose(leaving=before)
        except WeightcastError:
            self._targets = before
            raise
        finally:
            if head is not None and head is not self._head:
                head.close()
            if self._roster is not None:
                self._roster.set_members(self._targets)
        if not catch_up:
            return None
        result = self._hear(self._head.begin_catch_up() if self._head is not None else AttemptResult())
        if result.failure is not None:
            raise result.failure.rebuild()
        if not result.again:
            return None
        return self._transact(self._head.version if self._head is not None else 0)

    def health(self) -> tuple[TargetHealth, ...]:
        """Returns the recorded health of each target.  Not collective; it sends nothing.

        Returns:
            On the head, a row for each target, in order.  On other ranks, an empty tuple.
        """
        return self._roster.health() if self._roster is not None else ()

    def close(self) -> None:
        """Closes groups, buffers and connections, here and in the engines.  Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        with ExitStack() as rest:  # in reverse order; each runs even if another one fails
            if self._release is not None:
                rest.callback(self._release)
            rest.callback(self._group.close)
            rest.callback(self._drop_slots)
            if self._roster is not None:
                rest.callback(self._roster.close)
            if self._head is not None:
                rest.callback(self._head.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError("this updater is closed")

    def _enter(self) -> None:
        """Waits until every rank has come to the same call, before any engine is asked for anything.

        A call that failed on any rank has ended the ranks' group on all of them.  So this renews the group.

        Raises:
            TrainerRankFailed: A rank did not come.
        """
        patience_s = self._patience_s(entering=True)
        if self._group.failed:
            # A rank that was dead or silent is not waited for as long again.
            self._group.renew(timeout_s=self._config.timeout_s if self._group.lost else patience_s)
        try:
            self._group.barrier("the next call of the updater", timeout_s=patience_s)
        except TrainerRankFailed:
            if self._group.lost:
                raise
            # The call before failed on another rank and not on this one.
            self._group.renew(timeout_s=patience_s)
            self._group.barrier("the next call of the updater", timeout_s=patience_s)

    def _choose(self, *, leaving: Sequence[Target] = ()) -> None:
        """Makes the head's choices, which every rank hears."""
        places = self._group.gather_bytes(device_uuid(self._exporter.device).encode())
        choice = Choice()
        if self._group.is_head:
            assert places is not None
            where = [place.decode() for place in places]
            try:
                if self._roster is None:
                    self._roster = Roster(self._targets, timeout_s=self._config.timeout_s, recognise=recognise)
                else:
                    self._roster.set_members(self._targets, leaving=leaving)
                head = Head(
                    self._targets, self._roster, self._config, self._exporter, self._specs, where, before=self._head
                )
                choice = head.choose()
                layouts = plan_buckets(self._specs, bucket_bytes=self._config.bucket_bytes, packing=choice.packing)
                self._head, self._layouts = head, layouts
            except WeightcastError as error:
                choice = Choice(failure=Failure.of(error))
        choice = self._hear(choice)
        if choice.failure is not None:
            raise choice.failure.rebuild()
        if not self._group.is_head:
            self._layouts = plan_buckets(self._specs, bucket_bytes=self._config.bucket_bytes, packing=choice.packing)
        self._chosen = choice
        self._served = choice.served
        self._group.receivers = choice.receivers
        self._drop_slots()  # other targets may need other slots

    def _drop_slots(self) -> None:
        for slot in self._slots:
            slot.close()
        self._slots.clear()

    def _hear(self, message: _Message) -> _Message:
        """Returns the head's message on every rank; the argument counts on the head alone."""
        payload = msgspec.json.encode(message) if self._group.is_head else None
        heard = self._group.broadcast_bytes(payload, timeout_s=self._patience_s())
        return msgspec.json.decode(heard, type=type(message))

    def _patience_s(self, *, entering: bool = False) -> float:
        # Other ranks wait for the head longer than the head waits for them.
        waits = entering or not self._group.is_head
        return self._config.timeout_s * (FOLLOW_DEADLINES if waits else 1)

    def _transact(self, version: int) -> UpdateReport:
        """Repeats attempts until the update is over; the version counts on the head alone."""
        while True:
            result = self._attempt(version)
            if not result.again:
                break
        if result.report is not None:
            known = [row.version_after for row in result.report.targets if row.version_after is not None]
            self._served = max(known, default=self._served)
        if result.failure is not None:
            raise result.failure.rebuild(result.report)
        assert result.report is not None
        return result.report

    def _attempt(self, version: int) -> AttemptResult:
        """Runs one attempt; every rank returns the same result."""
        head = self._head
        kept_bytes = sum(slot.data.numel() for slot in self._slots)  # slots of an earlier update count too
        with PeakMemory(self._exporter.device) as peak, gc_paused():
            try:
                result = AttemptResult()
                if head is not None:
                    head.look_ahead()
                lent = self._lend()
                runs = tuple(
                    run_sizes(layout, lent[number] if lent else ()) for number, layout in enumerate(self._layouts)
                )
                sources = SourceSums() if self._config.verify != "none" else None
                buckets = self._fill_buckets(lent, sources)
                # With one trainer rank, buckets fill while the engines open their sessions: one on the host, and as
                # many as there are slots on a GPU, which works asynchronously.
                ahead = _NUM_SLOTS if self._exporter.device.type == "cuda" else 1
                first = list(islice(buckets, ahead if self._group.world_size == 1 else 0))
                if head is not None:
                    result = head.open(version, self._specs, runs)
                result = self._hear(result)
                if result.failure is not None or result.again:
                    return result
                sums: list[torch.Tensor] | None = [] if result.sums_buckets else None
                whole = self._stream(chain(first, buckets), sums)
                folded, found = self._gather_sums(sources, sums or ()) if whole and sources is not None else ((), {})
                if head is not None:
                    result = head.finish(folded, found)
            except BaseException as error:
                if head is not None:
                    head.give_up(f"the trainer failed: {type(error).__name__}: {error}".rstrip(": "))
                if self._group.world_size > 1:  # the other ranks would wait for this rank
                    self._group.abort(f"{type(error).__name__}: {error}")
                raise
        try:
            return self._conclude(result, lambda: kept_bytes + peak.extra_bytes)
        except TrainerRankFailed as error:
            report = head.switched() if head is not None else None
            if report is None:
                raise
            raise UpdateFailed(f"the engines have switched, but {error}", report=report) from error

    def _conclude(self, result: AttemptResult, extra_bytes: Callable[[], int]) -> AttemptResult:
        """Tells every rank the attempt's result, with the largest peak memory of all ranks in the report."""
        result = self._hear(result)
        if result.score:
            result = self._score()
        if result.report is not None:
            extra = self._group.gather_bytes(str(extra_bytes()).encode())
            if extra is not None:
                most = max(int(value) for value in extra)
                result = msgspec.structs.replace(
                    result, report=msgspec.structs.replace(result.report, peak_extra_bytes=most)
                )
            result = self._hear(result)
        return result

    def _lend(self) -> Sequence[Mapping[str, torch.Tensor]]:
        """Returns the tensors of each bucket that are sent without a copy; empty if the plan has none."""
        return cast(Lender, self._exporter).lend(self._layouts, self._group) if self._chosen.lends else ()

    def _fill_buckets(
        self, lent: Sequence[Mapping[str, torch.Tensor]], sources: SourceSums | None
    ) -> Iterator[tuple[Bucket | None, SharedSlot | None]]:
        """Fills each bucket into the next slot; yields None and None on a rank that only contributes shards."""
        receives = self._group.rank in self._group.receivers
        if receives and not self._slots:
            size = max(layout.size_bytes for layout in self._layouts)
            count = min(_NUM_SLOTS, len(self._layouts))
            self._slots = make_slots(count, max(size, 1), self._exporter.device, self._chosen.ways)
        slots = [slot.data for slot in self._slots] if receives else None
        buckets = bucketize(self._exporter, self._layouts, self._group, slots, lent, sources)
        for layout in self._layouts:
            slot = self._slots[layout.index % len(self._slots)] if receives else None
            if slot is not None:
                slot.reclaim()
            started = time.monotonic()
            bucket = next(buckets)
            if self._head is not None:
                self._head.add_phase("gather", time.monotonic() - started)
            yield bucket, slot

    def _stream(
        self, buckets: Iterator[tuple[Bucket | None, SharedSlot | None]], sums: list[torch.Tensor] | None
    ) -> bool:
        """Fills one bucket while the transport sends the one before it.

        Args:
            buckets: All buckets, with their slots.
            sums: Output list for the sums of each bucket's slots, on ranks other than the head; None for no sums.

        Returns:
            False if a bucket could not be sent; the same on every rank.
        """
        head = self._head
        sent_bytes, all_bytes = 0, total_bytes(self._specs) if self._progress is not None else 0
        for _ in self._layouts:
            go = b"go" if head is None or not head.failed else b"stop"
            if self._group.broadcast_bytes(go, timeout_s=self._patience_s()) != b"go":
                return False
            bucket, slot = next(buckets)
            if sums is not None and head is None and bucket is not None:
                sums.append(sums_of_slots(bucket, self._bucket_sums))
            shared = self._gather_shared(slot)
            if head is not None:
                assert bucket is not None
                head.send(bucket, shared)
                if self._progress is not None and not head.failed:
                    sent_bytes += sum(slot.size_bytes for slot in bucket.layout.slots)
                    self._progress(sent_bytes, all_bytes)
        return True

    def _gather_sums(
        self, sources: SourceSums, buckets: Sequence[torch.Tensor]
    ) -> tuple[Sequence[Folded], Mapping[int, Sequence[torch.Tensor]]]:
        """Gathers the sums of all ranks on the head, one message from each rank; empty on other ranks."""
        message = sum_messages.encode(sources.values(), buckets)
        messages = self._group.gather_bytes(message, timeout_s=self._patience_s())
        if messages is None:
            return (), {}
        return sum_messages.decode(self._exporter, self._layouts, self._group, messages)

    def _gather_shared(self, slot: SharedSlot | None) -> list[Shared]:
        """Gathers the handles of all filled buffers on the head."""
        chosen = self._chosen
        if not chosen.ways:
            return []
        mine = msgspec.json.encode(slot.share(opens=chosen.opens, ring_opens=chosen.ring_opens)) if slot else b""
        gathered = self._group.gather_bytes(mine) or []
        return [_shared.decode(item) for item in gathered if item]

    def _score(self) -> AttemptResult:
        """Compares the trainer's log-probabilities with the engines'."""
        scorer = cast(Scorer, self._exporter)
        mine, why = list[float](), ""
        try:
            mine = scorer.logprobs(_PROBE_TOKENS)
        except Exception as error:  # noqa: BLE001  the model's own code; the engines have switched, and that stands
            why = f"the trainer's forward pass failed: {type(error).__name__}: {error}"
        result = AttemptResult()
        if self._head is not None:
            result = self._head.compare(_PROBE_TOKENS, mine, why)
        return self._hear(result)
