"""LMDeploy's requests around a switch of weights: hold back, drop, wait, retract, and the mark that goes to all ranks.

Everything here runs on the event loop of LMDeploy's engine process, so a method without ``await`` is atomic.

The engine's main loop sends forwards ahead: while it waits for the output of one, it sends the next.  Workers take them
from a queue, in the same order on every rank.  The mark is an entry of that queue without inputs.  It has no output.
"""

# LMDeploy is not installed where this is checked.
# pyright: reportMissingImports=false
from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from weightcast.plugins.hook_points import LMDEPLOY

log = logging.getLogger("weightcast.plugins.lmdeploy")

# Key of a mark in what goes to the workers, and its values.
MARK = "weightcast"
SWITCH, RESET = "switch", "reset"
_LOOK_S = 0.01


class LmdeployRequests:
    """The requests of one engine."""

    def __init__(self, loop: Any) -> None:
        """Wraps methods of an ``EngineLoop`` that has not started; ``ConfigError`` if it is not as we know it."""
        from lmdeploy.pytorch.engine.request import RequestType

        LMDEPLOY.check_attributes(loop, "loop")
        LMDEPLOY.check_attributes(loop.scheduler, "scheduler")
        self._loop = loop
        self._scheduler, self._maker, self._executor = loop.scheduler, loop.inputs_maker, loop.executor
        self._sending = asyncio.Lock()  # the main loop's forwards and our mark, one after the other
        self._in_flight = 0  # forwards whose output has not been taken
        self._stopped = False  # True keeps the main loop from sending forwards
        self._withheld = False  # the main loop got no next forward from us, although it may have work
        self._may_send = asyncio.Event()
        self._at_rest = asyncio.Event()
        self._held: list[Any] | None = None  # new requests, while they are held back
        self._waiting: asyncio.Task[str] | None = None

        self._send_forward = self._executor.forward_async
        self._take_output = self._executor.get_output_async
        self._send_next = self._maker.send_next_inputs
        self._send_ahead = self._maker.prefetch_next_inputs
        self._executor.forward_async = self._forward
        self._executor.get_output_async = self._output
        self._maker.send_next_inputs = self._next
        self._maker.prefetch_next_inputs = self._ahead
        self._runnable = loop.has_runable_event
        also = self._runnable.extra_runable_checker
        self._runnable.extra_runable_checker = lambda: self._withheld or (also is not None and also())
        self._add_messages = loop.req_manager.callbacks[RequestType.ADD_MESSAGE]
        loop.req_manager.bind_func(RequestType.ADD_MESSAGE, self._new_messages)
        self._reset = loop.reset_runtime_state
        loop.reset_runtime_state = self._slept

    # -- called from the API server; each returns why it could not, or nothing

    async def pause(self, mode: str, timeout_s: float) -> str:
        """Holds new requests back and returns when none runs: ``abort`` drops those that do, ``wait`` lets them end."""
        if self._held is None:
            self._held = []
        if mode == "abort":
            words = await self._rest(timeout_s)
            if not words:
                dropped = self._drop_all()
                log.info("weightcast: %d requests dropped", dropped)
                words = await self._forget()
                self._go_on()
            return words
        self._waiting = asyncio.ensure_future(self._until_idle(timeout_s))
        try:
            return await self._waiting
        except asyncio.CancelledError:
            return "the pause was cancelled"
        finally:
            self._waiting = None

    def resume(self) -> None:
        """Lets the requests in that were held back, and ends a ``pause`` that still waits for running ones."""
        if self._waiting is not None:
            self._waiting.cancel()
        held, self._held = self._held, None
        if held:
            self._add_messages(held)
            self._runnable.set()

    async def retract(self, timeout_s: float) -> str:
        """Stops between two forwards and frees the KV cache of all requests; they wait, with their tokens.

        ``mark`` lets the engine go on.
        """
        words = await self._rest(timeout_s)
        if words:
            return words
        words = await self._forget()
        if words:
            self._go_on()
        return words

    async def mark(self) -> str:
        """Sends the mark at which all ranks switch, and lets the engine go on."""
        try:
            await self._send_mark(SWITCH)
        finally:
            self._go_on()
        return ""

    # -- what LMDeploy's main loop calls instead of its own

    async def _forward(self, inputs: Any) -> Any:
        self._in_flight += 1
        async with self._sending:
            return await self._send_forward(inputs)

    async def _output(self, *arguments: Any, **named: Any) -> Any:
        try:
            return await self._take_output(*arguments, **named)
        finally:
            self._in_flight -= 1
            if self._stopped and self._is_at_rest():
                # The main loop may find nothing to do now, and would not come to `_next`.  Whoever waits runs once the
                # loop has dealt with this output.
                self._at_rest.set()

    async def _next(self) -> Any:
        while self._stopped and self._is_at_rest():
            self._at_rest.set()
            await self._may_send.wait()
        if self._withheld:
            self._withheld = False
            self._runnable.set()
        return await self._send_next()

    async def _ahead(self) -> Any:
        if self._stopped:
            self._withheld = True
            return None, None
        return await self._send_ahead()

    def _new_messages(self, requests: list[Any], **named: Any) -> None:
        if self._held is None:
            self._add_messages(requests, **named)
        else:
            self._held += requests

    def _slept(self) -> None:
        """Called when LMDeploy has fallen asleep and ended all sessions.

        The requests that are held back go too: LMDeploy would find no session for them.  A forward that was sent ahead
        has lost its output.
        """
        self._reset()
        self._in_flight = 0
        held, self._held = self._held, None if self._held is None else []
        for request in held or ():
            self._loop.req_manager.reject_request(request.resp, reason="engine sleep")

    # -- between two forwards

    def _is_at_rest(self) -> bool:
        """True if no forward runs and no prompt is half read: of such a prompt, outputs may have been kept already."""
        return not self._in_flight and not self._maker.has_pending_long_context_chunk()

    async def _rest(self, timeout_s: float) -> str:
        """Keeps the main loop from sending, and returns once no forward runs."""
        self._stopped = True
        self._may_send.clear()
        self._at_rest.clear()
        if self._is_at_rest():
            return ""
        try:
            await asyncio.wait_for(self._at_rest.wait(), timeout_s)
        except TimeoutError:
            self._go_on()
            return f"the forward that runs did not end within {timeout_s:g} s"
        return ""

    def _go_on(self) -> None:
        self._stopped = False
        self._may_send.set()
        self._runnable.set()

    async def _until_idle(self, timeout_s: float) -> str:
        deadline = time.monotonic() + timeout_s
        while self._scheduler.has_unfinished() or self._scheduler.num_running() or self._in_flight:
            if time.monotonic() > deadline:
                return f"the requests that run did not end within {timeout_s:g} s"
            await asyncio.sleep(_LOOK_S)
        return await self._forget()

    def _drop_all(self) -> int:
        """Ends all requests that the engine has, and their sessions; returns their number.

        A session without one may be that of a request that is held back.
        """
        scheduler, dropped = self._scheduler, 0
        for session in list(scheduler.sessions.values()):
            for sequence in list(session.sequences.values()):
                response = getattr(sequence, "resp", None)
                if response is not None and not response.is_done:
                    self._loop.req_manager.reject_request(response, reason="weights are switched")
                    dropped += 1
            if session.sequences:
                scheduler.end_session(session.session_id)
        return dropped

    async def _forget(self) -> str:
        """Frees all KV cache: requests that run wait again, with their tokens; no prefix is kept for others.

        Workers keep the batch that decodes, and forget it too.
        """
        from lmdeploy.pytorch.messages import MessageStatus

        scheduler = self._scheduler
        running = [
            sequence
            for status in (MessageStatus.RUNNING, MessageStatus.READY)
            for sequence in list(scheduler.seq_manager.get_sequences(status).values())
        ]
        scheduler.preempt_seqs(running)
        for session in scheduler.sessions.values():
            for sequence in session.sequences.values():
                sequence.state.release_paging_resources()
        self._maker.reset_runtime_state()
        await self._send_mark(RESET)
        trie = scheduler.block_trie
        if trie.enabled:
            trie.evict(1 << 40)
            if trie.leaves:
                return f"{len(trie.leaves)} prefixes of the old weights are in use"
        return ""

    async def _send_mark(self, what: str) -> None:
        async with self._sending:
            await self._send_forward({MARK: what})
            # Ray's executor notes every forward until its output is taken; a mark has none.
            steps = getattr(self._executor, "_connector_steps", None)
            if steps:
                steps.pop()
