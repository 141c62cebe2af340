"""Python runs this at its start if this folder is on its path.  Ray's own processes need no engine, but its workers."""

import sys

scripts = [word for word in sys.orig_argv if word.endswith(".py") and "/ray/" in word]
if not scripts or scripts[0].endswith("/default_worker.py"):
    import cuda_on_host  # noqa: F401
