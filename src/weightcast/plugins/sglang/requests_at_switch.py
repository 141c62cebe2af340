"""A switch of weights as SGLang's scheduler sees it: the mark, running requests, KV cache, prefix cache and version.

SGLang's first rank broadcasts its requests to all ranks at the top of every pass of every event loop.  It adds a
``SwitchMark`` to them, and each rank carries out what waits when the mark comes to it (``plugins.switch_rank``): on
the scheduler's own thread, between two steps.
"""

# SGLang is not installed where this is checked.
# pyright: reportMissingImports=false
from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from weightcast.config import PauseMode
from weightcast.plugins.hook_points import SGLANG

log = logging.getLogger("weightcast.plugins.sglang")

_MARK = "|weightcast="
_REST_S = 0.02  # bounds what else an idle scheduler does in a pass, such as its metrics


class SglangRequests:
    """Switches the weights under one rank's scheduler."""

    def __init__(self, scheduler: Any, device: torch.device) -> None:
        """Raises ``ConfigError`` if this version's scheduler is not as we know it."""
        SGLANG.check_attributes(scheduler, "scheduler")
        self._scheduler = scheduler
        self._device = device
        self._switches = 0

    def switch(self, do: Callable[[], None], *, mode: PauseMode, version: str, served: str) -> None:
        """Runs ``do`` while no step runs, and treats the requests as the pause mode says.

        in_place: requests keep their tokens and KV cache.  retract: they keep their tokens, and their cache is computed
        anew.  abort and wait: the API server has seen to it that nothing runs, unless its operator had paused it
        before; then abort drops what is left, and wait treats it as retract does.  A server that was paused stays so.

        Args:
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


@dataclass(frozen=True, slots=True)
class SwitchMark:
    """Travels with SGLang's requests to every rank; SGLang pickles it."""

    number: int


class Boundary:
    """Sends such marks from the first rank, and takes them on every rank.

    An idle scheduler passes thousands of times a second and keeps Python's interpreter from our threads.  While our
    receiver is at work it rests until a request or a mark comes.
    """

    def __init__(self, step: Callable[[], object]) -> None:
        """``step`` is called on the scheduler's thread when a mark comes; it must not raise."""
        self._step = step
        self._steps: deque[SwitchMark] = deque()
        self._count = 0
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._scheduler: Any = None
        self._news: Any = None

    def attach(self, scheduler: Any) -> None:
        """Adds our type to a scheduler's dispatcher, and our wake-up to what an idle scheduler waits for."""
        # Neither is installed where this is checked.
        import zmq  # pyright: ignore[reportMissingImports]
        from sglang.utils import TypeBasedDispatcher  # pyright: ignore[reportMissingImports]

        scheduler._request_dispatcher += TypeBasedDispatcher([(SwitchMark, self._take)])
        if scheduler.idle_sleeper is not None:  # --sleep-on-idle: the first rank waits for its sockets up to a second
            scheduler.idle_sleeper.poller.register(self._wake, zmq.POLLIN)
        self._scheduler = scheduler
        receiver = scheduler.request_receiver
        SGLANG.check_attributes(receiver, "request receiver")
        self._news = zmq.Poller()
        for source in (receiver.recv_from_tokenizer, receiver.recv_from_rpc, self._wake):
            if source is not None:  # ranks after the first have no sockets, and wait for its broadcast
                self._news.register(source, zmq.POLLIN)

    def rest(self) -> bool:
        """First rank only: waits until a request or a mark comes, if SGLang has nothing to do; True if it had not."""
        scheduler = self._scheduler
        if not (scheduler._engine_paused or scheduler.is_fully_idle()):
            return False
        self._news.poll(1e3 * _REST_S)
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        return True

    def inject(self) -> None:
        """First rank only: adds a ``SwitchMark`` to the next requests."""
        self._count += 1
        self._steps.append(SwitchMark(self._count))
        os.eventfd_write(self._wake, 1)

    def pulled(self, requests: list[Any] | None) -> None:
        """First rank only: called with what SGLang is about to broadcast."""
        if requests is None or not self._steps:
            return
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        while self._steps:
            requests.append(self._steps.popleft())

    def _take(self, step: SwitchMark) -> None:
        self._step()
