"""A TCP proxy between the trainer and one engine that injects network faults.

The proxy parses requests far enough to recognise the messages of an update, so that a fault strikes at a message and
not after some milliseconds.  Answers pass unchanged.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

StepOf = Callable[[str, bytes], str]
WireFault = Literal["delay", "drop", "refuse", "cut", "flip", "lose answer", "flip answer"]


@dataclass(slots=True)
class Trap:
    """Fault to inject at a message.

    Attributes:
        step: Step of the message; see ``StepOf``.
        count: Number of messages of this step that pass before it.
        fault: Fault of the wire itself; None if only ``strike`` acts.
        strike: Called before the message is passed on.
    """

    step: str
    count: int = 0
    fault: WireFault | None = None
    delay_s: float = 0.0
    strike: Callable[[], None] = lambda: None
    sprung: threading.Event = field(default_factory=threading.Event)


class Loop:
    """One thread for all proxies."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="wire", daemon=True)
        self.thread.start()

    def run(self, work):
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(30)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


class Wire:
    """Between the trainer and one engine.

    Args:
        loop: Where it runs.
        step_of: What a request is, by its path and body: ``open``, ``bucket``, ... or empty for none of these.
        upstream: The engine's port; another engine may take its place.
    """

    def __init__(self, loop: Loop, step_of: StepOf, upstream: int) -> None:
        self._loop = loop
        self._step_of = step_of
        self.upstream = upstream
        self._trap: Trap | None = None
        self.seen: dict[str, int] = {}
        self._state: Literal["passes", "drop", "refuse"] = "passes"
        self._pairs: set[_Pair] = set()
        self._healed = asyncio.Event()
        self._server = loop.run(self._listen())
        self.port: int = self._server.sockets[0].getsockname()[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def set_trap(self, trap: Trap | None) -> None:
        """Sets the trap and restarts the count of messages."""
        self.seen.clear()
        self._trap = trap

    def heal(self) -> None:
        """Ends the cut connections, and lets new ones pass."""
        self.set_trap(None)
        self._loop.run(self._set("passes"))

    def close(self) -> None:
        self._loop.run(self._end())

    async def _listen(self) -> asyncio.Server:
        return await asyncio.start_server(self._accept, "127.0.0.1", 0)

    async def _end(self) -> None:
        self._server.close()
        await self._set("refuse")

    async def _set(self, state: Literal["passes", "drop", "refuse"]) -> None:
        cut_off = self._state != "passes" or state == "refuse"
        self._state = state
        if state == "drop":
            self._healed.clear()
        else:
            self._healed.set()
        if cut_off:
            for pair in list(self._pairs):
                pair.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._state == "refuse":
            writer.transport.abort()
            return
        pair = _Pair(self, reader, writer)
        self._pairs.add(pair)
        try:
            await pair.serve()
            if self.blocked():  # the engine does not hear that the trainer has hung up
                await self._healed.wait()
        finally:
            pair.abort()
            self._pairs.discard(pair)

    def blocked(self) -> bool:
        return self._state == "drop"

    async def passes(self, pair: _Pair, path: str, body: bytes) -> bytes | None:
        """The body to pass on; None for nothing."""
        step = self._step_of(path, body)
        number = self.seen.get(step, 0)
        self.seen[step] = number + 1
        trap = self._trap
        if trap is None or trap.sprung.is_set() or step != trap.step or number != trap.count:
            return body
        trap.sprung.set()
        trap.strike()
        match trap.fault:
            case "delay":
                await asyncio.sleep(trap.delay_s)
            case "drop":
                await self._set("drop")
                return None
            case "refuse":
                await self._set("refuse")
                return None
            case "cut":
                pair.abort()
                return None
            case "flip":
                return flipped(body, len(body) // 2)
            case "lose answer" | "flip answer":
                pair.answer_fault = trap.fault
            case None:
                pass
        return body


class _Pair:
    """One connection and its continuation."""

    def __init__(self, wire: Wire, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.wire, self.reader, self.writer = wire, reader, writer
        self.answer_fault: str = ""
        self.engine: asyncio.StreamWriter | None = None
        self.answers: asyncio.Task[None] | None = None

    async def serve(self) -> None:
        with suppress(OSError, EOFError, asyncio.IncompleteReadError):
            while True:
                head = await self.reader.readuntil(b"\r\n\r\n")
                path = head.split(b" ", 2)[1].decode()
                length = 0
                for line in head.split(b"\r\n"):
                    if line.lower().startswith(b"content-length:"):
                        length = int(line.split(b":")[1])
                body = await self.reader.readexactly(length)
                passed = None if self.wire.blocked() else await self.wire.passes(self, path, body)
                if passed is None:
                    await self.reader.read()  # nothing is passed on any more, not even that the trainer hangs up
                    return
                if self.engine is None:
                    back, self.engine = await asyncio.open_connection("127.0.0.1", self.wire.upstream)
                    self.answers = asyncio.create_task(self._answer(back))
                self.engine.write(head + passed)
                await self.engine.drain()

    async def _answer(self, back: asyncio.StreamReader) -> None:
        with suppress(OSError, EOFError):
            while data := await back.read(1 << 16):
                if self.wire.blocked() or self.answer_fault == "lose answer":
                    continue
                if self.answer_fault == "flip answer":
                    data, self.answer_fault = flipped(data, len(data) - 2), ""
                self.writer.write(data)
                await self.writer.drain()
        if not self.wire.blocked():
            self.writer.close()  # the engine has hung up

    def abort(self) -> None:
        for writer in (self.writer, self.engine):
            if writer is not None:
                writer.transport.abort()
        if self.answers is not None:
            self.answers.cancel()


def flipped(data: bytes, index: int) -> bytes:
    """One bit of one byte is another."""
    return data[:index] + bytes([data[index] ^ 1]) + data[index + 1 :]
