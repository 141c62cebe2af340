"""Waits, on a thread of an API server, for work on the server's event loop."""

from __future__ import annotations

from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TypeVar

from weightcast.errors import DeadlineExceeded, EngineFailure, Refused

_Result = TypeVar("_Result")


def result_of(future: Future[_Result], timeout_s: float, *, engine: str, what: str) -> _Result:
    """Returns the result of work that the engine's own code does; cancels the work after ``timeout_s``.

    Raises:
        Refused: The work was cancelled, because the update that asked for it was aborted.
        DeadlineExceeded: The work took too long.
        EngineFailure: The work failed; the error has the engine's words.
    """
    try:
        return future.result(timeout_s)
    except CancelledError as error:
        raise Refused("pause cancelled: the update that asked for it was aborted") from error
    except FutureTimeout as error:
        future.cancel()
        raise DeadlineExceeded(who=engine, waiting_for=what, timeout_s=timeout_s) from error
    except Exception as error:  # engines' errors have no common class
        raise EngineFailure(f"{engine}: {type(error).__name__}: {str(error).strip() or 'no words'}") from error
