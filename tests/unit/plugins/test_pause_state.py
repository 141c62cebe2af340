"""Why an engine does not run, as the hooks of all engines know it: every transition, for every pause mode."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, get_args

import pytest

from tests.helpers.clock import PATIENCE_S
from weightcast.config import PauseMode
from weightcast.errors import EngineFailure
from weightcast.plugins.lmdeploy.engine_hooks import LmdeployHooks
from weightcast.plugins.pause_state import PauseState, ServerHooks
from weightcast.plugins.sglang.engine_hooks import SglangHooks
from weightcast.plugins.vllm import engine_hooks as vllm_hooks
from weightcast.plugins.vllm.core_switch import ALONE, ASK, LOCKSTEP, SWITCH_BETWEEN
from weightcast.plugins.vllm.engine_hooks import VllmHooks
from weightcast.plugins.vllm.token_versions import SAY_VERSION

RUNNING, OURS, OPERATORS, ASLEEP, ENDING = PauseState
MODES = get_args(PauseMode)
TAGS = ("kv_cache", "weights")


@pytest.fixture(autouse=True)
def engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plays what the engines' own packages have."""
    module = ModuleType("sglang.srt.managers.io_struct")
    vars(module)["AbortReq"] = lambda **fields: SimpleNamespace(**fields)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(vllm_hooks, "end_vllm", lambda words: None)


class Client:
    """An engine that notes who paused it, seen as each of the engines' clients."""

    def __init__(self, cores: str = "") -> None:
        self.held, self.resumed, self.failure, self.cores = False, 0, "", cores
        self.said: Any = ["", False, True]
        # vLLM
        self.engine_core: Any = self
        # SGLang
        self.check_weights = None
        self.is_pause_cond = asyncio.Condition()
        self.model_update_lock = SimpleNamespace(is_locked=self.is_locked)
        # LMDeploy
        self.is_sleeping, self.sleeping_tags, self.engine = False, set[str](), self

    async def is_paused(self) -> bool:
        return self.held

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self.held = True
        if self.failure:
            raise RuntimeError(self.failure)

    pause_scheduler_async = pause_generation

    async def resume_generation(self) -> None:
        self.held = False
        self.resumed += 1

    async def call_utility_async(self, method: str, *arguments: Any) -> Any:
        if method == ASK:
            return self.cores
        if method == SAY_VERSION:
            return True
        assert method == SWITCH_BETWEEN
        if isinstance(self.said, Exception):
            self.held = True
            raise self.said
        return self.said

    @property
    def is_pause(self) -> bool:
        return self.held

    @is_pause.setter
    def is_pause(self, held: bool) -> None:
        self.resumed += self.held and not held
        self.held = held
        if held and self.failure:
            raise RuntimeError(self.failure)

    async def is_locked(self) -> bool:
        return False

    def _dispatch_to_scheduler(self, message: Any) -> None: ...

    async def _collective_rpc_async(self, call: str, method: str, *arguments: Any) -> str:
        if method == "pause":
            await self.pause_generation(mode="", clear_cache=False)
        else:
            await self.resume_generation()
        return ""


Make = Callable[[Client, asyncio.AbstractEventLoop], ServerHooks]


def of_vllm(client: Client, loop: asyncio.AbstractEventLoop) -> VllmHooks:
    made = VllmHooks(client, loop, prefix_caching=False)
    if client.cores:
        made.meet_cores()
        made.pause_in_switch(in_order=True)
    return made


def of_sglang(client: Client, loop: asyncio.AbstractEventLoop) -> SglangHooks:
    made = SglangHooks(client)
    made._loop = loop
    return made


def of_lmdeploy(client: Client, loop: asyncio.AbstractEventLoop) -> LmdeployHooks:
    made = LmdeployHooks(client)
    made._loop = loop
    return made


# How vLLM's cores step, if weights are staged; and the modes whose pause is a part of the switch.
ENGINES: list[tuple[Make, str, tuple[str, ...]]] = [
    (of_vllm, "", ()),
    (of_vllm, ALONE, ("in_place", "retract")),
    (of_vllm, LOCKSTEP, ("in_place",)),
    (of_sglang, "", ("in_place", "retract")),
    (of_lmdeploy, "", ("in_place", "retract")),
]
every_engine = pytest.mark.parametrize(("make", "cores", "in_switch"), ENGINES)
every_mode = pytest.mark.parametrize("mode", MODES)


@every_mode
@every_engine
def test_a_running_engine_is_ours_until_resume_unless_the_switch_itself_pauses(loop, make, cores, in_switch, mode):
    client = Client(cores)
    hooks = make(client, loop)
    hooks.pause(mode, PATIENCE_S)
    ours = mode not in in_switch
    assert (hooks.state, client.held, hooks.paused) == (OURS if ours else RUNNING, ours, ours)
    hooks.pause("abort", PATIENCE_S)  # the quarantine
    hooks.pause(mode, PATIENCE_S)  # the update that ends it
    assert (hooks.state, hooks.paused) == (OURS, True)
    hooks.resume()
    hooks.resume()
    assert (hooks.state, client.held, client.resumed) == (RUNNING, False, 1)


