"""Looks come soon after one another at first, and never further apart than a share of what was waited for."""

from __future__ import annotations

import pytest

from weightcast.runtime import deadline


def test_polling_adds_a_small_share_to_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(deadline.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(deadline.time, "sleep", sleep)
    sleeps = deadline.Backoff()
    while now[0] < 100.2:
        before = now[0]
        sleeps.sleep()
        assert 5e-5 <= pauses[-1] <= max((before - 100.0) / 16, 5e-5)
    assert max(pauses) == 2e-3
    assert len(pauses) < 300
