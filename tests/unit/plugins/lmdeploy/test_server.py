"""Our part of LMDeploy's API server, without LMDeploy: pauses, sleep and wake-up."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import APIRouter, HTTPException, Request

from tests.helpers.clock import PATIENCE_S
from tests.helpers.sleep_session import Session
from weightcast.errors import EngineFailure, Refused
from weightcast.plugins.engine_server import SleepGuard
from weightcast.plugins.lmdeploy.engine_hooks import LmdeployExecutor, LmdeployHooks
from weightcast.plugins.lmdeploy.folder import note_failure
from weightcast.plugins.lmdeploy.own_routes import guard_sleep
from weightcast.receiver.api_keys import Guard
from weightcast.receiver.lost_ranks import FarRanks


class Engine:
    """The engine process as the API server calls it."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.answers: dict[str, Any] = {}

    async def _collective_rpc_async(self, call: str, name: str, *arguments: Any) -> Any:
        assert call == "weightcast_call"
        self.calls.append((name, *arguments))
        answer = self.answers.get(name, "")
        if isinstance(answer, Exception):
            raise answer
        return answer


def hooks_of(engine: Engine, loop: asyncio.AbstractEventLoop) -> LmdeployHooks:
    hooks = LmdeployHooks(SimpleNamespace(is_sleeping=False, sleeping_tags=set(), engine=engine))
    hooks._loop = loop
    return hooks


def test_abort_and_wait_hold_requests_back_and_the_other_modes_do_not(loop: asyncio.AbstractEventLoop) -> None:
    engine = Engine()
    hooks = hooks_of(engine, loop)
    for mode in ("in_place", "retract"):
        hooks.pause(mode, PATIENCE_S)
        assert not hooks.paused
        hooks.resume()
    assert engine.calls == []
    hooks.pause("wait", PATIENCE_S)
    assert hooks.paused
    hooks.resume()
    assert not hooks.paused
    assert engine.calls == [("pause", "wait", PATIENCE_S), ("resume",)]


def test_a_pause_that_fails_says_why_and_can_be_resumed(loop: asyncio.AbstractEventLoop) -> None:
    engine = Engine()
    hooks = hooks_of(engine, loop)
    engine.answers["pause"] = "the requests that run did not end within 1 s"
    with pytest.raises(Refused, match="did not end within 1 s"):
        hooks.pause("wait", 1.0)
    hooks.resume()
    assert engine.calls[-1] == ("resume",)


def test_an_engine_process_that_is_gone_is_named(loop: asyncio.AbstractEventLoop) -> None:
    engine = Engine()
    hooks = hooks_of(engine, loop)
    engine.answers["pause"] = RuntimeError("PyTorch ZMQ engine process is not alive.")
    with pytest.raises(EngineFailure, match="engine process is not alive"):
        hooks.pause("abort", PATIENCE_S)


class AsyncEngine:
    """LMDeploy's ``AsyncEngine``, as far as it sleeps."""

    def __init__(self) -> None:
        self.is_sleeping, self.sleeping_tags = False, set[str]()
        self.engine: Any = None
        self.backend_config = SimpleNamespace(distributed_executor_backend="uni")
        self.levels: list[int] = []
        self.failure = ""

    async def sleep(self, level: int = 1) -> None:
        if self.failure:
            raise RuntimeError(self.failure)
        self.levels.append(level)
        self.is_sleeping, self.sleeping_tags = True, {"weights", "kv_cache"}

    def wakeup(self, tags: list[str] | None = None) -> None:
        wanted = set(tags or self.sleeping_tags)
        if wanted <= self.sleeping_tags:
            self.sleeping_tags -= wanted
        self.is_sleeping = bool(self.sleeping_tags)


