"""Keeps one engine: ``python -m weightcast.ray.keeper COMMAND...``.

Runs the command in a session of its own.  When the pipe on stdin closes, because the actor at its other end is done or
has died in whatever way, the engine is asked to end and after ten seconds killed with everything that it started.  If
the engine ends by itself, so does this process, with the same exit code.

Ray kills what its workers have started when they exit, this process too and without a word: the engine leads a session
that Ray does not see, so the kernel tells it then to end.
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
from types import FrameType

_GRACE_S = 10.0
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def keep(command: Sequence[str]) -> int:
    """Run until the engine ends or stdin does.

    Returns:
        The engine's exit code, 128 and the signal's number if a signal ended it.
    """
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
    _kill(process.pid)  # what the engine started and left behind
    return code if code >= 0 else 128 - code


def _end_with_this_process() -> None:
    """In the engine's process, before it is the engine's; the main thread starts it, whose end counts."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _ignore(number: int, frame: FrameType | None) -> None:
    pass


def _kill(session: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(session, signal.SIGKILL)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):  # the actor's end says when
        signal.signal(number, _ignore)  # not SIG_IGN, which the engine would inherit
    os._exit(keep(sys.argv[1:]))
