"""Requests that one of vLLM's API servers hands on to the one that owns the sessions."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fastapi import FastAPI, Request, Response

from tests.helpers.clock import PATIENCE_S
from tests.helpers.sessions import Sender
from weightcast.errors import ConfigError, EngineFailure
from weightcast.plugins.vllm import api_servers
from weightcast.plugins.vllm.api_servers import Door, HandsOn, add_first, found_door, number_of
from weightcast.receiver.server import weight_routes
from weightcast.wire.answers import Ack
from weightcast.wire.codec import encode
from weightcast.wire.messages import Message, Open

MIB = 1 << 20
OPEN = Sender({"a": torch.zeros(4)}).open


class Owner:
    """The owner's session handler, as far as a lease needs it."""

    def __init__(self) -> None:
        self.open = ""
        self.lost: list[str] = []

    def info(self) -> Any:
        return SimpleNamespace(specs=OPEN.specs)

    def apply(self, message: Message) -> Ack:
        assert isinstance(message, Open)
        self.open = message.session
        return Ack(ok=True, state="updating", version=1, ranks=1)

    def holds(self, session: str) -> bool:
        return session == self.open

    def lease_lost(self, session: str) -> None:
        self.open = ""
        self.lost.append(session)


def app_of(name: str, owner: Owner | None = None) -> FastAPI:
    app = FastAPI()

    @app.post("/weightcast/{route}")
    @app.post("/sleep")
    @app.post("/v1/completions")
    async def said(request: Request) -> Response:
        body = await request.body()
        headers = {"x-server": name, "x-query": request.url.query, "x-asked": request.headers.get("x-asking", "")}
        return Response(body[::-1], status_code=207, headers=headers)

    if owner is not None:
        app.router.routes[:0] = weight_routes(owner).routes  # type: ignore[arg-type]
    return app


class Call:
    """One request to an app."""

    def __init__(
        self, app: Any, path: str, *pieces: bytes, query: bytes = b"", root: str = "", sized: bool = False
    ) -> None:
        self.sent: list[dict[str, Any]] = []
        self.came, self.gone = asyncio.Event(), asyncio.Event()
        self._pieces = list(pieces) or [b""]
        length = (b"content-length", b"%d" % sum(map(len, pieces))) if sized else (b"transfer-encoding", b"chunked")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": root + path,
            "raw_path": (root + path).encode(),
            "root_path": root,
            "query_string": query,
            "headers": [(b"host", b"x"), (b"x-asking", b"me"), length],
        }
        self.running = asyncio.ensure_future(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._pieces:
            piece = self._pieces.pop(0)
            return {"type": "http.request", "body": piece, "more_body": bool(self._pieces)}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)
        self.came.set()
        if message["type"] == "http.response.body" and not message.get("more_body"):
            self.gone.set()

    async def answer(self) -> tuple[int, dict[bytes, bytes], bytes]:
        await asyncio.wait_for(self.running, PATIENCE_S)
        start, *bodies = self.sent
        return start["status"], dict(start["headers"]), b"".join(part.get("body", b"") for part in bodies)


def run(test: Callable[[HandsOn, Owner], Awaitable[None]]) -> None:
    """Runs a test with a server that hands on, and the owner."""

    async def main() -> None:
        owner = Owner()
        door = Door(app_of("owner", owner))
        name = await door.open()
        try:
            await test(HandsOn(app_of("here"), owner=lambda: name), owner)
        finally:
            await door.close()
        assert not os.path.exists(os.path.dirname(name))

    asyncio.run(main())


@pytest.mark.parametrize("built", [False, True])
def test_an_app_hands_on_also_if_it_was_put_together_before(built):
    async def test(server: HandsOn, _: Owner) -> None:
        app = app_of("here")
        if built:  # as vLLM 0.25 leaves it
            app.middleware_stack = app.build_middleware_stack()
        add_first(app, HandsOn, owner=server._owner)
        for path, wanted in (("/weightcast/other", b"owner"), ("/sleep", b"owner"), ("/v1/completions", b"here")):
            _, headers, _ = await Call(app, path, b"x").answer()
            assert headers[b"x-server"] == wanted

    run(test)


