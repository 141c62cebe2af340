"""Faults on request: an engine that refuses, is slow, falls silent, hangs up, dies or loads half, at a chosen request.

A list of faults is text, ``KIND@PATH#N`` with commas between::

    refuse@/update_weights_from_tensor#2      the second such request is answered 500, and nothing of it is done
    delay=3@/pause_generation                 the first one is done 3 s late
    drop@/end_weight_update                   the first one loses its connection, and nothing of it is done
    lose@/end_weight_update                   the first one is done, and then loses its connection
    half@/update_weights_from_tensor#3        half of the third one is loaded, then it is answered 500
    die@/update_weights_from_distributed#1    the whole engine is killed

Requests are counted from when the list was set, each path by itself.  Knows no dialect: ``half`` is for the route to do
(``wants_half``), everything else happens around it.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
from typing import Any, Literal, get_args

import msgspec
from fastapi import APIRouter, Request, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weightcast.errors import ConfigError

FaultKind = Literal["refuse", "delay", "drop", "lose", "half", "die"]
_PATTERN = re.compile(r"(?P<kind>[a-z]+)(=(?P<seconds>[0-9.]+))?@(?P<path>/[A-Za-z0-9_/]+)(#(?P<number>[0-9]+))?")
_HALF = "weightcast.half"
_WORDS = b'{"success": false, "message": "refused because a fault was asked for here"}'


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """What happens to one request.

    Attributes:
        kind: See the module's text.
        path: The route.
        number: Which request to it, from 1.
        seconds: For ``delay``: how long; 0 for ever.
    """

    kind: FaultKind
    path: str
    number: int = 1
    seconds: float = 0.0


def parse_faults(text: str) -> list[Fault]:
    """A list of faults from text; empty text is an empty list.

    Raises:
        ConfigError: It is not such a list.
    """
    found: list[Fault] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = _PATTERN.fullmatch(part)
        kind = match["kind"] if match is not None else ""
        if match is None or kind not in get_args(FaultKind):
            raise ConfigError(f"fault {part!r}: write KIND@/path#N, KIND one of {', '.join(get_args(FaultKind))}")
        fault = Fault(
            kind=kind,  # pyright: ignore[reportArgumentType]  looked up above
            path=match["path"],
            number=int(match["number"] or 1),
            seconds=float(match["seconds"] or 0.0),
        )
        found.append(fault)
    return found


class Faults:
    """The faults that are set now, and how many requests came since.  Thread-safe."""

    def __init__(self, text: str = "") -> None:
        self._lock = threading.Lock()
        self._seen: dict[str, int] = {}
        self._faults: list[Fault] = []
        self.set(text)

    def set(self, text: str) -> None:
        """Replace them, and count from the start.

        Raises:
            ConfigError: As ``parse_faults``.
        """
        faults = parse_faults(text)
        with self._lock:
            self._faults = faults
            self._seen.clear()

    def due(self, path: str) -> Fault | None:
        """The fault for this request, which is counted."""
        with self._lock:
            self._seen[path] = number = self._seen.get(path, 0) + 1
            return next((fault for fault in self._faults if (fault.path, fault.number) == (path, number)), None)


def wants_half(request: Request) -> bool:
    """True if a route should load half of what this request brings, and then fail."""
    return bool(request.scope.get(_HALF, False))


def fault_routes(faults: Faults) -> APIRouter:
    """``POST /faults`` with the list as plain text replaces it."""
    router = APIRouter()

    async def replace(request: Request) -> Response:
        faults.set((await request.body()).decode(errors="replace"))
        return Response(status_code=204)

    router.post("/faults", summary="Which faults are to happen, as text", status_code=204)(replace)
    return router


class WithFaults:
    """Middleware that makes them happen."""

    def __init__(self, app: ASGIApp, *, faults: Faults) -> None:
        self._app = app
        self._faults = faults

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or do to it what is due."""
        fault = self._faults.due(scope["path"]) if scope["type"] == "http" else None
        match fault.kind if fault is not None else None:
            case None:
                await self._app(scope, receive, send)
            case "delay":
                assert fault is not None
                await asyncio.sleep(fault.seconds or 1e6)
                await self._app(scope, receive, send)
            case "half":
                await self._app({**scope, _HALF: True}, receive, send)
            case "refuse":
                start: Message = {
                    "type": "http.response.start",
                    "status": 500,
                    "headers": [(b"content-type", b"application/json")],
                }
                await send(start)
                await send({"type": "http.response.body", "body": _WORDS})
            case "drop":
                await _hang_up(send)
            case "lose":
                await self._app(scope, receive, _swallow)
                await _hang_up(send)
            case "die":
                # Not the family only: whoever started this engine may be in the same process group.
                os.kill(os.getpid(), signal.SIGKILL)


async def _swallow(message: Message) -> None:
    """An answer that nobody gets."""


async def _hang_up(send: Send) -> None:
    """Promise more than comes: the server then closes the connection, and the client sees it break."""
    headers: Any = [(b"content-length", b"1000"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    raise _HungUp("the connection is dropped because a fault was asked for here")


class _HungUp(Exception):
    """Ends a request without its body."""
