"""Calls our methods in LMDeploy's engine process, over LMDeploy's own connection to it."""

from __future__ import annotations

import asyncio
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

from weightcast.errors import DeadlineExceeded, EngineFailure, Refused

_GRACE_S = 10.0  # the engine process keeps its own deadlines


class EngineCalls:
    """The engine process, as threads of the API server call it."""

    def __init__(self, engine: Any) -> None:
        """Makes the caller.

        Args:
            engine: LMDeploy's ``ZMQMPEngine``.
        """
        self._engine = engine
        self._loop: asyncio.AbstractEventLoop | None = None

    def set_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Notes the server's event loop, which exists once the server runs."""
        self._loop = loop

    def call(self, method: str, *arguments: Any, timeout_s: float) -> None:
        """Calls a method that returns why it failed, or nothing.

        Args:
            method: Name of the method, one of ``engine_process.METHODS``.
            arguments: Its arguments.
            timeout_s: Deadline of the method, in seconds.

        Raises:
            Refused: The engine process could not do it; nothing changed.
            DeadlineExceeded: It did not answer.
            EngineFailure: It is gone.
        """
        words = self.result(self._engine._collective_rpc_async(method, *arguments), timeout_s)
        if words:
            raise Refused(f"LMDeploy: {words}")

    def result(self, work: Any, timeout_s: float) -> Any:
        """Runs a coroutine on the server's event loop.

        Args:
            work: The coroutine.
            timeout_s: Deadline, in seconds.

        Raises:
            DeadlineExceeded: It did not end.
            EngineFailure: It failed, in LMDeploy's words.
        """
        if self._loop is None:
            work.close()
            raise EngineFailure("LMDeploy's server does not run yet")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout_s + _GRACE_S)
        except FutureTimeout as error:
            future.cancel()
            raise DeadlineExceeded(who="LMDeploy", waiting_for="its engine process", timeout_s=timeout_s) from error
        except CancelledError as error:
            raise EngineFailure("LMDeploy's server is stopping") from error
        except Exception as error:  # LMDeploy's errors have no common class
            raise EngineFailure(f"LMDeploy: {type(error).__name__}: {str(error).strip() or 'no words'}") from error
