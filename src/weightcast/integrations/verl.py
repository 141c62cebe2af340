"""A checkpoint engine for verl: ``checkpoint_engine.backend=weightcast``.

verl moves weights from its actor workers to the workers beside its rollout servers and loads them there itself.  This
class is the way between: buckets over one process group (nccl on GPUs, gloo on CPUs), every wait under a deadline, and
every tensor proven received.  In verl's configuration::

    actor_rollout_ref.rollout.checkpoint_engine.backend=weightcast
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=weightcast.integrations.verl

``engine_kwargs.weightcast`` takes the keyword arguments of ``WeightcastCheckpointEngine``.
"""

# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportUntypedClassDecorator=false

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import ray
import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.workers.rollout.utils import ensure_async_iterator

from weightcast.comm.rendezvous import Rendezvous
from weightcast.comm.update_group import GroupFailed, UpdateGroup
from weightcast.errors import ConfigError
from weightcast.integrations.tensor_stream import StreamReceiver, StreamSender
from weightcast.update.arguments import bytes_of, wire_dtype_of


@dataclass(frozen=True)
class GroupMember:
    """The part of a worker in the group, as ``prepare`` reports it to ``build_topology``.

    Attributes:
        group: Token of the group that the worker is in; empty if it is in none that can be used.
        host: Address of the rendezvous; empty unless the worker is the master.
    """

    group: str = ""
    world_size: int = 0
    host: str = ""
    port: int = 0


