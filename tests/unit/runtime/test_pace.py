"""Launches in slices: all tiles once and in order, with a turn for others between two slices and nowhere else."""

from __future__ import annotations

import threading

import pytest
import torch

from weightcast.runtime import pace
from weightcast.runtime.steps import StepCounter


class Stream:
    def __init__(self, said: list[str]) -> None:
        self.said = said

    def synchronize(self) -> None:
        self.said.append("waited")


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr(pace.torch.cuda, "current_stream", lambda: Stream(said))
    return said


class TurnSteps(StepCounter):
    """A step begins when it gets its turn."""

    def __init__(self, said: list[str], *, busy: bool) -> None:
        super().__init__(torch.device("cpu"))
        self.said, self.busy = said, busy

    def generates(self) -> bool:
        return self.busy

    def let_one_begin(self) -> bool:
        self.said.append("turn")
        with self.one():
            pass
        return True


class Engine:
    """It begins a step when it gets its turn."""

    def __init__(self, said: list[str], *, generates: bool = True, share: float = 1.0) -> None:
        self.said = said
        self.steps = TurnSteps(said, busy=generates)
        self.pace = pace.Pace(self.steps, share=share)

    def launch(self, count: int, size: int = 4) -> None:
        """A launch of so many tiles, of which ``size`` may come between two steps."""
        found: list[int] = []
        with pace.paced(self.pace):
            for part in pace.slices(count, size):
                found += range(count)[part]
                self.said.append(f"{part.stop - part.start}")
        assert found == list(range(count))


@pytest.mark.parametrize(("count", "slices"), [(0, ""), (1, "1"), (4, "4"), (5, "4 1"), (8, "4 4"), (9, "4 4 1")])
def test_between_two_slices_others_get_their_turn(said: list[str], count: int, slices: str) -> None:
    Engine(said).launch(count)
    assert " ".join(said) == slices.replace(" ", " waited turn ")


def test_while_nothing_is_generated_all_comes_at_once(said: list[str]) -> None:
    engine = Engine(said, generates=False)
    engine.launch(9)
    engine.steps.busy = True
    engine.launch(9)
    assert " ".join(said) == "9 4 waited turn 4 waited turn 1"


def test_an_engine_with_short_steps_lets_less_come_between_two(said: list[str]) -> None:
    Engine(said, share=0.25).launch(9, 8)
    assert " ".join(said) == "2 waited turn 2 waited turn 2 waited turn 2 waited turn 1"


def test_small_launches_share_what_comes_between_two_steps(said: list[str]) -> None:
    engine = Engine(said)
    for count in (2, 1, 3, 2):
        engine.launch(count)
    assert " ".join(said) == "2 1 1 waited turn 2 2"


def test_launches_of_other_kinds_share_it_too(said: list[str]) -> None:
    engine = Engine(said)
    engine.launch(1)
    engine.launch(800, 1000)  # three quarters of what may come are left
    engine.launch(4)
    assert " ".join(said) == "1 750 waited turn 50 4"


def test_a_step_that_has_begun_by_itself_is_not_waited_for(said: list[str]) -> None:
    engine = Engine(said)
    engine.launch(4)
    with engine.steps.one():
        pass
    engine.launch(3)
    engine.launch(3)
    assert " ".join(said) == "4 3 1 waited turn 2"


@pytest.mark.parametrize("begun", [0, 1, 2])
def test_after_a_standstill_the_next_step_is_left_alone(said: list[str], begun: int) -> None:
    engine = Engine(said)
    engine.launch(3)
    engine.pace.restart()
    for _ in range(begun):
        with engine.steps.one():
            pass
    engine.launch(5)
    assert " ".join(said) == f"3 {['waited turn turn ', 'waited turn ', ''][begun]}4 waited turn 1"


def test_a_step_that_does_not_come_is_waited_for_before_each_slice(
    said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(said)
    monkeypatch.setattr(engine.steps, "let_one_begin", lambda: False)
    engine.pace.restart()
    engine.launch(9)
    assert " ".join(said) == "waited 4 waited 4 waited 1"


def test_without_a_pace_all_comes_at_once(said: list[str]) -> None:
    assert list(pace.slices(9, 4)) == [slice(0, 9)]
    with pace.paced(Engine(said).pace):
        elsewhere: list[slice] = []
        thread = threading.Thread(target=lambda: elsewhere.extend(pace.slices(9, 4)))
        thread.start()
        thread.join()
    assert elsewhere == [slice(0, 9)]  # of this thread alone
    assert list(pace.slices(9, 4)) == [slice(0, 9)]
    assert said == []
