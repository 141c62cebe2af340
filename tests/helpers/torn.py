"""Faults for a flip: one that a test sets off inside it, as a GPU that has no memory left does."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from weightcast.receiver.exchanges import ChunkExchange, PointerExchange
from weightcast.receiver.staging import StagingSet

OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 32.00 MiB"


class FailingCopy(TorchDispatchMode):
    """Copies between tensors fail from the one with this number on, so many times; on this thread.

    Args:
        at: Number of the first copy that fails, from 0.
        times: How many fail.
        half: The copy that fails has written the first half of its target.
    """

    def __init__(self, at: int, *, times: int = 1, half: bool = True) -> None:
        super().__init__()
        self.at, self.times, self.half = at, times, half
        self.seen = 0
        self.failed = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            number, self.seen = self.seen, self.seen + 1
            if self.at <= number < self.at + self.times:
                self.failed += 1
                target, source = args[0], args[1]
                if self.half and target.dim() and target.shape == source.shape:
                    count = target.shape[0] // 2
                    func(target[:count], source[:count])
                raise torch.OutOfMemoryError(OUT_OF_MEMORY)
        return func(*args, **(kwargs or {}))


class Cut(dict[str, torch.Tensor]):
    """Parameters of which an exchange gets so many, and then an error.

    Attributes:
        times: How many errors are still to come.
    """

    def __init__(self, tensors: dict[str, torch.Tensor], *, after: int, times: int) -> None:
        super().__init__(tensors)
        self.after, self.times = after, times

    def items(self) -> ItemsView[str, torch.Tensor]:
        return self._items() if self.times > 0 else super().items()  # type: ignore[return-value]

    def _items(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number, item in enumerate(super().items()):
            if number == self.after:
                self.times -= 1
                raise torch.OutOfMemoryError(OUT_OF_MEMORY)
            yield item


def tear(staging: StagingSet, *, after: int, times: int = 1) -> Cut:
    """Let a flip fail when so many parameters have been exchanged.  With ``times=2`` the undo fails too."""
    cut = Cut({}, after=after, times=times)  # nothing is exchanged without staging
    for exchange in staging._exchanges:
        if isinstance(exchange, ChunkExchange | PointerExchange):
            cut.update(exchange._lives)
            exchange._lives = cut
    return cut