def test_a_request_of_updates_is_answered_by_the_owner_as_it_came():
    async def test(server: HandsOn, _: Owner) -> None:
        body = [bytes([number]) * MIB for number in range(5)]
        for path, sized in (("/weightcast/other", False), ("/sleep", True)):
            status, headers, answer = await Call(server, path, *body, query=b"level=2", sized=sized).answer()
            assert (status, headers[b"x-server"], headers[b"x-query"]) == (207, b"owner", b"level=2")
            assert headers[b"x-asked"] == b"me"
            assert answer == b"".join(body)[::-1]
        status, headers, answer = await Call(server, "/v1/completions", b"abc").answer()
        assert (status, headers[b"x-server"], answer) == (207, b"here", b"cba")
        assert (await Call(server, "/weightcast/other", root="/behind").answer())[1][b"x-server"] == b"owner"

    run(test)


def test_the_owner_refuses_before_it_has_read_a_body_that_is_too_large():
    async def test(server: HandsOn, owner: Owner) -> None:
        status, _, answer = await Call(server, "/weightcast/open", *[b"x" * MIB] * 40).answer()
        assert (status, b"the body has more than" in answer, owner.open) == (413, True, "")

    run(test)


def test_a_trainer_that_hangs_up_at_another_server_loses_its_lease():
    async def test(server: HandsOn, owner: Owner) -> None:
        call = Call(server, "/weightcast/open", encode(OPEN))
        await asyncio.wait_for(call.came.wait(), PATIENCE_S)
        await asyncio.sleep(0)
        assert (call.sent[0]["status"], owner.open, owner.lost) == (200, OPEN.session, [])
        call.gone.set()
        await asyncio.wait_for(call.running, PATIENCE_S)
        deadline = asyncio.get_running_loop().time() + PATIENCE_S
        while not owner.lost:
            assert asyncio.get_running_loop().time() < deadline
            await asyncio.sleep(0.01)
        assert owner.lost == [OPEN.session]

    run(test)


def test_no_other_user_reaches_the_socket_of_the_owner():
    async def test(server: HandsOn, _: Owner) -> None:
        path = Path(server._owner())  # type: ignore[reportPrivateUsage]
        assert stat.S_ISSOCK(path.stat().st_mode)
        assert (stat.S_IMODE(path.parent.stat().st_mode), stat.S_IMODE(path.stat().st_mode)) == (0o700, 0o600)

    run(test)


def test_signals_stay_with_the_server_that_had_them():
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)

    async def main() -> None:
        door = Door(app_of("owner"))
        # asyncio itself takes SIGINT while it runs
        at_start = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
        await door.open()
        assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == at_start
        await door.close()

    asyncio.run(main())
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_an_owner_that_ends_is_named_and_half_an_answer_is_no_whole_one(tmp_path):
    async def main() -> None:
        async def breaks(reader: Any, writer: Any) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 8\r\n\r\nhalf")
            await writer.drain()
            writer.close()

        path = str(tmp_path / "owner")
        listening = await asyncio.start_unix_server(breaks, path)
        server = HandsOn(app_of("here"), owner=lambda: path)
        call = Call(server, "/weightcast/status")
        with pytest.raises(EngineFailure, match=r"API server 0, .* ended in the middle of an answer"):
            await asyncio.wait_for(call.running, PATIENCE_S)
        assert call.sent[0]["status"] == 200
        assert all(message.get("more_body", True) for message in call.sent)
        listening.close()
        (tmp_path / "owner").unlink()
        status, _, answer = await Call(server, "/weightcast/status").answer()
        assert (status, b"API server 0" in answer, b"cannot be reached" in answer) == (503, True, True)

    asyncio.run(main())


def test_other_servers_wait_until_the_owner_is_ready(monkeypatch):
    told = iter(["", "", "/tmp/owner"])

    async def ask() -> str:
        return next(told)

    async def never() -> str:
        return ""

    assert asyncio.run(found_door(ask, 1)) == "/tmp/owner"
    monkeypatch.setattr(api_servers, "_START_S", 0.0)
    with pytest.raises(EngineFailure, match="API server 0, which owns the sessions of updates, was not ready"):
        asyncio.run(found_door(never, 1))


@pytest.mark.parametrize(
    ("rank", "count", "number"), [(0, None, (0, 1)), (0, 2, (0, 2)), (1, 2, (1, 2)), (-1, 1, (0, 1)), (None, 1, (0, 1))]
)
def test_servers_are_numbered_as_vllm_does(rank, count, number):
    parallel = SimpleNamespace() if rank is None else SimpleNamespace(_api_process_rank=rank)
    config = SimpleNamespace(parallel_config=parallel)
    assert number_of(config, SimpleNamespace(api_server_count=count)) == number


def test_several_servers_without_numbers_are_refused():
    config = SimpleNamespace(parallel_config=SimpleNamespace())
    with pytest.raises(ConfigError, match="several API servers cannot update one engine"):
        number_of(config, SimpleNamespace(api_server_count=2))
