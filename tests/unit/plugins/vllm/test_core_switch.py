"""The one call into vLLM's engine core that switches weights, on a core whose batches and workers are lists here."""

from __future__ import annotations

import enum
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from weightcast.plugins.vllm import core_switch


class PauseState(enum.IntEnum):
    """As vLLM's."""

    UNPAUSED = 0
    PAUSED_NEW = 1
    PAUSED_ALL = 2


class Scheduler:
    """As much of vLLM's scheduler as a switch needs."""

    def __init__(self, said: list[str]) -> None:
        self.said = said
        self.pause_state = PauseState.UNPAUSED
        self.running = ["one"]
        self.waiting: list[str] = []

    def set_pause_state(self, state: PauseState) -> None:
        self.said.append(state.name)
        self.pause_state = state


class Core:
    """An engine core with two batches in flight and two workers, which notes in which order things happen."""

    def __init__(self, *answers: str) -> None:
        self.said: list[str] = []
        self.scheduler = Scheduler(self.said)
        self.batch_queue: list[str] | None = ["second", "first"]
        self.model_executor = SimpleNamespace(collective_rpc=self.collective_rpc)
        self.answers = answers or ("", "")
        self.cache_goes = True
        self.broken = ""
        self.stamp = "0"

    def set_weight_version(self, version: str) -> None:
        self.stamp = version

    def _process_engine_step(self) -> bool:
        assert self.batch_queue
        assert self.scheduler.pause_state == PauseState.PAUSED_ALL, "a step would schedule another batch"
        self.said.append(self.batch_queue.pop())
        return False

    def reset_prefix_cache(self, reset_running_requests: bool, reset_connector: bool) -> bool:
        assert (reset_running_requests, reset_connector) == (True, True)
        self.said.append("cache")
        if self.broken:
            raise RuntimeError(self.broken)
        return self.cache_goes

    def reset_encoder_cache(self) -> None:
        self.said.append("encoders")

    def resume_scheduler(self) -> None:
        self.said.append("resume")
        self.scheduler.pause_state = PauseState.UNPAUSED

    def collective_rpc(self, method: str, timeout: float, args: tuple[str]) -> list[str]:
        assert (method, timeout) == ("weightcast_switch", 7.0)
        (why_not,) = args
        self.said.append(f"switch{why_not and ': ' + why_not}")
        if "gone" in self.answers:
            raise RuntimeError("worker 1 is gone")
        return list(self.answers)

    def switch(self, *, stamp: str = "", **asked: bool) -> list[Any]:
        wishes = dict.fromkeys(("rest", "keep_cache", "drop_cache", "drop_encoders", "resume"), False) | asked
        return core_switch.switch_between_steps(self, **wishes, timeout_s=7.0, stamp=stamp)


def test_batches_end_and_caches_go_before_the_workers_switch():
    core = Core()
    assert core.switch(rest=True, drop_cache=True, drop_encoders=True) == ["", False, False]
    assert core.said == ["PAUSED_ALL", "first", "second", "cache", "encoders", "switch", "UNPAUSED"]


@pytest.mark.parametrize("queue", [["second", "first"], [], None])
def test_in_place_nothing_but_the_switch_happens(queue):
    core = Core()
    core.batch_queue = queue
    assert core.switch() == ["", False, False]
    assert core.said == ["switch"]


def test_an_operators_pause_outlasts_a_switch_and_our_own_ends_with_it():
    core = Core()
    core.scheduler.pause_state = PauseState.PAUSED_NEW
    assert core.switch(rest=True, drop_cache=True) == ["", True, False]
    assert core.scheduler.pause_state == PauseState.PAUSED_NEW
    assert core.switch(rest=True, drop_cache=True, resume=True) == ["", True, False]
    assert core.said[-2:] == ["switch", "resume"]


def test_a_core_whose_worker_failed_stays_paused():
    core = Core("", "rank 1: out of order")
    assert core.switch(rest=True, drop_cache=True, resume=True) == ["rank 1: out of order", False, False]
    assert core.scheduler.pause_state == PauseState.PAUSED_ALL
    core.answers = ("", "")
    assert core.switch(rest=True, drop_cache=True) == ["", True, False]  # they go back
    assert core.scheduler.pause_state == PauseState.PAUSED_ALL
    gone = Core("gone")
    with pytest.raises(RuntimeError, match="worker 1 is gone"):
        gone.switch(resume=True)
    assert gone.scheduler.pause_state == PauseState.PAUSED_ALL


def test_no_worker_switches_if_a_cache_stays():
    core = Core("rank 0: refused")
    core.broken = "requests wait for remote KV"
    assert core.switch(rest=True, drop_cache=True) == ["", False, False]
    assert core.said[-2].startswith("switch: vLLM could not drop what the old weights computed: RuntimeError: requests")
    assert core.scheduler.pause_state == PauseState.UNPAUSED
    core.broken, core.cache_goes = "", False
    core.switch(rest=True, drop_cache=True, resume=True)
    assert core.said[-1] == "switch: vLLM could not drop the KV caches outside of it"
    assert core.scheduler.pause_state == PauseState.UNPAUSED


def test_tokens_carry_the_new_version_from_the_switch_on_and_only_if_it_was_made():
    core = Core()
    assert core.switch(stamp="7") == ["", False, True]
    core.answers = ("", "rank 1: out of order")
    assert core.switch(stamp="8") == ["rank 1: out of order", False, False]
    core = Core()
    core.cache_goes = False
    assert core.switch(drop_cache=True, stamp="7") == ["", False, False]
    assert core.stamp == "0"


def test_a_core_that_wakes_stays_paused_while_it_is_told_to():
    core = Core()
    core_switch.stay_paused(core, True)
    core.resume_scheduler()
    assert core.said == []
    core_switch.stay_paused(core, False)
    core.resume_scheduler()
    assert core.said == ["resume"]


def test_a_core_tells_every_api_server_which_one_owns_the_sessions():
    core = Core()
    assert core_switch.owner(core, "") == ""
    core_switch.owner(core, "/tmp/door")
    assert core_switch.owner(core, "") == "/tmp/door"


def test_an_engine_core_gets_the_methods_if_there_is_one(monkeypatch):
    module = ModuleType("vllm.v1.engine.core")
    module.EngineCore = type("EngineCore", (Core,), {})  # type: ignore[attr-defined]
    core_switch.install()
    assert not hasattr(module.EngineCore, core_switch.ASK)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    core_switch.install()
    core = module.EngineCore()
    assert getattr(core, core_switch.ASK)() == "alone"
    core.dp_group = object()
    assert getattr(core, core_switch.ASK)() == "lockstep"
    assert getattr(core, core_switch.SWITCH_BETWEEN)(False, False, False, False, False, 7.0, "") == ["", False, False]
    del core.batch_queue
    with pytest.raises(AttributeError, match="batch_queue"):
        getattr(core, core_switch.ASK)()