class Sleeper:
    """A server with the guard around sleep."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop, self.engine, self.lmdeploy, self.session = loop, Engine(), AsyncEngine(), Session()
        self.lmdeploy.engine = self.engine
        self.hooks = LmdeployHooks(self.lmdeploy)
        self.router = APIRouter()
        self.router.post("/wakeup")(lambda: None)
        guard = SleepGuard(self.session, self.hooks, partial(HTTPException, 409))  # type: ignore[arg-type]
        guard_sleep(self.router, self.lmdeploy, guard, self.hooks, Guard())

    def sleep(self, level: int = 1) -> None:
        asyncio.run_coroutine_threadsafe(self.lmdeploy.sleep(level), self.loop).result(PATIENCE_S)

    def wake(self, *tags: str) -> None:
        query = "&".join(f"tags={tag}" for tag in tags).encode()
        request = Request({"type": "http", "query_string": query, "headers": []})
        endpoint: Any = self.router.routes[0]
        asyncio.run_coroutine_threadsafe(endpoint.endpoint(request), self.loop).result(PATIENCE_S)

    @property
    def asked(self) -> list[str]:
        return [call[0] for call in self.engine.calls]


def test_requests_are_held_from_the_beginning_of_sleep_until_all_memory_is_back(
    loop: asyncio.AbstractEventLoop,
) -> None:
    server = Sleeper(loop)
    server.sleep()
    assert (server.asked, server.hooks.asleep) == (["pause"], {"weights", "kv_cache"})
    server.wake("weights")
    server.hooks.pause("abort", PATIENCE_S)  # an update
    server.hooks.resume()
    assert (server.asked, server.hooks.paused) == (["pause"], True)
    server.wake("weights", "kv_cache")
    server.wake("weights")
    assert (server.asked, server.hooks.paused) == (["pause", "resume"], False)


def test_engine_without_its_weights_lets_requests_go_on_after_an_update(loop: asyncio.AbstractEventLoop) -> None:
    server = Sleeper(loop)
    server.sleep(2)
    assert server.session.state == "quarantined"
    server.wake()
    assert (server.asked, server.hooks.paused, server.hooks.asleep) == (["pause"], True, frozenset())
    server.hooks.pause("retract", PATIENCE_S)
    server.hooks.resume()
    assert (server.asked[-1], server.hooks.paused) == ("resume", False)


def test_sleep_that_cannot_be_is_refused_and_requests_go_on(loop: asyncio.AbstractEventLoop) -> None:
    server = Sleeper(loop)
    server.engine.answers["pause"] = "the forward that runs did not end within 30 s"
    with pytest.raises(HTTPException, match="did not end within 30 s") as caught:
        server.sleep(2)
    assert (caught.value.status_code, server.asked, server.session.state) == (409, ["pause", "resume"], "serving")
    assert server.lmdeploy.levels == []
    server.engine.answers.clear()
    server.session.busy = True
    for refused in (server.sleep, server.wake):
        with pytest.raises(HTTPException, match="being updated by process 1"):
            refused()
    server.session.busy = False
    server.lmdeploy.failure = "no memory on the host"
    with pytest.raises(EngineFailure, match="no memory on the host"):
        server.sleep()
    assert (server.asked[-1], server.hooks.paused) == ("resume", False)
    server.lmdeploy.failure = ""
    server.sleep()
    with pytest.raises(HTTPException, match="sleeps already: weights"):
        server.sleep()
    with pytest.raises(HTTPException, match="no memory of LMDeploy is called cache"):
        server.wake("cache")
    with pytest.raises(HTTPException, match="the KV cache cannot wake before the weights"):
        server.wake("kv_cache")
    assert server.hooks.asleep == {"weights", "kv_cache"}


def test_the_rank_that_the_others_ended_because_of_is_named(tmp_path: Path) -> None:
    executor = LmdeployExecutor.__new__(LmdeployExecutor)
    FarRanks.__init__(executor)
    executor._folder, executor.hellos = str(tmp_path), []
    executor._control = [object(), object()]  # type: ignore[list-item]
    executor.tp_size = 2
    note_failure(str(tmp_path), EngineFailure("rank 1 (pid 7) was killed by signal 9", hint="restart the engine"))
    failure = executor._lost(0, "the answer to Commit")
    assert str(failure) == "rank 1 (pid 7) was killed by signal 9 (restart the engine), during the answer to Commit"
    with pytest.raises(EngineFailure, match="rank 1"):
        executor._check()
