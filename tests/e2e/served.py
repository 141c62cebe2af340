"""An engine in this process, with HTTP, shared memory and gloo between it and a trainer of the same process."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI
from torch import nn

from tests.helpers.clock import PATIENCE_S, wait_until
from tests.helpers.session_bench import Hooks, Ranks
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

Weights = Mapping[str, torch.Tensor]


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
