"""LMDeploy's executor mp, whose ranks are processes of the engine process: repairs without which it hangs.

Engine process and ranks exchange messages in 32 blocks of shared memory.  Before the blocks are used again, sender and
receivers meet at a barrier.  A rank of LMDeploy 0.18 enters it on the thread that runs its forwards.  If another rank
has begun a forward by then, it waits in an all-reduce for the first one, which waits at the barrier for it.
"""

# LMDeploy is not installed where this is checked.
# pyright: reportMissingImports=false
from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from multiprocessing.connection import wait
from typing import Any

from weightcast.errors import EngineFailure
from weightcast.plugins.lmdeploy.folder import note_failure

log = logging.getLogger("weightcast.plugins.lmdeploy")

_MODULE = "lmdeploy.pytorch.engine.executor.mp_executor"

# What LMDeploy calls with an answer while its ranks serve.
NO_ANSWERS = "LMDeploy's executor mp takes the next output of the model for the answer to this call"


def meet_beside_forwards() -> None:
    """Lets this rank meet the others on another thread than that of its forwards.  Does nothing with other executors.

    Called before the rank's first forward.
    """
    module = sys.modules.get(_MODULE)
    if module is None:
        return
    last = module.NUM_SHARED_BLOCK - 1

    @asynccontextmanager
    async def wait_async(self: Any) -> AsyncGenerator[None]:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, self.events[self._event_id].wait)
        yield
        if self._event_id == last:
            for _ in range(2):  # the sender clears the events in between
                await loop.run_in_executor(None, self.bar.wait)
        self._update_event_id()

    module.Notifier.wait_async = wait_async


def refuse_lost_answers() -> None:
    """Refuses calls of the ranks that want an answer of rank 0 while it serves; called in the engine process.

    LMDeploy always waits for the next output of rank 0.  It would take the answer for that output, and then read a
    block of shared memory that has none or an old one.
    """
    from lmdeploy.pytorch.engine.executor.mp_executor import MPExecutor

    call = MPExecutor.collective_rpc

    def collective_rpc(
        self: Any, method: str, args: Any = None, kwargs: Any = None, receiver_mask: int = 0xFF, return_mask: int = 0xFF
    ) -> Any:
        if self._prefetch_task is not None and receiver_mask & return_mask & 1:
            raise RuntimeError(f"{method}: {NO_ANSWERS}")
        return call(self, method, args, kwargs, receiver_mask, return_mask)

    MPExecutor.collective_rpc = collective_rpc


def end_with_lost_ranks(folder: str) -> None:
    """Lets the engine process end when one of its ranks fails or is killed; called in the engine process.

    LMDeploy waits for such a rank forever, and so do its clients.  It notices that the engine process has ended.  The
    folder of the server then has the reason.
    """
    from lmdeploy.pytorch.engine.executor.mp_executor import MPExecutor

    make, release = MPExecutor.__init__, MPExecutor.release

    def made(self: Any, *arguments: Any, **named: Any) -> None:
        self._weightcast_over = over = threading.Event()
        make(self, *arguments, **named)
        processes = [proc._proc for proc in self.procs]
        watch = threading.Thread(target=_watch, args=(processes, over, folder), name="weightcast-ranks", daemon=True)
        watch.start()

    def released(self: Any) -> None:
        self._weightcast_over.set()
        release(self)

    MPExecutor.__init__ = made
    MPExecutor.release = released


def _watch(processes: list[Any], over: threading.Event, folder: str) -> None:
    """Waits for the end of a rank that nobody has asked for.  A rank that was asked to end exits with 0."""
    running = {process.sentinel: rank for rank, process in enumerate(processes)}
    while running:
        for sentinel in wait(list(running)):
            rank = running.pop(sentinel)  # type: ignore[arg-type]
            process = processes[rank]
            process.join()
            code = process.exitcode
            if code == 0:
                continue
            if over.is_set():
                return
            how = f"was killed by signal {-code}" if code is not None and code < 0 else f"exited with {code}"
            words = f"rank {rank} (pid {process.pid}) {how}"
            note_failure(folder, EngineFailure(words, ranks=[rank], hint="restart the engine"))
            log.error("%s: LMDeploy's engine process ends, which would wait for it forever", words)
            for other in processes:  # they may be in a collective that nobody ends
                other.kill()
            os._exit(1)
