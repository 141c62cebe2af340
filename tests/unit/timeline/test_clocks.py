"""Clocks of other hosts are aligned, and the stated error is never smaller than the true one."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weightcast.timeline.clocks import Alignment, RoundTrip, align

# A busy machine makes a strategy slow, which says nothing about it.
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
delays = st.floats(min_value=0.0, max_value=0.2)


@st.composite
def trips(draw, offset):
    """Round trips whose ways there and back take any time; ``offset`` leads from the other clock to this one."""
    found, now = [], draw(st.floats(min_value=0.0, max_value=1e5))
    for _ in range(draw(st.integers(min_value=1, max_value=8))):
        there, work, back = draw(delays), draw(delays), draw(delays)
        heard = now + there
        found.append(RoundTrip(now, heard - offset, heard + work - offset, now + there + work + back))
        now += there + work + back + draw(delays)
    return found


@patient
@given(data=st.data(), offset=st.floats(min_value=1.0, max_value=1e6) | st.floats(min_value=-1e6, max_value=-1.0))
def test_error_is_never_smaller_than_the_true_one(data, offset):
    found = align(data.draw(trips(offset)))
    assert found is not None
    assert abs(found.offset_s - offset) <= found.error_s + 1e-6


@patient
@given(data=st.data())
def test_processes_of_one_host_need_no_alignment(data):
    assert align(data.draw(trips(0.0))) == Alignment(0.0, 0.0)


def test_more_round_trips_make_the_error_smaller():
    slow_there = RoundTrip(10.0, 110.5, 110.6, 10.6)
    slow_back = RoundTrip(20.0, 120.0, 120.1, 20.6)
    one, both = align([slow_there]), align([slow_there, slow_back])
    assert one is not None
    assert both is not None
    assert one.error_s == pytest.approx(0.25)
    assert both.error_s == pytest.approx(0.0, abs=1e-9)
    assert both.offset_s == pytest.approx(-100.0)


def test_clocks_that_drift_apart_are_told_by_a_larger_error():
    early = RoundTrip(0.0, 100.0, 100.0, 0.001)  # the offset is -100 s
    late = RoundTrip(1000.0, 1100.05, 1100.05, 1000.001)  # 50 ms later on the same clock
    found = align([early, late])
    assert found is not None
    for trip in (early, late):
        assert trip.low - found.error_s <= found.offset_s <= trip.high + found.error_s
    assert 0.04 < found.error_s < 0.06


def test_without_a_round_trip_there_is_no_alignment():
    assert align([]) is None


def test_alignments_add_up_along_the_way():
    assert Alignment(1.0, 0.1).after(Alignment(2.0, 0.2)) == Alignment(3.0, pytest.approx(0.3))
