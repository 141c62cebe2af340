"""Torch's watchdog ends no process because of a group of ours."""

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

from tests.clock import PATIENCE_S
from weightcast.comm import trainer_group, update_group
from weightcast.comm.watchdog import groups_that_end_nothing
from weightcast.errors import TrainerRankFailed

SETTING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class NcclOfTorch:
    """As much of ``ProcessGroupNCCL`` as reads the setting: this torch has none."""

    Options = SimpleNamespace

    def __init__(self, *_: object) -> None:
        self.handling = os.environ.get(SETTING)


def make_group_of_both_worlds(monkeypatch: pytest.MonkeyPatch) -> str | None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", NcclOfTorch, raising=False)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    made: Any = update_group._new_group(dist.HashStore(), 0, 1, torch.device("cuda", 0), "127.0.0.1", 1.0)
    return made.handling


def make_group_of_trainers(monkeypatch: pytest.MonkeyPatch) -> str | None:
    seen: list[str | None] = []

    def new_group(**_: object) -> None:
        seen.append(os.environ.get(SETTING))
        raise RuntimeError("seen enough")

    monkeypatch.setattr(dist, "new_group", new_group)
    with pytest.raises(TrainerRankFailed, match="seen enough"):
        trainer_group._new_group("nccl", timedelta(seconds=1))
    return seen[0]


@pytest.mark.parametrize("make", [make_group_of_both_worlds, make_group_of_trainers])
@pytest.mark.parametrize("before", [None, "1"])
def test_a_group_that_fails_does_not_end_the_process(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[pytest.MonkeyPatch], str | None], before: str | None
) -> None:
    if before is None:
        monkeypatch.delenv(SETTING, raising=False)
    else:
        monkeypatch.setenv(SETTING, before)
    assert make(monkeypatch) == "0"
    assert os.environ.get(SETTING) == before  # for the groups of others in this process


@pytest.mark.parametrize("before", [None, "1"])
def test_two_threads_leave_the_setting_as_it_was(monkeypatch: pytest.MonkeyPatch, before: str | None) -> None:
    monkeypatch.delenv(SETTING, raising=False)
    if before is not None:
        monkeypatch.setenv(SETTING, before)
    inside, out = threading.Event(), threading.Event()

    def first() -> None:
        with groups_that_end_nothing():
            inside.set()
            assert out.wait(PATIENCE_S)

    with ThreadPoolExecutor(1) as pool:
        one = pool.submit(first)
        assert inside.wait(PATIENCE_S)
        with groups_that_end_nothing():
            out.set()
            one.result(PATIENCE_S)  # the one that came first leaves first
            assert os.environ[SETTING] == "0"
    assert os.environ.get(SETTING) == before
