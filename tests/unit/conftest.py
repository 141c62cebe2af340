"""The fixtures of several files, and the rule of this folder: no test starts a process."""

from __future__ import annotations

import multiprocessing.process
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.session_bench import bench as bench

_HERE = Path(__file__).parent
_STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system"}
_watched = False  # while a test of this folder runs
_started: list[str] = []


def _look(event: str, args: tuple[Any, ...]) -> None:
    if _watched and event in _STARTS:
        _refuse(f"{event} {args}")


def _refuse(what: str) -> None:
    _started.append(what)
    pytest.fail(f"tests in tests/unit start no process ({what}): this test belongs in tests/process")


def _start(self: multiprocessing.process.BaseProcess) -> None:
    if _watched:  # a fork server forks in a process of its own
        _refuse(f"multiprocessing, {self.name}")
    _begin(self)


_begin = multiprocessing.process.BaseProcess.start
multiprocessing.process.BaseProcess.start = _start  # type: ignore[method-assign]
sys.addaudithook(_look)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    global _watched
    _watched = item.path.is_relative_to(_HERE)
    try:
        return (yield)
    finally:
        _watched = False


@pytest.fixture(autouse=True)
def no_process() -> Iterator[None]:
    """Fails a test that started a process and caught the failure, or did so in a thread."""
    yield
    started, _started[:] = list(_started), []
    assert not started, started
