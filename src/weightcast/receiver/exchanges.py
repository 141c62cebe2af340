"""How a flip exchanges the live parameters with those that wait: contents in one launch or in chunks, or pointers.

Each exchange has some parameters, by name, live and waiting.  ``exchange`` begins at the first of them, and ``undo``
goes back from wherever it ended, so one that failed half way can be undone, and an undo that failed be repeated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Protocol

import torch

from weightcast.digest.copies import bits
from weightcast.digest.exchange import MemoryExchange

Tensors = Mapping[str, torch.Tensor]
_CHUNK_BYTES = 32 << 20


class SetExchange(Protocol):
    """One way to exchange the parameters of two sets."""

    @property
    def begun(self) -> bool:
        """True while ``undo`` has something to undo."""
        ...

    def exchange(self) -> None:
        """Exchanges all."""
        ...

    def undo(self) -> None:
        """Undoes the last exchange; a second call does nothing."""
        ...

    def begin(self) -> None:
        """Forgets the last exchange."""
        ...


class ContentExchange:
    """One launch on a GPU exchanges the contents; addresses stay.  The parameters are on one device, without gaps."""

    def __init__(self, lives: Tensors, waiting: Tensors, *, waits: bool, begun: bool = False) -> None:
        """Takes at least one parameter; ``waits`` is as for ``MemoryExchange.run``."""
        pairs = [(tensor, waiting[name]) for name, tensor in lives.items()]
        self._memory, self._waits, self.begun = MemoryExchange(pairs), waits, begun

    def exchange(self) -> None:
        """Implements ``SetExchange.exchange``."""
        self._memory.run(wait=self._waits)
        self.begun = True

    def undo(self) -> None:
        """Implements ``SetExchange.undo``."""
        if self.begun:
            self._memory.run(wait=self._waits)
            self.begun = False

    def begin(self) -> None:
        """Implements ``SetExchange.begin``."""
        self.begun = False


class ChunkExchange:
    """Contents go by way of a scratch buffer, chunk by chunk: between devices, and where memory has gaps.

    After ``undo`` both sets hold the old contents.
    """

    def __init__(self, lives: Tensors, waiting: Tensors) -> None:
        """Allocates the scratch buffers."""
        self._lives, self._waiting = lives, waiting
        sizes: dict[torch.device, int] = {}
        for tensor in lives.values():
            size_bytes = _elements_at_once(tensor) * tensor.element_size()
            sizes[tensor.device] = max(sizes.get(tensor.device, 0), size_bytes)
        self._scratch = {
            device: torch.empty(size_bytes, dtype=torch.uint8, device=device) for device, size_bytes in sizes.items()
        }
        self._done, self._in_scratch = (
            0,
            False,
        )  # whole chunks, and whether the scratch has the old contents of the next

    @property
    def begun(self) -> bool:
        """As ``SetExchange.begun``."""
        return bool(self._done) or self._in_scratch

    def exchange(self) -> None:
        """Implements ``SetExchange.exchange``."""
        for live, waiting in self._chunks():
            old = self._scratch_for(live)
            old.copy_(live)
            self._in_scratch = True
            live.copy_(waiting)
            waiting.copy_(old)
            self._done += 1
            self._in_scratch = False

    def undo(self) -> None:
        """Implements ``SetExchange.undo``."""
        if not self.begun:
            return
        for number, (live, waiting) in enumerate(self._chunks()):
            if number < self._done:
                live.copy_(waiting)
            elif number == self._done and self._in_scratch:
                old = self._scratch_for(live)
                live.copy_(old)
                waiting.copy_(old)
        self.begin()

    def begin(self) -> None:
        """Implements ``SetExchange.begin``."""
        self._done, self._in_scratch = 0, False

    def _chunks(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields chunks of live and staged memory, always in the same order."""
        for name, tensor in self._lives.items():
            yield from _chunks_of(bits(tensor.data), bits(self._waiting[name]), _elements_at_once(tensor))

    def _scratch_for(self, live: torch.Tensor) -> torch.Tensor:
        size_bytes = live.numel() * live.element_size()
        return self._scratch[live.device][:size_bytes].view(live.dtype).view(live.shape)


class PointerExchange:
    """The parameter objects stay, and get the storage of those that wait: on CPUs, where no graph knows addresses."""

    def __init__(self, lives: Tensors, waiting: MutableMapping[str, torch.Tensor]) -> None:
        self._lives, self._waiting = lives, waiting
        self._done = 0

    @property
    def begun(self) -> bool:
        """As ``SetExchange.begun``."""
        return bool(self._done)

    def exchange(self) -> None:
        """Implements ``SetExchange.exchange``."""
        for name, tensor in self._lives.items():
            old = tensor.data
            tensor.data = self._waiting[name]
            self._waiting[name] = old
            self._done += 1

    def undo(self) -> None:
        """Implements ``SetExchange.undo``."""
        for name, tensor in list(self._lives.items())[: self._done][::-1]:
            old = tensor.data
            tensor.data = self._waiting[name]
            self._waiting[name] = old
            self._done -= 1

    def begin(self) -> None:
        """Implements ``SetExchange.begin``."""
        self._done = 0


def is_dense(tensor: torch.Tensor) -> bool:
    """True if the elements fill one run of memory without gaps, in any order of dimensions."""
    run = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda dim: dim[1]):
        if size == 1:
            continue
        if stride != run:
            return tensor.numel() == 0
        run *= size
    return True


def _elements_at_once(tensor: torch.Tensor) -> int:
    return min(tensor.numel(), max(1, _CHUNK_BYTES // tensor.element_size()))


def _chunks_of(live: torch.Tensor, waiting: torch.Tensor, elements: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields views of at most ``elements`` elements of two tensors with the same strides; flat if there are no gaps."""
    if not live.numel():
        return
    if live.dim() != 1 and is_dense(live):
        flat = (live.numel(),), (1,)
        live = live.as_strided(*flat, live.storage_offset())
        waiting = waiting.as_strided(*flat, waiting.storage_offset())
    if live.numel() <= elements:
        yield live, waiting
        return
    dim = max(range(live.dim()), key=lambda dim: (live.shape[dim] > 1, live.stride(dim)))
    size = live.shape[dim]
    step = max(1, elements // (live.numel() // size))
    for start in range(0, size, step):
        count = min(step, size - start)
        yield from _chunks_of(live.narrow(dim, start, count), waiting.narrow(dim, start, count), elements)
