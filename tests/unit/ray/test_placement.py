"""Which rank gets which bundle: the caller's order, or that of addresses; every mistake by name."""

from __future__ import annotations

import pickle

import pytest

from weightcast.errors import ConfigError, EngineFailure, TargetRejected, UpdateFailed
from weightcast.ray.bundles import by_address, choose_bundles
from weightcast.ray.executor import EnginePlace, parse_place
from weightcast.report import TargetReport, UpdateReport

CPU, GPU = {"CPU": 1.0}, {"CPU": 1.0, "GPU": 1.0}


def choose(specs, count, indices=None, order=None, resource="GPU", share=1.0):
    order = range(len(specs)) if order is None else order
    return choose_bundles(specs, count, indices=indices, order=order, resource=resource, share=share)


def test_the_callers_order_stays_the_callers():
    assert choose([GPU] * 4, 3, [2, 0, 3], order=[3, 2, 1, 0]) == (2, 0, 3)


def test_without_one_the_first_that_fit_in_the_order_of_addresses():
    assert choose([GPU, CPU, GPU, GPU], 2, order=[3, 1, 0, 2]) == (3, 0)
    assert choose([GPU, CPU, GPU, GPU], 2, order=[3, 1, 0, 2], resource="CPU") == (3, 1)


def test_a_share_is_enough_where_a_share_is_asked_for():
    half = {"GPU": 0.5}
    assert choose([half, half], 2, share=0.5) == (0, 1)
    with pytest.raises(ConfigError, match="2 ranks need a bundle with 1 GPU each, and 0 of 2 have that"):
        choose([half, half], 2)


@pytest.mark.parametrize(
    ("indices", "says"),
    [
        ([0, 4], "bundle index 4 for rank 1: the group has bundles 0 to 3"),
        ([-1, 0], "bundle index -1 for rank 0"),
        ([2, 2], "bundle index 2 is given for rank 0 and for rank 1"),
        ([0, 1], "bundle 1 for rank 1 holds {'CPU': 1.0}, and a rank takes 1 GPU"),
        ([0], "1 bundle indices for 2 ranks"),
        ([True, 0], "bundle index True"),
    ],
)
def test_a_wrong_index_is_named(indices, says):
    with pytest.raises(ConfigError) as caught:
        choose([GPU, CPU, GPU, GPU], 2, indices)
    assert says in str(caught.value)


def test_addresses_are_sorted_as_numbers_and_neighbours_keep_their_order():
    addresses = ["10.0.0.10", "node-b", "10.0.0.9", "10.0.0.10", "fd00::1", "10.0.0.9"]
    assert by_address(addresses) == [2, 5, 0, 3, 4, 1]


def test_bundles_on_the_command_line():
    assert parse_place(None, None) == EnginePlace()
    assert parse_place("jobs/mine", "3,1") == EnginePlace(group="mine", namespace="jobs", indices=(3, 1))
    with pytest.raises(ConfigError, match="need the placement group"):
        parse_place(None, "1,0")


def test_errors_cross_a_process_boundary_whole():
    report = UpdateReport(
        version=3,
        transport="ipc",
        bytes=1,
        buckets=1,
        seconds=1.0,
        phases={},
        peak_extra_bytes=0,
        digest=None,
        targets=(TargetReport(url="http://a", engine="x", status="quarantined"),),
    )
    for error in (
        UpdateFailed("failed", report=report, hint="look"),
        TargetRejected("no", url="http://a", half_updated=True, status=409),
        EngineFailure("rank 1 is gone", ranks=[1], hint="restart the engine"),
    ):
        twin = pickle.loads(pickle.dumps(error))
        assert type(twin) is type(error)
        assert str(twin) == str(error)
        assert vars(twin) == vars(error)
    assert twin.ranks == (1,)
    assert twin.__notes__ == ["hint: restart the engine"]
