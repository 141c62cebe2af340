"""An engine's steps, as work beside them sees them: a wait for the next one, and whether there will be one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from weightcast.runtime import steps as steps_of
from weightcast.runtime.steps import StepCounter


class Clock:
    """Time that passes while somebody sleeps; ``at`` has what happens when."""

    def __init__(self) -> None:
        self.now = 100.0
        self.at: list[tuple[float, StepCounter]] = []

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        while self.at and self.at[0][0] <= self.now:
            with self.at.pop(0)[1].one():
                pass


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(steps_of, "time", SimpleNamespace(monotonic=lambda: clock.now, sleep=clock.sleep))
    return clock


def test_the_next_step_of_an_engine_that_generates_is_waited_for(clock: Clock) -> None:
    steps = StepCounter(torch.device("cpu"))
    clock.at = [(100.004, steps)]
    assert not steps.let_one_begin()  # it has generated nothing yet
    assert clock.now == 100
    with steps.one():
        pass
    assert steps.let_one_begin()
    assert clock.now == pytest.approx(100.004, abs=0.0005)
    assert not steps.let_one_begin()  # no step comes
    assert clock.now == pytest.approx(100.034, abs=0.001)
    clock.now += 1
    assert not steps.let_one_begin()  # it has stopped
    assert clock.now == pytest.approx(101.034, abs=0.001)


@pytest.fixture
def on_a_gpu(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> StepCounter:
    """Steps whose work on a GPU ends at 100.3."""

    class Event:
        def record(self, stream: object) -> None:
            pass

        def query(self) -> bool:
            return clock.now >= 100.3

    monkeypatch.setattr(steps_of.torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(steps_of.torch.cuda, "Event", Event)
    return StepCounter(torch.device("cuda"))


def test_an_engine_in_a_long_step_generates(clock: Clock, on_a_gpu: StepCounter) -> None:
    assert not on_a_gpu.generates()
    with on_a_gpu.one():
        pass
    for at, expected in ((100.1, True), (100.29, True), (100.31, True), (100.35, False)):
        clock.now = at
        assert on_a_gpu.generates() == expected, at


def test_an_engine_that_takes_long_to_launch_a_step_generates(clock: Clock, on_a_gpu: StepCounter) -> None:
    clock.now = 200
    with on_a_gpu.one():
        clock.now = 201
        assert on_a_gpu.generates()
    clock.now = 201.1
    assert not on_a_gpu.generates()


def test_a_step_that_fails_is_over(clock: Clock, on_a_gpu: StepCounter) -> None:
    with pytest.raises(RuntimeError, match="out of memory"), on_a_gpu.one():
        raise RuntimeError("out of memory")
    clock.now = 100.1
    assert not on_a_gpu.generates()


@pytest.mark.parametrize("goes_on", [True, False])
def test_an_engine_that_stands_still_generates_only_if_it_goes_on(
    clock: Clock, on_a_gpu: StepCounter, goes_on: bool
) -> None:
    with on_a_gpu.one():
        pass
    on_a_gpu.stand_still(goes_on=goes_on)
    assert on_a_gpu.generates() == goes_on
    clock.now = 100.1  # its exchange of contents may still run, which is no step
    assert not on_a_gpu.generates()
