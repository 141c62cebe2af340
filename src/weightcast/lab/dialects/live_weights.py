"""Shared parts of the dialects: process groups made by a stock engine's trainer, and writes into live weights.

The server's process acts for all ranks of the engine.  It joins a group once for each rank and opens shared memory for
them.  The ranks then map one buffer of the server, and each keeps its slices.  Only engines on a CPU without staging
are supported.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
import torch.distributed as dist

from weightcast.comm.ipc import SharedBuffer
from weightcast.comm.update_group import GroupFailed, UpdateGroup, local_address_towards
from weightcast.errors import ConfigError, EngineFailure, Refused
from weightcast.receiver.session import SessionHandler
from weightcast.wire.bucket_sources import IpcSource
from weightcast.wire.layout import BucketLayout, TensorSlot, TensorSpec
from weightcast.wire.messages import Abort, Announce, Message, Open, Owner

CPU = torch.device("cpu")
_ALIGNMENT_BYTES = 64
_LOAD_S = 120.0

NamedTensors = Sequence[tuple[str, torch.Tensor]]


class LiveWeights:
    """Writes tensors into an engine's live weights as they arrive.  Thread-safe."""

    def __init__(self, receiver: SessionHandler) -> None:
        """Raises ``ConfigError`` if the engine has staging, or keeps its weights on GPUs."""
        info = receiver.info()
        if info.staging != "none":
            raise ConfigError(
                "a dialect writes straight into live weights, so the engine must not have staging",
                hint="start the engine with --staging none",
            )
        if any(rank.device != "cpu" for rank in info.ranks):
            raise ConfigError("dialects need an engine on a CPU", hint="start the engine with --device cpu")
        self._receiver = receiver
        self._specs = {spec.name: spec for spec in info.specs}

    @property
    def tp_size(self) -> int:
        """Number of ranks of the engine."""
        return self._receiver.executor.tp_size

    def write(self, named: NamedTensors) -> None:
        """Writes whole tensors.  As in stock engines, earlier ones stay written if a later one does not fit.

        Raises:
            KeyError: The model has no such tensor.
            ValueError: The model's tensor has another shape.
            EngineFailure: A rank failed.
            Refused: A weightcast update is running.
        """
        good: list[tuple[str, torch.Tensor]] = []
        wrong: Exception | None = None
        for name, tensor in named:
            spec = self._specs.get(name)
            if spec is None:
                wrong = KeyError(name)
            elif spec.shape != tuple(tensor.shape):
                wrong = ValueError(f"{name} has shape {tuple(tensor.shape)}, the model's has {spec.shape}")
            if wrong is not None:
                break
            good.append((name, tensor))
        if good:
            self._write(good)
        if wrong is not None:
            raise wrong

    def _write(self, named: NamedTensors) -> None:
        layout = _lay_out(named)
        session = secrets.token_hex(16)
        opening = Open(
            session=session,
            owner=Owner(host="dialect", pid=os.getpid()),
            version=0,
            timeout_s=_LOAD_S,
            lease_s=_LOAD_S,
            pause="abort",
            verify="none",
            specs=tuple(self._specs.values()),
        )
        buffer = SharedBuffer(max(layout.size_bytes, 1), CPU)
        try:
            for slot, (_, tensor) in zip(layout.slots, named, strict=True):
                buffer.data[slot.offset_bytes : slot.end_bytes].copy_(tensor.contiguous().view(-1).view(torch.uint8))
            bucket = Announce(session=session, layout=layout, source=IpcSource(handles=(buffer.handle(),)))
            with self._receiver.between_updates():
                self._tell(opening)
                try:
                    self._tell(bucket)
                finally:
                    self._tell(Abort(session=session, reason="the tensors are written"))
        finally:
            buffer.close()

    def _tell(self, message: Message) -> None:
        for ack in self._receiver.executor.apply(message, timeout_s=_LOAD_S):
            if not ack.ok:
                raise EngineFailure(f"rank {ack.rank}: {ack.error}", ranks=(ack.rank,))


class ForeignGroups:
    """Named groups made as ``torch.distributed`` makes them, with one member for each rank of the engine."""

    def __init__(self, tp_size: int) -> None:
        self._tp_size = tp_size
        self._groups: dict[str, list[UpdateGroup]] = {}
        self._lock = threading.Lock()

    def __contains__(self, name: str) -> bool:
        return name in self._groups

    def join(self, name: str, *, host: str, port: int, first_rank: int, world_size: int, timeout_s: float) -> None:
        """Joins the trainer's group.

        Raises:
            GroupFailed, DeadlineExceeded: The trainer or another member did not join.
        """
        address = local_address_towards(host, port)

        def connect() -> dist.Store:
            try:
                return dist.TCPStore(
                    host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
                )
            except (RuntimeError, ValueError) as error:
                raise GroupFailed(f"cannot reach the rendezvous at {host}:{port}: {error}") from error

        def member(rank: int) -> UpdateGroup:
            return UpdateGroup(
                store=connect,
                name=name,
                token="",
                rank=first_rank + rank,
                world_size=world_size,
                device=CPU,
                address=address,
                timeout_s=timeout_s,
                meeting="torch",
            )

        with ThreadPoolExecutor(max_workers=self._tp_size) as pool:
            members = list(pool.map(member, range(self._tp_size)))
        with self._lock:
            self._groups[name] = members

    def receive(self, name: str, size_bytes: int, *, timeout_s: float) -> torch.Tensor:
        """Receives one broadcast on every member and returns it.

        Raises:
            GroupFailed, DeadlineExceeded: The trainer died, aborted or stopped answering.
            Refused: The members received different bytes.
        """
        members = self._groups[name]
        buffers = [torch.empty(size_bytes, dtype=torch.uint8) for _ in members]

        def receive(index: int) -> None:
            members[index].broadcast(buffers[index], what="a bucket", timeout_s=timeout_s)

        with ThreadPoolExecutor(max_workers=len(members)) as pool:
            list(pool.map(receive, range(len(members))))
        if any(not torch.equal(buffers[0], other) for other in buffers[1:]):
            raise Refused("the members of one group received different bytes")
        return buffers[0]

    def leave(self, name: str) -> bool:
        """Leaves a group; returns False if there is none of this name."""
        with self._lock:
            members = self._groups.pop(name, None)
        for member in members or ():
            member.close()
        return members is not None


def table(names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> list[TensorSpec]:
    """Combines three lists of equal length into specs.

    Raises:
        ValueError: The lengths differ, or a dtype or shape is invalid.
    """
    return [
        TensorSpec(name=name, dtype=dtype, shape=tuple(shape))
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True)
    ]


def cut(flat: torch.Tensor, specs: Sequence[TensorSpec]) -> NamedTensors:
    """Views flat bytes as consecutive tensors."""
    found: list[tuple[str, torch.Tensor]] = []
    start = 0
    for spec in specs:
        part = flat[start : start + spec.size_bytes]
        start += spec.size_bytes
        found.append((spec.name, part.clone().view(spec.torch_dtype).view(spec.shape)))
    return found


def _lay_out(named: NamedTensors) -> BucketLayout:
    slots: list[TensorSlot] = []
    end = 0
    for name, tensor in named:
        spec = TensorSpec.of(name, tensor)
        start = -(-end // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        slots.append(TensorSlot(spec=spec, offset_bytes=start, num_rows=spec.num_rows))
        end = start + spec.size_bytes
    return BucketLayout(index=0, slots=tuple(slots), size_bytes=end)
