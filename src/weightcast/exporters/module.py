"""A module as named, unsharded tensors: plain, FSDP2 (``fully_shard``), tensor or expert parallel, on any mesh.

Reads parameters where they live, at the time they are asked for, and changes nothing about the model but one
thing: FSDP2 modules that still hold their gathered parameters from the last forward let go of them, as they do
before the next one anyway.

Does not know engines, buckets' lifetimes or transports.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from weightcast.comm.local import TrainerGroup
from weightcast.errors import ConfigError
from weightcast.exporters import casting, lora
from weightcast.exporters.families import family_named, family_of
from weightcast.exporters.gather import Gatherer, Held
from weightcast.exporters.mapping import Family, arrange, wire_dtype_of
from weightcast.exporters.names import check_names, is_wrapper
from weightcast.exporters.placed import PlacedTensors
from weightcast.exporters.quantise import Fp8Blocks, Quantiser
from weightcast.exporters.sharding import ShardOf
from weightcast.protocols import Shard
from weightcast.wire.bucket import Bucket
from weightcast.wire.layout import BucketLayout, TensorSpec, dtype_name


class ModuleExporter:
    """Parameters and persistent buffers of a module, in the order of its ``state_dict``, as a checkpoint has them.

    Names and layouts are those of a Hugging Face checkpoint: which table turns the trainer's into those is found by
    ``model.config.model_type``.  Tied weights are listed once, under the first of their names.  Non-persistent buffers
    are not listed.  LoRA adapters, as PEFT makes them, are merged into what is sent and left alone where they are.
    Every rank of the job builds one from its own part of the same model.

    Args:
        model: Plain, ``fully_shard``-ed, tensor or expert parallel (DTensor parameters), in a ``torch.compile``, DDP or
            activation-checkpointing wrapper or not.  Its structure must not change afterwards; its values may.
        wire_dtype: Floating-point tensors of 16 bits or more travel in this dtype; None keeps each tensor's own.
            Integers, bools, 8-bit floats and what the family wants kept keep theirs.
        names: Turns a name into the one that engines know; applied last.
        family: A table of names and layouts, or the name of one (``"plain"``: names as they are); None finds it.
        shard_of: Where in the whole tensor a plain, not DTensor, parameter of this rank lies, for trainers that shard
            without DTensor; see ``weightcast.exporters.sharding``.
        quantise: Which weights travel as 8-bit floats with scales; None for none of them.

    Attributes:
        family: The table that is used.

    Raises:
        ConfigError: The model has tensors that cannot be sent as they are; nothing has moved.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        wire_dtype: torch.dtype | None = None,
        names: Callable[[str], str] | None = None,
        family: Family | str | None = None,
        shard_of: ShardOf | None = None,
        quantise: Fp8Blocks | None = None,
    ) -> None:
        casting.check_wire_dtype(wire_dtype)
        self._model = model
        self._tensors = PlacedTensors(model, shard_of=shard_of, name_of=lora.name_of)
        self._merger = lora.Merger(model, self._tensors)
        config = _config_of(model)
        if isinstance(family, str):
            family = family_named(family)
        self.family = family or family_of(config, self._tensors.stored)
        self._arranged = arrange(self._tensors.stored, self.family, config)
        specs: list[TensorSpec] = []
        for tensor in self._arranged:
            own = {self._tensors.places[segment.source].dtype for segment in tensor.segments}
            if len(own) > 1:
                raise ConfigError(f"{tensor.name} is made of tensors of several dtypes: {', '.join(map(str, own))}")
            dtype = casting.wire_dtype(own.pop(), wire_dtype_of(tensor.name, self.family, wire_dtype))
            name = names(tensor.name) if names is not None else tensor.name
            specs.append(TensorSpec(name=name, dtype=dtype_name(dtype), shape=tensor.shape))
        self._quantiser = Quantiser(specs, self._local, quantise) if quantise is not None else None
        self._specs = tuple(specs) if self._quantiser is None else self._quantiser.specs
        check_names(spec.name for spec in self._specs)
        local = self._local if self._quantiser is None else self._quantiser.local
        self._gatherer = Gatherer(self._specs, local, self._tensors.look)
        self._number = {spec.name: number for number, spec in enumerate(self._specs)}

    @property
    def device(self) -> torch.device:
        """Where the weights live: the device with most of their bytes."""
        return self._tensors.device

    def specs(self) -> Sequence[TensorSpec]:
        """Every tensor, in the order of the model's ``state_dict``, those of a stacked one together."""
        return self._specs

    def shards(self) -> Iterator[Shard]:
        """What this rank holds, in the order of ``specs``; the model's own memory.  No communication.

        Raises:
            ConfigError: Values are computed on the way (quantised, adapters merged), so nobody holds them.
        """
        with self._tensors.looking():
            for number, spec in enumerate(self._specs):
                for held in self._local(number) if self._quantiser is None else self._quantiser.local(number):
                    if held.memory is None:
                        raise ConfigError(f"{spec.name} is computed on its way, so no rank holds it")
                    yield Shard(spec=spec, box=held.box, tensor=held.memory)

    def prepare(self, group: TrainerGroup) -> None:
        """Find out which rank holds what; ``fill`` does so too, if nobody has before.  Collective.

        Raises:
            ConfigError: The ranks do not hold one and the same model; the same on every rank.
            TrainerRankFailed: A rank is gone or did not take part in time.
        """
        with self._tensors.looking():
            self._prepare(group)

    def _prepare(self, group: TrainerGroup) -> None:
        self._merger.prepare(group)
        if self._quantiser is not None:
            self._quantiser.prepare(group)
        self._gatherer.prepare(group)

    def fill(self, bucket: Bucket | None, layout: BucketLayout, group: TrainerGroup) -> torch.Tensor | None:
        """Write the layout's tensors, gathered and cast, into the bucket of every receiver.  Collective.

        When it returns the bucket is complete, on the host's clock too, and the model's memory is no longer read.
        Beside the bucket it takes at most the bucket's size divided by the number of ranks (1 MiB at least); where
        values are computed on the way, the adapters of the bucket's weights and 16 MiB more.
        On a GPU it follows what the current stream did before.

        Args:
            bucket: On a rank of ``group.receivers`` where to, on its ``device``; None elsewhere.
            layout: Which tensors, or rows of them; the same on every rank.
            group: The trainer ranks.

        Returns:
            As ``Gatherer.fill``.

        Raises:
            ConfigError: The layout is not of this model, or the model was sharded anew.
            TrainerRankFailed: Another rank failed; the message names it.
        """
        with self._tensors.looking():
            self._prepare(group)
            try:
                self._merger.begin(layout, self._sources(layout), group)
                if self._quantiser is not None:
                    self._quantiser.begin(layout, group)
                return self._gatherer.fill(bucket, layout, group)
            except BaseException as error:
                group.abort(f"{type(error).__name__}: {error}")  # the others are about to wait for this rank
                raise
            finally:
                self._merger.end()
                if self._quantiser is not None:
                    self._quantiser.end()

    def lend(self, layouts: Sequence[BucketLayout], group: TrainerGroup) -> list[dict[str, torch.Tensor]]:
        """As ``Lender.lend``."""
        with self._tensors.looking():
            self._prepare(group)
            return [self._gatherer.lend(layout, group) for layout in layouts]

    def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probability of each token but the first given those before it, by the model's own forward pass.

        The pass is eager, in evaluation mode and without gradients; training mode is restored.  Computed from
        the logits in float32.  Collective over the trainer ranks if the model is sharded.

        Args:
            token_ids: At least two.
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

    def _local(self, number: int) -> list[Held]:
        """What this rank holds of a tensor, before it is quantised."""
        found: list[Held] = []
        for segment in self._arranged[number].segments:
            part = self._tensors.part(segment.source)
            box = segment.target_box(part[0]) if part is not None else None
            if part is not None and box is not None:
                found.append(self._merger.held(segment.source, segment, box, part))
        return found

    def _sources(self, layout: BucketLayout) -> list[int]:
        """Numbers of the stored tensors that a bucket is made of; none if no adapter is merged anyway."""
        if not self._merger:
            return []
        numbers = [self._number[slot.spec.name] for slot in layout.slots if slot.spec.name in self._number]
        if self._quantiser is not None:
            numbers = [self._quantiser.source(number) for number in numbers]
        return sorted({segment.source for number in numbers for segment in self._arranged[number].segments})

    def _forward_device(self) -> torch.device:
        """Where inputs go: with parameters offloaded to the host, FSDP2 computes on the mesh's device."""
        for number in range(len(self._tensors.places)):
            tensor = self._tensors.tensor(number)
            if isinstance(tensor, DTensor) and tensor.device_mesh.device_type == "cuda":
                return torch.device("cuda", torch.cuda.current_device())
        return self._tensors.device


def _config_of(model: nn.Module) -> Any:
    """The configuration of a Hugging Face model, in whatever wrappers."""
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
