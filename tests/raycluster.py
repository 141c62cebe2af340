"""Small Ray clusters on this machine, for the tests of one module.  CPUs are only counted, however many there are."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Iterator

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
        ray.init(address="local", num_cpus=8, include_dashboard=False, object_store_memory=STORE_BYTES, **_QUIET)
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
        started = Cluster(initialize_head=True, head_node_args={"num_cpus": 8, "node_ip_address": HEAD, **node})
        for address in (HIGH, LOW):
            started.add_node(num_cpus=1, node_ip_address=address, wait=False, **node)
    try:
        started.wait_for_nodes(90)
        ray.init(address=started.address, _node_ip_address=HEAD, **_QUIET)
        yield
    finally:
        _shut_down(started)
