"""Buckets that come by broadcast from a trainer's head.  The sender is ``transports/broadcast.py``."""

from __future__ import annotations

import threading

import torch

from weightcast.comm.group import WorldGroup, backend_for
from weightcast.errors import ConfigError, Refused
from weightcast.wire.bucket import Bucket
from weightcast.wire.layout import BucketLayout
from weightcast.wire.messages import Join

_MAX_GROUPS = 4  # a trainer that died between two updates told nobody that its group is over


class BroadcastSource:
    """Groups by name, and two receive buffers used in turn, so that one can be loaded while the next one fills.

    Thread rule: ``interrupt`` may come from any thread, the rest from one.
    """

    def __init__(self, device: torch.device, interrupted: threading.Event) -> None:
        """No group yet.

        Args:
            device: Where buckets go.
            interrupted: Set before a call of ``interrupt``; ends a meeting.
        """
        self._device = device
        self._interrupted = interrupted
        self._groups: dict[str, WorldGroup] = {}
        self._lock = threading.Lock()
        self._reading: WorldGroup | None = None
        self._buffers: list[torch.Tensor] = []
        self._loaded: list[torch.cuda.Event] = []
        self._turn = 0

    def join(self, message: Join, *, rank: int) -> None:
        """Join a group as rank ``first_rank + rank``.

        Raises:
            Refused: The group has no such rank, or a living group has that name: whoever joins another under it would
                send in its members' place.
            DeadlineExceeded, GroupFailed: The others did not come, or the trainer cannot be reached.
            ConfigError: The backend is not the one for this rank's device.
        """
        if message.backend != backend_for(self._device):
            raise ConfigError(
                f"group {message.group} uses {message.backend}, but this rank keeps its weights on {self._device}",
                hint="trainer and engine both on GPUs (nccl) or both on CPUs (gloo)",
            )
        if message.first_rank + rank >= message.world_size:
            raise Refused(f"a group of {message.world_size} has no rank {message.first_rank + rank}")
        self._drop_dead()
        if message.group in self._groups:
            raise Refused(f"there is a group {message.group} here already", hint="choose another name, or leave it")
        group = WorldGroup.join(
            host=message.host,
            port=message.port,
            name=message.group,
            token=message.token,
            rank=message.first_rank + rank,
            world_size=message.world_size,
            device=self._device,
            timeout_s=message.timeout_s,
            cancelled=self._interrupted,
        )
        with self._lock:
            self._groups[message.group] = group
            used_least = list(self._groups)[:-_MAX_GROUPS]
        for name in used_least:
            self.leave(name)

    def leave(self, name: str) -> None:
        """Leave a group; leaving what was never joined is fine."""
        with self._lock:
            group = self._groups.pop(name, None)
        if group is not None:
            group.close()

    def read(self, layout: BucketLayout, name: str, *, timeout_s: float) -> Bucket:
        """Receive the bucket.  Valid until the next but one.

        Raises:
            Refused: No such group here.
            DeadlineExceeded, GroupFailed: The trainer fell silent, died or aborted.
        """
        with self._lock:
            group = self._groups.pop(name, None)
            if group is not None:
                self._groups[name] = group  # the one used last comes last
            self._reading = group
        if group is None or not group.alive:
            raise Refused(f"not in group {name}", hint="the trainer joins again before its next update")
        try:
            if self._interrupted.is_set():
                raise Refused("interrupted")
            buffer = self._buffer(layout.size_bytes)
            if layout.size_bytes:
                group.broadcast(buffer[: layout.size_bytes], what=f"bucket {layout.index}", timeout_s=timeout_s)
            return Bucket(layout, buffer)
        finally:
            with self._lock:
                self._reading = None

    def release(self) -> None:
        """The bucket read last has been enqueued for loading; its buffer may be filled again after that."""
        if self._loaded:
            self._loaded[self._turn].record(torch.cuda.current_stream(self._device))

    def interrupt(self, reason: str) -> None:
        """Make a waiting ``read`` end now; its group is unusable afterwards, those of others are not touched."""
        with self._lock:
            group = self._reading
        if group is not None:
            group.abort(reason)

    def trim(self) -> None:
        """Give the receive buffers back, and what is left of groups that were aborted."""
        self._drop_dead()
        self._buffers.clear()
        self._loaded.clear()

    def close(self) -> None:
        """Leave every group and give the buffers back; safe to call twice."""
        for name in list(self._groups):
            self.leave(name)
        self.trim()

    def _drop_dead(self) -> None:
        for name, group in list(self._groups.items()):
            if not group.alive:
                self.leave(name)

    def _buffer(self, size_bytes: int) -> torch.Tensor:
        if not self._buffers or self._buffers[0].numel() < size_bytes:
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()
                self._loaded = [torch.cuda.Event(), torch.cuda.Event()]
            self._buffers = []  # the old ones go before the new ones come
            count = 2 if self._device.type == "cuda" else 1  # on the host, loading is over when it returns
            self._buffers = [
                torch.empty(max(size_bytes, 1), dtype=torch.uint8, device=self._device) for _ in range(count)
            ]
        self._turn = (self._turn + 1) % len(self._buffers)
        if self._loaded:
            self._loaded[self._turn].synchronize()
        return self._buffers[self._turn]
