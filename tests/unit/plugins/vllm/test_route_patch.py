"""Routes in a vLLM that has no plug-ins for them: its server's functions are wrapped."""

from __future__ import annotations

import asyncio
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from weightcast.plugins.vllm import add_routes

NCCL = {"backend": "nccl"}
ASKING = SimpleNamespace(weight_transfer_config={"backend": "weightcast"})


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
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    return found


def test_routes_come_after_the_servers_own_and_once(server: ModuleType) -> None:
    routes = Routes()
    add_routes(lambda: routes)  # type: ignore[arg-type, return-value]
    add_routes(lambda: routes)  # type: ignore[arg-type, return-value]
    app = server.build_app(ASKING, "tasks")
    assert routes.calls == [("attach", app)]
    asyncio.run(server.init_app_state("client", app.state, ASKING, "tasks"))
    assert routes.calls[1:] == [("init", "client", ASKING)]
    assert server.order == [("build", ASKING, "tasks"), ("state", "client", ASKING, "tasks")]


@pytest.mark.parametrize(
    "args",
    [SimpleNamespace(), SimpleNamespace(weight_transfer_config=None), SimpleNamespace(weight_transfer_config=NCCL)],
)
def test_a_server_that_does_not_name_our_backend_gets_nothing(server: ModuleType, args: Any) -> None:
    add_routes(Routes)  # type: ignore[arg-type]
    app = server.build_app(args, "tasks")
    asyncio.run(server.init_app_state("client", app.state, args, "tasks"))
    assert vars(app.state) == {}


def test_the_old_opt_in_still_adds_the_routes_which_then_say_what_is_missing(
    server: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "other,weightcast")
    routes = Routes()
    add_routes(lambda: routes)  # type: ignore[arg-type, return-value]
    app = server.build_app(SimpleNamespace(), "tasks")
    assert routes.calls == [("attach", app)]
