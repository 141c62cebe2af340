"""Counting rows: update after update, whatever comes twice, late or not at all is noticed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightcast.errors import Refused
from weightcast.receiver.arrivals import Arrivals, rows_of
from weightcast.wire.layout import Packing, TensorSpec, plan_buckets

SPECS = tuple(TensorSpec(name=f"w{number}", dtype="uint8", shape=(number + 1, 8)) for number in range(6))


def plans_of(bucket_bytes: int):
    layouts = plan_buckets(SPECS, bucket_bytes=bucket_bytes, packing=Packing(alignment_bytes=1))
    return [(layout, rows_of(layout, ())) for layout in layouts]


def arrive(arrivals: Arrivals, plan) -> None:
    layout, rows = plan
    if not arrivals.take_all(rows):
        for slot in layout.slots:
            arrivals.take(slot)


@given(
    cuts=st.lists(st.sampled_from([32, 48, 64, 1000]), min_size=1, max_size=4),
    orders=st.lists(st.lists(st.integers(0, 8), max_size=9), min_size=1, max_size=5),
)
def test_every_update_counts_as_the_first_one_does(cuts, orders):
    """The same arrivals, counted by an object that has seen complete updates and by a new one."""
    plans = {cut: plans_of(cut) for cut in cuts}
    old = Arrivals()
    for number, order in enumerate(orders):
        some = plans[cuts[number % len(cuts)]]
        for plan in [None, *some]:  # a complete update before each
            old.begin() if plan is None else arrive(old, plan)
        assert old.missing(SPECS) == []
        new = Arrivals()
        old.begin()
        for index in order:
            plan = some[index % len(some)]
            outcomes = []
            for arrivals in (old, new):
                try:
                    outcomes.append(arrive(arrivals, plan))
                except Refused as error:
                    outcomes.append(str(error))
            assert outcomes[0] == outcomes[1]
            assert old.missing(SPECS) == new.missing(SPECS)


@pytest.mark.parametrize("again", [0, 1])
def test_a_bucket_that_comes_twice_in_a_later_update_is_refused(again):
    arrivals, plans = Arrivals(), plans_of(48)
    for _ in range(2):
        arrivals.begin()
        for plan in plans:
            arrive(arrivals, plan)
        assert arrivals.missing(SPECS) == []
    arrivals.begin()
    arrive(arrivals, plans[0])
    arrive(arrivals, plans[1])
    with pytest.raises(Refused, match="arrived after"):
        arrive(arrivals, plans[again])
