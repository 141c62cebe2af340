"""Exports a module as named, unsharded tensors: plain, FSDP2 (``fully_shard``), tensor or expert parallel.

The exporter reads parameters where they live, when they are asked for.  It changes one thing about the model: FSDP2
modules that still hold gathered parameters from the last forward pass free them, as the next pass would anyway.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from weightcast.comm.trainer_group import TrainerGroup
from weightcast.digest.source_sums import Taker, join
from weightcast.errors import ConfigError
from weightcast.exporters import casting, lora
from weightcast.exporters.checkpoint_layout import Stored, arrange_as_saved
from weightcast.exporters.families import family_named
from weightcast.exporters.gather import GatherBucket, Gatherer
from weightcast.exporters.held_parts import Held
from weightcast.exporters.local_shard import ShardOf
from weightcast.exporters.mapping import Family, arrange, wire_dtype_of
from weightcast.exporters.module_tensors import PlacedTensors
from weightcast.exporters.names import check_names, is_wrapper
from weightcast.exporters.ownership import SharedParts
from weightcast.exporters.quantise import Fp8Format, Quantiser, quantised_specs
from weightcast.exporters.quantise_steps import QuantiseSteps
from weightcast.exporters.structure import Structure, in_planned_order
from weightcast.protocols import BucketUse, Exporter, Lying, PlannedBucket
from weightcast.runtime.gc_pause import gc_paused
from weightcast.wire.layout import BucketLayout, TensorSpec, dtype_name


class GatheringExporter(Exporter):
    """An exporter whose tensors a ``Gatherer`` gathers from the ranks' parts of a module; subclasses make the parts.

    ``device`` is the one that holds most of the weights' bytes.
    """

    _tensors: PlacedTensors
    _specs: tuple[TensorSpec, ...]
    _gatherer: Gatherer

    def specs(self) -> Sequence[TensorSpec]:
        """Every tensor, in the order of the model's ``state_dict``; the tensors of a stacked one stay together."""
        return self._specs

    def prepare(self, group: TrainerGroup) -> None:
        """Exchanges which rank holds which part.  Collective.

        Raises:
            ConfigError: The ranks hold different models; raised on every rank alike.
            TrainerRankFailed: A rank is gone or did not take part in time.
        """
        with self._tensors.looking():
            self._gatherer.prepare(group)

    def plan(self, layouts: Sequence[BucketLayout], group: TrainerGroup, use: BucketUse) -> Sequence[PlannedBucket]:
        """Implements ``Exporter.plan``.

        A bucket's extra memory is its size divided by the number of ranks (at least 1 MiB).  If values are cast or
        computed on the way, add 16 MiB and the adapters of the bucket's weights.

        Raises:
            ConfigError: A layout is not of this model.
        """
        return [WeightsBucket(self._gatherer.plan(layout, group, use), group, self._tensors) for layout in layouts]

    def unsummed(self) -> Collection[str]:
        """Implements ``Exporter.unsummed``."""
        return ()


