"""Python's collector of cycles, kept still while something short runs.

The collector starts by itself after so many new objects, and now and then walks everything that lives, of which a
training process has millions.  An update makes objects by the ten thousand, a few for each tensor, which need no
collector: they go when nobody refers to them any more.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Generator
from contextlib import contextmanager

_lock = threading.Lock()
_inside = 0
_was_on = False


@contextmanager
def collector_still() -> Generator[None]:
    """No collection starts by itself inside; afterwards it is as it was.  May be nested, and entered by any thread.

    Who has switched the collector off finds it off; ``gc.collect()`` works as ever.
    """
    global _inside, _was_on
    with _lock:
        if _inside == 0:
            _was_on = gc.isenabled()
            gc.disable()
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0 and _was_on:
                gc.enable()


def spare_what_lives() -> None:
    """The collector walks nothing any more that lives now: for the process of a server, once it is ready.

    What a framework brings with it stays to the end, hundreds of thousands of objects.  To walk them takes tenths of a
    second, and a request or an update waits for it whenever enough new ones have come.
    """
    gc.collect()  # what is garbage now would stay for ever
    gc.freeze()
