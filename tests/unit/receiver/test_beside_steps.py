"""A read-back of the reference engine lets its steps begin, if it goes on before its weights are proven."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers.messages import OPEN
from weightcast.receiver.beside_steps import BesideSteps
from weightcast.runtime import pace
from weightcast.runtime.steps import StepCounter
from weightcast.wire.answers import RankAck
from weightcast.wire.messages import Commit, Message, Readback


class Reading:
    """A receiver that reads weights back in two slices."""

    device = torch.device("cpu")

    def __init__(self, said: list[str]) -> None:
        self.said = said

    def apply(self, message: Message) -> RankAck:
        if isinstance(message, Readback):
            for part in pace.slices(8, 16):
                self.said.append(f"slice {part.start}")
        return RankAck(rank=0, ok=True)


class Turns(StepCounter):
    """A step begins when it is waited for."""

    def __init__(self, said: list[str]) -> None:
        super().__init__(torch.device("cpu"))
        self.said = said

    def let_one_begin(self) -> bool:
        self.said.append("step")
        with self.one():
            pass
        return True


@pytest.mark.parametrize("running", [True, False])
def test_no_step_is_waited_for_while_the_engine_is_paused_until_its_proof(
    monkeypatch: pytest.MonkeyPatch, running: bool
) -> None:
    monkeypatch.setattr(pace.torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: None))
    said: list[str] = []
    steps = Turns(said)
    receiver: Any = Reading(said)
    beside = BesideSteps(receiver, steps)
    if running:
        with steps.one():
            pass
    beside.apply(Commit(session=OPEN.session))
    beside.apply(Readback())
    assert said == ["slice 0"]
