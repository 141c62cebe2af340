"""Launches in slices: all tiles once and in order, with a turn for others between two slices and nowhere else."""

from __future__ import annotations

import threading

import pytest

from weightcast.runtime import pace


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


@pytest.mark.parametrize(("count", "turns"), [(0, 0), (1, 0), (4, 0), (5, 1), (8, 1), (9, 2)])
def test_between_two_slices_others_get_their_turn(said: list[str], count: int, turns: int) -> None:
    found: list[int] = []
    with pace.paced(lambda: said.append("turn")):
        for part in pace.slices(count, 4):
            found += range(count)[part]
            said.append("slice")
    assert found == list(range(count))
    assert said.count("turn") == turns
    assert said == (["slice", *["waited", "turn", "slice"] * turns] if count else [])


def test_without_a_pace_all_comes_at_once(said: list[str]) -> None:
    assert list(pace.slices(9, 4)) == [slice(0, 9)]
    with pace.paced(lambda: said.append("turn")):
        elsewhere: list[slice] = []
        thread = threading.Thread(target=lambda: elsewhere.extend(pace.slices(9, 4)))
        thread.start()
        thread.join()
    assert elsewhere == [slice(0, 9)]  # of this thread alone
    assert list(pace.slices(9, 4)) == [slice(0, 9)]
    assert said == []
