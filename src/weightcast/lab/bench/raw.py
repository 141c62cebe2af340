"""Plain torch communication for limits and peers: one group across all processes, and pipes that count.

Limits and peers use none of weightcast's own communication, so that its cost does not appear in their figures.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.distributed as dist

_LONG = timedelta(seconds=300)


class RawGroup:
    """A process group with a store of its own: nccl for CUDA tensors, gloo for others."""

    def __init__(self, *, port: int, name: str, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size, self.device = rank, size, device
        store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=_LONG)
        prefixed = dist.PrefixStore(name, store)
        self._group: Any
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = _LONG  # pyright: ignore[reportPrivateUsage]  torch has no other way
            self._group = dist.ProcessGroupNCCL(prefixed, rank, size, options)
        else:
            self._group = dist.ProcessGroupGloo(prefixed, rank, size, _LONG)
        self.calls = 0

    def broadcast(self, tensor: torch.Tensor, src: int = 0, stream: object = None) -> None:
        """Broadcasts rank ``src``'s tensor; on a GPU the call only enqueues it on the current stream."""
        self.calls += 1
        options = dist.BroadcastOptions()
        options.rootRank = src
        options.rootTensor = 0
        self._group.broadcast([tensor], options).wait()

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        """Gathers the tensors of all ranks, in order of rank."""
        self.calls += 1
        self._group._allgather_base(output, tensor).wait()  # pyright: ignore[reportPrivateUsage]

    def send(self, tensor: torch.Tensor, peer: int) -> None:
        """Sends a tensor to one rank."""
        self.calls += 1
        self._group.send([tensor], peer, 0).wait()

    def receive(self, tensor: torch.Tensor, peer: int) -> None:
        """Receives a tensor from one rank."""
        self.calls += 1
        self._group.recv([tensor], peer, 0).wait()

    def close(self) -> None:
        """Leaves the group."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            self._group.abort()
        self._group = None


class Pipe:
    """A connection between one trainer process and one engine process that counts messages and bytes.

    Messages are pickled, as the peers' own are. Real engines use HTTP or ZeroMQ, which cost more than a pipe.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.messages = self.sent_bytes = 0

    def send(self, value: object) -> None:
        """Sends any object that can be pickled."""
        body = bytes(ForkingPickler.dumps(value))
        self.messages += 1
        self.sent_bytes += len(body)
        self._connection.send_bytes(body)

    def receive(self) -> Any:
        """Returns the next message; raises ``TimeoutError`` after five minutes without one."""
        if not self._connection.poll(_LONG.total_seconds()):
            raise TimeoutError("the other process sent no message for five minutes")
        return self._connection.recv()


def store_for(size: int) -> dist.TCPStore:
    """Starts a store for the rendezvous of groups, on a free port of this machine."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=_LONG)


def synchronize(device: torch.device) -> None:
    """Waits for the device; does nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def stamp(device: torch.device) -> float:
    """Waits for the device and returns the time in seconds, on a clock that all processes of this machine share."""
    synchronize(device)
    return time.monotonic()


def chunks(size_bytes: int, chunk_bytes: int) -> Sequence[int]:
    """Divides ``size_bytes`` into pieces of at most ``chunk_bytes``."""
    whole, rest = divmod(size_bytes, chunk_bytes)
    return [chunk_bytes] * whole + ([rest] if rest else [])