class WeightsBucket(PlannedBucket):
    """A bucket of a module's tensors.  Adapters are merged, and values quantised, while it is filled.

    When ``fill`` returns, the copies are complete and the model's memory is no longer read.  On a GPU it follows the
    current stream's earlier work.  ``fill`` raises ``ConfigError`` if the model was sharded anew.
    """

    def __init__(
        self,
        gathered: GatherBucket,
        group: TrainerGroup,
        tensors: PlacedTensors,
        numbers: Sequence[int] = (),
        merged: lora.MergedBucket | None = None,
        scaled: tuple[Quantiser, QuantiseSteps] | None = None,
    ) -> None:
        """Takes what computes the bucket's values; ``numbers`` are those of the tensors that they come from."""
        super().__init__(gathered.layout, group)
        self.serves, self.serves_to = gathered.serves, gathered.serves_to
        self._gathered = gathered
        self._group = group
        self._tensors = tensors
        self._places: Sequence[torch.Tensor] = ()  # of the weights' sums and the adapters', among those of the bucket
        self.sum_places = gathered.sum_places
        if merged is not None:
            num_slots = len(gathered.layout.slots)
            parts = [(gathered.sum_places, range(num_slots), str), (merged.sum_places, (), merged.name_of)]
            self.sum_places, self._places = join(group.rank, num_slots, parts)
        self._numbers = numbers
        self._merged = merged
        self._scaled = scaled

    def prepare(self, data: torch.Tensor | None) -> None:
        """Implements ``PlannedBucket.prepare``."""
        with self._tensors.planning(self._numbers):
            if self._merged is not None:
                self._merged.prepare(self._gathered.use)
            try:
                if self._scaled is not None:
                    quantiser, steps = self._scaled
                    quantiser.prepare_scales(steps, self._group.device)
                self._gathered.prepare(data)
            finally:
                self._end()

    def fill(self, data: torch.Tensor | None, taker: Taker | None = None) -> torch.Tensor | None:
        """Implements ``PlannedBucket.fill``."""
        try:
            with self._tensors.reading(self._numbers):
                try:
                    if self._merged is not None:
                        adapters = taker.part(self._places[1]) if taker is not None else None
                        taker = taker.part(self._places[0]) if taker is not None else None
                        self._merged.begin(adapters)
                    if self._scaled is not None:
                        quantiser, steps = self._scaled
                        quantiser.begin(steps, self._group)
                    return self._gathered.fill(data, taker)
                finally:
                    self._end()
        except BaseException as error:
            self._group.abort(f"{type(error).__name__}: {error}")  # or the other ranks wait until their deadline
            raise

    def _end(self) -> None:
        if self._merged is not None:
            self._merged.end()
        if self._scaled is not None:
            self._scaled[0].end()

    def own_memory(self) -> Lying:
        """Implements ``PlannedBucket.own_memory``."""
        with self._tensors.looking():
            return self._gathered.own_memory()

    def sum_own(self, taker: Taker) -> None:
        """Implements ``PlannedBucket.sum_own``."""
        with self._tensors.looking():
            self._gathered.sum_own(taker)


