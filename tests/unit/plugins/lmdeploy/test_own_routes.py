"""LMDeploy's own update routes on a server with our receiver, without LMDeploy."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import APIRouter, FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from fastapi.testclient import TestClient
from pydantic import BaseModel

from tests.helpers.sleep_session import Session
from weightcast.errors import ConfigError
from weightcast.plugins.engine_server import SleepGuard
from weightcast.plugins.lmdeploy.engine_hooks import LmdeployHooks
from weightcast.plugins.lmdeploy.folder import note_written
from weightcast.plugins.lmdeploy.own_routes import admit_own_updates
from weightcast.receiver.api_keys import Guard


class Bucket(BaseModel):
    """A request of LMDeploy's, and what becomes of it."""

    writes: bool = False
    fails: str = ""
    finished: bool = False


class Server:
    """LMDeploy's routes with our wrappers around them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.session, self.resumed = folder, Session(), 0
        router = APIRouter()

        def play(bucket: Bucket) -> JSONResponse:
            if bucket.writes:
                note_written(str(folder))
            if bucket.fails == "raise":
                raise NotImplementedError  # as LMDeploy's other engines answer this call
            return JSONResponse({"success": not bucket.fails}, status_code=400 if bucket.fails else 200)

        @router.post("/update_weights")
        def update_params(request: Bucket, raw_request: Request = None) -> JSONResponse:  # type: ignore[assignment]
            return play(request)

        @router.post("/update_weights_from_distributed")
        async def distributed(request: Bucket, raw_request: Request = None) -> JSONResponse:  # type: ignore[assignment]
            await asyncio.sleep(0)
            return play(request)

        @router.post("/update_weights_from_ipc")
        async def ipc(request: Bucket, raw_request: Request = None) -> JSONResponse:  # type: ignore[assignment]
            return play(request)

        hooks: Any = LmdeployHooks(SimpleNamespace())
        hooks.resume = self.resume
        guard = SleepGuard(self.session, hooks, partial(HTTPException, 409))  # type: ignore[arg-type]
        admit_own_updates(router, self.session, guard, hooks, str(folder), Guard())  # type: ignore[arg-type]
        app = FastAPI()
        app.include_router(router)
        self.client = TestClient(app, raise_server_exceptions=False)

    def resume(self) -> None:
        self.resumed += 1

    def ask(self, path: str, **body: Any) -> int:
        return self.client.post(path, json=body).status_code


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return Server(tmp_path)


@pytest.mark.parametrize("path", ["/update_weights", "/update_weights_from_distributed"])
def test_an_engine_is_quarantined_from_the_first_write_to_the_end_of_the_update(server: Server, path: str) -> None:
    assert server.ask(path, writes=True) == 200
    assert server.session.state == "quarantined"
    assert server.ask(path, finished=True, fails="answer") == 400
    assert (server.session.state, server.resumed) == ("quarantined", 0)
    assert server.ask(path, finished=True) == 200
    assert (server.session.state, server.resumed) == ("serving", 1)


def test_one_request_of_checkpoint_engine_is_a_whole_update(server: Server) -> None:
    path = "/update_weights_from_ipc"
    assert server.ask(path, writes=True, fails="answer") == 400
    assert server.session.state == "quarantined"
    assert server.ask(path, writes=True) == 200
    assert (server.session.state, server.resumed) == ("serving", 1)


@pytest.mark.parametrize("fails", ["raise", "answer"])
def test_a_request_that_writes_nothing_changes_nothing(server: Server, fails: str) -> None:
    for path in ("/update_weights", "/update_weights_from_distributed", "/update_weights_from_ipc"):
        assert server.ask(path, fails=fails, finished=True) in (400, 500)
    assert server.ask("/update_weights", finished=True) == 200
    assert (server.session.state, server.resumed) == ("serving", 0)
    assert server.ask("/update_weights", finished="perhaps") == 422


def test_the_end_of_an_update_that_one_of_ours_has_replaced_is_no_end(server: Server) -> None:
    assert server.ask("/update_weights", writes=True) == 200
    server.session.state = "serving"  # a full update of ours
    assert server.ask("/update_weights", finished=True) == 200
    assert server.resumed == 0


def test_an_update_of_ours_keeps_own_requests_out(server: Server) -> None:
    server.session.busy = True
    answer = server.client.post("/update_weights", json={"writes": True})
    assert (answer.status_code, "being updated by process 1" in answer.text) == (409, True)
    assert not list(server.folder.iterdir())


def test_an_lmdeploy_without_one_of_the_routes_is_refused(tmp_path: Path) -> None:
    nothing: Any = None
    with pytest.raises(ConfigError, match="the server has no route /update_weights;"):
        admit_own_updates(APIRouter(), nothing, nothing, nothing, str(tmp_path), Guard())
