"""For processes of real engines in tests: starts that cost less of two cores.  Nothing else of theirs is changed.

Imports make some hundred thousand objects that live to the end; walking these time and again is a third of what they
take, so the collector looks less often.  And an engine has up to five processes, each of which would import everything
once more: where an engine asks for a new Python, it is forked from the one that asks, as vLLM does by itself wherever
it can.  With ``ENGINE_STARTS=python`` it gets what it asks for.
"""

import atexit
import gc
import os
from multiprocessing import context

gc.set_threshold(100_000, 50, 100)
atexit.register(gc.freeze)
if os.environ.get("ENGINE_STARTS") != "python":
    context._concrete_contexts["spawn"] = context._concrete_contexts["fork"]
