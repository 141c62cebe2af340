"""The cache of keys and values, one slot per running sequence.

The scheduler keeps the running sequences in slots ``[0, batch)`` without holes, so that a decode step reads views of
the cache and copies nothing.  On a CPU the pages are mapped zeroed and touched when first written, so an idle slot
costs nothing.
"""

from __future__ import annotations

import inspect
import math
import mmap
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache

from weightcast.errors import ConfigError


def cache_name(model: nn.Module) -> str:
    """Name of the cache among the arguments, and in the output, of a transformers model.

    It is ``cache`` since transformers 5.24, and was ``past_key_values`` before.
    """
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


class SlotCache(Cache):
    """A transformers cache over one preallocated tensor, (layers, 2, slots, kv heads, max_len, head_dim).

    Before each forward pass the runner calls `start_prefill` or `start_decode`, which decides where `update` stores the
    keys and values of the layers.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_slots: int,
        num_kv_heads: int,
        max_len: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(layers=[])
        self._shape = (num_layers, 2, num_slots, num_kv_heads, max_len, head_dim)
        self._dtype = dtype
        self._device = device
        self._data = torch.empty(0)
        self._layers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._used = [0] * num_slots
        self._rows: torch.Tensor | None = None
        self._positions = torch.empty(0)
        self._first = self._count = self._length = 0

    @property
    def size_bytes(self) -> int:
        return math.prod(self._shape) * self._dtype.itemsize

    def allocate(self) -> None:
        """Allocates the cache, zeroed, unless it is allocated already; raises ``ConfigError`` if memory is short."""
        if self._layers:
            return
        try:
            if self._device.type == "cpu":
                pages = mmap.mmap(-1, self.size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                self._data = torch.frombuffer(pages, dtype=torch.uint8).view(self._dtype).view(self._shape)
            else:
                self._data = torch.zeros(self._shape, dtype=self._dtype, device=self._device)
        except (OSError, torch.OutOfMemoryError) as error:
            raise ConfigError(
                f"a cache of {self.size_bytes / 2**30:.1f} GiB does not fit on {self._device}: {error}",
                hint="allow fewer requests at once (max_batch) or a shorter context (max_len)",
            ) from error
        self._layers = [(layer[0], layer[1]) for layer in self._data]

    def free(self) -> None:
        """Frees the memory; the next forward pass needs `allocate` first."""
        self._layers = []
        self._data = torch.empty(0)
        self._used = [0] * len(self._used)

    def start_prefill(self, *, first: int, lengths: list[int]) -> None:
        """Makes the next forward pass fill slots from ``first`` on, from position 0; ``lengths`` exclude padding."""
        self._rows = None
        self._first, self._count = first, len(lengths)
        longest = max(lengths)
        for slot in range(first, first + len(lengths)):
            # Positions after the end are masked, but 0 * nan is nan: values that an earlier sequence left there must
            # be finite, even if bad weights computed them.
            if self._used[slot] > longest:
                self._data[:, :, slot, :, longest : self._used[slot]].zero_()
            self._used[slot] = longest

    def start_decode(self, positions: torch.Tensor, *, length: int) -> None:
        """Makes the next forward pass append one token to slots ``[0, len(positions))``.

        Args:
            positions: Position of the new token in each slot, int64, on the cache's device.
            length: 1 + the largest position.
        """
        self._rows = torch.arange(len(positions), device=self._device)
        self._positions = positions
        self._count, self._length = len(positions), length
        for slot in range(len(positions)):
            self._used[slot] = max(self._used[slot], length)

    def copy(self, source: int, target: int, *, length: int) -> None:
        """Copies the first `length` positions of one slot over another."""
        data = self._data
        data[:, :, target, :, :length].copy_(data[:, :, source, :, :length])
        if self._used[target] > length:
            data[:, :, target, :, length : self._used[target]].zero_()
        self._used[target] = length

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores one layer's new keys and values; returns all keys and values that the layer attends to.

        Args:
            key_states: (batch, kv heads, tokens, head_dim).
            value_states: The same shape.
        """
        keys, values = self._layers[layer_idx]
        if self._rows is None:
            rows, length = slice(self._first, self._first + self._count), key_states.shape[2]
            keys[rows, :, :length].copy_(key_states)
            values[rows, :, :length].copy_(value_states)
            return key_states, value_states
        keys, values = keys[: self._count], values[: self._count]
        keys[self._rows, :, self._positions] = key_states[:, :, 0]
        values[self._rows, :, self._positions] = value_states[:, :, 0]
        return keys[:, :, : self._length], values[:, :, : self._length]
