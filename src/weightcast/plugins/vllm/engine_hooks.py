"""The receiver's engine hooks in vLLM's API server: pause, switch, resume, drop caches, set the version.

A switch is one call into each engine core (``core_switch``).  With staged weights the core rests, switches and goes on
in it.  Requests are only paused before it where they must end first, where engine cores step together, or where nothing
is staged.

Threads of the server call these methods; vLLM's engine client lives on the server's event loop.
"""

# vLLM is not installed where this is checked.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any

import msgspec

from weightcast.config import PauseMode
from weightcast.errors import EngineFailure
from weightcast.plugins.hook_points import VLLM
from weightcast.plugins.other_hosts import RankInvitation
from weightcast.plugins.pause_state import SHORT_S, PauseState, ServerHooks
from weightcast.plugins.vllm.cached_prefixes import NEXT_GENERATION
from weightcast.plugins.vllm.core_switch import ALONE, ASK, STAY_PAUSED, SWITCH_BETWEEN
from weightcast.plugins.vllm.rank_protocol import end_vllm
from weightcast.plugins.vllm.token_versions import SAY_VERSION

log = logging.getLogger("weightcast.plugins.vllm")

_REPLICAS_AGREE = 0.1  # nats
# vLLM's name of each mode, and whether it drops the KV cache.
_MODES: dict[PauseMode, tuple[str, bool]] = {
    "in_place": ("keep", False),
    "retract": ("keep", True),
    "wait": ("wait", True),
    "abort": ("abort", True),
}
_STALE_CACHE = (
    "in_place keeps the KV cache of the old weights, which this vLLM's prefix caching gives to new requests; use pause "
    "retract, or start vLLM with --no-enable-prefix-caching"
)
_STALE_STORE = "in_place keeps what the old weights computed in {}, which gives it to new requests; use pause retract"
_STARTED_WITH = "default"  # vLLM's own word for the version of the weights that it was started with


async def on_cores(client: Any, replicas: int, method: str, *arguments: Any) -> list[Any]:
    """Calls a method of every engine core.  vLLM's own call returns the first one's answer only."""
    core = client.engine_core
    if replicas == 1:
        return [await core.call_utility_async(method, *arguments)]
    calls = (core._call_utility_async(method, *arguments, engine=engine) for engine in core.core_engines)
    return await asyncio.gather(*calls)


