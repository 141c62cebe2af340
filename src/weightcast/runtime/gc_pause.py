"""Pauses Python's garbage collector while something short runs.

The collector starts after a number of new objects, and now and then walks all live objects, of which a training process
has millions.  An update makes tens of thousands of objects, a few for each tensor.  Reference counts free those, so no
collection is needed.
"""

from __future__ import annotations

import gc
import threading
from contextlib import ContextDecorator

_lock = threading.Lock()
_inside = 0
_was_on = False
_exempts = False  # True once objects were exempt from collection: Python counts them one by one, each time it is asked


class gc_paused(ContextDecorator):
    """Pauses automatic collection inside the block and then restores the setting.  May be nested, in any thread.

    What was made inside counts as old afterwards.  Else the next object that anybody makes would start a collection
    that walks all of it, tenths of a second for the plans of a large model.  A collector that was off stays off, and
    ``gc.collect()`` works as always.
    """

    def __enter__(self) -> None:
        global _inside, _was_on
        counted = False
        try:
            with _lock:
                if _inside == 0:
                    _was_on = gc.isenabled()
                _inside += 1
                counted = True
                gc.disable()
        except BaseException:  # an interrupt, after which nobody would leave the block
            if counted:
                self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        global _inside, _exempts
        with _lock:
            _inside -= 1
            if _inside == 0 and _was_on:
                _exempts = _exempts or gc.get_freeze_count() > 0
                if not _exempts:  # what others have exempted stays exempt
                    gc.freeze()
                    gc.unfreeze()
                gc.enable()


def spare_what_lives() -> None:
    """Exempts all live objects from collection; a server calls this once it is ready.

    A framework's hundreds of thousands of objects live as long as the process.  Walking them takes tenths of a second,
    and a request or an update has to wait for that.
    """
    global _exempts
    gc.collect()  # garbage that is frozen would stay for ever
    gc.freeze()
    _exempts = True
