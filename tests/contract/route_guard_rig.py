"""Runs under an engine's Python: strangers and key holders ask for the routes of our receiver in that engine's server.

``python route_guard_rig.py ENGINE [NAME=KEY ...]`` builds the app as the plug-in does, with the engine's own check of
keys around it, and prints one JSON object: the versions, what a stranger reached, and how holders of keys fared.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import itertools
import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from fastapi import APIRouter, Depends, FastAPI
from fastapi.responses import JSONResponse

from weightcast.wire.answers import Ack
from weightcast.wire.codec import encode
from weightcast.wire.engine_info import EngineInfo, EngineStatus
from weightcast.wire.messages import Readback
from weightcast.wire.pieces import WantedBoxes

OURS = (
    ("GET", "/weightcast/info"),
    ("GET", "/weightcast/status"),
    ("POST", "/weightcast/apply"),
    ("GET", "/weightcast/digests"),
    ("GET", "/weightcast/boxes"),
)
UNEXEMPT = (
    "/health",
    "/health_generate",
    "/ready",
    "/metrics",
    "/docs",
    "/redoc",
    "/nodes",
    "/openapi.json",
    "/v1/models",
)
HOSTS = (
    None,
    "",
    "engine:8000",
    *(f"x{path}{end}" for path in UNEXEMPT for end in ("?", "#", "/", "")),
    "x@y/health?",
    "//health?",
    "x\\health?",
    "x/health?@y",
    "[::1]/health?",
    "[::1",
    "x%2Fhealth%3F",
    "\xe9/health?",
    "x/health?\tengine",
)
PATHS = (
    "{path}",
    "/{path}",
    "{path}/",
    "{path}?x",
    "{path};x",
    "/health/..{path}",
    "/health{path}",
    "/health?{path}",
    "/v1/..{path}",
    "/./{path}",
    "{upper}",
    "/api{path}",
)
METHODS = ("GET", "POST", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE", "TRACE", "post", "X")
NO_KEYS: tuple[tuple[tuple[bytes, bytes], ...], ...] = (
    (),
    ((b"authorization", b""),),
    ((b"authorization", b"Bearer"),),
    ((b"authorization", b"Bearer "),),
    ((b"authorization", b"Bearer wrong"),),
    ((b"authorization", b"Bearer None"),),
    ((b"authorization", b"Bearer \xff\xfe"),),
    ((b"x-api-key", b"secret"), (b"cookie", b"authorization=Bearer secret")),
)


errors: list[str] = []


class Handler:
    """Stands in for the session handler; it notes who was called."""

    state = "serving"

    def __init__(self) -> None:
        self.reached: list[str] = []

    def info(self) -> EngineInfo:
        self.reached.append("info")
        facts: Any = {"protocol": 1, "engine": "e", "model": "m", "tp_size": 1, "host_id": "", "ranks": (), "specs": ()}
        return EngineInfo(**facts, state="serving", version=0, digest=None, staging="none", transports=())

    def status(self) -> EngineStatus:
        self.reached.append("status")
        return EngineStatus(engine="e", model="m", state="serving", version=0, digest=None)

    def apply(self, message: Any) -> Ack:
        self.reached.append(type(message).__name__)
        return Ack(ok=True, state="serving", version=0, ranks=1)

    def boxes(self) -> WantedBoxes:
        self.reached.append("boxes")
        return WantedBoxes(kinds=())

    @contextmanager
    def between_updates(self) -> Iterator[None]:
        self.reached.append("between updates")
        yield


def serve_by(handler: Handler) -> None:
    """Has servers of our plug-ins start with this handler."""
    from weightcast.plugins import engine_server

    vars(engine_server)["SessionHandler"] = lambda *_, **__: handler


def sglang(handler: Handler, keys: dict[str, str]) -> FastAPI:
    """SGLang's own check of keys, from its file alone: its package imports all of SGLang."""
    from weightcast.plugins.sglang import endpoints

    folder = importlib.util.find_spec("sglang")
    assert folder is not None
    assert folder.submodule_search_locations
    for name in ("sglang", "sglang.srt", "sglang.srt.utils", "sglang.srt.entrypoints"):
        sys.modules[name] = ModuleType(name)
    file = Path(folder.submodule_search_locations[0]) / "srt" / "utils" / "auth.py"
    spec = importlib.util.spec_from_file_location("sglang.srt.utils.auth", file)
    assert spec is not None
    assert spec.loader is not None
    auth = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(auth)
    http_server = sys.modules["sglang.srt.entrypoints.http_server"] = ModuleType("http_server")
    app = vars(http_server)["app"] = FastAPI()
    for path in endpoints.ROUTES:

        async def own() -> None:
            handler.reached.append("SGLang's own update")

        app.post(path)(auth.auth_level(auth.AuthLevel.ADMIN_OPTIONAL)(own))
    settings = SimpleNamespace(
        dp_size=1,
        served_model_name="m",
        enable_metrics=False,
        host="127.0.0.1",
        port=1,
        api_key=keys.get("api"),
        admin_api_key=keys.get("admin"),
    )
    nothing: Callable[..., Any] = lambda *_, **__: SimpleNamespace(hellos=(), model="m", note_loop=str)  # noqa: E731
    for name in ("SwitchExecutor", "SglangHooks", "engine_facts", "guard_sleep", "check_settings"):
        setattr(endpoints, name, nothing)
    for name in ("ranks_of", "transports_of", "_no_pause", "has_draft", "loses_weights"):
        setattr(endpoints, name, lambda *_, **__: ())
    endpoints.resolved = lambda given: given
    serve_by(handler)
    endpoints.os.environ[endpoints.FOLDER] = ""
    endpoints.before_serving(settings, SimpleNamespace(check_weights=None))
    if any(keys.values()):
        auth.add_api_key_middleware(app, api_key=keys.get("api"), admin_api_key=keys.get("admin"))
    return app


