"""Looks come soon after one another at first, and never further apart than a share of what was waited for."""

from __future__ import annotations

import pytest

from weightcast.comm import polling


def test_what_is_seen_too_late_is_a_small_part_of_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(polling.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(polling.time, "sleep", sleep)
    looks = polling.Looks()
    while now[0] < 100.2:
        before = now[0]
        looks.sleep()
        assert 5e-5 <= pauses[-1] <= max((before - 100.0) / 16, 5e-5)
    assert max(pauses) == 2e-3
    assert len(pauses) < 300
