"""Point-to-point operations of one gloo group of trainer ranks, each with a deadline that names the other rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from weightcast.comm.group_moves import NUM_TAGS, hang_up
from weightcast.comm.trainer_failure import FailureState


class GlooPeers:
    """The other ranks of a gloo group."""

    def __init__(self, group: dist.ProcessGroup, failure: FailureState) -> None:
        self._group = group
        self._failure = failure

    def send(self, tensor: torch.Tensor, peer: int, tag: int, what: str) -> dist.Work:
        """Starts to send a host tensor.  Both ends use the same tag, which is taken modulo ``NUM_TAGS``."""
        return self._post(self._group.send, tensor, peer, tag, what)

    def receive(self, tensor: torch.Tensor, peer: int, tag: int, what: str) -> dist.Work:
        """Starts to receive into a host tensor."""
        return self._post(self._group.recv, tensor, peer, tag, what)

    def wait(self, peer: int, work: dist.Work, what: str, deadline: float) -> None:
        """Waits for an operation with one rank, until ``deadline`` by ``time.monotonic``.

        Raises:
            TrainerRankFailed: The other rank is gone or did not take part in time.
        """
        try:
            # 0 would mean "no limit" to torch.
            work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
        except RuntimeError:
            self._failure.fail([peer], what, timed_out=time.monotonic() >= deadline)

    def hang_up(self) -> None:
        """Ends every wait of this process and of its peers in the group."""
        hang_up(self._group)

    def close(self) -> None:
        """Destroys the group."""
        destroy_group(self._group)

    def _post(
        self,
        operation: Callable[[list[torch.Tensor], int, int], dist.Work | None],
        tensor: torch.Tensor,
        peer: int,
        tag: int,
        what: str,
    ) -> dist.Work:
        try:
            work = operation([tensor], peer, tag % NUM_TAGS)
        except RuntimeError:  # the connection is closed already
            self._failure.fail([peer], what)
        assert work is not None
        return work


def destroy_group(group: dist.ProcessGroup) -> None:
    """Destroys a process group, unless the trainer has done so already."""
    if dist.is_initialized():
        with suppress(ValueError):
            dist.destroy_process_group(group)
