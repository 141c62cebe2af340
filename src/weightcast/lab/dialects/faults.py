"""Fault injection for dialects: an engine fails in a chosen way at a chosen request.

A list of faults is text, ``KIND@PATH#N`` separated by commas::

    refuse@/update_weights_from_tensor#2      the second such request is answered 500 and not executed
    delay=3@/pause_generation                 the first one is executed 3 s late
    drop@/end_weight_update                   the first one is not executed and its connection is closed
    lose@/end_weight_update                   the first one is executed, then its connection is closed
    half@/update_weights_from_tensor#3        half of the third one is loaded, then it is answered 500
    die@/update_weights_from_distributed#1    the whole engine is killed

Requests are counted per path, from the moment the list was set.  The route itself implements ``half`` (``wants_half``);
the middleware implements the other kinds.
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
    """Fault of one request.

    Attributes:
        kind: Kind of fault; the module's docstring lists them.
        number: Number of the request to this path, from 1.
        seconds: Length of a ``delay``; 0 means forever.
    """

    kind: FaultKind
    path: str
    number: int = 1
    seconds: float = 0.0


def parse_faults(text: str) -> list[Fault]:
    """Parses a list of faults, which may be empty; raises ``ConfigError`` if the text is malformed."""
    found: list[Fault] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = _PATTERN.fullmatch(part)
        kind = match["kind"] if match is not None else ""
        if match is None or kind not in get_args(FaultKind):
            raise ConfigError(
                f"fault {part!r} is malformed",
                hint=f"write KIND@/path#N, where KIND is one of {', '.join(get_args(FaultKind))}",
            )
        fault = Fault(
            kind=kind,  # pyright: ignore[reportArgumentType]  looked up above
            path=match["path"],
            number=int(match["number"] or 1),
            seconds=float(match["seconds"] or 0.0),
        )
        found.append(fault)
    return found


class Faults:
    """The current list of faults, with the number of requests since it was set.  Thread-safe."""

    def __init__(self, text: str = "") -> None:
        self._lock = threading.Lock()
        self._seen: dict[str, int] = {}
        self._faults: list[Fault] = []
        self.set(text)

    def set(self, text: str) -> None:
        """Replaces the list and restarts the counts; raises ``ConfigError`` if the text is malformed."""
        faults = parse_faults(text)
        with self._lock:
            self._faults = faults
            self._seen.clear()

    def due(self, path: str) -> Fault | None:
        """Counts a request and returns its fault, if any."""
        with self._lock:
            self._seen[path] = number = self._seen.get(path, 0) + 1
            return next((fault for fault in self._faults if (fault.path, fault.number) == (path, number)), None)


def wants_half(request: Request) -> bool:
    """True if a route should load half of this request's tensors and then fail."""
    return bool(request.scope.get(_HALF, False))


def fault_routes(faults: Faults) -> APIRouter:
    """Makes ``POST /faults``, which replaces the list by the plain text of its body."""
    router = APIRouter()

    async def replace(request: Request) -> Response:
        faults.set((await request.body()).decode(errors="replace"))
        return Response(status_code=204)

    router.post("/faults", summary="Set the faults to inject, as text", status_code=204)(replace)
    return router


class WithFaults:
    """Middleware that injects the faults."""

    def __init__(self, app: ASGIApp, *, faults: Faults) -> None:
        self._app = app
        self._faults = faults

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, or injects the fault that is due."""
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
                # Not the process group: the process that started this engine may be in it.
                os.kill(os.getpid(), signal.SIGKILL)


async def _swallow(message: Message) -> None:
    """Discards an answer."""


async def _hang_up(send: Send) -> None:
    """Announces a longer body than it sends, so that the server closes the connection and the client sees it break."""
    headers: Any = [(b"content-length", b"1000"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    raise _HungUp("the connection is closed on purpose: a fault was injected here")


class _HungUp(Exception):
    """Ends a request without its body."""
