"""One update of all targets is one transaction.

Every trainer rank has a ``WeightUpdater`` and calls its methods in step.  Rank 0, the *head*, talks to the engines and
decides (``head.py``); the others give what they hold and hear what was decided.  So every rank returns the same report
or raises the same error.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain, islice
from typing import Any, Self, cast

import msgspec
import torch
from torch import nn

from weightcast import errors
from weightcast.comm.collector import collector_still
from weightcast.comm.ipc import device_uuid
from weightcast.comm.local import TrainerGroup
from weightcast.comm.memory import PeakMemory
from weightcast.comm.share import Shared, SharedSlot, make_slots
from weightcast.config import Target, UpdateConfig
from weightcast.errors import ConfigError, TargetError, TrainerRankFailed, UpdateFailed, WeightcastError
from weightcast.exporters.bucketize import bucketize
from weightcast.exporters.module import ModuleExporter
from weightcast.fleet.health import TargetHealth
from weightcast.fleet.roster import Roster
from weightcast.head import FOLLOW_DEADLINES, Decision, Head
from weightcast.kinds import recognise
from weightcast.protocols import Exporter, Lender, Scorer
from weightcast.report import UpdateReport
from weightcast.wire.bucket import Bucket, run_sizes
from weightcast.wire.layout import DTYPES, BucketLayout, plan_buckets, total_bytes

Progress = Callable[[int, int], None]

_NUM_SLOTS = 2
_PROBE_TOKENS = tuple(range(5, 37))
_shared = msgspec.json.Decoder(Shared)


class WeightUpdater:
    """Keeps rollout engines at the trainer's weights.  Made by ``connect``; a context manager."""

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
        self._chosen = Decision()
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
        model: nn.Module | Exporter,
        targets: Sequence[Target | str],
        *,
        progress: Progress | None = None,
        **options: Any,
    ) -> Self:
        """Meet the engines and check that an update can work.  Collective: every trainer rank calls it.

        Args:
            model: A plain or FSDP2 module, or any ``Exporter``.
            targets: The engines; plain URLs will do.
            progress: Called on the head with (bytes sent, bytes in all) after each bucket.
            **options: The fields of ``UpdateConfig``: transport, bucket_bytes, pause, verify, digest, timeout_s,
                on_failure, wire_dtype, allow_older, behaviour_tolerance, rendezvous_host, disk_folder.

        Raises:
            ConfigError: It cannot work as asked; nothing has moved.
            TargetUnreachable, TargetRejected: An engine does not answer, or refuses.
            TrainerRankFailed: Another trainer rank did not take part.
        """
        try:
            config = UpdateConfig(**options)
        except TypeError as error:
            raise ConfigError(f"{error}".replace("UpdateConfig.__init__()", "WeightUpdater.connect()")) from None
        known = _known(targets)
        if config.wire_dtype is not None and config.wire_dtype not in DTYPES:
            raise ConfigError(f"wire_dtype={config.wire_dtype!r}: choose one of {', '.join(DTYPES)}")
        if isinstance(model, nn.Module):
            dtype = DTYPES[config.wire_dtype] if config.wire_dtype else None
            exporter: Exporter = ModuleExporter(model, wire_dtype=dtype)
        elif config.wire_dtype is not None:
            raise ConfigError(
                f"wire_dtype={config.wire_dtype!r} is for a module; {type(model).__name__} has dtypes of its own",
                hint=f"give it to the exporter: wire_dtype=torch.{config.wire_dtype}",
            )
        else:
            exporter = model
        return cls(exporter, known, config, progress)

    @property
    def transport(self) -> str:
        """``"ipc"``, ``"broadcast"``, ``"disk"`` or ``"checkpoint-engine"``, as asked or as chosen."""
        return self._chosen.transport

    def update(self, *, version: int) -> UpdateReport:
        """Put the weights as they are now into every target.  Collective: every trainer rank calls it.

        Args:
            version: What the engines will call these weights; counts up.

        Returns:
            The report, the same on every rank.

        Raises:
            UpdateFailed: A target failed (``on_failure="raise"``), or all did.  ``report`` says what each serves now.
            ConfigError, TargetUnreachable, TargetRejected: It failed before anything moved.
            TrainerRankFailed: Another trainer rank failed; the engines keep what they serve.  If they had switched by
                then, the head raises ``UpdateFailed`` instead, whose report says so; other ranks cannot know.
        """
        self._check_open()
        if isinstance(version, bool) or version < 0:
            raise ConfigError(f"version={version!r}: a version is a whole number from 0")
        if self._head is not None:
            self._head.begin(version)
        return self._transact(version)

    def retarget(self, targets: Sequence[Target | str], *, catch_up: bool = False) -> UpdateReport | None:
        """Membership changed: meet the new targets and let go of the old ones.  Collective.

        Who stays is not disturbed.  Who is new counts from its first full update on.

        Args:
            targets: The engines from now on.
            catch_up: Bring those that do not serve the current version to it now, without a new version for the
                others.  The weights must still be those of the last update: their digest is compared before
                anything is switched.

        Returns:
            With ``catch_up``, the report on those that were brought in; None if there were none.

        Raises:
            ConfigError, TargetUnreachable, TargetRejected: As ``connect``; the old targets stay.
            ConfigError: The weights have changed since the last update, or no digest can say so.  The new targets
                stay, and those that are not at the current version wait for the next update.
            UpdateFailed: As ``update``, of those that were to be brought in.
        """
        self._check_open()
        before, head = self._targets, self._head
        self._targets = _known(targets)
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
        decision = self._hear(self._head.begin_catch_up() if self._head is not None else Decision())
        if decision.error:
            raise _rebuild(decision)
        if not decision.again:
            return None
        return self._transact(self._head.version if self._head is not None else 0)

    def health(self) -> tuple[TargetHealth, ...]:
        """What is known of each target, and whether requests may go there.  Not collective; asks nobody.

        Returns:
            A row for each target, in order, on the head; nothing on other ranks.
        """
        return self._roster.health() if self._roster is not None else ()

    def close(self) -> None:
        """Let go of groups, buffers and connections, here and in the engines.  Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        with ExitStack() as rest:  # the last first, and each of them whatever happens to the others
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

    def _choose(self, *, leaving: Sequence[Target] = ()) -> None:
        """Probe, check, choose the transport; every rank hears the result."""
        places = self._group.gather_bytes(device_uuid(self._exporter.device).encode())
        decision = Decision()
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
                decision = head.choose()
                layouts = plan_buckets(self._specs, bucket_bytes=self._config.bucket_bytes, packing=decision.packing)
                self._head, self._layouts = head, layouts
            except WeightcastError as error:
                decision = Decision.of(error)
        decision = self._hear(decision)
        if decision.error:
            raise _rebuild(decision)
        if not self._group.is_head:
            self._layouts = plan_buckets(self._specs, bucket_bytes=self._config.bucket_bytes, packing=decision.packing)
        self._chosen = decision
        self._group.receivers = decision.receivers
        self._drop_slots()  # other targets may want others

    def _drop_slots(self) -> None:
        for slot in self._slots:
            slot.close()
        self._slots.clear()

    def _hear(self, decision: Decision) -> Decision:
        """What the head has decided."""
        payload = msgspec.json.encode(decision) if self._group.is_head else None
        heard = self._group.broadcast_bytes(payload, timeout_s=self._patience_s())
        return msgspec.json.decode(heard, type=Decision)

    def _patience_s(self, *, entering: bool = False) -> float:
        """For a message of the head: of those who wait for it, and of the head for those who should be waiting."""
        waits = entering or not self._group.is_head
        return self._config.timeout_s * (FOLLOW_DEADLINES if waits else 1)

    def _transact(self, version: int) -> UpdateReport:
        """Try until it is over; on ranks other than the head the version does not matter."""
        while True:
            decision = self._attempt(version)
            if not decision.again:
                break
        if decision.error:
            raise _rebuild(decision)
        assert decision.report is not None
        return decision.report

    def _attempt(self, version: int) -> Decision:
        """One try at the transaction; every rank returns the same decision."""
        head = self._head
        kept_bytes = sum(slot.data.numel() for slot in self._slots)  # from an earlier update; they count all the same
        with PeakMemory(self._exporter.device) as peak, collector_still():
            try:
                decision = Decision()
                # Ranks may be late here, later than an engine that holds still would wait; after it they are there.
                self._group.gather_bytes(b"here", timeout_s=self._patience_s(entering=True))
                if head is not None:
                    head.look_ahead()
                lent = self._lend()
                runs = tuple(
                    run_sizes(layout, lent[number] if lent else ()) for number, layout in enumerate(self._layouts)
                )
                buckets = self._fill_buckets(lent)
                # Where no other rank has to come for them, buckets fill while the engines open: on a host the first,
                # on a GPU, which goes on by itself, as many as there is room for.
                ahead = _NUM_SLOTS if self._exporter.device.type == "cuda" else 1
                first = list(islice(buckets, ahead if self._group.world_size == 1 else 0))
                if head is not None:
                    decision = head.open(version, self._specs, runs)
                decision = self._hear(decision)
                if decision.error or decision.again:
                    return decision
                self._stream(chain(first, buckets))
                if head is not None:
                    decision = head.finish()
            except BaseException as error:
                if head is not None:
                    head.give_up(f"the trainer failed: {type(error).__name__}: {error}".rstrip(": "))
                if self._group.world_size > 1:  # the other ranks would wait for this one
                    self._group.abort(f"{type(error).__name__}: {error}")
                raise
        try:
            return self._conclude(decision, lambda: kept_bytes + peak.extra_bytes)
        except TrainerRankFailed as error:
            report = head.switched() if head is not None else None
            if report is None:
                raise
            raise UpdateFailed(f"the engines have switched, but {error}", report=report) from error

    def _conclude(self, decision: Decision, extra_bytes: Callable[[], int]) -> Decision:
        """What came of it, as every rank hears it."""
        decision = self._hear(decision)
        if decision.score:
            decision = self._score()
        if decision.report is not None:
            extra = self._group.gather_bytes(str(extra_bytes()).encode())
            if extra is not None:
                most = max(int(value) for value in extra)
                decision = msgspec.structs.replace(
                    decision, report=msgspec.structs.replace(decision.report, peak_extra_bytes=most)
                )
            decision = self._hear(decision)
        return decision

    def _lend(self) -> Sequence[Mapping[str, torch.Tensor]]:
        """What of each bucket is sent from where it lies; nothing for none of all."""
        return cast(Lender, self._exporter).lend(self._layouts, self._group) if self._chosen.lends else ()

    def _fill_buckets(
        self, lent: Sequence[Mapping[str, torch.Tensor]]
    ) -> Iterator[tuple[Bucket | None, SharedSlot | None]]:
        """Bucket after bucket, each into the slot of its turn; both None on a rank that only gives."""
        receives = self._group.rank in self._group.receivers
        if receives and not self._slots:
            size = max(layout.size_bytes for layout in self._layouts)
            count = min(_NUM_SLOTS, len(self._layouts))
            self._slots = make_slots(count, max(size, 1), self._exporter.device, self._chosen.ways)
        slots = [slot.data for slot in self._slots] if receives else None
        buckets = bucketize(self._exporter, self._layouts, self._group, slots, lent)
        for layout in self._layouts:
            slot = self._slots[layout.index % len(self._slots)] if receives else None
            if slot is not None:
                slot.reclaim()
            started = time.monotonic()
            bucket = next(buckets)
            if self._head is not None:
                self._head.add_phase("gather", time.monotonic() - started)
            yield bucket, slot

    def _stream(self, buckets: Iterator[tuple[Bucket | None, SharedSlot | None]]) -> None:
        """Fill one bucket while the one before it is under way."""
        head = self._head
        sent_bytes, all_bytes = 0, total_bytes(self._specs) if self._progress is not None else 0
        for _ in self._layouts:
            go = b"go" if head is None or not head.failed else b"stop"
            if self._group.broadcast_bytes(go, timeout_s=self._patience_s()) != b"go":
                return
            bucket, slot = next(buckets)
            shared = self._gather_shared(slot)
            if head is not None:
                assert bucket is not None
                head.send(bucket, shared)
                if self._progress is not None and not head.failed:
                    sent_bytes += sum(slot.size_bytes for slot in bucket.layout.slots)
                    self._progress(sent_bytes, all_bytes)

    def _gather_shared(self, slot: SharedSlot | None) -> list[Shared]:
        """Handles of all filled buffers, on the head."""
        chosen = self._chosen
        if not chosen.ways:
            return []
        mine = msgspec.json.encode(slot.share(opens=chosen.opens, ring_opens=chosen.ring_opens)) if slot else b""
        gathered = self._group.gather_bytes(mine) or []
        return [_shared.decode(item) for item in gathered if item]

    def _score(self) -> Decision:
        """The trainer's own forward pass beside the engines'."""
        scorer = cast(Scorer, self._exporter)
        mine, why = list[float](), ""
        try:
            mine = scorer.logprobs(_PROBE_TOKENS)
        except Exception as error:  # noqa: BLE001  the model's own code; the engines have switched, and that stands
            why = f"the trainer's forward pass failed: {type(error).__name__}: {error}"
        decision = Decision()
        if self._head is not None:
            decision = self._head.compare(_PROBE_TOKENS, mine, why)
        return self._hear(decision)


def _known(targets: Sequence[Target | str]) -> tuple[Target, ...]:
    if not targets:
        raise ConfigError("no targets: an update of nothing is an error", hint="pass at least one Target(url)")
    known = tuple(Target(target) if isinstance(target, str) else target for target in targets)
    if len({target.url for target in known}) != len(known):
        raise ConfigError("a target is listed twice")
    return known


def _rebuild(decision: Decision) -> WeightcastError:
    """The head's error, on every rank."""
    if decision.error == "UpdateFailed":
        assert decision.report is not None
        return UpdateFailed(decision.text, report=decision.report, hint=decision.hint)
    kind = getattr(errors, decision.error, WeightcastError)
    if issubclass(kind, TargetError):
        return kind(decision.text, url=decision.url, hint=decision.hint)
    if issubclass(kind, ConfigError):
        return kind(decision.text, hint=decision.hint)
    return WeightcastError(decision.text, hint=decision.hint)
