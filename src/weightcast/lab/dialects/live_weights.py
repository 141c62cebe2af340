"""Shared parts of the dialects: process groups made by a stock engine's trainer, and writes into live weights.

The server's process acts for all ranks of the engine.  It joins a group once for each rank and opens shared memory for
them.  The ranks then map one buffer of the server on the host, and each keeps its slices.  Ranks on GPUs do so too: a
process cannot open a CUDA handle of its own, and one rank may live in the server's process.  Engines with staging are
not supported.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from weightcast.comm.ipc import SharedBuffer, device_of
from weightcast.comm.update_group import GroupFailed, UpdateGroup, backend_for, local_address_towards
from weightcast.errors import ConfigError, EngineFailure, Refused, WireError
from weightcast.lab.dialects.unpickled import dtype_named
from weightcast.receiver.session import SessionHandler
from weightcast.wire.bucket_sources import IpcSource
from weightcast.wire.layout import BucketLayout, TensorSlot, TensorSpec
from weightcast.wire.messages import Abort, Announce, Message, Open, Owner
from weightcast.wire.plans import UpdateTables

_CPU = torch.device("cpu")
_ALIGNMENT_BYTES = 64
_LOAD_S = 120.0

NamedTensorList = Sequence[tuple[str, torch.Tensor]]


class LiveWeights:
    """Writes tensors into an engine's live weights as they arrive.  Thread-safe."""

    def __init__(self, receiver: SessionHandler) -> None:
        """Raises ``ConfigError`` if the engine has staging, or GPUs that this process does not see."""
        info = receiver.info()
        if info.staging != "none":
            raise ConfigError(
                "a dialect writes straight into live weights, so the engine must not have staging",
                hint="start the engine with --staging none",
            )
        found = [device_of(rank.device) for rank in info.ranks]
        self.devices = tuple(device for device in found if device is not None)
        if len(self.devices) < len(found):
            unseen = next(rank for rank, device in zip(info.ranks, found, strict=True) if device is None)
            raise ConfigError(
                f"a dialect opens memory for all ranks, and this process does not see GPU {unseen.device} of rank "
                f"{unseen.rank}",
                hint="do not hide it with CUDA_VISIBLE_DEVICES",
            )
        self._receiver = receiver
        self._specs = {spec.name: spec for spec in info.specs}

    @property
    def device(self) -> torch.device:
        """The device of the first rank's weights."""
        return self.devices[0]

    @property
    def tp_size(self) -> int:
        """Number of ranks of the engine."""
        return self._receiver.executor.tp_size

    def write(self, named: NamedTensorList) -> None:
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

    def _write(self, named: NamedTensorList) -> None:
        layout = _lay_out(named)
        plan = UpdateTables(tuple(self._specs.values()), (layout,))
        session = secrets.token_hex(16)
        opening = Open(
            session=session,
            owner=Owner(host="dialect", pid=os.getpid()),
            version=0,
            timeout_s=_LOAD_S,
            lease_s=_LOAD_S,
            pause="abort",
            verify="none",
            plan=plan,
        )
        buffer = SharedBuffer(max(layout.size_bytes, 1), _CPU)
        try:
            for slot, (_, tensor) in zip(layout.slots, named, strict=True):
                buffer.data[slot.offset_bytes : slot.end_bytes].copy_(tensor.contiguous().view(-1).view(torch.uint8))
            bucket = Announce(session=session, plan=plan, bucket=0, source=IpcSource(handles=(buffer.handle(),)))
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

    def __init__(self, devices: Sequence[torch.device]) -> None:
        """Makes no group; ``devices`` has the device of each rank."""
        self._devices = tuple(devices)
        self.backend = backend_for(devices[0])
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
                device=self._devices[rank],
                address=address,
                timeout_s=timeout_s,
                meeting="torch",
            )

        with ThreadPoolExecutor(max_workers=len(self._devices)) as pool:
            members = list(pool.map(member, range(len(self._devices))))
        with self._lock:
            self._groups[name] = members

    def receive(self, name: str, size_bytes: int, *, timeout_s: float) -> torch.Tensor:
        """Receives one broadcast on every member and returns it.

        Raises:
            GroupFailed, DeadlineExceeded: The trainer died, aborted or stopped answering.
            Refused: The members received different bytes.
        """
        members = self._groups[name]
        buffers = [torch.empty(size_bytes, dtype=torch.uint8, device=device) for device in self._devices]

        def receive(index: int) -> None:
            members[index].broadcast(buffers[index], what="a bucket", timeout_s=timeout_s)

        with ThreadPoolExecutor(max_workers=len(members)) as pool:
            list(pool.map(receive, range(len(members))))
        if any(not torch.equal(buffers[0], other.to(buffers[0].device)) for other in buffers[1:]):
            raise Refused("the members of one group received different bytes")
        return buffers[0]

    def leave(self, name: str) -> bool:
        """Leaves a group; returns False if there is none of this name."""
        with self._lock:
            members = self._groups.pop(name, None)
        for member in members or ():
            member.close()
        return members is not None


def open_cuda(arguments: Sequence[Any], device: torch.device) -> torch.Tensor:
    """Opens GPU memory that ``torch.multiprocessing`` shares.

    Args:
        arguments: Those of ``rebuild_cuda_tensor``, as ``unpickled.read`` returns them.
        device: The GPU that the memory is on, as this process counts.

    Raises:
        WireError: The arguments have another form.
    """
    if len(arguments) != 15:
        raise WireError(f"rebuild_cuda_tensor needs 15 arguments, not {len(arguments)}")
    _, size, stride, offset, _, dtype, _, *rest = arguments
    typed: Any = torch.storage.TypedStorage
    rebuild: Any = rebuild_cuda_tensor
    with torch.cuda.device(device):
        return rebuild(torch.Tensor, size, stride, offset, typed, dtype_named(dtype), device.index, *rest)


def table(names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> list[TensorSpec]:
    """Combines three lists of equal length into specs.

    Raises:
        ValueError: The lengths differ, or a dtype or shape is invalid.
    """
    return [
        TensorSpec(name=name, dtype=dtype, shape=tuple(shape))
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True)
    ]


def cut(flat: torch.Tensor, specs: Sequence[TensorSpec]) -> NamedTensorList:
    """Views flat bytes as consecutive tensors."""
    found: list[tuple[str, torch.Tensor]] = []
    start = 0
    for spec in specs:
        part = flat[start : start + spec.size_bytes]
        start += spec.size_bytes
        found.append((spec.name, part.clone().view(spec.torch_dtype).view(spec.shape)))
    return found


def _lay_out(named: NamedTensorList) -> BucketLayout:
    slots: list[TensorSlot] = []
    end = 0
    for name, tensor in named:
        spec = TensorSpec.of(name, tensor)
        start = -(-end // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        slots.append(TensorSlot(spec=spec, offset_bytes=start, num_rows=spec.num_rows))
        end = start + spec.size_bytes
    return BucketLayout(index=0, slots=tuple(slots), size_bytes=end)
