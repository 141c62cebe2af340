"""The routes under ``/weightcast`` in vLLM's API server, and the session that they drive."""

# vLLM is not installed where this is checked.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

import asyncio
import logging
import os
import ssl
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, HTTPException

from weightcast.errors import ConfigError, Refused
from weightcast.plugins.engine_server import EngineServer
from weightcast.plugins.other_hosts import SET_A_SECRET, Elsewhere, engine_secret
from weightcast.plugins.rank_sockets import engine_facts, transports_of
from weightcast.plugins.vllm.answer_versions import AddsVersions, watch
from weightcast.plugins.vllm.api_servers import Door, HandsOn, add_first, found_door, number_of
from weightcast.plugins.vllm.core_switch import OWNER
from weightcast.plugins.vllm.engine_hooks import VllmHooks, on_cores
from weightcast.plugins.vllm.hazards import hazards_of
from weightcast.plugins.vllm.lora_server import Adapters, why_no_adapters
from weightcast.plugins.vllm.rank_protocol import (
    check_replicas,
    is_dummy,
    keeps_draft,
    maps_weights,
    on_several_hosts,
    settings_of,
)
from weightcast.plugins.vllm.rank_sockets import VllmExecutor
from weightcast.plugins.vllm.sleep import guard_sleep
from weightcast.plugins.vllm.stores import store_outside
from weightcast.receiver.adapter_routes import adapter_routes
from weightcast.receiver.api_keys import keys_of, warn_if_open
from weightcast.receiver.turns import Turns
from weightcast.report import count_of
from weightcast.wire.answers import Ack
from weightcast.wire.messages import Message

log = logging.getLogger("weightcast.plugins.vllm")

_ONE_HOST = ("uni", "mp")  # executors whose ranks are on one host, unless vLLM is told otherwise
_IN_ORDER = ("uni", "mp")  # executors whose ranks take calls and steps from one queue
_PAUSE_S = 30.0
_RANDOM = "vLLM was started with random weights (--load-format dummy): it is paused until a full update"
_SOME_TOKENS = (0,) * 8


