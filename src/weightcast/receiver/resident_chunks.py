"""One rank's weights as numbered chunks of bytes, in the engine's own layout, for a copy from rank to rank.

The chunks have what the loader's routes write, and nothing else.  So the digests of the source tensors prove every byte
of them.  Two ranks with the same routes and dtypes have the same chunks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import torch

from weightcast.errors import Refused
from weightcast.receiver.resident_sums import region_of
from weightcast.wire.layout import dtype_name
from weightcast.wire.routes import Route

CHUNK_BYTES = 8 << 20
_ALIGNMENT_BYTES = 16

Lookup = Callable[[str], torch.Tensor]


@dataclass(frozen=True, slots=True)
class _ChunkPart:
    """Elements of a route's region, in the order of its dimensions from ``first`` on, at byte ``offset`` of a chunk."""

    route: int
    first: int
    count: int
    offset: int


class ResidentChunks:
    """The chunks of one rank.  Two ranks with the same hash ``layout`` have the same parts in theirs."""

    def __init__(
        self, routes: Sequence[Route], tensor: Lookup, *, tp_size: int, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        """Cuts the weights into chunks of at most ``chunk_bytes``; copies nothing."""
        self._routes = sorted(routes, key=lambda route: (route.source, route.box_offset, route.parameter))
        self._dtypes = [tensor(route.parameter).dtype for route in self._routes]
        self._chunks = list(self._cut(chunk_bytes))
        names = [dtype_name(dtype) for dtype in self._dtypes]
        described = msgspec.json.encode((tp_size, chunk_bytes, names, self._routes))
        self.layout = hashlib.blake2b(described, digest_size=16).hexdigest()

    def __len__(self) -> int:
        return len(self._chunks)

    def size_bytes(self, index: int) -> int:
        """Bytes of a chunk."""
        last = self._chunks[index][-1]
        return last.offset + last.count * self._dtypes[last.route].itemsize

    def sources(self, first: int) -> list[str]:
        """Names of the source tensors in this chunk and those after it."""
        slots = (slot for chunk in self._chunks[first:] for slot in chunk)
        return list(dict.fromkeys(self._routes[slot.route].source for slot in slots))

    def read(self, index: int, tensor: Lookup) -> bytes:
        """Copies a chunk out of the parameters; waits for the device.  Raises ``Refused`` for no such chunk."""
        if index >= len(self._chunks):
            raise Refused(f"there is no chunk {index}: this rank has {len(self._chunks)}")
        places = list(self._places(index, tensor))
        device = places[0][1].device
        buffer = torch.zeros(self.size_bytes(index), dtype=torch.uint8, device=device)
        for offset, run in places:
            buffer[offset : offset + run.nbytes].view(run.dtype).copy_(run.reshape(-1))
        return buffer.cpu().numpy().tobytes()

    def write(self, index: int, data: bytes, tensor: Lookup) -> None:
        """Copies a chunk into the parameters; raises ``Refused`` if it has another size."""
        if len(data) != self.size_bytes(index):
            raise Refused(f"chunk {index} has {len(data)} bytes instead of {self.size_bytes(index)}")
        places = list(self._places(index, tensor))
        buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(places[0][1].device)
        for offset, run in places:
            run.copy_(buffer[offset : offset + run.nbytes].view(run.dtype).view(run.shape))

    def _cut(self, chunk_bytes: int) -> Iterator[list[_ChunkPart]]:
        chunk: list[_ChunkPart] = []
        end = 0
        for number, route in enumerate(self._routes):
            itemsize = self._dtypes[number].itemsize
            first, numel = 0, route.box.numel
            while first < numel:
                start = -(-end // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
                count = min(numel - first, (chunk_bytes - start) // itemsize)
                if count <= 0:
                    yield chunk
                    chunk, end = [], 0
                    continue
                chunk.append(_ChunkPart(number, first, count, start))
                first, end = first + count, start + count * itemsize
        if chunk:
            yield chunk

    def _places(self, index: int, tensor: Lookup) -> Iterator[tuple[int, torch.Tensor]]:
        """The offset in the chunk and the memory in the parameters of each run."""
        for slot in self._chunks[index]:
            route = self._routes[slot.route]
            offset = slot.offset
            for run in _runs(region_of(tensor(route.parameter), route), slot.first, slot.count):
                yield offset, run
                offset += run.nbytes


def _runs(view: torch.Tensor, first: int, count: int) -> Iterator[torch.Tensor]:
    """Views of ``count`` elements of a tensor of any strides, from the element ``first`` on, in order."""
    if not count:
        return
    if count == view.numel():
        yield view
        return
    if view.is_contiguous():
        yield view.view(-1)[first : first + count]
        return
    inner = view.numel() // view.shape[0]
    row, skipped = divmod(first, inner)
    if skipped:
        head = min(count, inner - skipped)
        yield from _runs(view[row], skipped, head)
        row, count = row + 1, count - head
    whole = count // inner
    if whole:
        yield view[row : row + whole]
    if count % inner:
        yield from _runs(view[row + whole], 0, count % inner)
