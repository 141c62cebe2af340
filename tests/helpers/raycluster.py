"""Small Ray clusters on this machine, for the tests of one module.  CPUs are only counted, however many there are."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest
import ray
from ray.cluster_utils import Cluster

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# Ray would end our actors for the memory that others use.
os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
# Before Ray starts: its processes inherit it.  An environment for actors alone would make Ray throw its idle ones away.
_PATH = os.pathsep.join([os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])])

STORE_BYTES = 128 << 20
_QUIET = {"log_to_driver": False, "logging_level": "error"}
# Addresses of this machine's loopback network are as good as those of three machines, and sort otherwise as text.
HEAD, LOW, HIGH = "127.0.0.9", "127.0.0.2", "127.0.0.10"
_STARTS = 4
_Made = TypeVar("_Made")


def _patiently(start: Callable[[], _Made]) -> _Made:
    """Starts Ray, which gives its own processes only 30 s; where others have the CPUs, one start may not do."""
    for left in reversed(range(_STARTS)):
        try:
            return start()
        except Exception as error:  # Ray has no class of its own for it
            if not left or "timed out during startup" not in str(error):
                raise
        _shut_down()  # when the error is gone, which keeps processes of the start
    raise AssertionError


def _shut_down(several: Cluster | None = None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # Ray leaves processes that it has told to end
        ray.shutdown()
        if several is not None:
            several.shutdown()
        gc.collect()


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """One node."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", _PATH)
        one = {"num_cpus": 8, "include_dashboard": False, "object_store_memory": STORE_BYTES}
        _patiently(lambda: ray.init(address="local", **one, **_QUIET))
    try:
        yield
    finally:
        _shut_down()


@pytest.fixture(scope="module")
def three_nodes() -> Iterator[None]:
    """Three nodes with addresses of their own; the tests are on the one in the middle."""
    node = {"object_store_memory": STORE_BYTES, "include_dashboard": False}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", _PATH)
        head = {"num_cpus": 8, "node_ip_address": HEAD, **node}
        started = _patiently(lambda: Cluster(initialize_head=True, head_node_args=head))
        for address in (HIGH, LOW):
            other = {"num_cpus": 1, "node_ip_address": address, "wait": False, **node}
            _patiently(lambda other=other: started.add_node(**other))
    try:
        started.wait_for_nodes(90)
        ray.init(address=started.address, _node_ip_address=HEAD, **_QUIET)
        yield
    finally:
        _shut_down(started)