class Endpoints(EngineServer):
    """vLLM's endpoint plug-in: ``attach_router`` adds the routes, and ``init_state`` connects the engine later."""

    name = "weightcast"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        super().__init__("vLLM", keys=None, score=self.score)
        self._turns = Turns()
        self._vllm: VllmHooks | None = None
        self._adapters: Adapters | None = None
        self._app: FastAPI | None = None
        self._door: Door | None = None
        self._owner = ""  # socket of the API server that owns the sessions, if that is another one

    def attach_router(self, app: FastAPI) -> None:
        """Adds the routes, each behind our own check of the key: vLLM's covers only its own routes."""
        add_first(app, AddsVersions)
        add_first(app, HandsOn, owner=lambda: self._owner)
        self._app = app
        for router in self.routers:
            app.include_router(router)
        app.include_router(
            adapter_routes(
                self._ready_adapters, lambda router, prefix: app.include_router(router, prefix=prefix), guard=self.guard
            )
        )

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Connects to the ranks, or to the API server that has; returns when this server may answer requests.

        Raises:
            ConfigError: vLLM has options that weightcast does not support.
        """
        watch(engine_client)
        config = engine_client.vllm_config
        number, servers = number_of(config, args)
        replicas = int(config.parallel_config.data_parallel_size)
        if number:

            async def ask() -> str:
                return (await on_cores(engine_client, replicas, OWNER, ""))[0]

            self._owner = await found_door(ask, number)
            return
        # As vLLM does: its option takes precedence over its variable.
        given = getattr(args, "api_key", None) or [os.environ.get("VLLM_API_KEY")]
        keys = keys_of(given, engine="vLLM", setting="api_key")
        self.guard.accept(keys)
        if getattr(args, "uds", None) is None and getattr(args, "ssl_cert_reqs", 0) != ssl.CERT_REQUIRED:
            warn_if_open(keys, host=getattr(args, "host", None), port=int(getattr(args, "port", 0)), option="--api-key")
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, self._connect, engine_client, loop, args, state.openai_serving_models, servers)
        if servers > 1:
            assert self._app is not None
            self._door = Door(self._app)
            await on_cores(engine_client, replicas, OWNER, await self._door.open())

    # -- methods that the routes call

    def apply(self, message: Message) -> Ack:
        """Implements ``SessionHandler.apply``."""
        return self._turns.apply(self.ready(), message)

    def score(self, token_ids: Sequence[int]) -> Sequence[float]:
        """Returns the log-probability of each token but the first, given those before it."""
        if self._vllm is None or self.ready().state == "quarantined" or self._vllm.asleep:
            raise Refused("this engine is paused and cannot score")
        return self._vllm.score(token_ids)

    def _connect(
        self,
        client: Any,
        loop: asyncio.AbstractEventLoop,
        args: Namespace,
        serving: Any,
        servers: int,
    ) -> None:
        import vllm

        config = client.vllm_config
        backend = getattr(config.weight_transfer_config, "backend", None)
        if backend != self.name:
            raise ConfigError(
                f"vLLM's weight-transfer backend is {backend or 'not set'}",
                hint='start vLLM with --weight-transfer-config \'{"backend": "weightcast"}\'',
            )
        parallel, settings = config.parallel_config, settings_of(config.additional_config)
        check_replicas(parallel)
        replicas = int(parallel.data_parallel_size)
        hooks = VllmHooks(
            client,
            loop,
            replicas=replicas,
            prefix_caching=bool(config.cache_config.enable_prefix_caching),
            encoders=bool(config.model_config.is_multimodal_model),
            cache_outside=store_outside(config),
        )
        hooks.meet_cores()
        world_size = replicas * int(parallel.world_size)
        elsewhere = elsewhere_of(config)
        executor = VllmExecutor(
            world_size,
            listen=hooks.listen,
            on_main=hooks.switch_model,
            elsewhere=elsewhere,
            on_far_rank_lost=hooks.end,
        )
        names = getattr(args, "served_model_name", None) or [config.model_config.model]
        name = names if isinstance(names, str) else names[0]
        staging = executor.staging()
        if staging != "none":
            hooks.pause_in_switch(
                in_order=parallel.distributed_executor_backend in _IN_ORDER,
                waits=staging == "device" and maps_weights(config),
            )
        ranks = count_of(parallel.world_size, "rank")
        facts = engine_facts(
            executor,
            notes=[f"{replicas} data-parallel engines with {ranks} each, updated together"] if replicas > 1 else (),
            engine=f"vllm {vllm.__version__}",
            model=name,
            transports=transports_of(executor.hellos),
            no_pause=hooks.no_pause,
            hazards=hazards_of(
                config,
                keeps_draft=keeps_draft(config),
                not_updated=settings.not_updated,
            ),
        )
        self._vllm = hooks
        sessions = self.start(executor, hooks, facts)
        self._adapters = Adapters(
            hooks,
            serving=serving,
            base=facts,
            engine=sessions,
            world_size=world_size,
            turns=self._turns,
            why_none=why_no_adapters(config, servers=servers),
            elsewhere=elsewhere,
        )
        guard_sleep(client, sessions, hooks, self._adapters)
        if settings.warm_up:  # vLLM compiles a function for log-probabilities of prompts, which ``behaviour`` asks for
            hooks.score(_SOME_TOKENS)
        if is_dummy(config):
            hooks.pause_anyway("abort", _PAUSE_S)
            with sessions.between_updates():
                sessions.discarded(_RANDOM)

    def _ready_adapters(self) -> Adapters:
        if self._adapters is None:
            raise HTTPException(503, "vLLM is still starting")
        return self._adapters


def elsewhere_of(config: Any) -> Elsewhere | None:
    """Address and secret for ranks on other hosts, or None if there can be none; ``ConfigError`` without a secret."""
    from vllm.utils.network_utils import get_ip

    parallel = config.parallel_config
    several = on_several_hosts(parallel)
    if not several and parallel.distributed_executor_backend in _ONE_HOST:
        return None
    secret = engine_secret(settings_of(config.additional_config).secret_file)
    if secret is None:
        if several:
            raise ConfigError("the ranks of this vLLM are on several hosts, and there is no secret", hint=SET_A_SECRET)
        return None  # a rank on another host will say so
    address = os.environ.get("VLLM_HOST_IP") or (parallel.master_addr if several else get_ip())
    return Elsewhere(address=address, secret=secret)
