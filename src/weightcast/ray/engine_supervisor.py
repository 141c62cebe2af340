"""Supervises one engine: ``python -m weightcast.ray.engine_supervisor COMMAND...``.

The supervisor runs the command in a session of its own.  When the pipe on stdin closes, because the actor at its other
end is done or has died, it asks the engine to end.  After ten seconds it kills the engine and everything that the
engine has started.  If the engine ends by itself, the supervisor ends with the same exit code.

When a Ray worker exits, Ray kills the processes that it has started, this one included.  Ray does not see the engine's
session, so the engine has asked the kernel for a SIGTERM when its supervisor dies.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress

_GRACE_S = 10.0
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def keep(command: Sequence[str]) -> int:
    """Runs the engine until it ends or stdin closes; returns its exit code, or 128 plus the signal that ended it."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_end_with_this_process
    )

    def watch() -> None:
        while os.read(0, 4096):
            pass
        process.terminate()
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            _kill(process.pid)

    threading.Thread(target=watch, daemon=True).start()
    code = process.wait()
    _kill(process.pid)  # processes that the engine has left behind
    return code if code >= 0 else 128 - code


def _end_with_this_process() -> None:
    """Runs in the new process before the engine.  The kernel watches the parent's main thread, which starts it."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _kill(session: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(session, signal.SIGKILL)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):  # only the pipe ends this process
        signal.signal(number, lambda number, frame: None)  # not SIG_IGN, which the engine would inherit
    os._exit(keep(sys.argv[1:]))
