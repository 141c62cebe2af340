"""Exchanges the contents of many pairs of memory at once, with nothing for each pair on the host.

On a GPU an exchange of any number of pairs is one launch.  It needs no memory beside its table of addresses.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch


class MemoryExchange:
    """Pairs of memory that change contents again and again, as long as all stays in place.  It keeps none alive."""

    def __init__(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Works out the table of at least one pair, all on one device; both of a pair have one size, and no gaps."""
        self._device = pairs[0][0].device
        spans = [(one.data_ptr(), other.data_ptr(), one.nbytes) for one, other in pairs]
        self._spans = spans if self._device.type == "cpu" else []
        if self._device.type == "cuda":
            from weightcast.digest.exchange_kernel import Launch

            self._launch = Launch(spans, self._device)

    def run(self, *, wait: bool = True) -> None:
        """Exchanges all pairs.  Waits for all work on the device before.

        Without ``wait``, whatever reads the memory afterwards must be ordered behind the current stream.
        """
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            self._launch.run()
            if wait:
                torch.cuda.current_stream(self._device).synchronize()
        for one, other, size in self._spans:
            held = ctypes.string_at(one, size)
            ctypes.memmove(one, other, size)
            ctypes.memmove(other, held, size)
