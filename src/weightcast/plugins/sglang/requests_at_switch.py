"""A switch of weights as SGLang's scheduler sees it: running requests, KV cache, prefix cache and version.

Everything here runs on the scheduler's own thread, between two steps.
"""

# SGLang is not installed where this is checked.
# pyright: reportMissingImports=false
from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch

from weightcast.config import PauseMode
from weightcast.plugins.sglang.hook_points import SCHEDULER_ATTRIBUTES, SGLANG

log = logging.getLogger("weightcast.plugins.sglang")

_MARK = "|weightcast="


class RequestsAtSwitch:
    """Switches the weights under one rank's scheduler."""

    def __init__(self, scheduler: Any, device: torch.device) -> None:
        """Notes the scheduler.

        Raises:
            ConfigError: This version's scheduler is not as we know it.
        """
        SGLANG.check_attributes(scheduler, SCHEDULER_ATTRIBUTES)
        self._scheduler = scheduler
        self._device = device
        self._switches = 0

    def switch(self, do: Callable[[], None], *, mode: PauseMode, version: str, served: str) -> None:
        """Runs ``do`` while no step runs, and treats the requests as the pause mode says.

        in_place: requests keep their tokens and KV cache.  retract: they keep their tokens, and their cache is computed
        anew.  abort and wait: the API server has seen to it that nothing runs, unless its operator had paused it
        before; then abort drops what is left, and wait treats it as retract does.  A server that was paused stays so.

        Args:
            do: Exchanges the weights.
            mode: The session's pause mode.
            version: Stamp of what is generated from now on, if ``do`` succeeds.
            served: Stamp of what was generated before.
        """
        from sglang.srt.managers.io_struct import AbortReq, ContinueGenerationReqInput, PauseGenerationReqInput

        scheduler = self._scheduler
        began = time.monotonic()
        paused, running = scheduler._engine_paused, len(scheduler.running_batch.reqs)
        if mode != "in_place":
            scheduler.pause_generation(PauseGenerationReqInput(mode="retract"))
            if mode == "abort":
                scheduler.abort_request(AbortReq(abort_all=True))
        try:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)  # with the overlap loop, a step may still read the weights
            do()
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()
            self._stamp(version, served)
        finally:
            self._switches += 1
            flushed = mode == "in_place" or self._flush()
            self._rename_waiting()
            if mode != "in_place" and not paused:
                # True would empty torch's cache, which costs tens of milliseconds.
                scheduler.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))
        log.info(
            "weightcast: version %s before step %s; %d requests were running; %s%s; %.1f ms",
            version,
            getattr(scheduler, "forward_ct", 0) + 1,
            running,
            mode,
            "" if flushed else ", old cache stays until it is evicted",
            1e3 * (time.monotonic() - began),
        )

    @property
    def steps_begun(self) -> int:
        """How many steps SGLang has begun; on any thread."""
        return int(getattr(self._scheduler, "forward_ct", 0))

    @property
    def running(self) -> bool:
        """True if requests are being answered; on any thread."""
        return bool(self._scheduler.running_batch.reqs) and not self._scheduler._engine_paused

    def name(self, request: Any) -> None:
        """Keeps a new request from the prefix cache of other weights: SGLang shares prefixes within one extra key."""
        base = (request.extra_key or "").partition(_MARK)[0]
        request.extra_key = f"{base}{_MARK}{self._switches}"

    def _stamp(self, version: str, served: str) -> None:
        """Sets the version of later tokens; SGLang 0.5.17 has it in its API server only.

        SGLang takes the tokens that it has noted for those of the old version.  With its overlap loop there is one more
        where requests are kept in place: that of the step which was computed last, and is noted a pass later.
        """
        record = getattr(self._scheduler, "record_weight_version_change", None)
        if record is None or version == served:
            return
        from sglang.srt.utils.weight_versions import WeightVersionEvent

        record(version)
        for batch, _ in getattr(self._scheduler, "result_queue", None) or ():
            for request in batch.reqs:
                if request is self._scheduler.chunked_req:
                    continue  # a part of its prompt was read, which gives no token
                events, noted = request.weight_version_events, len(request.output_ids)
                if noted:
                    events.pop()
                events.append(WeightVersionEvent(old_version=served, num_output_tokens=noted + 1))

    def _flush(self) -> bool:
        """Empties the caches; False if something still holds pages, which costs memory only.

        Version 0.5.17 refuses while requests wait.  Here they hold no pages: they are new or retracted.
        """
        scheduler = self._scheduler
        waiting, scheduler.waiting_queue = scheduler.waiting_queue, []
        try:
            return bool(scheduler.flush_cache(empty_cache=False))
        finally:
            scheduler.waiting_queue = waiting

    def _rename_waiting(self) -> None:
        """Names the requests that wait without cache anew: they were named when they came."""
        queued = getattr(self._scheduler.grammar_manager, "grammar_queue", ())
        for request in (*self._scheduler.waiting_queue, *queued):
            if not getattr(getattr(request, "kv", None), "holds_kv", False):
                self.name(request)
