"""Parameters that a commit exchanges by mapping other memory to their addresses, and their second copies.

Torch's own memory cannot be mapped anew, so the parameters move once, before anything has noted their addresses.
"""

from __future__ import annotations

import gc
import itertools
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping

import torch

from weightcast.runtime.mapped_memory import LIVE, WAITING, CudaMapper, MappedPair

_ALIGNMENT_BYTES = 512  # as torch's own memory
_STORED_AT_ONCE = 256 << 20  # torch takes pinned memory in powers of two


class MappedSet:
    """Both copies of the parameters of one model that could be moved."""

    def __init__(
        self, residents: Mapping[str, torch.Tensor], mapper: CudaMapper, after_move: Callable[[], object]
    ) -> None:
        """Moves the parameters that nothing else shares memory with, and makes their second copies.

        The residents are on one device and without gaps.  ``after_move`` frees the memory that they have left, or it
        would be missed.  This raises torch.OutOfMemoryError or DriverError.
        """
        gc.collect()  # what is garbage shares memory too
        alone = _references(torch.empty(1))
        self._tensors = {
            name: tensor for name, tensor in residents.items() if tensor.nbytes and _references(tensor) == alone
        }
        sizes = [-(-tensor.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for tensor in self._tensors.values()]
        self._starts = dict(zip(self._tensors, itertools.accumulate(sizes, initial=0), strict=False))
        self._pair: MappedPair | None = MappedPair(sum(sizes), mapper) if sizes else None
        self._kept: weakref.ref[MappedPair] | None = None
        self._stored: list[torch.Tensor] = []
        self._let_go = False
        self.begun = False  # ``undo`` has something to undo
        self.waiting: dict[str, torch.Tensor] = {}
        if self._pair is not None:
            self._pair.fill(LIVE)
            for name, tensor in self._tensors.items():
                _move(tensor, self._pair, self._starts[name])
            after_move()
            self._fill(self._pair)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    @property
    def size_bytes(self) -> int:
        """Memory of one copy; both together take twice as much."""
        return self._pair.size_bytes if self._pair is not None else 0

    def free(self) -> None:
        """Frees the second copies."""
        self.begun = False
        self.waiting = {}
        if self._pair is not None:
            self._pair.empty(WAITING)
            # An engine that moves its parameters away frees the first copies too.
            self._kept, self._pair = weakref.ref(self._pair), None

    def allocate(self) -> bool:
        """Undoes ``free``; raises torch.OutOfMemoryError.

        Returns False if a parameter has left its place since; this set is of no use then.
        """
        if self._pair is not None:
            return True
        pair = self._held()
        if pair is None or not self._all_in(pair):
            return not self._tensors
        self._fill(pair)
        self._pair, self._kept = pair, None
        return True

    def store(self) -> None:
        """Copies the first copies to the host, from where ``restore`` brings them back."""
        if (pair := self._held()) is not None:
            if not pair.whole:
                pair.mend()
            self._stored = [
                torch.empty(part.numel(), dtype=part.dtype, pin_memory=part.is_cuda).copy_(part)
                for part in _parts(pair)
            ]

    def let_go(self) -> int:
        """Frees the first copies too, after ``free``; returns their bytes.

        Their addresses stay theirs, and nothing may read or write there before ``restore``.
        """
        pair = self._held()
        if pair is None or self._let_go:
            return 0
        pair.empty(LIVE)
        self._let_go = True
        return pair.size_bytes

    def restore(self) -> None:
        """Undoes ``let_go``; contents that were not stored are unknown then.

        Raises:
            torch.OutOfMemoryError: There is too little memory; nothing has changed.
        """
        if (pair := self._held()) is not None and self._let_go:
            pair.fill(LIVE)
            self._let_go = False
        if pair is not None and self._stored:
            for part, stored in zip(_parts(pair), self._stored, strict=True):
                part.copy_(stored)
            self._stored = []

    def in_place(self) -> bool:
        """True if no parameter has left its place."""
        return self._pair is None or self._all_in(self._pair)

    def begin(self) -> None:
        """Forgets the last exchange: ``undo`` does nothing before the next one."""
        self.begun = False

    def exchange(self) -> None:
        """Exchanges both copies, after all work on the device.  Call ``undo`` after the driver's error."""
        if self._pair is not None:
            self._pair.exchange()
            self.begun = True

    def undo(self) -> None:
        """Undoes the exchange, also one that failed half way; a second call does nothing.  Errors as ``exchange``."""
        if self._pair is None:
            return
        if not self._pair.whole:
            self._pair.mend()
        if self.begun:
            self._pair.exchange()
            self.begun = False

    def _fill(self, pair: MappedPair) -> None:
        pair.fill(WAITING)
        self.waiting = {
            name: pair.tensor(WAITING, self._starts[name], tensor).copy_(tensor.detach())
            for name, tensor in self._tensors.items()
        }

    def _held(self) -> MappedPair | None:
        return self._pair if self._pair is not None or self._kept is None else self._kept()

    def _all_in(self, pair: MappedPair) -> bool:
        first = pair.address(LIVE)
        return all(tensor.data_ptr() == first + self._starts[name] for name, tensor in self._tensors.items())


def _move(tensor: torch.Tensor, pair: MappedPair, start: int) -> None:
    with torch.inference_mode(tensor.is_inference()):  # or the parameter would become one of the other kind
        tensor.data = pair.tensor(LIVE, start, tensor).copy_(tensor.detach())


def _parts(pair: MappedPair) -> Iterator[torch.Tensor]:
    whole = torch.empty(pair.size_bytes, dtype=torch.uint8, device="meta")
    yield from pair.tensor(LIVE, 0, whole).split(_STORED_AT_ONCE)


def _references(tensor: torch.Tensor) -> tuple[int, int]:
    """How many tensors and other objects of this process, outside Python and in it, refer to a tensor's memory."""
    storage = tensor.untyped_storage()
    # torch has no public way.
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)  # pyright: ignore
