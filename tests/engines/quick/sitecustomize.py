"""For processes of real engines in tests, found through ``PYTHONPATH``: imports without rounds of the collector.

They make some hundred thousand objects that live to the end, and an engine has up to five processes.  Walking these
objects time and again is a third of what a start takes on two cores.  Nothing else is changed.
"""

import atexit
import gc

gc.set_threshold(100_000, 50, 100)
atexit.register(gc.freeze)