def lmdeploy(handler: Handler, keys: dict[str, str]) -> FastAPI:
    from lmdeploy.serve.utils.server_utils import AuthenticationMiddleware

    from weightcast.plugins.lmdeploy import endpoints, own_routes

    app, router = FastAPI(), APIRouter()
    for path in ("/wakeup", *own_routes._WRITING):

        def own(request: dict[str, Any], raw_request: Any = None) -> Any:
            handler.reached.append("LMDeploy's own update")
            return JSONResponse({})

        own.__annotations__ = {"request": dict[str, Any]}
        router.post(path, dependencies=[Depends(lambda: None)])(own)
    nothing: Callable[..., Any] = lambda *_, **__: SimpleNamespace(model="m", note_loop=str)  # noqa: E731
    for name in ("LmdeployHooks", "LmdeployExecutor", "engine_facts"):
        setattr(endpoints, name, nothing)
    serve_by(handler)
    config = SimpleNamespace(
        tp=1, enable_prefix_caching=False, enable_metrics=False, distributed_executor_backend="uni"
    )
    engine = SimpleNamespace(
        backend_config=config,
        model_name="m",
        speculative_config=None,
        engine=SimpleNamespace(_collective_rpc=lambda _: True),
        sleep=None,
        wakeup=None,
    )
    given = list(keys.values())
    endpoints.add_routes(router, engine, tempfile.mkdtemp(), given)
    app.include_router(router)
    if given:
        app.add_middleware(AuthenticationMiddleware, tokens=given)
    return app


def vllm(handler: Handler, keys: dict[str, str]) -> FastAPI:
    from weightcast.plugins.vllm.endpoints import Endpoints

    app, endpoints = FastAPI(), Endpoints()
    endpoints.attach_router(app)
    endpoints._sessions = handler  # type: ignore[assignment]
    endpoints.guard.accept(keys.values())
    return app


def reference(handler: Handler, keys: dict[str, str]) -> FastAPI:
    from weightcast.rollout.engine import RolloutEngine
    from weightcast.rollout.server import build_app
    from weightcast.rollout.text import TextTokenizer

    scheduler = SimpleNamespace(stats=None, failure=None, score=None)
    engine = RolloutEngine(scheduler=scheduler, text=TextTokenizer(), model="m", receiver=handler)  # type: ignore[arg-type]
    return build_app(engine, api_key=next(iter(keys.values()), None))


def bare(handler: Handler, keys: dict[str, str]) -> FastAPI:
    """Our routes in a server that knows no keys."""
    from weightcast.receiver.api_keys import Guard
    from weightcast.receiver.peer_routes import peer_routes
    from weightcast.receiver.server import weight_routes

    app, guard = FastAPI(), Guard(keys.values())
    app.include_router(weight_routes(handler, guard=guard))  # type: ignore[arg-type]
    app.include_router(peer_routes(lambda: handler, guard=guard))  # type: ignore[arg-type, return-value]
    return app