@every_mode
@pytest.mark.parametrize(("make", "cores", "in_switch"), ENGINES[:-1])  # LMDeploy has no pause for operators
def test_an_operators_pause_outlasts_updates_and_quarantine(loop, make, cores, in_switch, mode):
    client = Client(cores)
    hooks = make(client, loop)
    client.held = True
    hooks.pause(mode, PATIENCE_S)
    assert hooks.state is (RUNNING if mode in in_switch else OPERATORS)
    hooks.pause("abort", PATIENCE_S)
    hooks.pause(mode, PATIENCE_S)
    assert hooks.state is OPERATORS
    hooks.resume()
    assert (hooks.state, client.held, client.resumed) == (RUNNING, True, 0)


@every_mode
@every_engine
def test_nothing_is_called_while_memory_sleeps(loop, make, cores, in_switch, mode):
    client = Client(cores)
    hooks = make(client, loop)
    hooks.hold_for_sleep()
    client.held = client.is_sleeping = True
    client.sleeping_tags = set(TAGS)
    hooks.fell_asleep(TAGS)
    client.sleeping_tags.discard("weights")
    hooks.woke(["weights"])
    hooks.pause(mode, PATIENCE_S)
    hooks.resume()
    assert (hooks.state, hooks.asleep, hooks.paused, client.resumed) == (ASLEEP, {"kv_cache"}, True, 0)
    client.is_sleeping = False
    hooks.woke(["kv_cache"])
    hooks.resume()
    resumed = 0 if make is of_vllm else 1  # vLLM resumes by itself
    assert (hooks.state, client.resumed) == (RUNNING, resumed)


@every_engine
def test_a_pause_that_fails_half_way_is_ours(loop, make, cores, in_switch):
    client = Client(cores)
    hooks = make(client, loop)
    client.failure = "out of order"
    with pytest.raises(EngineFailure, match="out of order"):
        hooks.pause("abort", PATIENCE_S)
    assert hooks.state is OURS
    client.failure = ""
    hooks.resume()
    assert (hooks.state, client.held, client.resumed) == (RUNNING, False, 1)


def test_sglang_that_fell_asleep_under_an_operators_pause_stays_paused(loop):
    client = Client()
    hooks = of_sglang(client, loop)
    client.held = True
    hooks.hold_for_sleep()
    hooks.fell_asleep(TAGS)
    hooks.woke(TAGS)
    hooks.resume()
    assert (hooks.state, client.held, client.resumed) == (RUNNING, True, 0)


@pytest.mark.parametrize(
    ("said", "state"),
    [
        (["", False, True], RUNNING),
        (["rank 0: out of order", False, False], OURS),
        (["rank 0: out of order", True, False], OPERATORS),  # paused before
        (RuntimeError("worker 0 is gone"), OURS),
    ],
)
def test_a_switch_that_fails_leaves_vllm_paused(loop, said, state):
    client = Client(ALONE)
    hooks = of_vllm(client, loop)
    hooks.pause("in_place", PATIENCE_S)
    client.said = said
    if isinstance(said, Exception):
        with pytest.raises(EngineFailure, match="worker 0 is gone"):
            hooks.switch(PATIENCE_S)
    else:
        hooks.switch(PATIENCE_S)
    assert hooks.state is state
    client.said = ["", True, True]
    hooks.switch(PATIENCE_S)  # the abort
    assert hooks.state is state
    hooks.resume()
    assert (hooks.state, client.resumed) == (RUNNING, int(state is OURS))


@pytest.mark.parametrize(("mode", "state"), [("wait", RUNNING), ("abort", RUNNING), ("retract", RUNNING)])
def test_a_switch_that_succeeds_ends_the_pause_for_it(loop, mode, state):
    client = Client(ALONE)
    hooks = of_vllm(client, loop)
    hooks.pause(mode, PATIENCE_S)
    hooks.switch(PATIENCE_S)
    hooks.resume()
    assert (hooks.state, client.resumed) == (state, 0)  # vLLM's cores resume within the switch


@every_mode
def test_a_vllm_that_ends_is_called_no_more(loop, mode):
    client = Client(ALONE)
    hooks = of_vllm(client, loop)
    hooks.pause("abort", PATIENCE_S)
    hooks.end("rank 1 on host b is gone")
    hooks.end("rank 2 on host b is gone")
    client.held = False
    hooks.pause(mode, PATIENCE_S)
    hooks.resume()
    assert (hooks.state, hooks.paused, client.held, client.resumed) == (ENDING, True, False, 0)
