"""Exports weights that the trainer converts itself: Megatron-Core through a bridge, or any stream of named tensors.

A bridge does its own communication.  Megatron-Bridge (``export_hf_weights``) and mbridge (``export_weights``) are such
bridges; neither is imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from weightcast.comm.trainer_group import TrainerGroup
from weightcast.digest.copies import Flat
from weightcast.digest.source_sums import Taker
from weightcast.errors import ConfigError, WeightcastError
from weightcast.exporters import casting
from weightcast.exporters.names import check_names
from weightcast.protocols import BucketUse, Exporter, PlannedBucket
from weightcast.wire.box import contiguous_strides
from weightcast.wire.layout import BucketLayout, TensorSlot, TensorSpec

NamedTensors = Callable[[], Iterable[tuple[str, torch.Tensor]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """One slot of a bucket.

    Attributes:
        number: Number of the tensor in the stream.
        further: True for a piece of a tensor whose first rows are in an earlier bucket.
        rows: First row and number of rows; None for the whole tensor.
        ends: True for the last rows of the last tensor.
        stride: Strides in the bucket, in elements.
        offset: Distance from the bucket's first byte, in elements.
    """

    number: int
    spec: TensorSpec
    further: bool
    rows: tuple[int, int] | None
    ends: bool
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class BridgeExporter(Exporter):
    """The tensors that a bridge yields.

    A bridge holds one whole tensor at a time beside the buckets.  Its stream has an order, so the tensors of a bucket
    must come in the order of ``specs``.  A model of several dtypes is therefore refused if an engine wants one dtype in
    a bucket.

    Args:
        weights: Function that every trainer rank calls at the start of every update; yields (Hugging Face name, whole
            tensor).  All ranks read it in step; a rank without buckets may get any values.  For Megatron-Bridge
            ``lambda: bridge.export_hf_weights(model, cpu=False)``, for mbridge ``lambda:
            bridge.export_weights(models)``.
        specs: Names and shapes of the tensors, in the bridge's order.  None runs the bridge once now to learn them,
            which is collective and costs a conversion.
        wire_dtype: Floating-point tensors of 16 bits or more travel in this dtype; None keeps each tensor's own.
        device: Device for the buckets of these weights.

    Raises:
        ConfigError: The bridge yields nothing, or names that cannot be sent.
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
        self.device = device or torch.device("cpu")
        self._stream = _Stream(weights)

    def specs(self) -> Sequence[TensorSpec]:
        """Every tensor, in the bridge's order."""
        return self._specs

    def plan(self, layouts: Sequence[BucketLayout], group: TrainerGroup, use: BucketUse) -> Sequence[PlannedBucket]:
        """Implements ``Exporter.plan``.  ``ConfigError`` if a layout has a tensor that the bridge does not have."""
        return [
            _StreamBucket(layout, group, self._stream, [self._step(slot) for slot in layout.slots])
            for layout in layouts
        ]

    def _step(self, slot: TensorSlot) -> _Step:
        spec, number = slot.spec, self._order.get(slot.spec.name)
        if number is None or self._specs[number] != spec:
            raise ConfigError(
                f"the bucket carries {spec.name} {spec.dtype} {list(spec.shape)}, and the bridge does not"
            )
        return _Step(
            number=number,
            spec=spec,
            further=slot.first_row > 0,
            rows=None if slot.whole else (slot.first_row, slot.num_rows),
            ends=number == len(self._specs) - 1 and slot.first_row + slot.num_rows == spec.num_rows,
            dtype=spec.torch_dtype,
            shape=slot.shape,
            stride=contiguous_strides(slot.shape),
            offset=slot.offset_bytes // spec.torch_dtype.itemsize,
        )


class _StreamBucket(PlannedBucket):
    """A bucket of tensors in the bridge's order, filled from the bridge's stream.

    ``fill`` raises ``ConfigError`` if the bridge has another order, and ``WeightcastError`` if it yields other tensors
    than before.
    """

    def __init__(self, layout: BucketLayout, group: TrainerGroup, stream: _Stream, steps: Sequence[_Step]) -> None:
        super().__init__(layout, group)
        self._group = group
        self._stream = stream
        self._steps = steps

    def fill(self, data: torch.Tensor | None, taker: Taker | None = None) -> None:
        """Reads the stream up to the layout's last tensor.  Collective if the bridge is."""
        try:
            flat = Flat(data) if data is not None else None
            for step in self._steps:
                part = self._stream.advance(step)
                if flat is not None:
                    if step.rows is not None:
                        part = part.narrow(0, *step.rows)
                    flat.region(step.dtype, step.shape, step.stride, step.offset, as_bits=False).copy_(part)
            if self._steps[-1].ends:
                self._stream.check_over()
        except BaseException as error:
            self._stream.end()
            self._group.abort(f"{type(error).__name__}: {error}")
            raise


class _Stream:
    """The tensors that a bridge yields, read once in each update."""

    def __init__(self, weights: NamedTensors) -> None:
        self._weights = weights
        self._stream: Iterator[tuple[str, torch.Tensor]] | None = None
        self._at = -1
        self._now: torch.Tensor | None = None

    def advance(self, step: _Step) -> torch.Tensor:
        """The tensor of a slot.  The first row of the first tensor starts the stream anew."""
        spec, number = step.spec, step.number
        if step.further and number == self._at and self._now is not None:
            return self._now
        if number == 0 and not step.further:  # a new update, even if the last one failed halfway
            self.end()
            self._stream = iter(self._weights())
        if step.further or self._stream is None or number != self._at + 1:
            raise ConfigError(
                f"the bucket needs {spec.name} out of the bridge's order, and a bridge yields its tensors once",
                hint="an engine that wants one dtype in a bucket needs a wire_dtype that makes all dtypes alike",
            )
        found = next(self._stream, None)
        if found is None or found[0] != spec.name or tuple(found[1].shape) != spec.shape:
            what = f"{found[0]} {list(found[1].shape)}" if found is not None else "nothing more"
            raise WeightcastError(f"the bridge yields {what} where it yielded {spec.name} {list(spec.shape)} before")
        self._at, self._now = number, found[1].detach()
        return self._now

    def check_over(self) -> None:
        """Raises ``WeightcastError`` if the bridge yields more; ends the stream."""
        for name, _ in self._stream or ():
            raise WeightcastError(f"the bridge yields {name} after its last tensor, and did not before")
        self.end()

    def end(self) -> None:
        """Drops the stream and its tensor; the first tensor starts it anew."""
        self._stream, self._at, self._now = None, -1, None
