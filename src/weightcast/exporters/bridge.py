"""Trainers that convert their own weights: Megatron-Core through a bridge, or anything that yields named tensors.

A bridge turns its sharded model into whole tensors with Hugging Face names, one after the other, doing what
communication it needs.  Megatron-Bridge and mbridge both do (``export_hf_weights``, ``export_weights``); neither is
imported here.  What a bridge yields is a stream in an order of its own, so it is read once for each update, and a
tensor that a bucket needs is waited for.

Knows the stream and nothing of Megatron: no layer, no pipeline, no parallel state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from weightcast.comm.local import TrainerGroup
from weightcast.errors import ConfigError, WeightcastError
from weightcast.exporters import casting
from weightcast.exporters.names import check_names
from weightcast.protocols import Shard
from weightcast.wire.bucket import Bucket
from weightcast.wire.layout import BucketLayout, TensorSlot, TensorSpec

NamedTensors = Callable[[], Iterable[tuple[str, torch.Tensor]]]


class BridgeExporter:
    """What a bridge yields, as an exporter.

    Args:
        weights: Called at the start of every update, on every trainer rank in step; yields (Hugging Face name, whole
            tensor).  Every rank must take part in every step; ranks that do not have buckets may be given anything.
            ``lambda: bridge.export_hf_weights(model, cpu=False)`` for Megatron-Bridge, ``lambda:
            bridge.export_weights(models)`` for mbridge.
        specs: Names and shapes of what it yields, in its order; None: it is run once now to find out, which is
            collective and costs a conversion.
        wire_dtype: Floating-point tensors of 16 bits or more travel in this dtype; None keeps each tensor's own.
        device: Where buckets for these weights should be.

    Raises:
        ConfigError: It yields nothing, or names that cannot be sent.

    A bridge holds one whole tensor at a time beside the buckets, and its stream has an order, so a bucket's tensors
    must come in the order of ``specs``: with engines that want one dtype in a bucket, a model of several dtypes is
    refused.
    """

    def __init__(
        self,
        weights: NamedTensors,
        *,
        specs: Sequence[TensorSpec] | None = None,
        wire_dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        casting.check_wire_dtype(wire_dtype)
        self._weights = weights
        if specs is None:
            specs = [
                TensorSpec.of(name, tensor, dtype=casting.wire_dtype(tensor.dtype, wire_dtype))
                for name, tensor in weights()
            ]
        if not specs:
            raise ConfigError("the bridge yields no tensors")
        check_names(spec.name for spec in specs)
        self._specs = tuple(specs)
        self._order = {spec.name: number for number, spec in enumerate(specs)}
        self._device = device or torch.device("cpu")
        self._stream: Iterator[tuple[str, torch.Tensor]] | None = None
        self._at = -1
        self._now: torch.Tensor | None = None

    @property
    def device(self) -> torch.device:
        """Where buckets for these weights should be."""
        return self._device

    def specs(self) -> Sequence[TensorSpec]:
        """Every tensor, in the bridge's order."""
        return self._specs

    def shards(self) -> Iterator[Shard]:
        """None: a bridge says what it yields, not what this rank holds.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError("a bridge yields whole tensors and does not say which parts of them a rank holds")

    def prepare(self, group: TrainerGroup) -> None:
        """Nothing to find out: the bridge knows who holds what."""

    def fill(self, bucket: Bucket | None, layout: BucketLayout, group: TrainerGroup) -> None:
        """Read the stream up to the layout's last tensor.  Collective, as far as the bridge is.

        Args:
            bucket: Where to; None on a rank that only takes part in the bridge's communication.
            layout: Which tensors, or rows of them, in the bridge's order.
            group: Not used for tensors; told if this rank fails.

        Raises:
            ConfigError: The layout is not of this bridge, or wants tensors in another order.
            WeightcastError: The bridge yields something else than it did before.
        """
        try:
            for slot in layout.slots:
                whole = self._advance(slot)
                if bucket is not None:
                    part = whole.narrow(0, slot.first_row, slot.num_rows) if slot.spec.shape else whole
                    bucket.view(slot).copy_(part)
        except BaseException as error:
            self._end()
            group.abort(f"{type(error).__name__}: {error}")
            raise
        last = layout.slots[-1]
        if self._order[last.spec.name] == len(self._specs) - 1 and last.first_row + last.num_rows == last.spec.num_rows:
            for name, _ in self._stream or ():
                self._end()
                raise WeightcastError(f"the bridge yields {name} after its last tensor, which it did not before")
            self._end()

    def _advance(self, slot: TensorSlot) -> torch.Tensor:
        """The tensor that a slot wants; begins the stream anew at the first row of its first."""
        spec = slot.spec
        number = self._order.get(spec.name)
        if number is None or self._specs[number] != spec:
            raise ConfigError(f"the bucket carries {spec.name}, which the bridge does not yield so")
        further = slot.first_row > 0  # a piece of a tensor that was cut
        if further and number == self._at and self._now is not None:
            return self._now
        if number == 0 and not further:  # a new update, whatever became of the last one and wherever it ended
            self._end()
            self._stream = iter(self._weights())
        if further or self._stream is None or number != self._at + 1:
            raise ConfigError(
                f"{spec.name} is wanted out of turn: a bridge's tensors come in one order",
                hint="an engine that wants one dtype in a bucket needs a wire_dtype that makes them all alike",
            )
        found = next(self._stream, None)
        if found is None or found[0] != spec.name or tuple(found[1].shape) != spec.shape:
            what = f"{found[0]} {list(found[1].shape)}" if found is not None else "nothing more"
            raise WeightcastError(f"the bridge yields {what} where it had {spec.name} {list(spec.shape)} before")
        self._at, self._now = number, found[1].detach()
        return self._now

    def _end(self) -> None:
        self._stream, self._at, self._now = None, -1, None
