"""The targets of the updates to come, and what every trainer rank has ready for them.

Rank 0's head chooses the plan.  All ranks hear it, and make their streams of buckets for it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

import msgspec

from weightcast.comm.ipc import device_uuid
from weightcast.comm.nccl import settings_here
from weightcast.config import Target, UpdateConfig
from weightcast.errors import WeightcastError
from weightcast.protocols import Exporter
from weightcast.report import UpdateReport
from weightcast.runtime.gc_pause import gc_paused
from weightcast.transports.health import TargetHealth
from weightcast.transports.plan import UpdatePlan
from weightcast.update.bucket_memory import check_planned_bytes, free_bytes_of
from weightcast.update.bucket_stream import BucketStream
from weightcast.update.choose import Planner
from weightcast.update.finite import checks_finite
from weightcast.update.follower import Follower
from weightcast.update.head import Head, Progress
from weightcast.update.messages import AttemptResult, Failure, RankDevice, least_free_bytes
from weightcast.update.recognise import recognise_on_loop
from weightcast.update.roster import Roster
from weightcast.update.served_parts import layouts_in_place
from weightcast.update.trainer_ranks import TrainerRanks
from weightcast.watch.listeners import Events
from weightcast.wire.adapters import AdapterRequest
from weightcast.wire.layout import BucketLayout, TensorSpec, plan_buckets

log = logging.getLogger("weightcast.update")
_LOOK_AGAIN, _CHOOSE_AGAIN = 1, 2  # what a trainer rank wants before the next call


class Fleet:
    """The targets, and the plan, the head and the stream of buckets for them.

    Every trainer rank has one and calls each method in step, ``health`` and ``close`` excepted.

    Attributes:
        head: The head on rank 0, a follower on the other ranks.
        plan: The plan that every rank has heard.
        served: Highest version that the targets serve, as far as is known; None if no target knows its own.
    """

    def __init__(
        self,
        exporter: Exporter,
        specs: tuple[TensorSpec, ...],
        targets: Sequence[Target],
        config: UpdateConfig,
        ranks: TrainerRanks,
        events: Events,
        *,
        adapter: AdapterRequest | None,
        progress: Progress | None,
    ) -> None:
        """Asks nothing yet; ``choose`` follows."""
        self._exporter = exporter
        self._specs = specs
        self._targets = tuple(targets)
        self._config = config
        self._ranks = ranks
        self._group = ranks.group
        self._events = events
        self._progress = progress
        recognise = partial(recognise_on_loop, adapter=adapter)
        self._roster = Roster((), timeout_s=config.timeout_s, recognise=recognise, events=events)  # empty on followers
        self._stream: BucketStream | None = None
        self._looks_again = False  # True while ranks may plan for different models
        self.head: Follower = Follower()
        self.plan = UpdatePlan()
        self.served: int | None = None
        self._settled = False  # True while the head, the stream and the plan are those of all ranks, and whole

    @property
    def stream(self) -> BucketStream:
        """The stream of buckets for the plan."""
        assert self._stream is not None
        return self._stream

    def health(self) -> tuple[TargetHealth, ...]:
        """The known health of every target, in order; sends nothing.  Empty on ranks other than the head."""
        return self._roster.health()

    def close(self) -> None:
        """Closes buffers and connections, here and in the engines; each even if another one fails."""
        with ExitStack() as rest:
            if self._stream is not None:
                rest.callback(self._stream.close)
            rest.callback(self._roster.close)
            rest.callback(self.head.close)

    @gc_paused()
    def choose(self, *, leaving: Sequence[Target] = ()) -> None:
        """Makes the head's choices, which every rank hears.  If it is broken off later on, nothing is settled."""
        seats = self._seats()
        result, follower, layouts = AttemptResult(), Follower(), list[BucketLayout]()
        if self._group.is_head:
            try:
                self._roster.set_members(self._targets, leaving=leaving)
                planner = self._planner(seats)
                follower = head = Head(self._targets, self._roster, planner, self._events, progress=self._progress)
                result = head.choose()
                self._roster.check_one_engine_each()
                assert result.plan is not None
                layouts = self._layouts_for(result.plan)
            except WeightcastError as error:
                result = AttemptResult(failure=Failure.of(error))
        result = self._ranks.hear_or_raise(result)
        assert result.plan is not None
        self._settled = False
        # Engines unmap the buffers that are freed next, and map the new ones after that.
        self.head.close(self._roster.links)
        self.head, self.served = follower, result.served
        self._use(result.plan, layouts)
        self._prepare()
        self._settled = True

    def begin(self, version: int, *, counts_on: bool) -> None:
        """Begins an update, as ``Head.begin``, when every rank has come."""
        self.head.begin(version, counts_on=counts_on)
        if not self._enter():
            self._choose_anew()
            self.head.begin(version, counts_on=counts_on)

    def retarget(self, targets: Sequence[Target]) -> None:
        """Replaces the targets; after an error the old ones stay."""
        before, plan = self._targets, self.plan
        try:
            self._enter()
            self._targets = tuple(targets)
            self.choose(leaving=before)
        except BaseException:
            self._targets, self.plan = before, plan
            if not self._settled:
                self.head.close()  # while it still knows the clients of the new targets
            raise
        finally:
            if self._group.is_head:
                self._roster.set_members(self._targets)

    def release(self) -> None:
        """Makes engines unmap the trainer's memory."""
        self._enter(looks=False)  # it needs no weights
        self.head.release()
        self.stream.buckets.forget()
        self._ranks.hear(AttemptResult())

    def replan(self, plan: UpdatePlan) -> None:
        """Replaces the plan in the middle of an update, because a transport gave way."""
        self._settled, began = False, time.monotonic()
        self._use(plan)
        self._settled = True
        self.head.run.add_phase("recover", time.monotonic() - began)

    def interrupted(self, error: BaseException) -> None:
        """Ends what an interrupt has left open.  It may have come anywhere, so nothing is sure to be whole."""
        self._settled = False
        self.head.break_off(error)

    def note_served(self, report: UpdateReport) -> None:
        """Notes what the targets serve after an update."""
        known = [row.version_after for row in report.targets if row.version_after is not None]
        self.served = max(known, default=self.served)

    def _enter(self, *, looks: bool = True) -> bool:
        """Waits for the other ranks and, if it ``looks``, plans again for a model that has changed.

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
            check_planned_bytes(self._config, self.stream.buckets.planned_bytes)
        except WeightcastError as error:
            problem = error
        self._ranks.agree(problem)
        self._exporter.prepare(self._group)
        self.stream.plan_buckets()
        self._looks_again = False
        log.info("the model is made in another way than before, so its tensors were looked at again")

    def _choose_anew(self) -> None:
        """Makes the head's choices again after a call that was broken off; a failure has the update's report."""
        before = self.head
        try:
            self.choose()
        except WeightcastError as error:
            if not self._ranks.has_heard(error):
                raise
            failed = self._ranks.error_in(self._ranks.hear(before.fail(error)))
            assert failed is not None
            raise failed from error

    def _seats(self) -> Sequence[RankDevice]:
        """Where each trainer rank keeps its weights, in order of rank; none on ranks other than the head."""
        device = self._exporter.device
        held = self._stream.buckets.buffer_bytes if self._stream is not None else 0  # freed before others are allocated
        seat = RankDevice(device_uuid(device), free_bytes_of(device) + held, settings_here(device))
        places = self._group.gather_bytes(msgspec.json.encode(seat)) or ()
        return [msgspec.json.decode(place, type=RankDevice) for place in places]

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

    def _prepare(self) -> None:
        """Works out on both sides what the first update would otherwise have to find out."""
        shared = self.stream.share_ahead()
        self.head.prepare(self.stream.plan(), shared)
        self.stream.prepare()
        self.head.end_preparing()
        self.head.meet_ahead()

    def _use(self, plan: UpdatePlan, layouts: Sequence[BucketLayout] = ()) -> None:
        """Makes the stream of buckets for the head's plan, with layouts that are known already."""
        earlier = self._stream
        if earlier is not None:
            earlier.close()  # other targets and transports may need other buffers
        self.plan = plan
        self.head.use(plan)
        travelling, num_mapped = plan.travelling(self._specs), 0
        if plan.mapped:
            layouts, num_mapped = layouts_in_place(self._exporter, self._group, travelling, plan)
        self._stream = BucketStream(
            self._exporter,
            layouts or self._layouts_for(plan),
            self._group,
            plan,
            self.head,
            specs=travelling,
            num_mapped=num_mapped,
            verifies=self._config.verify != "none",
            check_finite=checks_finite(self._config, self._exporter.device),
            wait_s=self._ranks.wait_s,
            timeout_s=self._config.timeout_s,
            events=self._events,
            earlier=earlier,
        )

    def _layouts_for(self, plan: UpdatePlan) -> list[BucketLayout]:
        return plan_buckets(plan.travelling(self._specs), bucket_bytes=plan.bucket_bytes, packing=plan.packing)
