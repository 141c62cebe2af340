"""Our half of an engine's API server, and the guard around an engine's sleep, without an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from tests.helpers.sleep_session import Session
from weightcast.config import PauseMode
from weightcast.errors import Refused
from weightcast.plugins.engine_server import EngineServer, SleepGuard
from weightcast.plugins.pause_state import PauseState, ServerHooks
from weightcast.receiver.engine_state import EngineFacts, EngineState
from weightcast.wire.engine_info import RankInfo

FACTS = EngineFacts(
    engine="engine 1",
    model="m",
    host_id="h",
    ranks=(RankInfo(rank=0, pid=1, device="cpu"),),
    staging="device",
    transports=("ipc",),
    specs=(),
    note="2 engines",
)
KEY = {"authorization": "Bearer secret"}


class Hooks(ServerHooks):
    """Hooks that log what is asked of the engine."""

    engine = "Engine"

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []

    def pause(self, mode: PauseMode, timeout_s: float) -> None:
        self.log.append(f"pause {mode}")
        self.become(PauseState.OURS)

    def hold_for_sleep(self) -> None:
        self.pause("abort", 1.0)

    async def _go_on(self) -> None:
        self.log.append("resume")


def test_a_server_answers_503_before_its_start_and_tells_afterwards_what_sleeps() -> None:
    server, hooks, app = EngineServer("Engine", keys=["secret"]), Hooks(), FastAPI()
    for router in server.routers:
        app.include_router(router)
    with TestClient(app) as client:
        assert client.get("/weightcast/info").status_code == 401
        early = client.get("/weightcast/info", headers=KEY)
        assert (early.status_code, "Engine is still starting" in early.text) == (503, True)
        sessions = server.start(SimpleNamespace(tp_size=1), hooks, FACTS, metrics=False)  # type: ignore[arg-type]
        try:
            hooks.fell_asleep(["weights", "kv_cache"])
            for path in ("info", "status"):
                told = client.get(f"/weightcast/{path}", headers=KEY).json()
                assert (told["message"], told["paused"]) == ("2 engines; asleep: kv_cache, weights", True)
            state = EngineState(hooks, FACTS, version=0, tp_size=1)
            assert state.held_back().startswith("asleep: kv_cache, weights; it has the new weights")
            hooks.woke(["weights", "kv_cache"])
            assert client.get("/weightcast/info", headers=KEY).json()["message"] == "2 engines"
            assert state.held_back() == ""
            assert hooks._loop is not None
        finally:
            sessions.close()


@pytest.fixture
def asleep() -> tuple[Session, Hooks, SleepGuard]:
    session, hooks = Session(), Hooks()
    return session, hooks, SleepGuard(session, hooks, ValueError)  # type: ignore[arg-type]


def test_requests_are_held_while_memory_falls_asleep_and_until_it_is_awake(asleep) -> None:
    _, hooks, guard = asleep

    async def day() -> None:
        said = await guard.sleep(lambda: hooks.log.append("sleep") or "slept", tags=["weights"], awake=["weights"])
        assert (said, hooks.state) == ("slept", PauseState.ASLEEP)
        with pytest.raises(ValueError, match="memory sleeps already: weights"):
            await guard.sleep(lambda: None, awake=["weights"])
        await guard.wake(lambda: hooks.woke(["weights"]))

    asyncio.run(day())
    assert hooks.log == ["pause abort", "sleep", "resume"]
    assert hooks.state is PauseState.RUNNING


def test_an_engine_whose_weights_are_lost_is_held_until_an_update_resumes_it(asleep) -> None:
    session, hooks, guard = asleep

    def fail() -> None:
        assert session.state == "quarantined", "before the call, which may fail half way"
        raise RuntimeError("no memory on the host")

    async def night() -> None:
        with pytest.raises(RuntimeError, match="no memory on the host"):
            await guard.sleep(fail, tags=["weights"], discards="gone")

    asyncio.run(night())
    assert (hooks.log, hooks.state, hooks.asleep) == (["pause abort"], PauseState.OURS, frozenset())


@pytest.mark.parametrize("busy", ["engine", "also"])
def test_sleep_and_wake_up_are_refused_during_an_update(busy: str) -> None:
    session, hooks = Session(), Hooks()

    @contextmanager
    def also() -> Iterator[None]:
        if busy == "also":
            raise Refused("being updated by process 1")
        yield

    session.busy = busy == "engine"
    guard = SleepGuard(session, hooks, ValueError, also=also)  # type: ignore[arg-type]
    calls: list[Callable[[Callable[[], Any]], Any]] = [guard.sleep, guard.wake, guard.alone]
    for call in calls:
        with pytest.raises(ValueError, match="being updated by process 1"):
            asyncio.run(call(lambda: hooks.log.append("called")))
    assert hooks.log == []
