"""Remarks on rates that are far below those of earlier updates."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from weightcast.report import LegReport
from weightcast.transports.usual_rates import UsualRates

LEG = LegReport(ranks=(0, 1), by="group", trainers=(0,), bytes=4 << 30)
USUAL = [9.0, 1.0, 1.0, 1.1]  # the first one opens connections


def remarks(seconds: Sequence[float], leg: LegReport = LEG, *, rates: UsualRates | None = None) -> list[str]:
    rates = rates or UsualRates()
    return [rates.look("http://a", [replace(leg, seconds=one)], "these") for one in seconds]


def test_a_low_rate_names_the_leg_both_rates_and_what_to_look_at(caplog) -> None:
    *quiet, low, other = remarks([*USUAL, 2.5, 1.2])
    assert (quiet, other) == ([""] * 4, "")
    for words in (str(replace(LEG, seconds=2.5)), "1.72 GB/s, and usually at 4.29 GB/s", "3 updates", "the network"):
        assert words in low
    assert [record.message for record in caplog.records] == [f"http://a: {low}"]


def test_a_rate_that_stays_low_is_logged_once_and_becomes_the_usual_one(caplog) -> None:
    found = remarks([*USUAL, *[2.5] * 20])
    assert found[4]
    assert found[5]
    assert not found[-1]
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("seconds", "leg"),
    [
        ([1.0, 1.0, 1.0, 9.0], LEG),  # too few to compare with
        ([9.0, 9.0, 9.0, 9.0, 1.0], LEG),
        ([*USUAL, 1.9], LEG),
        ([9.0, 0.01, 0.01, 0.01, 0.2], LEG),  # a fraction of a second
        ([*USUAL, 9.0], replace(LEG, bytes=1 << 20)),
    ],
)
def test_updates_that_say_little_are_no_warning(seconds, leg) -> None:
    assert not any(remarks(seconds, leg))


def test_rates_with_other_targets_or_other_legs_are_not_compared() -> None:
    rates = UsualRates()
    assert not any(remarks(USUAL, rates=rates))
    assert not rates.look("http://a", [replace(LEG, seconds=9.0)], "others")
    assert not any(remarks(USUAL, rates=rates))
    assert not any(remarks([9.0, 9.0], replace(LEG, by="buffer"), rates=rates))