class VllmHooks(ServerHooks):
    """``EngineHooks`` over vLLM's engine client."""

    engine = "vLLM"

    def __init__(
        self,
        client: Any,
        loop: asyncio.AbstractEventLoop,
        *,
        prefix_caching: bool,
        encoders: bool = False,
        replicas: int = 1,
        cache_outside: str = "",
    ) -> None:
        """Makes the hooks without calling vLLM.

        Args:
            prefix_caching: Whether vLLM reuses the KV cache of one request for another.
            encoders: Whether the model has encoders, such as a vision tower, whose outputs vLLM caches.
            replicas: Number of data-parallel engines behind the client.
            cache_outside: Store of KV caches outside of vLLM's own, in words; empty if there is none.
        """
        super().__init__(loop)
        self._client = client
        self._resume_vllm = client.resume_generation  # vLLM's own, which ``sleep`` wraps for everybody else
        self._prefixes = "shared" if prefix_caching else "none"  # shared by all weights, until ``meet_cores``
        self._cache_outside = cache_outside
        self._encoders = encoders
        self._replicas = replicas
        self._mode: PauseMode = "in_place"
        self._kind = ""  # how engine cores step
        self._in_switch: tuple[PauseMode, ...] = ()  # modes whose pause is a part of the switch
        self._alone = False  # the switch itself drops what the old weights computed, and ends a pause of ours
        self._in_order = self._waits = False
        self._goes_on = False
        self._stamp = self._stamp_before = _STARTED_WITH
        self._says_versions = False

    def woke(self, tags: Collection[str]) -> None:
        """Notes that vLLM has this memory again.  With the last of it, vLLM resumes by itself."""
        super().woke(tags)
        if not self.asleep:
            self.become(PauseState.RUNNING)

    def woken_by(self, tags: Sequence[str] | None) -> frozenset[str]:
        """Returns the memory that ``wake_up(tags)`` wakes: none if some of it is awake."""
        wanted = self.asleep if tags is None else frozenset(tags) - {"scheduling"}
        return wanted if wanted <= self.asleep else frozenset()

    def wake_paused(self, wake_up: Callable[[], Any]) -> Any:
        """Wakes all memory without weights that are known: vLLM stays paused until an update resumes it.

        Requests that came while it slept end.

        Args:
            wake_up: vLLM's own call, whose answer is returned.
        """
        self.pause_anyway("abort", SHORT_S)
        self.wait(self._on_cores(STAY_PAUSED, True), SHORT_S, "engine cores to stay paused")
        try:
            answer = wake_up()
        finally:
            self.wait(self._on_cores(STAY_PAUSED, False), SHORT_S, "engine cores that stayed paused")
        self.woke(self.asleep)
        self.become(PauseState.OURS)
        return answer

    @property
    def no_pause(self) -> dict[PauseMode, str]:
        """As ``EngineInfo.no_pause``."""
        if self._prefixes == "shared":
            return {"in_place": _STALE_CACHE}
        return {"in_place": _STALE_STORE.format(self._cache_outside)} if self._cache_outside else {}

    def meet_cores(self) -> None:
        """Learns how engine cores step, once, at the start.

        From now on answers say their versions, and a switch in place leaves nobody the old weights' cached prefixes, if
        this vLLM's cores can that.

        Raises:
            ConfigError: This version of vLLM has another engine core.
        """
        try:
            (self._kind,) = set(self.wait(self._on_cores(ASK), SHORT_S, "engine cores to answer"))
        except EngineFailure as error:
            raise VLLM.other_version([str(error)]) from error
        said = self.wait(self._on_cores(SAY_VERSION, self._stamp), SHORT_S, "engine cores to note the version")
        self._says_versions = all(said)
        if not self._says_versions:
            log.warning("weightcast says no weight version in answers, as this vLLM has another scheduler")
        if hasattr(self._client, "get_weight_version"):
            self._stamp = str(self.wait(self._client.get_weight_version(), SHORT_S, "the weight version"))
        if self._prefixes == "shared" and all(
            self.wait(self._on_cores(NEXT_GENERATION, False), SHORT_S, "engine cores to look at the prefix cache")
        ):
            self._prefixes = "apart"

    def pause(self, mode: PauseMode, timeout_s: float) -> None:
        """Pauses vLLM and returns when no request runs; does nothing if the switch itself comes between two steps.

        If vLLM sleeps, wholly or in part, it runs nothing and has dropped its caches, so this does nothing.
        """
        self._mode = mode
        self._goes_on = False
        if self.state in (PauseState.ENDING, PauseState.ASLEEP):
            return
        if self.state is PauseState.RUNNING and mode in self._in_switch:
            return
        if self.state is PauseState.RUNNING and self._alone:
            self._goes_on = self._pause_now(self._pause_for_switch(_MODES[mode][0]), mode, timeout_s)
            return
        self.pause_anyway(mode, timeout_s)

    def pause_anyway(self, mode: PauseMode, timeout_s: float) -> None:
        """Pauses vLLM, asleep or not."""
        name, clear = _MODES[mode]
        self._pause_now(self._pause(name, clear), mode, timeout_s)

    def _pause_now(self, pausing: Coroutine[Any, Any, bool], mode: PauseMode, timeout_s: float) -> bool:
        """Pauses vLLM and notes whose pause it is; returns True if it is ours."""
        ran = self._awake_state is PauseState.RUNNING
        if ran:
            self.become(PauseState.OURS)
        before = self.wait(pausing, timeout_s, "running requests to stop", stoppable=mode == "wait")
        if ran and before:
            self.become(PauseState.OPERATORS)
        return self._awake_state is PauseState.OURS

    async def _pause(self, name: str, clear: bool) -> bool:
        """Pauses vLLM and returns whether it was paused before.

        It awaits one call before the next, because vLLM's client may reorder concurrent calls.
        """
        before = await self._client.is_paused()
        await self._client.pause_generation(mode=name, clear_cache=clear)
        return bool(before)

    async def _pause_for_switch(self, name: str) -> bool:
        """As ``_pause``, without what the switch does, and without the 20 ms that vLLM waits for the last outputs."""
        before = await self._client.is_paused()
        await self._client.engine_core.pause_scheduler_async(mode=name, clear_cache=False)
        return bool(before)

    def _go_on(self) -> Coroutine[Any, Any, Any]:
        return self._resume_vllm()

    def drop_caches(self) -> None:
        """Drops the cached outputs of encoders after a pause that kept caches; other pauses have dropped them.

        If half of an image is in a request's KV cache, the rest of it comes from the new weights: vLLM runs the encoder
        again.
        """
        if self._encoders and self._mode == "in_place" and not self._alone and not self.asleep:
            self.wait(self._client.reset_encoder_cache(), SHORT_S, "the cache of encoders to be dropped")

    def set_version(self, version: int) -> None:
        """Sets the weight version of answers, which is vLLM's own too where it has one, unless a switch has."""
        stamp = str(version)
        if stamp == self._stamp:
            return
        if self._says_versions:
            self.wait(self._on_cores(SAY_VERSION, stamp), SHORT_S, "the new version to be noted")
        if hasattr(self._client, "update_weight_version"):
            self.wait(self._client.update_weight_version(stamp), SHORT_S, "the new version to be noted")
        self._stamp = stamp

    def listen(self, invitation: RankInvitation) -> None:
        """Gives every rank the invitation: it then listens, or comes from another host."""
        text = msgspec.json.encode(invitation).decode()
        self.rpc("init_weight_transfer_engine", SHORT_S, init_info={"invitation": text})

    def pause_in_switch(self, *, in_order: bool, waits: bool = False) -> None:
        """From now on a switch of staged weights makes the pause that it needs itself, where it can.

        If workers take calls and steps from one queue (``in_order``), the switch need not wait for steps.  If it waits
        for the device all the same (``waits``), a core that steps alone hands out the tokens in flight before it.
        """
        self._in_order, self._waits = in_order, waits
        self._alone = self._kind == ALONE
        if self._alone:
            self._in_switch = ("in_place", "retract")
        elif in_order and not self._encoders:
            # Cores that share experts cannot all stop before the same step, so whatever is computed again must wait.
            self._in_switch = ("in_place",)

    def switch_model(self, timeout_s: float, version: str) -> None:
        """As ``switch``, and tokens from then on carry the new version, or the one before it.

        Args:
            version: Version of the weights to switch to; empty if those before come back.
        """
        if version:
            self._stamp_before = self._stamp
        stamp = version or self._stamp_before
        if self.switch(timeout_s, stamp):
            self._stamp = stamp

    def switch(self, timeout_s: float, stamp: str = "") -> bool:
        """Lets every rank's main thread do its task, between the same two steps of an engine core.

        A core whose rank failed stays paused until ``resume``.

        Args:
            stamp: Weight version of tokens from then on; empty leaves it.

        Returns:
            True if ``stamp`` is in force.
        """
        ours = self._alone and not self.asleep  # otherwise a pause, or sleep, has dropped the caches
        keep_cache = self._mode == "in_place" and not self.asleep
        drop_cache, drop_encoders = ours and self._mode != "in_place", ours and self._encoders
        rest = drop_cache or drop_encoders or not self._in_order or (ours and self._waits)
        wishes = (rest, keep_cache, drop_cache, drop_encoders, self._goes_on)
        calls = self._on_cores(SWITCH_BETWEEN, *wishes, timeout_s, stamp)
        before = self._awake_state
        if before is PauseState.RUNNING:
            self.become(PauseState.OURS)  # if the call fails, nobody knows more
        said = self.wait(calls, timeout_s, "all ranks to switch")
        if not any(failed for failed, *_ in said):
            self.become(PauseState.RUNNING if self._goes_on else before)
        elif before is PauseState.RUNNING and any(paused for _, paused, _ in said):
            self.become(PauseState.OPERATORS)
        self._goes_on = False
        return all(stamped for *_, stamped in said)

    def _on_cores(self, method: str, *arguments: Any) -> Coroutine[Any, Any, list[Any]]:
        return on_cores(self._client, self._replicas, method, *arguments)

    def score(self, token_ids: Sequence[int], lora: Any = None) -> list[float]:
        """Returns the log-probability of each token but the first, given those before it.

        ``lora`` is vLLM's request for an adapter; None for the model alone.

        Raises:
            EngineFailure: Data-parallel engines answer otherwise than the first one.
        """
        replicas = range(self._replicas) if self._replicas > 1 else (None,)
        first, *others = (
            self.wait(self._score(list(token_ids), replica, lora), 4 * SHORT_S, "log-probabilities")
            for replica in replicas
        )
        for number, found in enumerate(others, 1):
            off = max((abs(one - other) for one, other in zip(first, found, strict=True)), default=0.0)
            if not off <= _REPLICAS_AGREE:
                raise EngineFailure(
                    f"data-parallel engine {number} answers otherwise than engine 0: "
                    f"log-probabilities are off by {off:.3g} (tolerance {_REPLICAS_AGREE:g})"
                )
        return first

    def end(self, words: str) -> None:
        """Ends vLLM because a rank on another host is lost, as vLLM itself does for a rank on this host."""
        if self._awake_state is not PauseState.ENDING:
            self.become(PauseState.ENDING)
            end_vllm(words)

    def rpc(self, method: str, timeout_s: float, **arguments: Any) -> list[Any]:
        """Calls a method of every worker, on its main thread."""
        return self.wait(
            self._client.collective_rpc(method, timeout=timeout_s, kwargs=arguments),
            timeout_s,
            f"{method} on all ranks",
        )

    async def _score(self, token_ids: list[int], replica: int | None, lora: Any) -> list[float]:
        from vllm import SamplingParams, TokensPrompt
        from vllm.utils import random_uuid

        parameters = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        last: Any = None
        more: dict[str, Any] = {} if replica is None else {"data_parallel_rank": replica}
        if lora is not None:
            more["lora_request"] = lora
        async for output in self._client.generate(
            TokensPrompt(prompt_token_ids=token_ids), parameters, f"weightcast-{random_uuid()}", **more
        ):
            last = output
        if last is None or last.prompt_logprobs is None:
            raise EngineFailure("vLLM returned no log-probabilities; it may have been paused")
        return [found[token].logprob for token, found in zip(token_ids[1:], last.prompt_logprobs[1:], strict=True)]
