"""Routes in a vLLM that has no plug-ins for them: its server's functions are wrapped."""

from __future__ import annotations

import asyncio
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from weightcast.plugins.vllm import add_routes


class Routes:
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def attach_router(self, app: Any) -> None:
        self.calls.append(("attach", app))

    async def init_state(self, client: Any, state: Any, args: Any) -> None:
        self.calls.append(("init", client, args))


def a_server() -> ModuleType:
    server = ModuleType("api_server")
    server.order = []

    def build_app(args: Any, tasks: Any) -> Any:
        server.order.append(("build", args, tasks))
        return SimpleNamespace(state=SimpleNamespace())

    async def init_app_state(client: Any, state: Any, args: Any, tasks: Any) -> None:
        server.order.append(("state", client, args, tasks))

    server.build_app, server.init_app_state = build_app, init_app_state
    return server


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    found = a_server()
    monkeypatch.setitem(sys.modules, "vllm.entrypoints.openai.api_server", found)
    monkeypatch.setenv("VLLM_PLUGINS", "other,weightcast")
    return found


def test_routes_come_after_the_servers_own_and_once(server: ModuleType) -> None:
    routes = Routes()
    add_routes(lambda: routes)  # type: ignore[arg-type, return-value]
    add_routes(lambda: routes)  # type: ignore[arg-type, return-value]
    app = server.build_app("args", "tasks")
    assert routes.calls == [("attach", app)]
    asyncio.run(server.init_app_state("client", app.state, "args", "tasks"))
    assert routes.calls[1:] == [("init", "client", "args")]
    assert server.order == [("build", "args", "tasks"), ("state", "client", "args", "tasks")]


def test_without_the_opt_in_nothing_is_touched(server: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    before = server.build_app
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    add_routes(Routes)  # type: ignore[arg-type]
    monkeypatch.delenv("VLLM_PLUGINS")
    add_routes(Routes)  # type: ignore[arg-type]
    assert server.build_app is before
