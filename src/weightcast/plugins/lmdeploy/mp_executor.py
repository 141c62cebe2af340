"""LMDeploy's executor mp, whose ranks are processes of the engine process: repairs without which it hangs.

Engine process and ranks exchange messages in 32 blocks of shared memory.  Before the blocks are used again, sender and
receivers meet at a barrier.  A rank of LMDeploy 0.18 enters it on the thread that runs its forwards.  If another rank
has begun a forward by then, it waits in an all-reduce for the first one, which waits at the barrier for it.
"""

# LMDeploy is not installed where this is checked.
# pyright: reportMissingImports=false
from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

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
