"""A small Ray cluster on this machine, for the tests of one module."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import ray

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Eight CPUs to count with, however many there are; gone when the module's tests are done."""
    path = os.pathsep.join([os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])])
    ray.init(
        num_cpus=8,
        include_dashboard=False,
        object_store_memory=128 << 20,
        log_to_driver=False,
        logging_level="error",
        runtime_env={"env_vars": {"PYTHONPATH": path}},
    )
    try:
        yield
    finally:
        ray.shutdown()
