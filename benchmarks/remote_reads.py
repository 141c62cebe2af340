"""Reads trainer ranks' memory through NIXL alone, beside the reads of an update, for ``direct.py``.

Both run in the engine ranks of an update that has just ended, from the same registered memory and with as many bytes
from each trainer rank.  ``repeat`` does the reads of that update again, bucket after bucket, as they were prepared for
it, and nothing else of the update.  ``alone`` does what NIXL's own benchmark does: one agent, one prepared list of
equal blocks for each trainer rank, posted together, and a loop that asks until all are done.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from typing import Any

import torch

from weightcast.comm.nixl import make_agent
from weightcast.comm.remote_reads import Pull, RemoteReader
from weightcast.wire.bucket_sources import RemoteMemory

_LOCAL = "NIXL_INIT_AGENT"
_BLOCK_BYTES = 1 << 20


class RecordedReads:
    """Notes the reads of one engine rank in its last update.

    ``reader.read`` is wrapped: it does what it did and notes its arguments.
    """

    def __init__(self, reader: RemoteReader) -> None:
        self._read = reader.read
        self._calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.seconds = 0.0
        made: Any = reader
        made.read = self._noted

    def _noted(self, pulls: Any, size_bytes: int, **options: Any) -> torch.Tensor:
        self._calls.append(((pulls, size_bytes), options))
        began = time.monotonic()
        try:
            return self._read(pulls, size_bytes, **options)
        finally:
            self.seconds += time.monotonic() - began

    def begin(self) -> None:
        """A new update."""
        self._calls.clear()
        self.seconds = 0.0

    def repeat(self) -> int:
        """Does all reads of the update again; returns the bytes."""
        for arguments, options in self._calls:
            self._read(*arguments, **(options | {"interrupted": _never}))
        return sum(_bytes_of(pull) for (pulls, _), _ in self._calls for pull in pulls)

    def alone(self) -> Alone:
        """As many bytes from each trainer rank, through an agent of its own."""
        sizes: Counter[str] = Counter()
        memories: dict[str, RemoteMemory] = {}
        for (pulls, _), _ in self._calls:
            for pull in pulls:
                known = memories.get(pull.memory.agent)
                if known is None or pull.memory.size_bytes > known.size_bytes:
                    memories[pull.memory.agent] = pull.memory
                sizes[pull.memory.agent] += _bytes_of(pull)
        return Alone([(memories[agent], size) for agent, size in sizes.items()])


class Alone:
    """Prepared reads of equal blocks, which may be done again and again."""

    def __init__(self, parts: list[tuple[RemoteMemory, int]]) -> None:
        _, self._agent = make_agent()
        self._data = torch.empty(sum(size for _, size in parts), dtype=torch.uint8)
        self._registered = self._agent.register_memory(self._data)
        self._kept: list[Any] = []
        self._transfers: list[Any] = []
        first = self._data.data_ptr()
        for memory, size in parts:
            self._agent.add_remote_agent(memory.metadata)
            self._agent.make_connection(memory.agent)
            # The buffer is smaller than all that was read from it, so its blocks are read many times.
            starts = itertools.cycle(range(0, max(1, memory.size_bytes - _BLOCK_BYTES + 1), _BLOCK_BYTES))
            here: list[tuple[int, int, int]] = []
            there: list[tuple[int, int, int]] = []
            for done in range(0, size, _BLOCK_BYTES):
                block = min(_BLOCK_BYTES, size - done, memory.size_bytes)
                here.append((first + done, block, 0))
                there.append((memory.address + memory.first_byte + next(starts), block, 0))
            first += size
            lists = [
                self._agent.prep_xfer_dlist(owner, torch.tensor(rows, dtype=torch.int64).numpy().view("uint64"), "DRAM")
                for owner, rows in ((_LOCAL, here), (memory.agent, there))
            ]
            every = torch.arange(len(here), dtype=torch.int32).numpy()
            self._kept += lists
            self._transfers.append(self._agent.make_prepped_xfer("READ", lists[0], every, lists[1], every))

    def read(self) -> int:
        """Reads everything once; returns the bytes."""
        states = [self._agent.transfer(transfer) for transfer in self._transfers]
        while "PROC" in states:
            states = [self._agent.check_xfer_state(transfer) for transfer in self._transfers]
            time.sleep(0)
        if set(states) != {"DONE"}:
            raise SystemExit(f"NIXL says {', '.join(states)}")
        return self._data.numel()

    def close(self) -> None:
        """Releases everything that NIXL keeps."""
        for one in (*self._transfers, *self._kept):
            one.release()
        self._agent.deregister_memory(self._registered)


def _bytes_of(pull: Pull) -> int:
    return sum(runs.size_bytes * runs.number for _, runs in pull.runs)


def _never() -> bool:
    return False
