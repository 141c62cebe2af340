"""In vLLM's API server: the routes under ``/weightcast``, and what stands behind them."""

# vLLM is not installed where this is checked.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

import asyncio
import os
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from fastapi import Depends, FastAPI, HTTPException, Request

from weightcast.comm.ipc import host_id
from weightcast.errors import ConfigError, Refused
from weightcast.plugins.vllm.executor import VllmExecutor
from weightcast.plugins.vllm.hooks import VllmHooks
from weightcast.plugins.vllm.words import Hello
from weightcast.receiver.engine import EngineFacts, ReceiverEngine
from weightcast.receiver.keys import Keys
from weightcast.receiver.server import weight_routes
from weightcast.receiver.staging import Place
from weightcast.wire.layout import TensorSpec
from weightcast.wire.messages import Ack, EngineInfo, Message, RankInfo


class Endpoints:
    """What vLLM calls an endpoint plug-in: routes first, the engine later."""

    name = "weightcast"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._engine: ReceiverEngine | None = None
        self._hooks: VllmHooks | None = None
        self._keys = Keys(())

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes; vLLM's own key check covers its own routes only."""
        app.include_router(weight_routes(self, score=self.score), dependencies=[Depends(self._check_key)])

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Meet the ranks.

        Raises:
            ConfigError: vLLM was started otherwise than weightcast needs it.
        """
        keys: Sequence[str | None] = [*(getattr(args, "api_key", None) or ()), os.environ.get("VLLM_API_KEY")]
        self._keys = Keys(key for key in keys if key)
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, self._start, engine_client, loop, args)

    # -- what the routes need of an engine

    def info(self) -> EngineInfo:
        """As ``ReceiverEngine.info``."""
        return self._ready().info()

    def apply(self, message: Message) -> Ack:
        """As ``ReceiverEngine.apply``."""
        return self._ready().apply(message)

    def holds(self, session: str) -> bool:
        """As ``ReceiverEngine.holds``."""
        return self._ready().holds(session)

    def lease_lost(self, session: str) -> None:
        """As ``ReceiverEngine.lease_lost``."""
        self._ready().lease_lost(session)

    def score(self, token_ids: Sequence[int]) -> Sequence[float]:
        """Log-probability of each token but the first given those before it."""
        if self._hooks is None or self._ready().state == "quarantined":
            raise Refused("this engine is paused and cannot score")
        return self._hooks.score(token_ids)

    def _start(self, client: Any, loop: asyncio.AbstractEventLoop, args: Namespace) -> None:
        import vllm

        config = client.vllm_config
        backend = getattr(config.weight_transfer_config, "backend", None)
        if backend != self.name:
            raise ConfigError(
                f"vLLM's weight-transfer backend is {backend or 'not set'}",
                hint='start vLLM with --weight-transfer-config \'{"backend": "weightcast"}\'',
            )
        if (getattr(args, "api_server_count", None) or 1) > 1:
            raise ConfigError("several API servers cannot update one engine", hint="--api-server-count 1")
        hooks = VllmHooks(client, loop, prefix_caching=bool(config.cache_config.enable_prefix_caching))
        executor = VllmExecutor(int(config.parallel_config.world_size), listen=hooks.listen, on_main=hooks.on_main)
        names = getattr(args, "served_model_name", None) or [config.model_config.model]
        facts = EngineFacts(
            engine=f"vllm {vllm.__version__}",
            model=names if isinstance(names, str) else names[0],
            host_id=host_id(),
            ranks=tuple(RankInfo(rank=hello.rank, pid=hello.pid, device=hello.device) for hello in executor.hellos),
            staging=_least(executor.hellos),
            transports=("ipc", "broadcast"),
            specs=_specs(executor.hellos),
        )
        self._hooks = hooks
        self._engine = ReceiverEngine(executor, hooks, facts)

    def _ready(self) -> ReceiverEngine:
        if self._engine is None:
            raise HTTPException(503, "vLLM is still starting")
        return self._engine

    def _check_key(self, request: Request) -> None:
        if not self._keys.admit(request.headers.get("Authorization", "").encode()):
            raise HTTPException(401, "a valid API key is wanted as Authorization: Bearer")


def _least(hellos: Sequence[Hello]) -> Place:
    places = {hello.staging for hello in hellos}
    return "none" if "none" in places else "host" if "host" in places else "device"


def _specs(hellos: Sequence[Hello]) -> tuple[TensorSpec, ...]:
    """Each tensor with the dtype of a rank that keeps a part of it."""
    kept: dict[str, TensorSpec] = {}
    for hello in hellos:
        places = set(hello.places)
        kept.update({spec.name: spec for spec in hello.specs if spec.name not in kept or spec.name in places})
    return tuple(kept.values())
