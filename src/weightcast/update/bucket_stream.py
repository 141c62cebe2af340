"""Fills buckets on every trainer rank and hands them to the head, in a pipeline.

The exporter fills one bucket while the transport sends the one before it.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, islice

import msgspec
import torch

from weightcast.comm.rendezvous import Invited
from weightcast.comm.shared_buckets import Shared, SharedSlot
from weightcast.comm.trainer_group import TrainerGroup
from weightcast.digest.source_sums import AllSums, SourceSums
from weightcast.errors import ConfigError
from weightcast.exporters import all_sums
from weightcast.exporters.bucketize import bucketize
from weightcast.protocols import Exporter, Lying
from weightcast.runtime.lru import Lru
from weightcast.transports.link import margin_s
from weightcast.transports.plan import UpdatePlan
from weightcast.update.exchange import Exchange
from weightcast.update.follower import Follower
from weightcast.update.prepare import SendPlan
from weightcast.update.rank_buckets import NUM_SLOTS, RankBuckets
from weightcast.watch.listeners import Events
from weightcast.wire.bucket import Bucket
from weightcast.wire.layout import BucketLayout, TensorSpec
from weightcast.wire.messages import MAX_RUN
from weightcast.wire.plans import encode_parts

log = logging.getLogger("weightcast.update.bucket_stream")

# A run of buckets.  After a failure ranks go on to its end, so it must not take long; a word for each costs each rank.
_RUN_S = 0.25


class _Go(msgspec.Struct, frozen=True, array_like=True):
    """The head's word before a run of buckets, in which no rank hears from it again.

    Attributes:
        end: Number of the bucket after the run; 0 if nothing more is sent.
        groups: The groups that trainer ranks send in.
    """

    end: int
    groups: tuple[str, ...] = ()


_encoder = msgspec.json.Encoder()
_go = msgspec.json.Decoder(_Go)
_failures = msgspec.json.Decoder(dict[str, str])
_shared = msgspec.json.Decoder(Shared)
_TIMES_ITS_BYTES = 8  # memory of decoded handles and parts
_known_shared: Lru[tuple[bytes, str], Shared] = Lru(64 << 20)
_Filled = Iterator[tuple[Bucket | None, SharedSlot | None]]


@dataclass(slots=True, kw_only=True)
class Filling:
    """The buckets of one attempt.

    Attributes:
        sources: Sums of this rank's shards, which grow with each bucket; None without verification.
        lying: This rank's parts of each bucket that engines read in place.
        mapped: On the head, the handles to all ranks' own memory, for each bucket that engines read there.
        buckets: Fills and returns the next bucket and its buffer; None and None on a rank that only contributes shards.
        sums: Sums of the slots of each bucket that was sent, if they are asked for, on ranks other than the head.
    """

    plan: SendPlan
    sources: SourceSums | None
    lying: Sequence[Lying] = ()
    mapped: Sequence[Sequence[Shared]] = ()
    buckets: _Filled = field(default_factory=lambda: iter(()))
    sums: list[torch.Tensor] = field(default_factory=list[torch.Tensor])


class BucketStream:
    """The loop over the buckets of one membership, in step with the other trainer ranks.  Every rank has one.

    Attributes:
        buckets: This rank's buckets.
        exchange: Its messages to engine ranks.
    """

    def __init__(
        self,
        exporter: Exporter,
        layouts: Sequence[BucketLayout],
        group: TrainerGroup,
        choice: UpdatePlan,
        head: Follower,
        *,
        specs: Sequence[TensorSpec],
        num_mapped: int = 0,
        verifies: bool,
        check_finite: bool,
        wait_s: float,
        timeout_s: float,
        events: Events,
        earlier: BucketStream | None = None,
    ) -> None:
        """Allocates nothing yet.

        Args:
            specs: The tensors in the dtypes in which they travel.
            num_mapped: Number of layouts, the first ones, whose tensors engines read where the trainer keeps them.
            verifies: True if the sums of this rank's shards are needed.
            check_finite: True if weights must be finite; of use here where the head does not see all of a bucket.
            wait_s: Deadline of one wait for another trainer rank, in seconds.
            earlier: The stream of the membership before; its plans are used if they fit.
        """
        self._specs = specs
        self._group = group
        self._choice = choice
        self._device = exporter.device
        self.buckets = RankBuckets(
            exporter,
            layouts,
            group,
            choice,
            num_mapped=num_mapped,
            verifies=verifies,
            check_finite=check_finite,
            earlier=earlier.buckets if earlier is not None else None,
        )
        self._head = head
        self._verifies = verifies
        # Ranks that send to engine ranks themselves may wait a whole deadline for these before they come.
        self._wait_s = max(wait_s, timeout_s + margin_s(timeout_s)) if choice.exchanges else wait_s
        self._events = events
        sizes = (sum(slot.size_bytes for slot in layout.slots) for layout in layouts)
        self._sent_bytes = list(itertools.accumulate(sizes, initial=0))  # by the number of buckets that were sent
        self._plan: SendPlan | None = None
        self.exchange = Exchange(
            rank=group.rank,
            num_trainers=group.world_size,
            device=exporter.device,
            timeout_s=timeout_s,
            chains=choice.chains,
            host=group.hosts[group.rank],
        )
        self._mine: tuple[Shared, bytes] | None = None  # handles to this rank's own memory, as they were sent last
        # True if engines read buffers of other ranks than the head, so that it hears of each one that is filled.
        self._signals = bool(choice.sharings or choice.leg_hosts) and choice.receivers != (0,)
        # True if every rank sends its parts by itself, so that one word of the head is enough for a run of buckets.
        self._by_itself = choice.exchanges and not choice.leg_hosts
        # True if engine ranks know the parts of each trainer rank from the plan.
        self._tells_parts = self._by_itself or (choice.scattered and "remote" in choice.sharings)
        self._told: Sequence[bytes] | None = None
        self._run = 1
        self._run_began = self._heard_at = 0.0

    def plan_buckets(self) -> None:
        """Plans every bucket again, for a model that was looked at again."""
        self.buckets.plan()
        self._told = None

    def plan(self) -> SendPlan:
        """The plan of the updates to come."""
        if self._plan is None:
            self._plan = SendPlan(self._specs, self.buckets.layouts, self._told or ())
        return self._plan

    def share_ahead(self) -> list[list[Shared]]:
        """The shared memory of each bucket from each trainer rank, in order of rank, on the head.  Collective.

        These are the parts, and the handles to memory that stays where it is from now on: this allocates buffers.
        Empty if neither is known before an update.
        """
        choice = self._choice
        if choice.leg_hosts or not (choice.scattered or choice.sharings):
            return []  # each engine rank has its own legs, which its first bucket tells
        if self._tells_parts:
            self._tell_parts()
            return []
        found: list[list[Shared]] = []
        problem = ""
        for number in range(len(self.buckets.layouts)):
            mine: Shared | None = None
            try:
                mine = self.buckets.ahead(number) if not problem else None
            except ConfigError as error:
                problem = str(error)
                log.info("engines map this rank's memory in the first update, if they can: %s", problem)
            if number < self.buckets.num_mapped:
                found.append(self._gather_mapped(mine))
                continue
            data = self.buckets.encoded_ahead(number, mine)
            found.append(self._shared_by(self._gather(data) or []))
        return found

    def _tell_parts(self) -> None:
        """Tells the head this rank's parts of every bucket, for the plan, if they were planned anew.  Collective."""
        if not self._tells_parts or self._told is not None:
            return
        mine = encode_parts(self.buckets.parts)
        self._told = self._gather(mine) or ()
        self._plan = None

    def prepare(self) -> None:
        """Works out the steps of every bucket, without reading or moving weights."""
        self.buckets.prepare(size_bytes=self._sent_bytes[-1])

    def begin(self) -> Filling:
        """Begins one attempt, with the weights as they lie now.  Collective: every trainer rank calls it.

        The head has asked the engines what they serve, and they answer meanwhile.
        """
        self.exchange.begin()
        self._tell_parts()
        self._heard_at = time.monotonic()
        sources = SourceSums([one.sum_places for one in self.buckets.planned]) if self._verifies else None
        filling = Filling(plan=self.plan(), sources=sources)
        filling.lying = self.buckets.look()
        if self._sums_ahead and sources is not None:
            for planned, taker, _ in zip(self.buckets.planned, sources.takers, filling.lying, strict=False):
                planned.sum_own(taker)
        return filling

    def start(self, filling: Filling) -> None:
        """Does what needs no session, while engines open theirs.  Collective: every trainer rank calls it.

        The head gets the handles to what engines read in place.  Where no other rank is needed, the first buckets are
        filled: one on the host, as many as there are on a GPU.
        """
        filling.mapped = [self._gather_mapped(self.buckets.share(lying)) for lying in filling.lying]
        buckets = self._fill(filling)
        ahead = NUM_SLOTS if self._device.type == "cuda" else 1
        # Buffers that are read through NIXL are as large as what their readers want.
        if self._group.world_size > 1 or filling.lying or "remote" in self._choice.sharings:
            ahead = 0
        first = list(islice(buckets, ahead))
        filling.buckets = chain(first, buckets)

    @property
    def _sums_ahead(self) -> bool:
        """True if a GPU sums what engines read in place before they can read, while messages are on their way.

        A host sums while they read, since they would wait for it.
        """
        return self._device.type == "cuda"

    def send(self, filling: Filling, *, sums_buckets: bool) -> AllSums:
        """Sends all buckets.  Collective: every trainer rank calls it.

        With ``sums_buckets``, every rank with a bucket sums it.  Returns the sums of all ranks on the head; there are
        none without verification, and after a failure.
        """
        with self._patience():
            sent = self._send_each(filling, sums_buckets=sums_buckets)
        if not sent or filling.sources is None:
            return AllSums()
        buckets = filling.sums if sums_buckets else None
        return all_sums.add_up(filling.sources, buckets, self._group, timeout_s=self._wait_s)

    @contextmanager
    def _patience(self) -> Generator[None]:
        """Lets a rank that is ahead in its run wait for the head, which may wait a whole deadline for an engine."""
        group, before = self._group, self._group.timeout_s
        if not self._head.leads and not self._signals:
            group.timeout_s = max(before, self._wait_s)
        try:
            yield
        finally:
            group.timeout_s = before

    def meet(self, invited: Sequence[Invited]) -> None:
        """Joins groups of all trainer ranks and engine ranks; the head notes what fails.  Collective."""
        self._tell_failures(self._head.meet(self.exchange, invited))

    def abort(self, reason: str) -> None:
        """Ends the messages to engine ranks after a failure."""
        self.exchange.abort(reason)

    def close(self) -> None:
        """Frees the buffers; safe to call twice."""
        self.exchange.close()
        self.buckets.forget()
        self.buckets.free()

    def _fill(self, filling: Filling) -> _Filled:
        """Fills each bucket into its slot; yields None and None on a rank that only contributes shards."""
        buckets, first = self.buckets, self.buckets.num_mapped
        for layout in buckets.layouts[:first]:  # nothing is filled
            yield Bucket(layout, torch.empty(layout.size_bytes, dtype=torch.uint8, device="meta")), None
        made = buckets.make_slots()
        takers = filling.sources.takers[first:] if filling.sources is not None else None
        filled = bucketize(buckets.planned[first:], None if made is None else [slot.data for slot in made], takers)
        for layout in buckets.layouts[first:]:
            slot = buckets.slot(layout.index)
            if slot is not None:
                waits = time.monotonic()
                slot.reclaim()
                self._sent_since(waits)
            began = time.monotonic()
            bucket = next(filled)
            ended = time.monotonic()
            self._events.step_ended("gather", began, ended, bucket=layout.index)
            self._head.run.add_phase("gather", ended - began)
            yield bucket, slot

    def _send_each(self, filling: Filling, *, sums_buckets: bool) -> bool:
        """Sends one bucket after the other; False, the same on every rank, if one could not be sent."""
        head, buckets, exchanges, end = self._head, self.buckets, self._choice.exchanges, 0
        self._heard_at = time.monotonic()
        for index in range(len(buckets.layouts)):
            if index == end:
                go = self._hear(index)
                if not go.end:
                    self.exchange.abort("the update failed")
                    return False
                self.exchange.keep(go.groups)
                end = min(go.end, len(buckets.layouts))
                if self._by_itself:
                    head.announce(buckets.layouts[index:end], (self._sent_bytes[end], self._sent_bytes[-1]))
            bucket, slot = next(filling.buckets)
            if sums_buckets and not head.leads and bucket is not None:
                filling.sums.append(filling.plan.sums.of(bucket))
            mapped = index < buckets.num_mapped
            shared = filling.mapped[index] if mapped else self._gather_shared(buckets.handle(index, bucket, slot))
            if not self._by_itself:
                head.send(bucket, shared, (self._sent_bytes[index + 1], self._sent_bytes[-1]))
            if mapped and not self._sums_ahead and filling.sources is not None:
                buckets.planned[index].sum_own(filling.sources.takers[index])
            if exchanges and head.failed:
                self.exchange.abort("the update failed")  # the others may wait for engine ranks
            elif exchanges and bucket is not None:
                began = time.monotonic()
                planned = buckets.planned[index]
                self.exchange.send(bucket, planned.serves_to if self._choice.leg_hosts else {"": planned.serves})
                self._sent_since(began)
        return not exchanges or self._end_exchange()

    def _hear(self, index: int) -> _Go:
        """The head's word on the run that begins with a bucket.  Collective."""
        if self._choice.exchanges and index:
            self._tell_failures()
        word = _Go(0) if self._head.failed else _Go(index + self._run_from(index), self._head.groups)
        go = _go.decode(self._group.broadcast_bytes(_encoder.encode(word), timeout_s=self._left_s))
        self._heard_at = time.monotonic()
        return go

    @property
    def _left_s(self) -> float:
        """Deadline of a wait for the head: what this rank did since it heard from it counts as waiting."""
        since_s = 0.0 if self._head.leads else time.monotonic() - self._heard_at
        return max(self._wait_s - since_s, self._wait_s / 2)

    def _run_from(self, index: int) -> int:
        """Number of buckets until ranks hear from the head again: more, as long as a run takes little time."""
        now = time.monotonic()
        took_s, self._run_began = now - self._run_began, now
        if self._signals or (self._group.world_size == 1 and not self._by_itself):
            return 1  # a buffer may be filled again when the head says so
        if index == 0:
            self._run = 1
        elif took_s < _RUN_S / 2:
            self._run = min(2 * self._run, MAX_RUN)
        elif took_s > _RUN_S:
            self._run = max(self._run // 2, 1)
        return self._run

    def _end_exchange(self) -> bool:
        """Waits for all messages to engine ranks; False if some failed on any rank."""
        began = time.monotonic()
        self.exchange.drain()
        self._sent_since(began)
        self._tell_failures()
        go = b"stop" if self._head.failed else b"go"
        if self._group.broadcast_bytes(go, timeout_s=self._left_s) != b"go":
            self.exchange.abort("the update failed")
            return False
        return True

    def _sent_since(self, began: float) -> None:
        """Adds the time of this rank's messages, and of waits for their readers, to the update's phases."""
        self._head.run.add_phase("send", time.monotonic() - began)

    def _tell_failures(self, failures: Mapping[str, str] | None = None) -> None:
        """Tells the head in which groups each rank's messages failed, unless ``failures`` are given."""
        failed = self.exchange.failures if failures is None else dict(failures)
        gathered = self._group.gather_bytes(_encoder.encode(failed), timeout_s=self._left_s)
        if gathered is not None:
            self._head.exchange_failed([_failures.decode(one) for one in gathered])

    def _gather_shared(self, mine: bytes) -> list[Shared]:
        """Gathers the handles of all filled buffers on the head, and the parts that each has if it has not all."""
        if not self._choice.sharings and not self._choice.leg_hosts:
            return []
        return self._shared_by((self._gather(mine) if self._signals else [mine]) or [])

    def _gather_mapped(self, mine: Shared | None) -> list[Shared]:
        """Gathers the handles to all ranks' own memory on the head; ``mine`` is None if this rank cannot give any."""
        if self._group.world_size == 1:
            return [mine] if mine is not None else []
        if mine is not None and (self._mine is None or self._mine[0] is not mine):
            self._mine = mine, msgspec.json.encode(mine)
        data = self._mine[1] if mine is not None and self._mine is not None else b""
        return self._shared_by(self._gather(data) or [])

    def _gather(self, data: bytes) -> list[bytes] | None:
        """Gathers what every rank gives, on the head; None elsewhere.  Collective."""
        return self._group.gather_bytes(data, timeout_s=self._wait_s)

    def _shared_by(self, gathered: Sequence[bytes]) -> list[Shared]:
        """The handles that trainer ranks sent, in order of rank, with the host where they can be opened."""
        hosts = self._group.hosts if self._choice.reading_hosts or self._choice.leg_hosts else ()
        return [_shared_of(item, hosts[rank] if hosts else "") for rank, item in enumerate(gathered) if item]


def _shared_of(item: bytes, host: str) -> Shared:
    """Decodes what a trainer rank sent: the same object for the same bytes, as long as it is kept."""
    known = _known_shared.get((item, host))
    if known is None:
        known = _shared.decode(item)
        known = msgspec.structs.replace(known, host=host) if host else known
        _known_shared.put((item, host), known, _TIMES_ITS_BYTES * len(item))
    return known
