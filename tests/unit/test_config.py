"""``UpdateConfig`` refuses wrong options before anything is opened."""

from __future__ import annotations

import math

import pytest

from weightcast.config import MAX_TIMEOUT_S, UpdateConfig
from weightcast.errors import ConfigError
from weightcast.update import sessions


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, math.nan])
def test_deadline_must_be_positive(timeout_s: float) -> None:
    with pytest.raises(ConfigError, match="a deadline is a positive number of seconds"):
        UpdateConfig(timeout_s=timeout_s)


@pytest.mark.parametrize("timeout_s", [MAX_TIMEOUT_S + 1, math.inf])
def test_deadline_over_six_hours_is_refused(timeout_s: float) -> None:
    with pytest.raises(ConfigError, match="a deadline is at most 21600 seconds") as caught:
        UpdateConfig(timeout_s=timeout_s)
    assert "each single wait" in (caught.value.hint or "")


def test_longest_deadline_fits_the_longest_lease() -> None:
    assert UpdateConfig(timeout_s=MAX_TIMEOUT_S).timeout_s * sessions.LEASE_DEADLINES == 86_400
