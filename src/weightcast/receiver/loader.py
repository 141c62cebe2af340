"""Loads buckets into parameters: replays the model's own copies, and reads back what is resident.

The loader watches the model's ``load_weights`` once (``recorder``).  From then on an update replays its copies into the
staging set.  Sources that the model computes with stay with ``load_weights``: they wait whole and are loaded at the
commit, or as they come where nothing is staged (``computed_sources``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from weightcast.errors import ConfigError
from weightcast.receiver.arrivals import Arrivals, rows_of
from weightcast.receiver.bucket_copier import BucketCopier
from weightcast.receiver.bucket_copies import BucketCopies, LoadPlan, ShareRoutes
from weightcast.receiver.computed_sources import ComputedSources
from weightcast.receiver.coverage import overlapping, uncovered, within
from weightcast.receiver.offer import check_offer
from weightcast.receiver.recorder import LoadWeights, record_routes
from weightcast.receiver.resident_sums import ResidentSums
from weightcast.receiver.resident_versions import Finisher, ResidentVersions
from weightcast.receiver.staging import StagingPlace, StagingSet
from weightcast.wire.bucket import Bucket
from weightcast.wire.casts import why_no_cast
from weightcast.wire.held import NOTHING_HELD, HeldSums, HeldTable
from weightcast.wire.layout import BucketLayout, TensorSlot, TensorSpec
from weightcast.wire.messages import Prepare
from weightcast.wire.plans import UpdateTables
from weightcast.wire.routes import Route

READ_BACK = ("resident", "behaviour")  # levels of proof that read the live weights back


def residents_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by name; those that are one and the same memory once."""
    transient = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in module._non_persistent_buffers_set  # pyright: ignore[reportPrivateUsage]  torch has no other way
    }
    found: dict[str, torch.Tensor] = dict(model.named_parameters())
    found.update((name, buffer) for name, buffer in model.named_buffers() if name not in transient)
    places: dict[tuple[object, ...], str] = {}
    return {name: tensor for name, tensor in found.items() if places.setdefault(_place(tensor, name), name) == name}


def _place(tensor: torch.Tensor, name: str) -> tuple[object, ...]:
    if not tensor.numel():
        return (name,)
    return tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


