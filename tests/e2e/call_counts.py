"""A trainer and an engine in this process, with HTTP, shared memory and gloo between them, whose calls are counted.

Calls are counted and not timed, so that a busy machine changes nothing.
"""

from __future__ import annotations

import gc
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import PurePath
from types import CodeType, FrameType
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI
from torch import nn

from tests.clock import PATIENCE_S, wait_until
from tests.unit.session_bench import Hooks, Ranks
from weightcast import UpdateReport, WeightUpdater
from weightcast.comm import nixl
from weightcast.comm.ipc import host_id
from weightcast.receiver.engine_state import EngineFacts
from weightcast.receiver.peer_routes import peer_routes
from weightcast.receiver.rank import WeightReceiver
from weightcast.receiver.server import weight_routes
from weightcast.receiver.session import SessionHandler
from weightcast.wire.engine_info import RankInfo
from weightcast.wire.layout import TensorSpec
from weightcast.wire.messages import Message

FEW, MANY = 64, 256
BUCKETS = 4
Weights = Mapping[str, torch.Tensor]


class Calls:
    """Counts the calls of weightcast's functions, in threads that start after it was made."""

    def __init__(self) -> None:
        self.counts: Counter[str] | None = None
        self._names: dict[int, tuple[CodeType, str]] = {}  # by identity: equal code may be of two files

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        counts = self.counts
        if counts is not None and event == "call":
            code = frame.f_code
            known = self._names.get(id(code))
            if known is None:
                self._names[id(code)] = known = code, _name_of(code)
            if known[1]:
                counts[known[1]] += 1

    @contextmanager
    def counted(self) -> Iterator[Counter[str]]:
        gc.collect()  # a generator that an earlier test left would end in between, which counts as a call
        self.counts = found = Counter[str]()
        sys.setprofile(self)
        try:
            yield found
        finally:
            sys.setprofile(None)
            self.counts = None


def _name_of(code: CodeType) -> str:
    """The file, line and name of a function of weightcast; empty for any other."""
    path = PurePath(code.co_filename)
    if "weightcast" not in path.parts:
        return ""
    return f"{path.parent.name}/{path.name}:{code.co_firstlineno} {code.co_name}"


class Keeper(nn.Module):
    """An engine's model that keeps each tensor as it comes."""

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        super().__init__()
        self.kept = nn.ParameterList(
            nn.Parameter(torch.zeros(spec.shape, dtype=spec.torch_dtype), requires_grad=False) for spec in specs
        )
        self.named = dict(zip((spec.name for spec in specs), self.kept, strict=True))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        with torch.no_grad():
            for name, tensor in weights:
                self.named[name].copy_(tensor)


class Metered:
    """Counts the bytes of bodies that an application is sent, and that it answers with."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self.size_bytes = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def received() -> Any:
            message = await receive()
            self.size_bytes += len(message.get("body", b""))
            return message

        async def answered(message: Any) -> None:
            self.size_bytes += len(message.get("body", b""))
            await send(message)

        await self._app(scope, received, answered)


class Served:
    """A real receiver behind HTTP, in this process."""

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self.model = Keeper(specs)
        self.receiver = WeightReceiver(self.model, load_weights=self.model.load_weights, expected=tuple(specs))
        self.heard: list[Message] = []
        ranks = Ranks([self.receiver])
        apply = ranks.apply

        def noting(message: Message, **options: Any) -> Any:
            self.heard.append(message)
            return apply(message, **options)

        ranks.apply = noting  # type: ignore[method-assign]
        facts = EngineFacts(
            engine="test 1",
            model="m",
            host_id=host_id(),
            ranks=(RankInfo(rank=0, pid=1, device="cpu"),),
            staging="device",
            transports=("ipc", "direct", "broadcast"),
            specs=tuple(specs),
            reads_remote=not nixl.missing(),
        )
        self.handler = SessionHandler(ranks, Hooks(), facts)
        app = FastAPI()
        app.include_router(weight_routes(self.handler))
        app.include_router(peer_routes(lambda: self.handler))
        listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listening.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        self.metered = Metered(app)
        self._server = uvicorn.Server(uvicorn.Config(self.metered, log_level="error", access_log=False))
        self._thread = threading.Thread(target=self._server.run, args=([listening],), daemon=True)
        self._thread.start()
        wait_until(lambda: self._server.started, "the server")

    def differing(self, sent: Weights) -> list[str]:
        """Names of the tensors that the engine keeps with other bytes."""
        kept = self.model.named
        assert kept.keys() == sent.keys()
        return [name for name, tensor in sent.items() if not _alike(kept[name].detach(), tensor.detach())]

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(PATIENCE_S)
        self.handler.close()
        self.receiver.close()


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    same = a.dtype == b.dtype and a.shape == b.shape
    return same and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def counts_of(
    calls: Calls,
    exporter: Any,
    specs: Sequence[TensorSpec],
    train: Callable[[], object],
    sent: Callable[[], Weights],
    transport: Any,
    **options: Any,
) -> tuple[list[Counter[str]], list[UpdateReport]]:
    """The calls of ``connect`` and of three updates of ``BUCKETS`` buckets, and the reports of these.

    Args:
        exporter: The model, as ``connect`` takes it.
        specs: The tensors that the engine keeps.
        train: Changes the weights before each update.
        sent: The weights as the engine must keep them.
    """
    served = Served(specs)
    try:
        found: list[Counter[str]] = []
        reports: list[UpdateReport] = []
        size = sum(spec.size_bytes for spec in specs)
        options = {"bucket_bytes": size // BUCKETS, "transport": transport} | options
        with calls.counted() as connecting:
            updater = WeightUpdater.connect(exporter, served.url, **options)
        found.append(connecting)
        with updater:
            for version in (1, 2, 3):
                train()
                assert served.differing(sent())
                with calls.counted() as updating:
                    reports.append(updater.update(version=version))
                assert served.differing(sent()) == []
                found.append(updating)
        return found, reports
    finally:
        served.close()


# The places of the second set must be looked up, and pointers exchanged; each takes a fraction of a microsecond.
# Whoever waits looks again and again, however many tensors there are.
ALLOWED = "receiver/staging.py", "comm/", "runtime/"
POLLED = "look_for_refusals", "is_due"


def grown(few: Counter[str], many: Counter[str], allowed: Sequence[str] = ()) -> dict[str, int]:
    """Functions that are called more often for more tensors in as many buckets, but for ``allowed`` ones."""
    more = {name: count for name, count in many.items() if count - few[name] > (MANY - FEW) // 2}
    return {
        name: count
        for name, count in more.items()
        if not name.startswith((*ALLOWED, *allowed)) and not name.endswith(POLLED)
    }
