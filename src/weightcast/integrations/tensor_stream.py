"""A stream of named tensors from one process to many, in buckets over one process group.

It is for frameworks that hand over tensors one by one and load them themselves: nobody knows the names beforehand, and
no engine speaks our protocol.  Each bucket is three broadcasts: the length of a message, the message (layout and sums
of the tensors), and the bytes.  The receiver sums what arrived and compares, so every tensor that it yields is proven
*received*.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta

from weightcast.comm.update_group import UpdateGroup
from weightcast.digest.bucket_sums import PlanSums
from weightcast.errors import ConfigError, VerificationFailed, WireError
from weightcast.exporters import casting
from weightcast.wire.bucket import Bucket
from weightcast.wire.layout import MAX_TENSORS, BucketLayout, TensorSlot, TensorSpec

_ALIGNMENT_BYTES = 256
_MAX_MESSAGE_BYTES = 1 << 30


class StreamMessage(msgspec.Struct, frozen=True, kw_only=True):
    """Says what follows on the group.

    Attributes:
        index: Position in the stream, from 0.
        layout: Layout of the bucket that follows; None at the end of the stream.
        sums: Partial digest sum of each slot.
        tensors: At the end, the number of tensors that were sent.
        version: At the end, the version of the weights; -1 if the sender names none.
    """

    index: Annotated[int, Meta(ge=0)]
    layout: BucketLayout | None = None
    sums: Annotated[tuple[int, ...], Meta(max_length=MAX_TENSORS)] = ()
    tensors: int = 0
    version: int = -1


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(StreamMessage).decode


class StreamSender:
    """Rank 0's end.  ``put`` every tensor, then ``end``; the next stream may follow.

    A bucket is in flight while the next one is filled, so two buckets of memory are used.

    Attributes:
        sent_bytes: Bytes of this stream's tensors so far.
    """

    def __init__(
        self, group: UpdateGroup, *, bucket_bytes: int, timeout_s: float, wire_dtype: torch.dtype | None = None
    ) -> None:
        """Allocates nothing yet.

        Args:
            group: The group; this process is its rank 0.
            timeout_s: Deadline of each broadcast, in seconds.
            wire_dtype: Dtype to which floating-point tensors are cast; None keeps each tensor's own.

        Raises:
            ConfigError: The dtype cannot be cast to.
        """
        casting.check_wire_dtype(wire_dtype)
        self.sent_bytes = 0
        self._group = group
        self._bucket_bytes = bucket_bytes
        self._timeout_s = timeout_s
        self._wire_dtype = wire_dtype
        self._buffers: list[torch.Tensor] = []
        self._sums = PlanSums()
        self._layouts: list[BucketLayout] = []
        self._slots: list[TensorSlot] = []
        self._end = 0
        self._index = 0
        self._names: set[str] = set()
        self._in_flight: list[tuple[Any, torch.Tensor]] = []  # the tensors must live until the broadcast is over

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Adds one whole tensor; sends a bucket whenever one is full.

        Raises:
            ConfigError: The name was sent already, or one row of the tensor does not fit into a bucket.
            DeadlineExceeded, GroupFailed: A receiver died, refused or fell silent.
        """
        dtype = casting.wire_dtype(tensor.dtype, self._wire_dtype)
        spec = TensorSpec.of(name, tensor, dtype=dtype)
        if name in self._names:
            raise ConfigError(f"{name} comes twice in one update")
        if spec.row_bytes > self._bucket_bytes:
            raise ConfigError(
                f"one row of {name} has {spec.row_bytes} bytes and does not fit into a bucket of {self._bucket_bytes}",
                hint=f"use bucket_bytes={spec.row_bytes} or more",
            )
        self._names.add(name)
        row = 0
        while True:
            offset = -(-self._end // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
            rows = spec.num_rows - row
            if offset + rows * spec.row_bytes > self._bucket_bytes:
                fits = (self._bucket_bytes - offset) // spec.row_bytes if offset < self._bucket_bytes else 0
                if self._slots and (spec.size_bytes <= self._bucket_bytes or fits <= 0):
                    self._flush()
                    continue
                rows = fits
            slot = TensorSlot(spec=spec, offset_bytes=offset, first_row=row, num_rows=rows)
            part = tensor.detach().narrow(0, row, rows) if spec.shape else tensor.detach()
            place = self._buffer()[slot.offset_bytes : slot.end_bytes]
            place.view(spec.torch_dtype).view(slot.shape).copy_(part)
            self._slots.append(slot)
            self._end = slot.end_bytes
            row += rows
            if row >= spec.num_rows:
                break
            self._flush()
        self.sent_bytes += spec.size_bytes

    def end(self, version: int | None = None) -> None:
        """Sends what is left and says that the stream is complete.

        Raises:
            ConfigError: No tensor was put.
            DeadlineExceeded, GroupFailed: As ``put``.
        """
        if not self._names:
            raise ConfigError("the stream has no tensors: an update of nothing is an error")
        if self._slots:
            self._flush()
        self._tell(
            StreamMessage(index=self._index, tensors=len(self._names), version=-1 if version is None else version)
        )
        self._wait()
        self._index, self._names, self.sent_bytes = 0, set(), 0
        self._sums, self._layouts = _sums_after(self._layouts, self._sums), []

    def trim(self) -> None:
        """Frees the buffers."""
        self._buffers = []

    def _buffer(self) -> torch.Tensor:
        if not self._buffers:
            self._buffers = [
                torch.empty(self._bucket_bytes, dtype=torch.uint8, device=self._group.device) for _ in range(2)
            ]
        return self._buffers[self._index % 2]

    def _flush(self) -> None:
        """Starts the broadcast of the bucket, after the one before has arrived."""
        buffer = self._buffer()
        layout = BucketLayout(index=self._index, slots=tuple(self._slots), size_bytes=self._end)
        self._layouts.append(layout)
        sums = self._sums.of(Bucket(layout, buffer))
        self._wait()
        self._tell(StreamMessage(index=self._index, layout=layout, sums=tuple(sums.tolist())))
        self._start(buffer[: self._end])
        self._slots, self._end = [], 0
        self._index += 1

    def _tell(self, message: StreamMessage) -> None:
        data = _encode(message)
        device = self._group.device
        self._start(torch.tensor([len(data)], dtype=torch.int64).view(torch.uint8).to(device))
        self._start(torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device))

    def _start(self, data: torch.Tensor) -> None:
        self._in_flight.append((self._group.start_broadcast(data), data))

    def _wait(self) -> None:
        works, self._in_flight = self._in_flight, []
        for work, _ in works:
            self._group.finish(work, what=f"bucket {self._index - 1} of the stream", timeout_s=self._timeout_s)


