"""Buckets that come by broadcast from a trainer's head.  The sender is ``transports/broadcast.py``."""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from weightcast.comm.group_moves import Move, Relay
from weightcast.comm.update_group import UpdateGroup, backend_for
from weightcast.errors import ConfigError, Refused
from weightcast.wire.bucket import Bucket
from weightcast.wire.layout import BucketLayout
from weightcast.wire.messages import Join

_BUFFERS = 2
_MAX_GROUPS = 4  # a trainer that died between two updates told nobody that its group is over


@dataclass(frozen=True, slots=True)
class _Entered:
    """A bucket's broadcast that this rank has entered; ``work`` is None for a bucket without bytes."""

    group: UpdateGroup
    size_bytes: int
    buffer: torch.Tensor
    work: Any


@dataclass(frozen=True, slots=True)
class Passing:
    """A bucket's messages on their way to the next rank of the chain."""

    group: UpdateGroup
    works: list[Any]
    what: str


class GroupSource:
    """Groups by name, and two receive buffers used in turn, so that one can be loaded while the next one fills.

    Thread rule: ``interrupt`` may come from any thread, the rest from one.
    """

    def __init__(self, device: torch.device, interrupted: threading.Event) -> None:
        """No group yet; ``interrupted`` is set before a call of ``interrupt`` and ends a meeting."""
        self._device = device
        self._interrupted = interrupted
        self._groups: dict[str, UpdateGroup] = {}
        self._lock = threading.Lock()
        self._reading: UpdateGroup | None = None
        self._buffers: list[torch.Tensor] = []
        self._loaded: list[torch.cuda.Event] = []
        self._turn = 0
        self._entered: _Entered | None = None

    def join(self, message: Join, *, rank: int, tells: bytes | None = None) -> None:
        """Joins a group as rank ``first_rank + rank``: ``rank`` is this one's place among its engine's members.

        ``tells`` is as for ``UpdateGroup``, and so are the errors.  ConfigError says that the backend is not that of
        this rank's device.  Refused says that the group has no such rank, or that a living group has that name: whoever
        joins another under it would send in its members' place.
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
        group = UpdateGroup.join(
            host=message.host,
            port=message.port,
            name=message.group,
            token=message.token,
            rank=message.first_rank + rank,
            world_size=message.world_size,
            device=self._device,
            timeout_s=message.timeout_s,
            cancelled=self._interrupted,
            tells=tells,
            relays=message.relays,
        )
        with self._lock:
            self._groups[message.group] = group
            used_least = list(self._groups)[:-_MAX_GROUPS]
        for name in used_least:
            self.leave(name)

    def leave(self, name: str) -> None:
        """Leaves a group; a group that was never joined is no error."""
        with self._lock:
            group = self._groups.pop(name, None)
        if group is not None:
            if self._entered is not None and self._entered.group is group:
                self._entered = None
                self._leave_buffers()
            group.close()

    def read(
        self,
        layout: BucketLayout,
        name: str,
        *,
        timeout_s: float,
        next_bytes: int = 0,
        patience_s: float | None = None,
    ) -> Bucket:
        """Receives a bucket, which is valid until the next but one.

        Args:
            next_bytes: Size of the bucket that will follow from the same group; 0 if it is not known.  If it fits a
                buffer, its broadcast is entered before this one is returned, and goes on meanwhile.
            patience_s: Seconds within which the next bucket comes, if its broadcast is entered; None for the deadline
                of the rendezvous.  Only gloo keeps such a limit.

        Refused says that there is no such group here; other errors are those of ``UpdateGroup.finish``.
        """
        with self._reading_from(name) as group:
            entered, self._entered = self._entered, None
            if entered is None:
                entered = self._enter(group, layout.size_bytes)
            elif entered.group is not group or entered.size_bytes != layout.size_bytes:
                self._give_up(entered, "another bucket came than was announced")
                raise Refused(
                    f"bucket {layout.index} has {layout.size_bytes} bytes and comes from group {name}; "
                    f"{entered.size_bytes} bytes were announced, from {entered.group.name}"
                )
            try:
                if entered.work is not None:
                    group.finish(entered.work, what=f"bucket {layout.index}", timeout_s=timeout_s)
            except BaseException:
                self._leave_buffers()
                raise
            if 0 < next_bytes <= entered.buffer.numel():
                self._entered = self._enter(group, next_bytes, patience_s)
            return Bucket(layout, entered.buffer)

    def relay(self, name: str) -> Relay:
        """Place of this rank in its chain; that of a rank without a chain if there is no such group here."""
        group = self._groups.get(name)
        return Relay() if group is None else group.relay

    def receive(
        self, name: str, receives: Sequence[Move], passes: Sequence[Move] = (), *, what: str, timeout_s: float
    ) -> Passing:
        """Receives messages of other members, then starts ``passes``, which are sent out of the same memory.

        Errors are as for ``read`` and call the messages ``what``.
        """
        with self._reading_from(name) as group:
            group.finish_moves(group.start_moves((), receives), what=what, timeout_s=timeout_s)
            return Passing(group, group.start_moves(passes), f"{what}, passed on")

    def finish(self, passing: Passing, *, timeout_s: float) -> None:
        """Waits until what was passed on is sent, so that its memory may be written; errors are as for ``read``.

        A group that was aborted has nothing on its way any more.
        """
        if passing.works and passing.group.alive:
            with self._reading_from(passing.group.name) as group:
                group.finish_moves(passing.works, what=passing.what, timeout_s=timeout_s)

    def release(self, bucket: Bucket) -> None:
        """Marks a bucket as enqueued for loading; its buffer may be filled again after that."""
        if not self._loaded:
            return  # on the host it was loaded when that returned
        for buffer, loaded in zip(self._buffers, self._loaded, strict=True):
            if buffer.data_ptr() == bucket.data.data_ptr():
                loaded.record(torch.cuda.current_stream(self._device))

    def expect_nothing(self) -> None:
        """Says that no bucket follows.  A group whose next broadcast was entered is unusable afterwards."""
        entered, self._entered = self._entered, None
        if entered is not None:
            self._give_up(entered, "the update ended")

    def interrupt(self, reason: str) -> None:
        """Ends a waiting ``read`` now.  Its group is unusable afterwards; other groups are not touched."""
        with self._lock:
            group = self._reading
        if group is not None:
            group.abort(reason)

    def trim(self) -> None:
        """Frees the receive buffers, and the rest of groups that were aborted.

        What a broadcast was entered with stays: another trainer may leave in the middle of this one's update.
        """
        self._drop_dead()
        self._buffers.clear()
        self._loaded.clear()

    def close(self) -> None:
        """Leaves every group and frees the buffers; safe to call twice."""
        for name in list(self._groups):
            self.leave(name)
        self.trim()

    @contextmanager
    def _reading_from(self, name: str) -> Generator[UpdateGroup]:
        """The group, which ``interrupt`` aborts meanwhile."""
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
            yield group
        finally:
            with self._lock:
                self._reading = None

    def _drop_dead(self) -> None:
        for name, group in list(self._groups.items()):
            if not group.alive:
                self.leave(name)

    def _enter(self, group: UpdateGroup, size_bytes: int, patience_s: float | None = None) -> _Entered:
        buffer = self._buffer(size_bytes)
        work = group.start_broadcast(buffer[:size_bytes], patience_s=patience_s) if size_bytes else None
        return _Entered(group, size_bytes, buffer, work)

    def _give_up(self, entered: _Entered, why: str) -> None:
        entered.group.abort(why)
        self._leave_buffers()

    def _leave_buffers(self) -> None:
        """Takes other buffers from now on, on the host: gloo may go on writing to those of a broadcast given up.

        It keeps them alive.  NCCL's ends with the abort.
        """
        if self._device.type == "cpu":
            self._buffers.clear()

    def _buffer(self, size_bytes: int) -> torch.Tensor:
        if not self._buffers or self._buffers[0].numel() < size_bytes:
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()
                self._loaded = [torch.cuda.Event(), torch.cuda.Event()]
            self._buffers = []  # the old ones go before the new ones come
            self._buffers = [
                torch.empty(max(size_bytes, 1), dtype=torch.uint8, device=self._device) for _ in range(_BUFFERS)
            ]
        self._turn = (self._turn + 1) % len(self._buffers)
        if self._loaded:
            self._loaded[self._turn].synchronize()
        return self._buffers[self._turn]
