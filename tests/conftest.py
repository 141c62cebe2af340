"""Fixtures and hooks that all tests share; what they use is in ``tests/helpers``."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from tests.helpers import fork_server
from tests.helpers.scheduling import place_of, scheduler
from tests.helpers.stolen import pytest_runtest_protocol, pytest_terminal_summary  # noqa: F401  # hooks

if TYPE_CHECKING:
    from tests.helpers.harness import Engine

_UNIT = Path(__file__).parent / "unit"
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Ray's workers would run only where nobody else has work to do: beside two other files their starts took minutes.
os.environ.setdefault("RAY_worker_niceness", "0")
# Beside other work, an example may take any time.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


def pytest_configure(config: pytest.Config) -> None:
    told = getattr(config, "workerinput", {}).get("fork_server")
    if told is not None:
        fork_server.use(told)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tells a worker where the fork server of all workers is; the first one starts it."""
    node.workerinput["fork_server"] = fork_server.start()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Thousands of tests are made here and stay: each collection of garbage would look at all of them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return scheduler(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.hookimpl(tryfirst=True)  # before marks are selected by
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of ``make test`` as short: all of tests/unit, and what says so elsewhere."""
    for item in items:
        if item.path.is_relative_to(_UNIT):
            item.add_marker("short")
    items.sort(key=place_of)


@pytest.fixture(autouse=True)
def restored_logger() -> Iterator[None]:
    """Undoes what a test did to the package's logger, so that tests after it in the same process see log lines."""
    logger = logging.getLogger("weightcast")
    level, propagate, handlers = logger.level, logger.propagate, list(logger.handlers)
    yield
    logger.setLevel(level)
    logger.propagate = propagate
    logger.handlers[:] = handlers


@pytest.fixture(scope="session")
def engines() -> Iterator[SimpleNamespace]:
    """Toy engines of every kind, shared by all tests: whoever uses them leaves them serving."""
    from tests.helpers.harness import Engine

    started = SimpleNamespace(
        one=Engine("--local"),
        two=Engine("--tp", "2", "--dtype", "bfloat16"),
        host=Engine("--local", "--staging", "host"),
        bare=Engine("--local", "--staging", "none"),
    )
    started.all = list(vars(started).values())
    try:
        assert all(engine.port for engine in started.all)
        yield started
    finally:
        for engine in started.all:
            engine.close()


@pytest.fixture
def fresh() -> Iterator[object]:
    """Starts engines for one test, which may do to them what it likes."""
    from tests.helpers.harness import Engine

    yield from _closed_after_the_test(Engine)


@pytest.fixture
def placed() -> Iterator[object]:
    """As ``fresh``, on another host or out of reach: the first argument is a function of ``helpers/placed.py``."""
    from tests.helpers.placed import PlacedEngine

    yield from _closed_after_the_test(PlacedEngine)


def _closed_after_the_test(make: Callable[..., Engine]) -> Iterator[Callable[..., Engine]]:
    started: list[Engine] = []

    def start(*args: Any, **options: Any) -> Engine:
        started.append(make(*args, **options))
        return started[-1]

    yield start
    for engine in started:
        engine.close()
