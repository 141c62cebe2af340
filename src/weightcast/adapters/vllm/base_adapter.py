"""The steps around vLLM's weight transfer: pause, resume, version stamp and score.

vLLM cannot stage: buckets go straight into live weights.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence

from weightcast.adapters.stock import StockAdapter
from weightcast.adapters.vllm import requests
from weightcast.adapters.vllm.requests import if_there, post
from weightcast.adapters.vllm.server_info import SERVER_INFO, Facts
from weightcast.comm.run_steps import EngineRequest, Steps
from weightcast.errors import ConfigError
from weightcast.wire.answers import Ack
from weightcast.wire.engine_info import EngineInfo
from weightcast.wire.messages import Close, Commit, Open


class BaseVllmAdapter(StockAdapter, ABC):
    """One vLLM server during its updates."""

    def __init__(self, info: EngineInfo) -> None:
        super().__init__(info)
        self._facts = Facts()
        self._paused_s = 0.0  # time.monotonic() of the pause; 0 if this session has not paused the engine
        self._started = False
        # The live weights may be parts of two versions: after the first bucket, or if the engine was paused before us.
        self._mixed = info.paused
        self._version = 0

    def open(self, message: Open) -> Steps:
        """Pauses the engine and starts an update; ``ConfigError`` if a cache would give results of the old weights."""
        self._version = message.version
        self._started = False
        self._paused_s = 0.0
        self._facts = Facts.of((yield from if_there(SERVER_INFO)))
        why = self._facts.never_emptied or self._facts.no_pause().get(message.pause)
        if why:
            raise ConfigError(
                f"{self._info.engine} cannot be updated with pause={message.pause!r}: {why}; nothing was changed"
            )
        started = time.monotonic()
        yield from requests.pause(message.pause)
        self._paused_s = started
        yield from self._start_update()
        return self._updating()

    def close(self, message: Close) -> Steps:
        """Sends nothing: vLLM has no such step."""
        yield from ()
        return self._updating()

    def commit(self, message: Commit) -> Steps:
        """Finishes the weight update, stamps the version and resumes."""
        version = str(self._version)
        yield from self._finish_update(version)
        # Some versions take the version with the finish, some have this route, and some have no versions.
        yield from if_there(post("/update_weight_version", {"new_version": version}))
        yield from requests.resume()
        self._mixed = False
        stall_s = time.monotonic() - self._paused_s
        return Ack(
            ok=True,
            version=self._version,
            ranks=self._info.tp_size,
            stall_s=stall_s,
            not_updated=("the draft model",) if self._facts.draft else (),
        )

    def abort(self, session: str, reason: str) -> Steps:
        """Resumes the engine if no bucket was sent.

        vLLM cannot restore the old weights, so after a bucket it stays paused until an update succeeds.
        """
        if self._mixed or (self._started and not (yield from self._try_finish())):
            return Ack(ok=True, state="quarantined", ranks=self._info.tp_size)
        self._started = False
        if self._paused_s:
            yield from requests.resume()
        return Ack(ok=True, ranks=self._info.tp_size)

    def score(self, token_ids: Sequence[int]) -> Generator[EngineRequest, bytes, list[float]]:
        """Asks ``/v1/completions`` for ``prompt_logprobs``."""
        return (yield from requests.score(self._info.model, token_ids))

    @abstractmethod
    def _start_update(self) -> Generator[EngineRequest, bytes, None]:
        """Sets ``_started``."""

    @abstractmethod
    def _finish_update(self, version: str) -> Generator[EngineRequest, bytes, None]:
        """Clears ``_started``."""

    @abstractmethod
    def _try_finish(self) -> Generator[EngineRequest, bytes, bool]:
        """Finishes a weight update without a bucket; False if the engine refuses."""

    def _updating(self) -> Ack:
        return Ack(ok=True, state="updating", ranks=self._info.tp_size)
