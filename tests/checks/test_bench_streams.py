"""Gaps that clients see during an update are blamed on it only if they do not come without one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from benchmarks.engine_streams import Request, compare

STEP_S = 0.005
LENGTH_S = 0.06
UPDATES = [(at, at + LENGTH_S) for at in (2.0, 3.5, 5.0)]
DURING = (0.5, 6.5)


def streams(
    held: Sequence[tuple[float, float]] = (), *, joins: Sequence[float] = (), count: int = 8, end: float = 7.0
) -> list[Request]:
    """Requests that get a token in each step of 5 ms, but for steps that last longer.

    Args:
        held: When a step begins that lasts longer, and how much longer.
        joins: When all requests have ended, and others take their place.
    """
    ticks, at = [0.0], 0.0
    while at < end:
        at += STEP_S + sum(more for begin, more in held if at <= begin < at + STEP_S)
        ticks.append(at)
    edges = [-1.0, *joins, end + 1.0]
    return [
        Request(sent=max(begin, 0.0), times=[tick for tick in ticks if begin <= tick < stop], finish="length")
        for begin, stop in pairwise(edges)
        for _ in range(count)
    ]


def seen(requests: list[Request], **options: object) -> dict:
    return compare(requests, UPDATES, DURING, allowed_s=0.015, **options)  # type: ignore[arg-type]


def test_steps_that_all_last_the_same_are_nobody_s() -> None:
    found = seen(streams())
    assert found["step_s"] == pytest.approx(STEP_S, abs=1e-4)
    assert found["limit_s"] == pytest.approx(0.02, abs=1e-4)
    assert found["updates"]["count"] == found["beside"]["count"] == 3
    assert found["updates"]["max_s"] == found["all_beside"]["max_s"] == STEP_S
    assert found["ours"] == []


def test_a_gap_that_only_an_update_has_is_its_own() -> None:
    found = seen(streams([(3.53, 0.03)]))
    assert found["ours"] == [1]
    assert found["updates"]["longest_s"] == [STEP_S, pytest.approx(0.035, abs=1e-3), STEP_S]
    assert found["updates"]["median_s"] == STEP_S
    assert found["beside"]["max_s"] == STEP_S


def test_a_gap_within_what_is_allowed_is_not_blamed() -> None:
    assert seen(streams([(3.53, 0.014)]))["ours"] == []
    assert seen(streams([(3.53, 0.016)]))["ours"] == [1]


def test_a_gap_that_comes_without_an_update_as_well_is_not_the_update_s() -> None:
    assert seen(streams([(3.53, 0.03), (4.5, 0.031)]))["ours"] == []
    found = seen(streams([(3.53, 0.03), (4.5, 0.02)]))
    assert found["ours"] == [1]
    assert found["all_beside"]["max_s"] == pytest.approx(0.025, abs=1e-3)


def test_a_step_that_reads_prompts_excuses_only_windows_with_new_requests() -> None:
    prompts = [(1.2, 0.03), (2.02, 0.028)]
    found = seen(streams(prompts, joins=[1.21, 2.03]))
    assert found["updates"]["joined"] == [8, 0, 0]
    assert found["ours"] == []
    # The update in which nobody joined has no such excuse.
    assert seen(streams([*prompts, (5.02, 0.028)], joins=[1.21, 2.03]))["ours"] == [2]


def test_an_update_may_add_what_is_allowed_to_a_step_that_reads_prompts() -> None:
    def half_join(held: Sequence[tuple[float, float]], joins: Sequence[float]) -> list[Request]:
        return [*streams(held, joins=joins, count=4), *streams(held, count=4)]

    joins = [1.21, 2.03]
    found = seen(half_join([(1.2, 0.03), (2.02, 0.044)], joins))
    assert found["reading_limit_s"] == pytest.approx(STEP_S + 0.03 + 0.015, abs=1e-3)
    assert found["ours"] == []
    assert seen(half_join([(1.2, 0.03), (2.02, 0.047)], joins))["ours"] == [0]
    # Without such a window beside, nothing says how long a step that reads prompts is.
    assert seen(half_join([(2.02, 0.016)], joins[1:]))["ours"] == [0]


def test_the_last_message_of_an_update_comes_a_step_later() -> None:
    assert seen(streams([(2.0 + LENGTH_S - 0.001, 0.03)]))["ours"] == [0]


def test_other_work_on_the_device_is_no_window_without_an_update() -> None:
    held = [(3.53, 0.03), (4.5, 0.05)]
    assert seen(streams(held))["ours"] == []
    assert seen(streams(held), busy=[(4.4, 4.6)])["ours"] == [1]


def test_windows_without_an_update_touch_none_and_lie_where_all_streams_ran() -> None:
    # Long gaps at both ends, and around each update, where its effects may still be felt.
    held = [(0.2, 0.2), (2.15, 0.03), (6.7, 0.5)]
    found = seen(streams(held, end=9.0))
    assert found["all_beside"]["max_s"] == STEP_S
    assert found["all_beside"]["count"] > 50
    with pytest.raises(ValueError, match="no window"):
        compare(streams(), UPDATES, (1.99, 2.3), allowed_s=0.015)
