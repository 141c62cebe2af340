"""The routes of adapters: a place is asked for, and then each adapter is updated like a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from tests.helpers.models import specs_of, weights_of
from tests.helpers.sessions import Sender
from tests.unit.receiver.test_turns import handler
from weightcast.adapters.native.detect import NativeAdapterKind
from weightcast.comm.run_steps import EngineRequest
from weightcast.errors import ConfigError, Refused, TargetRejected
from weightcast.receiver.adapter_routes import adapter_routes
from weightcast.receiver.api_keys import Guard
from weightcast.receiver.session import SessionHandler
from weightcast.wire.adapters import KIND, AdapterRequest, adapter_path
from weightcast.wire.engine_info import EngineInfo
from weightcast.wire.messages import Message

WEIGHTS = weights_of(0)


class Adapter:
    """One adapter over a real session handler."""

    def __init__(self, name: str) -> None:
        self.handler: SessionHandler = handler(name, WEIGHTS)

    def info(self) -> EngineInfo:
        return msgspec.structs.replace(self.handler.info(), kind=KIND)

    def status(self) -> Any:
        return self.handler.status()

    def apply(self, message: Message) -> Any:
        return self.handler.apply(message)

    def holds(self, session: str) -> bool:
        return self.handler.holds(session)

    def lease_lost(self, session: str) -> None:
        self.handler.lease_lost(session)

    def score(self, token_ids: Sequence[int]) -> Sequence[float]:
        return [0.5] * (len(token_ids) - 1)


class Adapters:
    """An engine with room for one adapter."""

    def __init__(self) -> None:
        self.known: dict[str, Adapter] = {}

    def register(self, request: AdapterRequest) -> EngineInfo:
        if request.name not in self.known:
            if self.known:
                raise Refused("no slot is left", hint="take one out")
            self.known[request.name] = Adapter(request.name)
        return self.known[request.name].info()

    def drop(self, name: str) -> bool:
        return self.known.pop(name, None) is not None

    def find(self, name: str) -> Adapter | None:
        return self.known.get(name)

    def names(self) -> Sequence[str]:
        return tuple(self.known)


@pytest.fixture
def client() -> TestClient:
    app, adapters = FastAPI(), Adapters()
    app.include_router(
        adapter_routes(
            lambda: adapters,
            lambda router, prefix: app.include_router(router, prefix=prefix),
            guard=Guard(["key"]),
        )
    )
    return TestClient(app, headers={"Authorization": "Bearer key"})


def ask(client: TestClient, name: str, url: str = "http://e:1") -> EngineInfo | None:
    """Runs the trainer's own steps against the routes."""
    steps = NativeAdapterKind(AdapterRequest(name=name, config={}, specs=tuple(specs_of(WEIGHTS)))).recognise(url)
    request: EngineRequest = next(steps)
    try:
        while True:
            if request.path == "/weightcast/status":  # of the engine's model
                request = steps.send(b"{}")
                continue
            answer = client.request(request.method, request.path, content=request.body)
            if answer.status_code >= 400:
                request = steps.throw(TargetRejected(answer.text, url=url, status=answer.status_code))
            else:
                request = steps.send(answer.content)
    except StopIteration as end:
        return end.value


def test_an_adapter_has_the_routes_of_a_model_below_its_name(client: TestClient) -> None:
    assert client.get(adapter_path("alice") + "/weightcast/info").status_code == 404
    for _ in range(2):  # the second time nothing changes
        info = ask(client, "alice")
        assert info is not None
        assert (info.kind, info.model, len(info.specs)) == (KIND, "alice", len(specs_of(WEIGHTS)))
    assert client.get("/weightcast/adapters").json()[0]["name"] == "alice"
    root = adapter_path("alice") + "/weightcast"
    assert client.get(f"{root}/info").status_code == 200
    assert client.post(f"{root}/score", json={"token_ids": [1, 2, 3]}).json() == {"logprobs": [0.5, 0.5]}
    sender = Sender(WEIGHTS)
    assert client.post(f"{root}/apply", content=msgspec.json.encode(sender.commit())).status_code == 409
    with pytest.raises(ConfigError, match=r"nothing was sent: .*no slot is left"):
        ask(client, "bob")
    assert client.delete(adapter_path("alice")).status_code == 204
    assert client.delete(adapter_path("alice")).status_code == 404
    assert client.get(f"{root}/info").status_code == 404
    assert ask(client, "bob") is not None
    assert client.get(adapter_path("bob") + "/weightcast/status").json()["model"] == "bob"


def test_every_route_wants_the_key(client: TestClient) -> None:
    assert ask(client, "alice") is not None
    client.headers.pop("Authorization")
    for path in ("/weightcast/adapters", adapter_path("alice") + "/weightcast/info"):
        assert client.get(path).status_code == 401
    assert client.delete(adapter_path("alice")).status_code == 401
    assert client.post("/weightcast/adapters", content=b"{}").status_code == 401


@pytest.mark.parametrize("body", [b"", b"[]", b'{"name": "a/b", "config": {}, "specs": []}', b'{"name": "a"}'])
def test_a_malformed_request_is_refused(client: TestClient, body: bytes) -> None:
    answer = client.post("/weightcast/adapters", content=body)
    assert answer.status_code == 400
    assert "not a request for an adapter" in answer.text


def test_an_engine_without_adapters_is_named() -> None:
    steps = NativeAdapterKind(AdapterRequest(name="a", config={}, specs=tuple(specs_of(WEIGHTS)))).recognise(
        "http://e:1"
    )
    next(steps)
    steps.send(b"{}")
    with pytest.raises(ConfigError, match="takes no LoRA adapter in memory"):
        steps.throw(TargetRejected("no route", url="http://e:1", status=404))
