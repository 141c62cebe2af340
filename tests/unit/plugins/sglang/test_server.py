"""Our part of SGLang's API server, without SGLang: pauses."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.helpers.clock import PATIENCE_S
from weightcast.errors import DeadlineExceeded, Refused
from weightcast.plugins.sglang.engine_hooks import SglangHooks


@pytest.fixture(autouse=True)
def modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module of SGLang that our code imports."""
    module = ModuleType("sglang.srt.managers.io_struct")
    vars(module)["AbortReq"] = lambda **fields: SimpleNamespace(**fields)
    monkeypatch.setitem(sys.modules, module.__name__, module)


class Lock:
    def __init__(self) -> None:
        self.readers = 0

    async def is_locked(self) -> bool:
        return self.readers > 0


class Manager:
    """Has the attributes of SGLang's tokenizer manager that our code uses."""

    check_weights = None

    def __init__(self) -> None:
        self.is_pause = False
        self.is_pause_cond = asyncio.Condition()
        self.model_update_lock = Lock()
        self.aborts = 0
        self.version = ""

    def _dispatch_to_scheduler(self, message: Any) -> None:
        assert message.abort_all
        assert not message.rid
        self.aborts += 1
        self.model_update_lock.readers = max(0, self.model_update_lock.readers - 1)

    def _update_weight_version_if_provided(self, weight_version: str) -> None:
        self.version = weight_version


@pytest.fixture
def hooks() -> Iterator[tuple[SglangHooks, Manager]]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    manager = Manager()
    made = SglangHooks(manager)
    made._loop = loop
    yield made, manager
    loop.call_soon_threadsafe(loop.stop)
    thread.join(PATIENCE_S)
    loop.close()


def test_abort_drops_requests_until_none_runs_and_holds_new_ones(hooks: tuple[SglangHooks, Manager]) -> None:
    made, manager = hooks
    manager.model_update_lock.readers = 3
    made.pause("abort", PATIENCE_S)
    assert (manager.aborts, manager.is_pause, made.paused) == (3, True, True)
    made.set_version(7)
    made.resume()
    assert (manager.version, manager.is_pause) == ("7", False)


def test_wait_aborts_nothing_and_can_be_cancelled(hooks: tuple[SglangHooks, Manager]) -> None:
    made, manager = hooks
    manager.model_update_lock.readers = 1
    with pytest.raises(DeadlineExceeded, match="running requests to stop"):
        made.pause("wait", 0.2)
    failed: list[Exception] = []

    def wait() -> None:
        try:
            made.pause("wait", PATIENCE_S)
        except Refused as error:
            failed.append(error)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    while waiting.is_alive():
        made.stop_waiting()
        waiting.join(0.05)
    assert "cancelled" in str(failed[0])
    made.resume()
    assert (manager.aborts, manager.is_pause) == (0, False)


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_modes_that_keep_requests_leave_the_api_server_alone(hooks: tuple[SglangHooks, Manager], mode: Any) -> None:
    made, manager = hooks
    manager.model_update_lock.readers = 1
    made.pause(mode, PATIENCE_S)
    assert not manager.is_pause
    made.resume()


def test_an_operators_pause_is_left_to_the_operator(hooks: tuple[SglangHooks, Manager]) -> None:
    made, manager = hooks
    manager.is_pause = True
    manager.model_update_lock.readers = 1
    made.pause("abort", PATIENCE_S)
    made.resume()
    assert (manager.aborts, manager.is_pause) == (0, True)


def test_a_quarantined_server_is_held_until_an_update_of_any_mode_succeeds(hooks: tuple[SglangHooks, Manager]) -> None:
    made, manager = hooks
    made.pause("abort", PATIENCE_S)  # the quarantine
    made.pause("in_place", PATIENCE_S)
    assert manager.is_pause
    made.resume()
    assert not manager.is_pause