@CheckpointEngineRegistry.register("weightcast")
class WeightcastCheckpointEngine(CheckpointEngine):
    """Sends buckets from actor rank 0 to every rollout worker.

    The group stays from update to update.  It is made again when its members change or one of them has failed.

    Args:
        bucket_size: Size of a bucket, in bytes; each worker uses two.
        is_master: True on actor rank 0.
        timeout_s: Deadline of each single wait, in seconds.
        wire_dtype: Dtype to which floating-point tensors are cast, e.g. ``"bfloat16"``; None keeps verl's own.
        rebuild_group: True makes a new group for every update.
        device: Device of the buckets; None takes the current GPU, or the CPU if there is none.
    """

    def __init__(
        self,
        bucket_size: int | str,
        *,
        is_master: bool = False,
        timeout_s: float = 120.0,
        wire_dtype: torch.dtype | str | None = None,
        rebuild_group: bool = False,
        device: str | None = None,
    ) -> None:
        self._bucket_bytes = bytes_of("bucket_size", bucket_size)
        self._is_master = is_master
        self._timeout_s = timeout_s
        self._wire_dtype = wire_dtype_of(wire_dtype)
        self._rebuild = rebuild_group
        self._device = device
        self._store: Rendezvous | None = None
        self._group: UpdateGroup | None = None
        self._token = ""
        self._sender: StreamSender | None = None
        self._receiver: StreamReceiver | None = None
        self._bystander = False

    def prepare(self) -> GroupMember:
        """Reports the group that this worker is in; the master opens a rendezvous if it has none."""
        if self._group is None or not self._group.alive:
            self._leave()
        if self._is_master and self._store is None:
            self._store = Rendezvous(host=ray.util.get_node_ip_address().strip("[]"), timeout_s=self._timeout_s)
        return GroupMember(
            group=self._token,
            world_size=self._group.world_size if self._group is not None else 0,
            host=self._store.host if self._store is not None else "",
            port=self._store.port if self._store is not None else 0,
        )

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[GroupMember]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Gives actor rank 0 rank 0, the rollout workers the ranks after it, and the other actor workers none."""
        master, world_size = metadata[0], 1 + rollout_world_size
        if not master.host:
            raise ConfigError(
                "actor rank 0 opened no rendezvous", hint="verl must create its checkpoint engine with is_master=True"
            )
        members = [master, *metadata[actor_wg_world_size:]]
        same = all(member.group == master.group and member.world_size == world_size for member in members)
        token = master.group if same and master.group else secrets.token_hex(16)

        def kwargs(ranks: list[int]) -> dict[str, list[Any]]:
            return {
                "rank": ranks,
                "world_size": [world_size] * len(ranks),
                "token": [token] * len(ranks),
                "master": [master] * len(ranks),
            }

        return kwargs([0, *[-1] * (actor_wg_world_size - 1)]), kwargs(list(range(1, world_size)))

    def init_process_group(self, rank: int, world_size: int, token: str, master: GroupMember) -> None:
        """Meets the other members, unless this worker is in the group already.

        Args:
            rank: This worker's rank; -1 if it takes no part.

        Raises:
            DeadlineExceeded, GroupFailed: A member did not come, or the rendezvous cannot be reached.
        """
        self._bystander = rank < 0
        if self._bystander or (token == self._token and self._group is not None and self._group.rank == rank):
            return
        self._leave()
        name, device = f"verl-{token[:8]}", self._bucket_device()
        if rank == 0:
            store = self._store
            if store is None:
                raise ConfigError("this worker has rank 0 and no rendezvous", hint="verl calls prepare() first")
            self._group = UpdateGroup(
                store=store.visit,
                name=name,
                token=token,
                rank=0,
                world_size=world_size,
                device=device,
                address=store.host,
                timeout_s=self._timeout_s,
            )
            self._sender = StreamSender(
                self._group, bucket_bytes=self._bucket_bytes, timeout_s=self._timeout_s, wire_dtype=self._wire_dtype
            )
        else:
            self._group = UpdateGroup.join(
                host=master.host,
                port=master.port,
                name=name,
                token=token,
                rank=rank,
                world_size=world_size,
                device=device,
                timeout_s=self._timeout_s,
            )
            self._receiver = StreamReceiver(self._group, timeout_s=self._timeout_s)
        self._token = token

    def finalize(self) -> None:
        """Frees the buckets, and the group if it is to be made again for each update."""
        for end in (self._sender, self._receiver):
            if end is not None:
                end.trim()
        if self._rebuild:
            self._leave()

    @torch.no_grad()
    async def send_weights(self, weights: Any, global_steps: int | None = None) -> dict[str, float]:
        """Sends the weights; on an actor worker without a rank, only reads them, since reading is collective.

        Returns:
            Metrics of the sender, empty elsewhere: bytes and seconds.

        Raises:
            ConfigError: A tensor cannot be sent.
            DeadlineExceeded, GroupFailed: A rollout worker failed or fell silent.
        """
        if self._bystander:
            async for _ in ensure_async_iterator(weights):
                pass
            return {}
        sender = self._sender
        if sender is None:
            raise GroupFailed("this worker is in no group", hint="verl calls init_process_group() first")
        started = time.monotonic()
        try:
            async for name, tensor in ensure_async_iterator(weights):
                sender.put(name, tensor)
            sent_bytes = sender.sent_bytes
            sender.end(global_steps)
        except BaseException as error:
            self._abort(error)
            raise
        return {"weightcast/bytes": float(sent_bytes), "weightcast/seconds": time.monotonic() - started}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Yields names and whole tensors, each a view that is valid until a tensor of the next bucket is asked for.

        The next bucket arrives while this one is loaded.

        Args:
            global_steps: Version that is expected; the sender's must be the same.

        Raises:
            VerificationFailed: Other bytes arrived than were sent.
            GroupFailed: The sender failed, or sent another version.
            DeadlineExceeded: The sender fell silent.
        """
        receiver = self._receiver
        if receiver is None:
            raise GroupFailed("this worker is in no group", hint="verl calls init_process_group() first")
        reading = asyncio.create_task(asyncio.to_thread(receiver.read))
        try:
            while (bucket := await reading) is not None:
                reading = asyncio.create_task(asyncio.to_thread(receiver.read))
                for name, tensor in bucket:
                    yield name, tensor
        except BaseException as error:  # also if the consumer stops early: the sender must not wait for it
            self._abort(error)
            await asyncio.gather(reading, return_exceptions=True)
            raise
        if receiver.version != global_steps:
            raise GroupFailed(f"the actor sent version {receiver.version}, and {global_steps} was expected")

    def _bucket_device(self) -> torch.device:
        if self._device is not None:
            return torch.device(self._device)
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")

    def _abort(self, error: BaseException) -> None:
        if self._group is not None:
            self._group.abort(f"{type(error).__name__}: {error}")

    def _leave(self) -> None:
        if self._group is not None:
            self._group.close()
        self._group = self._sender = self._receiver = None
        self._token = ""
