"""One rank of a trainer that keeps training and updating the same engines; functions for ``tests.helpers.ranks.Ranks``.

``begin`` comes first and ``end`` last; in between the model and the updater live in the rank's process.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from tests.helpers.harness import on_every_rank
from weightcast import Target, WeightUpdater
from weightcast.comm.group_moves import Move
from weightcast.comm.update_group import UpdateGroup
from weightcast.errors import TrainerRankFailed
from weightcast.lab.connect import connect as connect_in_lab


class Training:
    """A model under FSDP2, its optimizer, and the updater of some engines.

    Attributes:
        sent: Bytes of the messages that this rank has sent to engine ranks since the last call began.
        strike: Called once the third bucket of an update is on its way.
    """

    def __init__(self, folder: str, mesh_shape: tuple[int, ...]) -> None:
        torch.set_num_threads(1)
        self.folder = Path(folder)
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard")[-len(mesh_shape) :])
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.updater: WeightUpdater | None = None
        self.sent = 0
        self.strike: Callable[[], object] | None = None

    def connect(self, urls: Sequence[str], options: dict[str, Any]) -> None:
        settings = {"bucket_bytes": 1 << 16, "timeout_s": 120.0, "on_failure": "quarantine"} | options
        if self.updater is not None:
            self.updater.close()
        self.updater = connect_in_lab(
            self.model, [Target(url) for url in urls], transport="direct", progress=self._progress, **settings
        )

    def _progress(self, done: int, total: int) -> None:
        if self.strike is not None and 3 <= done < total:
            strike, self.strike = self.strike, None
            strike()


_training: Training | None = None
_start_moves = UpdateGroup.start_moves


def _counting(self: UpdateGroup, sends: Sequence[Move], receives: Sequence[Move] = ()) -> Any:
    training().sent += sum(move.data.numel() for move in sends)
    return _start_moves(self, sends, receives)


def training() -> Training:
    assert _training is not None, "begin() comes first"
    return _training


def begin(folder: str, mesh_shape: tuple[int, ...]) -> None:
    """Loads a checkpoint, sharded over a mesh of all ranks; a first dimension of two is replicas."""
    global _training
    _training = Training(folder, mesh_shape)
    UpdateGroup.start_moves = _counting


def connect(urls: list[str], options: dict[str, Any]) -> None:
    """Connects to engines by ``direct``, instead of those before."""
    training().connect(urls, options)


def train(save_to: str) -> None:
    """Takes a step of training, and saves the whole weights as a checkpoint."""
    held = training()
    tokens = torch.tensor([[5, 17, 3, 29, 300, 44]])
    held.model(tokens, labels=tokens).loss.backward()
    held.optimizer.step()
    held.optimizer.zero_grad()
    whole = {name: tensor.full_tensor().detach() for name, tensor in held.model.named_parameters()}
    if dist.get_rank() == 0:
        shutil.copytree(held.folder, save_to)
        save_file(whole, Path(save_to) / "model.safetensors", metadata={"format": "pt"})
    dist.barrier()


def update(version: int, strike: Callable[[], object] | None = None) -> tuple[str, int]:
    """The report of one update as JSON, and the bytes that this rank sent to engine ranks.

    ``strike`` is called on the head, once the third bucket is on its way.
    """
    held = training()
    assert held.updater is not None
    held.sent = 0
    held.strike = strike if dist.get_rank() == 0 else None
    report = on_every_rank(held.updater.update(version=version))
    assert held.strike is None, "the update had too few buckets"
    return report, held.sent


def failed_update(version: int, strike: Callable[[], object]) -> str:
    """The error of an update that loses a trainer rank."""
    with pytest.raises(TrainerRankFailed) as caught:
        update(version, strike)
    return str(caught.value)


def end() -> None:
    """Closes the updater."""
    global _training
    held, _training = training(), None
    UpdateGroup.start_moves = _start_moves
    if held.updater is not None:
        held.updater.close()
