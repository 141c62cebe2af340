"""Torch's watchdog ends no process because of a group of ours, and waits for no dump."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.helpers.clock import PATIENCE_S
from weightcast.comm import trainer_group, update_group
from weightcast.comm.watchdog import groups_that_end_nothing
from weightcast.errors import TrainerRankFailed

SETTINGS = (
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_DUMP_ON_TIMEOUT",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC",
    "TORCH_NCCL_BLOCKING_WAIT",
)


def settings() -> tuple[str | None, ...]:
    return tuple(os.environ.get(name) for name in SETTINGS)


class NcclOfTorch:
    """As much of ``ProcessGroupNCCL`` as reads the settings: this torch has none."""

    Options = SimpleNamespace

    def __init__(self, *_: object) -> None:
        self.settings = settings()


def make_group_of_both_worlds(monkeypatch: pytest.MonkeyPatch) -> tuple[str | None, ...]:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", NcclOfTorch, raising=False)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    made: Any = update_group._new_group(dist.HashStore(), 0, 1, torch.device("cuda", 0), "127.0.0.1", 1.0)
    return made.settings


def make_group_of_trainers(monkeypatch: pytest.MonkeyPatch) -> tuple[str | None, ...]:
    seen: list[tuple[str | None, ...]] = []

    def new_group(**_: object) -> None:
        seen.append(settings())
        raise RuntimeError("seen enough")

    monkeypatch.setattr(dist, "new_group", new_group)
    with pytest.raises(TrainerRankFailed, match="seen enough"):
        trainer_group._new_group("nccl", timedelta(seconds=1))
    return seen[0]


@pytest.fixture(params=[None, "2"])
def before(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[str | None, ...]:
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
        if request.param is not None:
            monkeypatch.setenv(name, request.param)
    return settings()


@pytest.mark.parametrize(("make", "blocks"), [(make_group_of_both_worlds, True), (make_group_of_trainers, False)])
def test_a_group_that_fails_neither_ends_nor_holds_up_the_process(
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[pytest.MonkeyPatch], tuple[str | None, ...]],
    blocks: bool,
    before: tuple[str | None, ...],
) -> None:
    assert make(monkeypatch) == ("0", "0", "0", "1" if blocks else before[-1])
    assert settings() == before  # for the groups of others in this process


def test_two_threads_leave_the_settings_as_they_were(before: tuple[str | None, ...]) -> None:
    inside, out = threading.Event(), threading.Event()

    def first() -> None:
        with groups_that_end_nothing(watched=False):
            inside.set()
            assert out.wait(PATIENCE_S)

    with ThreadPoolExecutor(1) as pool:
        one = pool.submit(first)
        assert inside.wait(PATIENCE_S)
        with groups_that_end_nothing(watched=True):
            out.set()
            one.result(PATIENCE_S)  # the one that came first leaves first
            assert settings() == ("0", "0", "0", before[-1])
    assert settings() == before