class Loader:
    """Loads the buckets of one update into one rank's model."""

    def __init__(
        self,
        model: nn.Module,
        *,
        load_weights: LoadWeights,
        expected: Sequence[TensorSpec],
        finishers: Sequence[Finisher] = (),
        residents: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Watches ``load_weights`` once and changes nothing.

        Args:
            load_weights: Takes ``(name, tensor)`` pairs of whole tensors.
            expected: Every tensor of a full update, whole.
            finishers: Run once after new weights are live.
            residents: Tensors that ``load_weights`` writes, by name, for an engine that packs them; the finishers
                bring them into the model.  None takes the model's parameters and buffers.

        Raises:
            ConfigError: The loader cannot be watched, writes a parameter twice, or puts another in its place.
        """
        self.expected = {spec.name: spec for spec in expected}
        self.residents = dict(residents) if residents is not None else residents_of(model)
        recording = record_routes(load_weights, list(expected), self.residents)
        if residents is None:
            _check_in_place(self.residents, residents_of(model))
        self.routes: Mapping[str, list[Route]] = recording.routes
        self.computing = ComputedSources(recording.groups, load_weights, self.expected, self.residents)
        self.computed = frozenset(self.computing.names)
        routes = [route for found in recording.routes.values() for route in found]
        places = self.computing.places
        unwritten = uncovered([*routes, *places], self.residents, recording.filled)
        written = {name: tensor for name, tensor in self.residents.items() if name not in unwritten}
        # A view of a written tensor changes with it.
        unwritten = [name for name in unwritten if not within(self.residents[name], written)]
        self.not_updated = tuple(unwritten)
        self.skipped = frozenset(
            name for name in self.expected if name not in self.computed and not self.routes.get(name)
        )
        self._written = {route.parameter for route in (*routes, *places)}
        self._shared = _sharing(model)
        self._copied = ResidentSums(routes, self.expected, recording.constants)
        self._sums = ResidentSums(routes, self.expected, recording.constants, places) if places else self._copied
        self._device = next(iter(self.residents.values())).device if self.residents else torch.device("cpu")
        self.staging = StagingSet(self.residents, "none")
        self.live = self._live(finishers)
        self._arrivals = Arrivals()
        self.plan = LoadPlan()
        self.copier = BucketCopier(self.expected, ShareRoutes.of(self.routes, self.computing.parts))
        self._copies: Mapping[str, str] = {}
        # The parts of ``written``, for those of the routes.
        self._parts: tuple[HeldTable, HeldTable] | None = None
        # Cache for the table that was announced last, which is the same in every update.
        self._fits: Sequence[TensorSpec] | None = None
        self.touched = False

    def unstaged_because(self, *, keep_storage: bool = False) -> str:
        """The reason why a new version cannot wait in a second set of weights; empty if it can.

        Parameters that share memory are torn apart if one gets another storage.  An exchange of contents leaves views
        whole, but two parameters with a common element would exchange it twice.
        """
        if not keep_storage and self._device.type == "cpu":
            return self._shared
        return overlapping({name: tensor for name, tensor in self.residents.items() if name in self._written})

    @property
    def copies(self) -> Mapping[str, str]:
        """Names of tensors that this rank does not keep, each with that of the tensor that it must equal."""
        return self._copies

    @copies.setter
    def copies(self, copies: Mapping[str, str]) -> None:
        self._copies = copies
        compared = [self.expected[name] for name in dict.fromkeys((*copies, *copies.values()))]
        self.copier.routes = ShareRoutes.of(self.routes, self.computing.parts, compared)

    @property
    def held_bytes(self) -> int:
        """Bytes of the sources that wait whole for a commit."""
        return self.computing.size_bytes

    @property
    def size_bytes(self) -> int:
        """Bytes of one set of parameters and buffers on this rank."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.residents.values())

    @property
    def placed(self) -> list[str]:
        """Names of the expected tensors that this rank keeps a part of, or computes with."""
        return [name for name in self.expected if self.routes.get(name) or name in self.computed]

    def expect_kept_dtypes(self) -> None:
        """Expects every tensor in the dtype that this rank keeps, instead of that of the checkpoint's file.

        For one that is computed with, that is the dtype of what is computed, if a cast to it keeps values.  So ranks
        that copy a tensor and ranks that compute with it expect the same.
        """
        written = {name: routes[0] for name, routes in self.routes.items() if routes}
        for name, route in (written | self.computing.first_places).items():
            spec = self.expected[name]
            kept = self.residents[route.parameter].dtype
            if name in written or not why_no_cast(name, spec.torch_dtype, kept):
                self.expected[name] = TensorSpec.of(name, torch.empty(spec.shape, device="meta"), dtype=kept)

    def partly_written(self) -> list[str]:
        """Names of the parameters and buffers that a full update leaves as they are, wholly or in part."""
        written: dict[str, int] = {}
        for routes in (*self.routes.values(), self.computing.places):
            for route in routes:
                written[route.parameter] = written.get(route.parameter, 0) + route.box.numel
        return [name for name, tensor in self.residents.items() if written.get(name, 0) < tensor.numel()]

    def stage(self, place: StagingPlace, *, keep_storage: bool = False, **options: Any) -> None:
        """Allocates the staging set; the options are those of ``StagingSet``."""
        why = self.unstaged_because(keep_storage=keep_storage)
        if place != "none" and why:
            raise ConfigError(f"this model's weights cannot be staged: {why}", hint="use staging none")
        # A parameter that no update writes has no second version and stays where it is.
        written = {name: tensor for name, tensor in self.residents.items() if name in self._written}
        staged = written if place != "none" else self.residents
        self.staging = StagingSet(staged, place, keep_storage=keep_storage, **options)
        self.live = self._live(self.live.finishers)

    def check(self, specs: Sequence[TensorSpec]) -> None:
        """Refuses tensors that are not a full update of this model.  Those that its loader skips are optional.

        Raises:
            Refused: Something is missing, unknown, of another shape, or of a dtype whose cast to the model's would not
                keep its values; all are named.
        """
        if specs is self._fits:
            return
        check_offer(specs, self.expected, optional=self.skipped, kept_dtypes=self._kept_dtypes)
        self._fits = specs

    def _kept_dtypes(self, name: str) -> Iterator[torch.dtype]:
        """The dtype of each parameter that a source tensor is copied into."""
        return (self.residents[route.parameter].dtype for route in self.routes.get(name, ()))

    def begin(self, plan: UpdateTables | None = None, *, proves: bool = True) -> None:
        """Forgets what an earlier update left, and looks where the parameters lie now.

        Args:
            plan: Plan of the update; None if its buckets come without one.
            proves: False if nobody will ask what is resident after the update.
        """
        self._use(plan)
        self.staging.begin()
        self.staging.look(forms=True)
        self._arrivals.begin()
        self.computing.begin(proves=proves)
        self.touched = False
        self.copier.begin()

    def prepare(self, message: Prepare) -> HeldSums:
        """Works out what the updates to come need to know, from their plan.  Writes no weights.

        Returns:
            The parts that a read-back sums, with sums of 0.  Nothing if no proof will be asked for.
        """
        self.staging.look(forms=True)
        self._use(message.plan)
        layouts, told = message.plan.layouts, message.plan.parts
        for number, layout in enumerate(layouts):
            if message.way == "buckets":
                whole = self.copier.plan_whole(layout)
                self.copier.prepare(whole, [layout.size_bytes], self._device, self.staging)
            elif told:
                # Of the parts that ranks read, the source names those ranks that have any.
                parts = tuple(filter(None, told[number])) if message.way == "reads" else told[number]
                exchange = self.copier.plan_exchange(layout, parts, read=message.way == "reads")
                self.copier.prepare(exchange.copies, [exchange.size_bytes], self._device, self.staging)
        self._arrivals.prepare(list(map(self._rows, layouts)), message.plan.specs)
        if message.verify in READ_BACK:
            self.live.know()
        if message.verify == "none":
            return NOTHING_HELD
        return self.computing.empty_answer(self._sums.prepare(self.staging.form, self._device, self.staging.lives))

    def place(self, bucket: Bucket) -> None:
        """Works out the launches for a bucket that will come in this memory."""
        self.copier.place([bucket.data], self.copier.plan_whole(bucket.layout), self.staging)

    def load(self, bucket: Bucket, *, summed: bool = True) -> None:
        """As ``load_from``, out of a buffer with the whole bucket."""
        self.load_from([bucket.data], self.copier.plan_whole(bucket.layout), summed=summed)

    def load_from(
        self, buffers: Sequence[torch.Tensor], plan: BucketCopies, *, far: Collection[int] = (), summed: bool = True
    ) -> None:
        """Copies this rank's own share of a bucket into the staging set, out of the places of a plan, each flat uint8.

        Enqueued on the current stream of a GPU, done on a CPU.

        Args:
            far: Numbers of buffers that lie on another GPU and are mapped for this rank's.
            summed: False if nobody needs ``written``.

        Raises:
            Refused: Rows arrive out of order or twice.
        """
        if not self._arrivals.take_all(self._rows(plan.layout)):
            for number, slot in enumerate(plan.layout.slots):
                self._arrivals.take(slot)
                if slot.spec.name in self.computed:
                    self._hand_over(slot, self.copier.put_together(slot, plan.wholes[number], buffers))
        self.touched = self.touched or (not self.staging.staged and bool(plan.parameters))
        self.copier.copy(buffers, plan, self.staging, far=far, summed=summed)

    def written(self) -> HeldSums:
        """Sums of this rank's share of the source tensors, as it was copied.  Waits for the device.

        Sources that the loader computes with are summed as they arrive, in the dtypes that are expected.
        """
        form, targets, routes = self.staging.waiting_form, self.staging.targets, self.copier.routes
        totals = self.copier.totals()
        found = self._copied.completed(totals[: routes.num_routes], form, self._device, targets)
        if not self.computed:
            return found
        parts = self.computing.held_parts
        if self._parts is None or self._parts[0] is not found.table:
            self._parts = found.table, (*found.table, *parts)
        own = totals[routes.num_routes : routes.num_routes + len(parts)]
        return HeldSums(self._parts[1], torch.cat([found.totals, own]))

    def waiting(self) -> HeldSums:
        """As ``written``, for weights that did not come in buckets: reads the staging set.  Waits for the device."""
        staging = self.staging
        return self.computing.answer_copied(self._sums.held(staging.waiting_form, self._device, staging.targets))

    def missing(self, specs: Sequence[TensorSpec]) -> list[str]:
        """Announced tensors that have not arrived, or not all of them."""
        return self._arrivals.missing(specs)

    def _rows(self, layout: BucketLayout) -> Mapping[str, int]:
        """As ``rows_of``; the same object while a bucket has the same layout."""
        known = self.plan.rows.get(layout.index)
        if known is None or known[0] != layout:
            known = self.plan.rows[layout.index] = layout, rows_of(layout, self.computed)
        return known[1]

    def _live(self, finishers: Sequence[Finisher]) -> ResidentVersions:
        return ResidentVersions(self.staging, self._sums, self.computing, finishers=finishers, device=self._device)

    def _use(self, plan: UpdateTables | None) -> None:
        """Drops all that belongs to another plan."""
        if not self.plan.is_of(plan):
            self.plan = LoadPlan(plan)
            self.copier.use(self.plan)

    def _hand_over(self, slot: TensorSlot, view: torch.Tensor) -> None:
        """Keeps a copy of a whole tensor for the loader; the bucket is the trainer's."""
        whole = self._arrivals.whole(slot, view)
        if whole is None:
            return
        self.computing.take(slot.spec.name, whole.to("cpu") if self.staging.place == "host" else whole)
        if not self.staging.staged:
            self.touched = True
            self.computing.load()


def _check_in_place(before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in before.items():
        if after.get(name) is not tensor:
            raise ConfigError(
                f"load_weights puts another parameter in the place of {name} instead of writing into it",
                hint="use param.data.copy_(weight), so that what holds the parameter sees the new values",
            )


def _sharing(model: nn.Module) -> str:
    """Which two of a model's tensors share memory, in words; empty if none do."""
    owner: dict[int, str] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.numel():
            first = owner.setdefault(tensor.untyped_storage().data_ptr(), name)
            if first != name:
                return f"{first} and {name} share memory"
    return ""