class NamedExporter(GatheringExporter):
    """The tensors of a module, under the names and in the layouts of a checkpoint, gathered into buckets.

    Args:
        model: The whole model, which has the names.
        make_tensors: Function that lists this rank's tensors of it as they are now.  The other arguments are as for
            ``ModuleExporter``.

    Raises:
        ConfigError: The model has tensors that cannot be sent as they are; nothing has moved.
    """

    _names_stay: ClassVar[bool] = True  # as ``Structure.names``
    _planned: Sequence[TensorSpec] = ()  # before they are quantised

    @gc_paused()  # a large model makes a million small objects here, and none of them is garbage
    def __init__(
        self,
        model: nn.Module,
        make_tensors: Callable[[], PlacedTensors],
        *,
        wire_dtype: torch.dtype | None = None,
        names: Callable[[str], str] | None = None,
        family: Family | str | None = None,
        quantise: Fp8Format | None = None,
    ) -> None:
        casting.check_wire_dtype(wire_dtype)
        self.casts = wire_dtype is None
        self._model = model
        self._make_tensors = make_tensors
        self._names = names
        self._given_family = family_named(family) if isinstance(family, str) else family
        self._quantise = quantise
        self._look(lambda name, table: wire_dtype_of(name, table, wire_dtype))

    def _look(self, dtype_of: Callable[[str, Family], torch.dtype | None]) -> None:
        """Works out everything that depends on how the model is made now; ``dtype_of`` a tensor to be cast to."""
        tensors = self._make_tensors()
        merger = lora.Merger(self._model, tensors)
        config, family = _config_of(self._model), self._given_family
        if family is not None:
            arranged = arrange(tensors.stored, family, config)
        else:
            places = tensors.places
            stored = [Stored(name=place.name, shape=place.shape, dtype=place.dtype) for place in places]
            numbers = {id(tensors.model_tensor(number)): number for number in range(len(places))}
            family, arranged = arrange_as_saved(self._model, stored, numbers, config)
        specs: list[TensorSpec] = []
        for tensor in arranged:
            own = {tensors.places[segment.source].dtype for segment in tensor.segments}
            if len(own) > 1:
                raise ConfigError(f"{tensor.name} joins tensors of several dtypes: {', '.join(map(str, own))}")
            name = self._names(tensor.name) if self._names is not None else tensor.name
            dtype = casting.wire_dtype(own.pop(), dtype_of(name if self._planned else tensor.name, family))
            specs.append(TensorSpec(name=name, dtype=dtype_name(dtype), shape=tensor.shape))
        if self._planned:
            specs, arranged = in_planned_order(self._planned, specs, arranged, self._tensors.ties)
            tensors.device = self._tensors.device  # that of the buckets; parts elsewhere are copied to it
        travelling = tuple(specs if self._quantise is None else quantised_specs(specs, self._quantise))
        check_names(spec.name for spec in travelling)
        self.family, self._arranged, self._tensors, self._merger = family, arranged, tensors, merger
        self._planned, self._specs, self.device = specs, travelling, tensors.device
        shared = SharedParts(tensors, arranged, specs, travelling=travelling, computed=merger.merges)
        watch = tensors.watch
        self._quantiser: Quantiser | None = None
        if self._quantise is None:
            self._gatherer = Gatherer(self._specs, self._local, shared, watch)
        else:
            self._quantiser = quantiser = Quantiser(specs, self._local, shared, self._quantise)
            self._gatherer = Gatherer(self._specs, quantiser.local, quantiser, watch, quantiser)
        self._number = {spec.name: number for number, spec in enumerate(self._specs)}
        self._structure = Structure(tensors.roots, names=self._names_stay)

    def changed(self) -> bool:
        """Implements ``Exporter.changed``."""
        self._tensors.reshard()
        return not self._structure.holds() or self._tensors.changed() or self._merger.changed()

    @gc_paused()
    def look_again(self) -> None:
        """Implements ``Exporter.look_again``."""
        planned = {spec.name: spec.torch_dtype for spec in self._planned}
        self._look(lambda name, _: planned.get(name))

    def prepare(self, group: TrainerGroup) -> None:
        """Exchanges which rank holds which part, of adapters too.  Errors as for ``GatheringExporter.prepare``."""
        self._merger.prepare(group)
        super().prepare(group)

    def plan(self, layouts: Sequence[BucketLayout], group: TrainerGroup, use: BucketUse) -> Sequence[PlannedBucket]:
        """Implements ``Exporter.plan``; as ``GatheringExporter.plan``."""
        planned: list[PlannedBucket] = []
        for layout in layouts:
            gathered, numbers = self._gatherer.plan(layout, group, use), self._sources(layout)
            merged = self._merger.plan(layout, numbers, group, use) if self._merger else None
            scaled = None
            if self._quantiser is not None:
                scaled = self._quantiser, self._quantiser.plan(layout, self._tensors.watch(numbers))
            planned.append(WeightsBucket(gathered, group, self._tensors, numbers, merged, scaled))
        return planned

    def _local(self, number: int) -> list[Held]:
        found: list[Held] = []
        for segment in self._arranged[number].segments:
            part = self._tensors.part(segment.source)
            box = segment.target_box(part[0]) if part is not None else None
            if part is not None and box is not None:
                found.append(self._merger.held(segment.source, segment, box, part))
        return found

    def _sources(self, layout: BucketLayout) -> list[int]:
        """Numbers of the module's tensors that the values of a bucket come from."""
        numbers = [self._number[slot.spec.name] for slot in layout.slots]
        if self._quantiser is not None:
            numbers = [self._quantiser.source(number) for number in numbers]
        return sorted({segment.source for number in numbers for segment in self._arranged[number].segments})


class WeightsExporter(NamedExporter):
    """The same for modules of which every rank holds boxes of tensors, which engines may also read from it."""

    scatters = True

    def computing_bytes(self) -> int | None:
        """As ``Exporter.computing_bytes``; None with adapters that PEFT merges, a layer at a time."""
        merging = self._merger.computing_bytes()
        if merging is None:
            return None
        return merging + (16 * lora.CHUNK_ELEMENTS if merging or self._quantiser is not None else 0)

    def whole_on(self, hosts: Sequence[str]) -> frozenset[str]:
        """Implements ``Exporter.whole_on``."""
        return self._gatherer.whole_on(hosts)

    def unmappable(self, group: TrainerGroup, specs: Sequence[TensorSpec], *, casts: bool) -> Collection[str]:
        """Implements ``Exporter.unmappable``."""
        with self._tensors.looking():
            return self._gatherer.unmappable(group, specs, casts=casts)


