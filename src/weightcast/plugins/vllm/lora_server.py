"""The LoRA adapters that trainers update in memory, in vLLM's API server.

Each adapter has a session, a version and a digest of its own.  vLLM offers it under its name from its first commit on.
"""

# vLLM is not installed where this is checked.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from weightcast.errors import EngineFailure, Refused, some
from weightcast.plugins.other_hosts import Elsewhere
from weightcast.plugins.rank_sockets import tables_of
from weightcast.plugins.vllm.engine_hooks import VllmHooks
from weightcast.plugins.vllm.rank_protocol import AdapterOrder
from weightcast.plugins.vllm.rank_sockets import VllmExecutor
from weightcast.plugins.vllm.worker_hooks import ADAPTER
from weightcast.receiver.engine_state import EngineFacts
from weightcast.receiver.session import SessionHandler
from weightcast.receiver.turns import Turns
from weightcast.watch.spans import EngineSpans
from weightcast.wire.adapters import KIND, AdapterRequest
from weightcast.wire.answers import Ack
from weightcast.wire.engine_info import EngineInfo, EngineStatus
from weightcast.wire.messages import Message, Open

log = logging.getLogger("weightcast.plugins.vllm")

_ORDER_S = 60.0
_NEW = "vLLM does not offer this adapter before its first update"


class AdapterHooks:
    """``EngineHooks`` of one adapter: vLLM's own pause, and no stamp on the model's weights."""

    def __init__(self, hooks: VllmHooks, publish: Callable[[int], None]) -> None:
        """All modes but ``in_place`` drop the prefix cache, which knows an adapter by its name only."""
        self._hooks = hooks
        self._publish = publish
        self.pause, self.stop_waiting, self.resume = hooks.pause, hooks.stop_waiting, hooks.resume

    @property
    def paused(self) -> bool:
        """As ``VllmHooks.paused``."""
        return self._hooks.paused

    def drop_caches(self) -> None:
        """Does nothing: the pause has dropped what an adapter computes."""

    def set_version(self, version: int) -> None:
        """Offers the adapter to vLLM's clients."""
        self._publish(version)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedLora:
    """One adapter, as the routes below its name see it; ``engine`` has the sessions of the engine's model."""

    request: AdapterRequest
    handler: SessionHandler
    engine: SessionHandler
    turns: Turns
    withdraw: Callable[[], None]
    score_with: Callable[[Sequence[int]], Sequence[float]]

    def info(self) -> EngineInfo:
        """As ``SessionHandler.info``."""
        return msgspec.structs.replace(self.handler.info(), kind=KIND)

    def status(self) -> EngineStatus:
        """As ``SessionHandler.status``."""
        return self.handler.status()

    def apply(self, message: Message) -> Ack:
        """As ``SessionHandler.apply``, while no other update of this engine is under way.

        An adapter of a quarantined model is refused, because its commit would end the quarantine's pause.
        """
        if isinstance(message, Open) and self.engine.state == "quarantined":
            now = self.handler.info()
            why = "the model of this engine is quarantined: send it a full update first"
            return Ack(ok=False, error=why, state=now.state, version=now.version, ranks=now.tp_size)
        answer = self.turns.apply(self.handler, message)
        if answer.state == "quarantined":
            self.withdraw()
        return answer

    def holds(self, session: str) -> bool:
        """As ``SessionHandler.holds``."""
        return self.handler.holds(session)

    def lease_lost(self, session: str) -> None:
        """As ``SessionHandler.lease_lost``."""
        self.handler.lease_lost(session)
        if self.handler.state == "quarantined":
            self.withdraw()

    def score(self, token_ids: Sequence[int]) -> Sequence[float]:
        """Returns the log-probability of each token but the first, given those before it, with the adapter."""
        if self.handler.info().version is None:
            raise Refused(_NEW)
        return self.score_with(token_ids)


