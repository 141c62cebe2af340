"""A rank whose engine polls without a pause, as SGLang's scheduler does when nobody asks it anything."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.messages import OPEN
from weightcast.plugins.switch_rank import SwitchRank
from weightcast.wire.answers import RankAck
from weightcast.wire.messages import Abort, Message, Open

RELEASES = 300


class Working:
    """A receiver that gives the interpreter away often, as torch calls and reads from sockets do."""

    def apply(self, message: Message) -> RankAck:
        for _ in range(RELEASES):
            time.sleep(0)
        return RankAck(rank=0, ok=True)


class PolledRank(SwitchRank):
    engine = "an engine that polls"

    def __init__(self) -> None:
        super().__init__(0, torch.device("cpu"))
        receiver: Any = Working()
        self.receiver = receiver

    def carry_out(self, do: Callable[[], None], session: Open, *, forward: bool) -> None:
        do()


@pytest.fixture
def interval() -> Iterator[None]:
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


def passes_during(rank: SwitchRank, message: Message) -> int:
    """Passes of a loop in this thread while another thread carries out a message."""
    thread = threading.Thread(target=rank.apply, args=(message,))
    thread.start()
    passes = 0
    while thread.is_alive():
        rank.yield_interpreter()
        passes += 1
    thread.join()
    return passes


@pytest.mark.usefixtures("interval")
def test_an_engine_that_polls_leaves_the_interpreter_to_an_update(tmp_path: Path) -> None:
    rank = PolledRank()
    rank.listen(str(tmp_path))
    # Without a yield, each release costs 5 ms, which is thousands of passes.
    assert passes_during(rank, OPEN) < 20 * RELEASES


@pytest.mark.usefixtures("interval")
def test_an_engine_without_an_update_does_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = PolledRank()
    rank.listen(str(tmp_path))
    slept: list[float] = []
    monkeypatch.setattr("weightcast.plugins.switch_rank.time.sleep", slept.append)
    rank.yield_interpreter()
    assert slept == []
    rank.apply(OPEN)
    slept.clear()
    rank.yield_interpreter()
    assert len(slept) == 1
    rank.apply(Abort(session=OPEN.session, reason="the trainer is gone"))
    slept.clear()
    rank.yield_interpreter()
    assert slept == []


class Crowded(Working):
    """A receiver on a device where a trainer has the memory for now."""

    room = False

    def wake(self) -> None:
        if not self.room:
            raise torch.OutOfMemoryError("Tried to allocate 2 GiB.\nSee the documentation.")


def test_update_without_room_for_staging_after_sleep_is_refused_and_the_next_one_tries_again() -> None:
    rank, receiver = PolledRank(), Crowded()
    rank.receiver = receiver  # type: ignore[assignment]
    rank.stage_again()
    ack = rank.apply(OPEN)
    assert (ack.ok, ack.refused) == (False, True)
    assert ack.error.endswith("since an engine that polls woke up: Tried to allocate 2 GiB.")
    receiver.room = True
    assert rank.apply(OPEN).ok
