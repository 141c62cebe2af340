"""Ends a process of vLLM that has lost its counterpart on another host, which vLLM itself does not notice."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time

log = logging.getLogger("weightcast.plugins.vllm")

_SOON_S = 5.0  # those who wait for an answer get it
_ORDERLY_S = 20.0


def end_vllm(words: str) -> None:
    """Ends this process soon, in order if vLLM can; its other processes on this host end with it.

    Its main thread would wait for the other host for ever, and clients for their answers.
    """
    log.error("weightcast: %s; vLLM cannot go on without it and ends now, restart it on all its hosts", words)
    threading.Thread(target=_end, name="weightcast-end", daemon=True).start()


def _end() -> None:
    time.sleep(_SOON_S)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_ORDERLY_S)
    os._exit(1)  # the main thread is inside of a collective, where it hears no signal