class ModuleExporter(WeightsExporter):
    """Parameters and persistent buffers of a module, in the order of its ``state_dict``, as a checkpoint has them.

    Names and layouts are those of a Hugging Face checkpoint; ``model.config.model_type`` chooses their table.  Tied
    weights are listed once, under the first of their names.  Non-persistent buffers are not listed.  PEFT's LoRA
    adapters are merged into the bytes that are sent; the model itself is not changed.  Every trainer rank builds an
    exporter from its own part of the same model.

    Args:
        model: Plain, ``fully_shard``-ed, tensor or expert parallel (DTensor parameters), also inside a
            ``torch.compile``, DDP or activation-checkpointing wrapper.  Its values may change later.  Modules may be
            replaced as well, as long as the same tensors travel.
        wire_dtype: Floating-point tensors of 16 bits or more travel in this dtype; None keeps each tensor's own.
            Integers, bools, 8-bit floats and tensors that the family protects keep theirs.
        names: Function from a name to the one that engines know; applied last.
        family: A table of names and layouts, or its name (``"plain"``: names as they are); None finds the table.
        shard_of: Place of a plain (not DTensor) parameter in the whole tensor, for trainers that shard without DTensor;
            see ``weightcast.exporters.local_shard``.
        quantise: The weights that travel as 8-bit floats with scales; None for none.

    Attributes:
        family: The table in use.

    Raises:
        ConfigError: The model has tensors that cannot be sent as they are; nothing has moved.
    """

    scores = True

    def __init__(
        self,
        model: nn.Module,
        *,
        wire_dtype: torch.dtype | None = None,
        names: Callable[[str], str] | None = None,
        family: Family | str | None = None,
        shard_of: ShardOf | None = None,
        quantise: Fp8Format | None = None,
    ) -> None:
        super().__init__(
            model,
            lambda: PlacedTensors(model, shard_of=shard_of, name_of=lora.names_without_adapters(model)),
            wire_dtype=wire_dtype,
            names=names,
            family=family,
            quantise=quantise,
        )

    def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probability of each token but the first given those before it, by the model's own forward pass.

        The pass is eager, in evaluation mode and without gradients; training mode is restored.  The softmax is in
        float32.  Collective over the trainer ranks if the model is sharded.

        Args:
            token_ids: At least two tokens.
        """
        if len(token_ids) < 2:
            raise ValueError("a log-probability needs two tokens")
        model: Any = self._model
        while is_wrapper(model) or hasattr(model, "_orig_mod"):
            model = model.module if is_wrapper(model) else model._orig_mod
        options: dict[str, Any] = {}
        if "use_cache" in inspect.signature(model.forward).parameters:
            options["use_cache"] = False
        tokens = torch.tensor([list(token_ids)], dtype=torch.int64, device=self._forward_device())
        with torch.no_grad(), _evaluating(model):
            output = model(tokens, **options)
            logits = getattr(output, "logits", output)
            if isinstance(logits, tuple):
                logits = logits[0]
            if isinstance(logits, DTensor):
                logits = logits.full_tensor()
            log_p = torch.log_softmax(logits[0, :-1].float(), dim=-1)
            chosen = log_p.gather(-1, tokens[0, 1:, None].to(log_p.device))[:, 0]
        self._tensors.reshard()
        return chosen.tolist()

    def _forward_device(self) -> torch.device:
        """Device for inputs: FSDP2 computes on the mesh's device even if parameters are offloaded to the host."""
        for number in range(len(self._tensors.places)):
            tensor = self._tensors.tensor(number)
            if isinstance(tensor, DTensor) and tensor.device_mesh.device_type == "cuda":
                return torch.device("cuda", torch.cuda.current_device())
        return self._tensors.device


def _config_of(model: nn.Module) -> Any:
    """The configuration of a Hugging Face model, through its wrappers; None if there is none."""
    module: Any = model
    while module is not None and not hasattr(module, "config"):
        module = getattr(module, "_orig_mod", None) or (module.module if is_wrapper(module) else None)
    return getattr(module, "config", None)


@contextmanager
def _evaluating(model: nn.Module) -> Generator[None]:
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
