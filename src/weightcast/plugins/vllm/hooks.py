"""In vLLM's API server: what our receiver asks of the engine, in vLLM's words.

Everything here is called on threads of the server; vLLM's engine client lives on the server's event loop.
"""

# vLLM is not installed where this is checked.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

from weightcast.config import PauseMode
from weightcast.errors import DeadlineExceeded, EngineFailure, Refused

_SHORT_S = 30.0
# Requests, tokens, cache: kept, kept, kept; kept, kept, dropped; run to their end; dropped.
_MODES: dict[PauseMode, tuple[str, bool]] = {
    "in_place": ("keep", False),
    "retract": ("keep", True),
    "wait": ("wait", True),
    "abort": ("abort", True),
}


class VllmHooks:
    """``EngineHooks`` over vLLM's engine client."""

    def __init__(self, client: Any, loop: asyncio.AbstractEventLoop, *, prefix_caching: bool) -> None:
        """Nothing is called yet.

        Args:
            client: vLLM's ``AsyncLLM``.
            loop: Where it lives.
            prefix_caching: Does vLLM reuse the cache of one request for another?
        """
        self._client = client
        self._loop = loop
        self._prefix_caching = prefix_caching
        self._paused = False
        self._draining: Future[Any] | None = None

    @property
    def paused(self) -> bool:
        """True while we hold vLLM still; a pause of somebody else's is not seen."""
        return self._paused

    def pause(self, mode: PauseMode, timeout_s: float) -> None:
        """Return when nothing runs."""
        if mode == "in_place" and self._prefix_caching:
            raise Refused(
                "in_place keeps cache of the old weights, which vLLM's prefix caching would give to new requests",
                hint="pause retract, or start vLLM with --no-enable-prefix-caching",
            )
        name, clear = _MODES[mode]
        self._paused = True
        work = asyncio.run_coroutine_threadsafe(self._client.pause_generation(mode=name, clear_cache=clear), self._loop)
        self._draining = work if mode == "wait" else None
        try:
            self._result(work, timeout_s, "running requests to stop")
        finally:
            self._draining = None

    def stop_waiting(self) -> None:
        """End a pause that waits for running requests; vLLM goes on with the ``resume`` that follows."""
        draining = self._draining
        if draining is not None:
            draining.cancel()

    def resume(self) -> None:
        """Go on."""
        self.wait(self._client.resume_generation(), _SHORT_S, "vLLM to resume")
        self._paused = False

    def drop_caches(self) -> None:
        """Pausing has dropped them, for the modes that do not keep them."""

    def set_version(self, version: int) -> None:
        """vLLM attaches it to what it generates, in the versions that do so."""
        if not hasattr(self._client, "update_weight_version"):
            return
        self.wait(self._client.update_weight_version(str(version)), _SHORT_S, "the new version to be noted")

    def listen(self, folder: str) -> None:
        """Make every rank listen in a folder."""
        self.rpc("init_weight_transfer_engine", _SHORT_S, init_info={"folder": folder})

    def on_main(self, timeout_s: float) -> None:
        """Let every rank's main thread do what waits for it."""
        self.rpc("start_weight_update", _SHORT_S)
        self.rpc("finish_weight_update", timeout_s)

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probability of each token but the first given those before it."""
        return self.wait(self._score(list(token_ids)), 4 * _SHORT_S, "log-probabilities")

    def rpc(self, method: str, timeout_s: float, **arguments: Any) -> list[Any]:
        """A method of every worker, on its main thread."""
        return self.wait(
            self._client.collective_rpc(method, timeout=timeout_s, kwargs=arguments),
            timeout_s,
            f"{method} on all ranks",
        )

    def wait(self, work: Coroutine[Any, Any, Any], timeout_s: float, what: str) -> Any:
        """Run it on the server's loop and wait here.

        Raises:
            DeadlineExceeded: It took too long.
            EngineFailure: vLLM failed; its words.
        """
        return self._result(asyncio.run_coroutine_threadsafe(work, self._loop), timeout_s, what)

    def _result(self, future: Future[Any], timeout_s: float, what: str) -> Any:
        try:
            return future.result(timeout_s)
        except CancelledError as error:
            raise Refused("whoever wanted the engine to hold still has gone") from error
        except FutureTimeout as error:
            future.cancel()
            raise DeadlineExceeded(who="vLLM", waiting_for=what, timeout_s=timeout_s) from error
        except Exception as error:  # vLLM's errors have no common class
            raise EngineFailure(f"vLLM: {type(error).__name__}: {str(error).strip() or 'no words'}") from error

    async def _score(self, token_ids: list[int]) -> list[float]:
        from vllm import SamplingParams, TokensPrompt
        from vllm.utils import random_uuid

        parameters = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        last: Any = None
        async for output in self._client.generate(
            TokensPrompt(prompt_token_ids=token_ids), parameters, f"weightcast-{random_uuid()}"
        ):
            last = output
        if last is None or last.prompt_logprobs is None:
            raise EngineFailure("vLLM gave no log-probabilities; it may have been paused")
        return [found[token].logprob for token, found in zip(token_ids[1:], last.prompt_logprobs[1:], strict=True)]
