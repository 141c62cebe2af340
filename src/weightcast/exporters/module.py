"""A module as named, unsharded tensors: plain, FSDP2 (``fully_shard``), tensor or expert parallel, on any mesh.

Reads parameters where they live, at the time they are asked for, and changes nothing about the model but one
thing: FSDP2 modules that still hold their gathered parameters from the last forward let go of them, as they do
before the next one anyway.

Does not know engines, buckets' lifetimes or transports.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from weightcast.comm.local import TrainerGroup
from weightcast.errors import ConfigError
from weightcast.exporters import casting
from weightcast.exporters.families import family_named, family_of
from weightcast.exporters.gather import Gatherer, Held, Stored, slices
from weightcast.exporters.mapping import Family, arrange
from weightcast.exporters.names import check_names, is_wrapper, strip_wrappers
from weightcast.exporters.sharding import ShardOf, stored_part, whole_shape
from weightcast.protocols import Shard
from weightcast.wire.bucket import Bucket
from weightcast.wire.digest import Box
from weightcast.wire.layout import MAX_DIMS, BucketLayout, TensorSpec, dtype_name


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor hangs: asked for by attribute, since optimizers and FSDP2 replace tensors.

    Its name and its whole shape are as they were when the exporter was made.
    """

    module: nn.Module
    attribute: str
    name: str
    shape: tuple[int, ...]


class ModuleExporter:
    """Parameters and persistent buffers of a module, in the order of its ``state_dict``, as a checkpoint has them.

    Names and layouts are those of a Hugging Face checkpoint: which table turns the trainer's into those is found by
    ``model.config.model_type``.  Tied weights are listed once, under the first of their names.  Non-persistent buffers
    are not listed.  Every rank of the job builds one from its own part of the same model.

    Args:
        model: Plain, ``fully_shard``-ed, tensor or expert parallel (DTensor parameters), in a ``torch.compile``, DDP or
            activation-checkpointing wrapper or not.  Its structure must not change afterwards; its values may.
        wire_dtype: Floating-point tensors of 16 bits or more travel in this dtype; None keeps each tensor's own.
            Integers, bools, 8-bit floats and what the family wants kept keep theirs.
        names: Turns a name into the one that engines know; applied last.
        family: A table of names and layouts, or the name of one (``"plain"``: names as they are); None finds it.
        shard_of: Where in the whole tensor a plain, not DTensor, parameter of this rank lies, for trainers that shard
            without DTensor; see ``weightcast.exporters.sharding``.

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
    ) -> None:
        casting.check_wire_dtype(wire_dtype)
        self._model = model
        self._shard_of = shard_of
        self._fsdp_modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._reshard()
        self._places: list[_Place] = []
        self._parts: dict[int, tuple[Box, torch.Tensor] | None] = {}
        self._device = torch.device("cpu")
        dtypes = self._collect()
        if not self._places:
            raise ConfigError("the model has no parameters and no persistent buffers")
        stored = [(place.name, place.shape) for place in self._places]
        config = _config_of(model)
        if isinstance(family, str):
            family = family_named(family)
        self.family = family or family_of(config, stored)
        self._arranged = arrange(stored, self.family, config)
        kept = re.compile(self.family.keeps_dtype) if self.family.keeps_dtype else None
        specs: list[TensorSpec] = []
        for tensor in self._arranged:
            own = {dtypes[segment.source] for segment in tensor.segments}
            if len(own) > 1:
                raise ConfigError(f"{tensor.name} is made of tensors of several dtypes: {', '.join(map(str, own))}")
            wanted = None if kept is not None and kept.fullmatch(tensor.name) else wire_dtype
            dtype = casting.wire_dtype(own.pop(), wanted)
            name = names(tensor.name) if names is not None else tensor.name
            specs.append(TensorSpec(name=name, dtype=dtype_name(dtype), shape=tensor.shape))
        check_names(spec.name for spec in specs)
        self._specs = tuple(specs)
        self._gatherer = Gatherer(self._specs, self._local)

    def _collect(self) -> list[torch.dtype]:
        """Find every tensor of the model; the dtype of each."""
        dtypes: list[torch.dtype] = []
        seen: set[int] = set()
        device_bytes: Counter[torch.device] = Counter()
        for path, module in self._model.named_modules():
            if isinstance(module, FullyShardedDataParallel):
                raise ConfigError("the model is sharded with FSDP1", hint="shard it with torch's fully_shard (FSDP2)")
            prefix = strip_wrappers(self._model, path)
            for attribute, tensor in _own_tensors(module):
                if id(tensor) in seen:
                    continue
                seen.add(id(tensor))
                name = f"{prefix}.{attribute}" if prefix else attribute
                _check_tensor(name, tensor)
                part = stored_part(name, tensor, self._shard_of)
                if part is not None:
                    device_bytes[part[1].device] += part[1].nbytes
                shape = whole_shape(name, tensor, self._shard_of)
                self._places.append(_Place(module, attribute, name, shape))
                dtypes.append(tensor.dtype)
        if device_bytes:
            self._device = device_bytes.most_common(1)[0][0]
        return dtypes

    @property
    def device(self) -> torch.device:
        """Where the weights live: the device with most of their bytes."""
        return self._device

    def specs(self) -> Sequence[TensorSpec]:
        """Every tensor, in the order of the model's ``state_dict``, those of a stacked one together."""
        return self._specs

    def shards(self) -> Iterator[Shard]:
        """What this rank holds, in the order of ``specs``; the model's own memory.  No communication."""
        with self._looking():
            for number, spec in enumerate(self._specs):
                for held in self._local(number):
                    assert held.memory is not None
                    yield Shard(spec=spec, box=held.box, tensor=held.memory)

    def prepare(self, group: TrainerGroup) -> None:
        """Find out which rank holds what; ``fill`` does so too, if nobody has before.  Collective.

        Raises:
            ConfigError: The ranks do not hold one and the same model; the same on every rank.
            TrainerRankFailed: A rank is gone or did not take part in time.
        """
        with self._looking():
            self._gatherer.prepare(group)

    def fill(self, bucket: Bucket | None, layout: BucketLayout, group: TrainerGroup) -> None:
        """Write the layout's tensors, gathered and cast, into the bucket of every receiver.  Collective.

        When it returns the bucket is complete, on the host's clock too, and the model's memory is no longer read.
        Beside the bucket it takes at most the bucket's size divided by the number of ranks (1 MiB at least).
        On a GPU it follows what the current stream did before.

        Args:
            bucket: On a rank of ``group.receivers`` where to, on its ``device``; None elsewhere.
            layout: Which tensors, or rows of them; the same on every rank.
            group: The trainer ranks.

        Raises:
            ConfigError: The layout is not of this model, or the model was sharded anew.
            TrainerRankFailed: Another rank failed; the message names it.
        """
        with self._looking():
            self._gatherer.fill(bucket, layout, group)

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
        self._reshard()
        return chosen.tolist()

    def _local(self, number: int) -> list[Held]:
        """What this rank holds of a travelling tensor."""
        found: list[Held] = []
        for segment in self._arranged[number].segments:
            part = self._part(segment.source)
            box = segment.target_box(part[0]) if part is not None else None
            if part is not None and box is not None:
                view = part[1][slices(segment.source_box(box), part[0].offset)]
                found.append(Stored(box, segment.view(view)))
        return found

    def _part(self, source: int) -> tuple[Box, torch.Tensor] | None:
        """What this rank holds of a stored tensor."""
        if source not in self._parts:
            place = self._places[source]
            tensor = getattr(place.module, place.attribute)
            shape = whole_shape(place.name, tensor, self._shard_of)
            if shape != place.shape:
                raise ConfigError(
                    f"{place.name} has shape {shape} and had {place.shape} when the exporter was made",
                    hint="make a new exporter when the model's structure changes",
                )
            self._parts[source] = stored_part(place.name, tensor, self._shard_of)
        return self._parts[source]

    @contextmanager
    def _looking(self) -> Generator[None]:
        """Look at each stored tensor once, since hundreds of experts are in one, and anew the next time."""
        self._reshard()
        self._parts.clear()
        try:
            yield
        finally:
            self._parts.clear()

    def _reshard(self) -> None:
        """FSDP2 leaves parameters gathered after some forward passes; what it shows then is not the shard."""
        for module in self._fsdp_modules:
            module.reshard()

    def _forward_device(self) -> torch.device:
        """Where inputs go: with parameters offloaded to the host, FSDP2 computes on the mesh's device."""
        for place in self._places:
            tensor = getattr(place.module, place.attribute)
            if isinstance(tensor, DTensor) and tensor.device_mesh.device_type == "cuda":
                return torch.device("cuda", torch.cuda.current_device())
        return self._device