async def ask(
    app: Any, method: str, path: str, host: str | None, headers: Iterable[tuple[bytes, bytes]], **scope: Any
) -> int:
    """Sends one request; returns the status, 0 if there was no answer."""
    status = 0
    sent = iter([{"type": "http.request", "body": encode(Readback())}])

    async def receive() -> Any:
        return next(sent, {"type": "http.disconnect"})

    async def send(message: Any) -> None:
        nonlocal status
        status = message.get("status", status)

    found = [] if host is None else [(b"host", host.encode("latin-1"))]
    asked = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [*found, *headers, (b"content-type", b"application/json")],
        "root_path": "",
        "scheme": "http",
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
        **scope,
    }
    try:
        await app(asked, receive, send)
    except Exception as error:  # noqa: BLE001  Starlette raises for hosts that it cannot read; uvicorn then answers 500
        errors.append(f"{type(error).__name__}: {error}")
        return 500
    return status


async def strangers(app: Any, handler: Handler, own: Iterable[str]) -> tuple[int, list[str]]:
    """Asks for every route without a key, in all odd ways; returns the number of tries, and those that got in."""
    tries, leaks = 0, list[str]()

    async def knock(method: str, path: str, host: str | None, headers: Any, **scope: Any) -> None:
        nonlocal tries
        tries += 1
        handler.reached.clear()
        status = await ask(app, method, path, host, headers, **scope)
        if handler.reached:
            leaks.append(f"{method} {path} host {host!r} {headers} {scope}: {status}, reached {handler.reached}")

    routes = [*OURS, *(("POST", path) for path in own)]
    for (method, path), host, headers in itertools.product(routes, HOSTS, NO_KEYS):
        await knock(method, path, host, headers)
    for (_, path), odd, method in itertools.product(routes, PATHS, METHODS):
        asked = odd.format(path=path, upper=path.upper())
        await knock(method, asked, "x/health?", ())
        await knock(method, asked, "engine", (), root_path="/api")
        await knock(method, asked, "x/health?", (), root_path="/health", raw_path=b"/health")
    for _, path in routes:
        await knock("GET", path, "x/health?", (), type="websocket", subprotocols=[])
        await knock("POST", path, "engine", ((b"x-forwarded-prefix", b"/health"), (b"x-forwarded-host", b"x/health?")))
        encoded = "".join(f"%{ord(letter):02x}" for letter in path)
        await knock("POST", path, "x/health?", (), raw_path=encoded.encode())  # as uvicorn passes it on
        await knock("POST", encoded, "x/health?", ())
    return tries, leaks


async def holders(app: Any, handler: Handler, keys: dict[str, str]) -> dict[str, dict[str, int]]:
    """For nobody and each key: the status of each of our routes; those that were not reached count as negative."""
    found: dict[str, dict[str, int]] = {}
    for name, key in {"nobody": "", **keys}.items():
        headers = [(b"authorization", f"Bearer {key}".encode())] if key else []
        found[name] = {}
        for method, path in OURS:
            handler.reached.clear()
            status = await ask(app, method, path, "engine:8000", headers)
            found[name][path] = status if handler.reached else -status
    return found


def main() -> None:
    engine, *given = sys.argv[1:]
    keys = dict(pair.split("=", 1) for pair in given)
    handler = Handler()
    app = {"sglang": sglang, "lmdeploy": lmdeploy, "vllm": vllm, "reference": reference, "bare": bare}[engine](
        handler, keys
    )
    own = {
        "sglang": ["/update_weights_from_tensor", "/update_weights_from_disk"],
        "lmdeploy": ["/update_weights", "/update_weights_from_distributed", "/update_weights_from_ipc", "/wakeup"],
    }
    tries, leaks = asyncio.run(strangers(app, handler, own.get(engine, ()))) if keys else (0, [])
    found = asyncio.run(holders(app, handler, keys))
    versions = [importlib.metadata.version(name) for name in ("fastapi", "starlette")]
    print(json.dumps({"versions": versions, "tries": tries, "leaks": leaks, "holders": found, "errors": errors[-2:]}))


if __name__ == "__main__":
    main()
