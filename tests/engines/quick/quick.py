"""For processes of real engines in tests: starts and waits that cost less of two cores.  Nothing else is changed.

Imports make some hundred thousand objects that live to the end; walking these time and again is a third of what they
take, so the collector looks less often.  And an engine has up to five processes, each of which would import everything
once more: where an engine asks for a new Python, it is forked from the one that asks, as vLLM does by itself wherever
it can.  With ``ENGINE_STARTS=python`` it gets what it asks for.

vLLM's ranks wait for each other with ``sched_yield`` in a loop, for a second after each message: on two cores whoever
they wait for hardly gets one.  Here they sleep a millisecond.
"""

import atexit
import gc
import os
import time
from multiprocessing import context

gc.set_threshold(100_000, 50, 100)
atexit.register(gc.freeze)
os.sched_yield = lambda: time.sleep(0.001)
if os.environ.get("ENGINE_STARTS") != "python":
    context._concrete_contexts["spawn"] = context._concrete_contexts["fork"]