def _config_of(model: nn.Module) -> Any:
    """The configuration of a Hugging Face model, in whatever wrappers."""
    module: Any = model
    while module is not None and not hasattr(module, "config"):
        module = getattr(module, "_orig_mod", None) or (module.module if is_wrapper(module) else None)
    return getattr(module, "config", None)


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """A module's parameters and persistent buffers, without those of its children."""
    yield from module.named_parameters(recurse=False, remove_duplicate=False)
    # torch has no public way to ask which buffers are persistent, short of building the whole state dict.
    hidden: set[str] = module._non_persistent_buffers_set  # pyright: ignore[reportPrivateUsage]
    for attribute, tensor in module.named_buffers(recurse=False, remove_duplicate=False):
        if attribute not in hidden:
            yield attribute, tensor


def _check_tensor(name: str, tensor: torch.Tensor) -> None:
    if tensor.is_meta:
        raise ConfigError(f"{name} is on the meta device", hint="give the model its weights before exporting them")
    if is_lazy(tensor):
        raise ConfigError(f"{name} is a lazy parameter without a shape", hint="run one forward pass first")
    if tensor.layout != torch.strided:
        raise ConfigError(f"{name} is {tensor.layout}, and only dense tensors can be sent")
    if tensor.dim() > MAX_DIMS:
        raise ConfigError(f"{name} has {tensor.dim()} dimensions, and at most {MAX_DIMS} can be sent")
    dtype_name(tensor.dtype)
    # A subclass with a dispatch of its own (quantised, nested, ...) is not what its storage holds.
    if not isinstance(tensor, DTensor) and _dispatch(type(tensor)) is not _dispatch(torch.Tensor):
        raise ConfigError(f"{name} is a {type(tensor).__name__}, whose bytes are not its values")


def _dispatch(kind: type[torch.Tensor]) -> object:
    return getattr(kind, "__torch_dispatch__", None)


@contextmanager
def _evaluating(model: nn.Module) -> Generator[None]:
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