class Adapters:
    """All adapters of one vLLM server that weightcast updates."""

    def __init__(
        self,
        hooks: VllmHooks,
        *,
        serving: Any,
        base: EngineFacts,
        engine: SessionHandler,
        world_size: int,
        turns: Turns,
        why_none: str,
        elsewhere: Elsewhere | None,
    ) -> None:
        """Nothing is asked yet.

        Args:
            serving: vLLM's ``OpenAIServingModels``, which knows adapters by name.
            why_none: The reason why this server can take no adapter; empty if it can.
            elsewhere: Address and secret for ranks on other hosts; None if there are none.
        """
        self._hooks = hooks
        self._serving = serving
        self._base = base
        self._engine = engine
        self._world_size = world_size
        self._turns = turns
        self._why_none = why_none
        self._elsewhere = elsewhere
        self._lock = threading.RLock()
        self._known: dict[str, tuple[ServedLora, VllmExecutor]] = {}

    def find(self, name: str) -> ServedLora | None:
        """The adapter with this name."""
        known = self._known.get(name)
        return known[0] if known is not None else None

    def names(self) -> Sequence[str]:
        """Names of all adapters."""
        return tuple(self._known)

    def register(self, request: AdapterRequest) -> EngineInfo:
        """Gives an adapter a slot on every rank, unless it has one already.  Nothing that vLLM serves changes.

        Raises:
            Refused: vLLM cannot serve this adapter, or has another one of that name.
        """
        with self._lock:
            adapter = self.find(request.name)
            if adapter is None:
                adapter = self._add(request)
            elif _form(adapter.request) != _form(request):
                raise Refused(
                    f"vLLM has an adapter {request.name} with other tensors: {_difference(adapter.request, request)}",
                    hint=f"use another name, or take it out first: weightcast.drop_adapter or DELETE {request.name}",
                )
            return adapter.info()

    def drop(self, name: str) -> bool:
        """Takes an adapter out; False if there is none of this name.  Raises ``Refused`` during an update of it."""
        with self._lock:
            known = self._known.get(name)
            if known is None:
                return False
            with known[0].handler.between_updates():
                self._forget(name)
                self._order(AdapterOrder(name=name))
            return True

    def discarded(self) -> None:
        """Forgets every adapter, because the workers have dropped their memory."""
        with self._lock:
            for name in list(self._known):
                self._forget(name)

    @contextmanager
    def between_updates(self) -> Generator[None]:
        """Keeps updates of adapters out; see ``SessionHandler.between_updates``."""
        with self._lock, ExitStack() as stack:
            for adapter, _ in self._known.values():
                stack.enter_context(adapter.handler.between_updates())
            yield

    def _add(self, request: AdapterRequest) -> ServedLora:
        self._check(request)
        lora_id = int(self._serving.lora_id_counter.inc(1))
        others = any(name not in self._known for name in self._serving.lora_requests)
        try:
            executor = VllmExecutor(
                self._world_size,
                listen=lambda invitation: self._order(
                    AdapterOrder(
                        name=request.name, request=request, lora_id=lora_id, invitation=invitation, others=others
                    )
                ),
                on_main=lambda timeout_s, _: self._hooks.switch(timeout_s),
                elsewhere=self._elsewhere,
                on_far_rank_lost=self._hooks.end,
            )
        except (Refused, EngineFailure):
            self._order(AdapterOrder(name=request.name), quiet=True)  # ranks that had a slot for it give it back
            raise
        specs, unknown = tables_of(executor.hellos)
        if unknown:
            self._order(AdapterOrder(name=request.name), quiet=True)
            executor.close()
            named = some([spec.name for spec in unknown])
            raise Refused(
                f"this model has no layer for {len(unknown)} tensors of the adapter {request.name}: {named}",
                hint="start vLLM with --lora-target-modules that include them, or train others",
            )
        adapter = self._made(request, lora_id, specs, executor)
        self._known[request.name] = adapter, executor
        log.info("weightcast: a slot for the adapter %s, %d tensors", request.name, len(specs))
        return adapter

    def _made(self, request: AdapterRequest, lora_id: int, specs: Any, executor: VllmExecutor) -> ServedLora:
        from vllm.lora.request import LoRARequest

        name = request.name

        def lora(version: int | None) -> Any:
            # The path is no folder.  vLLM's prefix cache takes it for a part of the adapter's identity.
            path = f"weightcast:{name}@{version}"
            return LoRARequest(lora_name=name, lora_int_id=lora_id, lora_path=path, base_model_name=self._base.model)

        def publish(version: int) -> None:
            self._serving.lora_requests[name] = lora(version)

        facts = EngineFacts(
            engine=self._base.engine,
            model=name,
            host_id=self._base.host_id,
            ranks=executor.rank_infos(),
            staging=executor.staging(),
            staging_bytes=max(hello.staging_bytes for hello in executor.hellos),
            transports=self._base.transports,
            specs=specs,
            note=f"LoRA adapter of {self._base.model}",
            no_pause=self._hooks.no_pause,
        )
        handler = SessionHandler(
            executor,
            AdapterHooks(self._hooks, publish),
            facts,
            version=None,
            watchers=(EngineSpans(),),
        )
        return ServedLora(
            request=request,
            handler=handler,
            engine=self._engine,
            turns=self._turns,
            withdraw=lambda: self._serving.lora_requests.pop(name, None),
            score_with=lambda tokens: self._hooks.score(tokens, lora(handler.info().version)),
        )

    def _check(self, request: AdapterRequest) -> None:
        if self._why_none:
            raise Refused(self._why_none)
        if self._hooks.asleep:
            raise Refused("the engine is asleep", hint="POST /wake_up first")
        if self._serving.is_base_model(request.name):
            raise Refused(f"{request.name} is the name of the model that this vLLM serves", hint="choose another name")
        if request.name in self._serving.lora_requests:
            raise Refused(
                f"vLLM has loaded an adapter {request.name} from a folder",
                hint="choose another name, or POST /v1/unload_lora_adapter first",
            )

    def _forget(self, name: str) -> None:
        adapter, executor = self._known.pop(name)
        self._serving.lora_requests.pop(name, None)
        adapter.handler.close()
        executor.close()

    def _order(self, order: AdapterOrder, *, quiet: bool = False) -> None:
        """Sends an order to every worker; raises ``Refused``, with the reason, if one cannot carry it out."""
        said = self._hooks.rpc(ADAPTER, _ORDER_S, order=msgspec.json.encode(order).decode())
        reasons = list(dict.fromkeys(words for words in said if words))
        if reasons and not quiet:
            raise Refused("; ".join(reasons))


def why_no_adapters(vllm_config: Any, *, servers: int) -> str:
    """The reason why this vLLM, with so many API servers, can take no adapter in memory; empty if it can."""
    if vllm_config.lora_config is None:
        return "vLLM was started without LoRA: start it with --enable-lora and --max-lora-rank N"
    if servers > 1:
        return f"{servers} API servers would have to offer an adapter in memory at once: set --api-server-count 1"
    if int(vllm_config.parallel_config.data_parallel_size) > 1:
        # An engine without requests computes with vLLM's own dummy adapters, which take the slots of ours.
        return "adapters in memory have not been tried with data parallelism: start one server for each replica"
    return ""


def _form(request: AdapterRequest) -> dict[str, tuple[int, ...]]:
    return {spec.name: spec.shape for spec in request.specs}


def _difference(had: AdapterRequest, wants: AdapterRequest) -> str:
    before, after = _form(had), _form(wants)
    for name in (*before, *after):
        if before.get(name) != after.get(name):
            shapes = [list(form[name]) if name in form else "none" for form in (before, after)]
            return f"{name} has shape {shapes[0]} there and {shapes[1]} here"
    return ""
