"""Parameters that a commit exchanges by mapping other memory to their addresses, and their second copies.

Torch's own memory cannot be mapped anew, so the parameters move once, before anything has noted their addresses.
"""

from __future__ import annotations

import gc
import itertools
import sys
import weakref
from collections.abc import Mapping

import torch

from weightcast.runtime.mapped_memory import LIVE, WAITING, CudaMapper, MappedPair

_ALIGNMENT_BYTES = 512  # as torch's own memory


class MappedSet:
    """Both copies of the parameters of one model that could be moved."""

    def __init__(self, residents: Mapping[str, torch.Tensor], mapper: CudaMapper) -> None:
        """Moves the parameters that nothing else shares memory with, and makes their second copies.

        The residents are on one device and without gaps.  It raises torch.OutOfMemoryError or DriverError.
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
        self.exchanged = False  # ``undo`` has something to undo
        self.waiting: dict[str, torch.Tensor] = {}
        if self._pair is not None:
            self._pair.fill(LIVE)
            for name, tensor in self._tensors.items():
                _move(tensor, self._pair, self._starts[name])
            if next(iter(self._tensors.values())).device.type == "cuda":
                torch.cuda.empty_cache()  # or the memory that the parameters have left would be missed
            self._fill(self._pair)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    @property
    def size_bytes(self) -> int:
        """Memory of one copy; both together take twice as much."""
        return self._pair.size_bytes if self._pair is not None else 0

    def free(self) -> None:
        """Frees the second copies."""
        self.exchanged = False
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
        pair = self._kept() if self._kept is not None else None
        if pair is None or not self._all_in(pair):
            return not self._tensors
        self._fill(pair)
        self._pair, self._kept = pair, None
        return True

    def in_place(self) -> bool:
        """True if no parameter has left its place."""
        return self._pair is None or self._all_in(self._pair)

    def begin(self) -> None:
        """Forgets the last exchange: ``undo`` does nothing before the next one."""
        self.exchanged = False

    def exchange(self) -> None:
        """Exchanges both copies, after all work on the device.  Call ``undo`` after the driver's error."""
        if self._pair is not None:
            self._pair.exchange()
            self.exchanged = True

    def undo(self) -> None:
        """Undoes the exchange, also one that failed half way; a second call does nothing.  Errors as ``exchange``."""
        if self._pair is None:
            return
        if not self._pair.whole:
            self._pair.mend()
        if self.exchanged:
            self._pair.exchange()
            self.exchanged = False

    def _fill(self, pair: MappedPair) -> None:
        pair.fill(WAITING)
        self.waiting = {
            name: pair.tensor(WAITING, self._starts[name], tensor).copy_(tensor.detach())
            for name, tensor in self._tensors.items()
        }

    def _all_in(self, pair: MappedPair) -> bool:
        first = pair.address(LIVE)
        return all(tensor.data_ptr() == first + self._starts[name] for name, tensor in self._tensors.items())


def _move(tensor: torch.Tensor, pair: MappedPair, start: int) -> None:
    with torch.inference_mode(tensor.is_inference()):  # or the parameter would become one of the other kind
        tensor.data = pair.tensor(LIVE, start, tensor).copy_(tensor.detach())


def _references(tensor: torch.Tensor) -> tuple[int, int]:
    """How many tensors and other objects of this process, outside Python and in it, refer to a tensor's memory."""
    storage = tensor.untyped_storage()
    # torch has no public way.
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)  # pyright: ignore
