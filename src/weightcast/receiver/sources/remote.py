"""Buckets in memory of trainer ranks on any hosts, read through NIXL.  The owner's end is ``comm/remote_memory.py``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from weightcast.comm.remote_reads import Pull, RemoteReader, RemoteReadFailed
from weightcast.receiver.bucket_copies import ExchangePlan
from weightcast.wire.bucket_sources import RemoteBuffer
from weightcast.wire.layout import BucketLayout
from weightcast.wire.pieces import PieceMessage, Runs, runs_of


class RemoteMemorySource:
    """Reads one rank's share of a bucket and nothing else."""

    def __init__(self, device: torch.device) -> None:
        self.reader = RemoteReader(device)
        self._runs: dict[int, tuple[ExchangePlan, tuple[int | None, ...], list[list[tuple[int, Runs]]]]] = {}

    def read(
        self,
        layout: BucketLayout,
        buffers: Sequence[RemoteBuffer],
        plan: ExchangePlan,
        *,
        wanted: str,
        timeout_s: float,
        interrupted: Callable[[], bool],
    ) -> torch.Tensor:
        """Reads the share as the plan's messages lie in their receive buffer; valid until the next read.

        The buffers are in the order of the messages; ``wanted`` names the boxes that this rank wants, by which it finds
        its packs.  It raises as ``RemoteReader.read``, and for a buffer that is too small.
        """
        packs = tuple(
            next((pack.first_byte for pack in buffer.packs if pack.wanted == wanted), None) for buffer in buffers
        )
        for buffer, message, pack in zip(buffers, plan.messages, packs, strict=True):
            if pack is not None and pack + message.packed_bytes > buffer.memory.size_bytes:
                raise RemoteReadFailed(
                    f"bucket {layout.index} has a pack of {message.packed_bytes} bytes at {pack}, and the buffer of "
                    f"{buffer.memory.owner} has {buffer.memory.size_bytes}"
                )
            if layout.size_bytes > buffer.memory.size_bytes:
                raise RemoteReadFailed(
                    f"bucket {layout.index} has {layout.size_bytes} bytes, and the buffer of {buffer.memory.owner} "
                    f"has {buffer.memory.size_bytes}"
                )
        known = self._runs.get(layout.index)
        # A plan for equal parts is another object in each update; its messages are the same.
        if known is None or known[0].messages is not plan.messages or known[1] != packs:
            runs = [
                _runs_of(layout, message, start, pack)
                for message, start, pack in zip(plan.messages, plan.starts, packs, strict=True)
            ]
            known = self._runs[layout.index] = plan, packs, runs
        pulls = [
            Pull((layout.index, number), buffer.memory, runs)
            for number, (buffer, runs) in enumerate(zip(buffers, known[2], strict=True))
            if runs
        ]
        return self.reader.read(
            pulls, plan.size_bytes, what=f"bucket {layout.index}", timeout_s=timeout_s, interrupted=interrupted
        )

    def close(self) -> None:
        """Forgets the trainer's memory and frees this rank's; safe to call twice."""
        self._runs.clear()
        self.reader.close()


def _runs_of(layout: BucketLayout, message: PieceMessage, start: int, pack: int | None) -> list[tuple[int, Runs]]:
    """The runs in a trainer rank's buffer, and the place of each in the memory that they are read into."""
    found: list[tuple[int, Runs]] = []
    if pack is not None and message.packed_bytes:
        found.append((start, Runs(pack, message.packed_bytes, message.packed_bytes, 1)))
    for piece in message.pieces:
        if pack is not None and not piece.straight:
            continue
        first = start + piece.offset_bytes
        for runs in runs_of(layout.slots[piece.slot], piece.box):
            found.append((first, runs))
            first += runs.size_bytes * runs.number
    return found