def _sums_after(layouts: Sequence[BucketLayout], sums: PlanSums) -> PlanSums:
    """The sums for the next stream, which mostly has the buckets of the one that ended."""
    return sums if layouts == sums.layouts else PlanSums(layouts)


class StreamReceiver:
    """A receiving end.  ``read`` returns bucket after bucket until the stream ends.

    A bucket's tensors are views of one of two buffers: the next ``read`` but one overwrites them.

    Attributes:
        version: Version of the last stream that ended; None if its sender named none.
    """

    def __init__(self, group: UpdateGroup, *, timeout_s: float) -> None:
        """Allocates nothing yet."""
        self.version: int | None = None
        self._group = group
        self._timeout_s = timeout_s
        self._buffers: list[torch.Tensor] = []
        self._sums = PlanSums()
        self._layouts: list[BucketLayout] = []
        self._index = 0
        self._whole = 0  # tensors that arrived in full
        self._cut: tuple[TensorSpec, torch.Tensor, int] | None = (
            None  # a tensor in several buckets, and its rows so far
        )

    def read(self) -> list[tuple[str, torch.Tensor]] | None:
        """Receives one bucket.

        Returns:
            The tensors that are complete now, by name; None at the end of the stream.

        Raises:
            VerificationFailed: Other bytes arrived than were sent.
            WireError: The message is malformed, or buckets are missing.
            DeadlineExceeded, GroupFailed: The sender died or fell silent.
        """
        try:
            return self._read()
        except BaseException as error:
            self._group.abort(f"a receiver failed: {error}")
            raise

    def trim(self) -> None:
        """Frees the buffers."""
        self._buffers = []

    def _read(self) -> list[tuple[str, torch.Tensor]] | None:
        message = self._message()
        if message.index != self._index:
            raise WireError(f"message {message.index} of the stream came where {self._index} was expected")
        layout = message.layout
        if layout is None:
            if message.tensors != self._whole or self._cut is not None:
                raise WireError(f"the stream had {message.tensors} tensors, and {self._whole} arrived in full")
            self.version = message.version if message.version >= 0 else None
            self._index = self._whole = 0
            self._sums, self._layouts = _sums_after(self._layouts, self._sums), []
            return None
        layout.check()
        buffer = self._buffer(layout.size_bytes)
        self._group.broadcast(
            buffer[: layout.size_bytes], what=f"bucket {layout.index} of the stream", timeout_s=self._timeout_s
        )
        bucket = Bucket(layout, buffer)
        self._layouts.append(layout)
        arrived = self._sums.of(bucket).tolist()
        if tuple(arrived) != message.sums:
            pairs = zip(layout.slots, arrived, message.sums, strict=False)
            names = [slot.spec.name for slot, ours, theirs in pairs if ours != theirs]
            raise VerificationFailed(
                f"bucket {layout.index} of the stream arrived with other bytes than were sent; they differ in "
                f"{', '.join(names[:5]) or 'the number of tensors'}",
                url="",
                names=names,
                hint="the weights of this process are incomplete: run the update again",
            )
        self._index += 1
        return list(self._complete(bucket))

    def _complete(self, bucket: Bucket) -> Iterator[tuple[str, torch.Tensor]]:
        for slot, view in bucket.views():
            if slot.whole:
                self._whole += 1
                yield slot.spec.name, view
                continue
            if self._cut is None:
                whole = torch.empty(slot.spec.shape, dtype=slot.spec.torch_dtype, device=view.device)
                self._cut = slot.spec, whole, 0
            spec, whole, rows = self._cut
            if spec != slot.spec or rows != slot.first_row:
                raise WireError(f"rows from {slot.first_row} of {slot.spec.name} came out of order")
            whole.narrow(0, rows, slot.num_rows).copy_(view)
            rows += slot.num_rows
            self._cut = (spec, whole, rows) if rows < spec.num_rows else None
            if self._cut is None:
                self._whole += 1
                yield spec.name, whole

    def _message(self) -> StreamMessage:
        what = f"message {self._index} of the stream"
        length = torch.empty(8, dtype=torch.uint8, device=self._group.device)
        self._group.broadcast(length, what=what, timeout_s=self._timeout_s)
        size_bytes = int(length.cpu().view(torch.int64).item())
        if not 0 < size_bytes <= _MAX_MESSAGE_BYTES:
            raise WireError(f"a message of {size_bytes} bytes was announced")
        data = torch.empty(size_bytes, dtype=torch.uint8, device=self._group.device)
        self._group.broadcast(data, what=what, timeout_s=self._timeout_s)
        try:
            return _decode(data.cpu().numpy().tobytes())
        except (msgspec.DecodeError, ValueError) as error:
            raise WireError(f"{what} cannot be read: {error}") from error

    def _buffer(self, size_bytes: int) -> torch.Tensor:
        device = self._group.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # copies out of the buffer that is filled next
        if len(self._buffers) < 2:
            self._buffers = [torch.empty(0, dtype=torch.uint8, device=device) for _ in range(2)]
        turn = self._index % 2
        if self._buffers[turn].numel() < size_bytes:
            self._buffers[turn] = torch.empty(size_bytes, dtype=torch.uint8, device=device)
        return self._buffers[turn]
