"""An engine's steps, as work beside them sees them: a wait for the next one, and whether there will be one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from weightcast.runtime import steps as steps_of
from weightcast.runtime.steps import Steps


class Clock:
    """Time that passes while somebody sleeps; ``at`` has what happens when."""

    def __init__(self) -> None:
        self.now = 100.0
        self.at: list[tuple[float, Steps]] = []

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        while self.at and self.at[0][0] <= self.now:
            self.at.pop(0)[1].begin()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(steps_of, "time", SimpleNamespace(monotonic=lambda: clock.now, sleep=clock.sleep))
    return clock


def test_the_next_step_of_an_engine_that_generates_is_waited_for(clock: Clock) -> None:
    steps = Steps(torch.device("cpu"))
    clock.at = [(100.004, steps)]
    assert not steps.let_one_begin()  # it has generated nothing yet
    assert clock.now == 100
    steps.begin()
    assert steps.let_one_begin()
    assert clock.now == pytest.approx(100.004, abs=0.0005)
    assert not steps.let_one_begin()  # no step comes
    assert clock.now == pytest.approx(100.034, abs=0.001)
    clock.now += 1
    assert not steps.let_one_begin()  # it has stopped
    assert clock.now == pytest.approx(101.034, abs=0.001)


@pytest.fixture
def on_a_gpu(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Steps:
    """Steps on a stream that is busy until 100.3."""
    stream = SimpleNamespace(query=lambda: clock.now >= 100.3)
    monkeypatch.setattr(steps_of.torch.cuda, "current_stream", lambda device: stream)
    return Steps(torch.device("cuda"))


def test_an_engine_in_a_long_step_generates(clock: Clock, on_a_gpu: Steps) -> None:
    assert not on_a_gpu.generates()
    on_a_gpu.begin()
    for at, expected in ((100.1, True), (100.29, True), (100.31, True), (100.35, False)):
        clock.now = at
        assert on_a_gpu.generates() == expected, at


@pytest.mark.parametrize("goes_on", [True, False])
def test_what_runs_after_a_standstill_is_a_step_only_where_the_engine_goes_on(
    clock: Clock, on_a_gpu: Steps, goes_on: bool
) -> None:
    on_a_gpu.begin()
    on_a_gpu.stand_still(goes_on=goes_on)
    assert on_a_gpu.generates() == goes_on
    clock.now = 100.1
    assert on_a_gpu.generates() == goes_on
