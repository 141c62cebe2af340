"""Our receiver inside SGLang: the entry point of the group ``sglang.srt.plugins``.

SGLang calls ``register`` in its main process and in every scheduler process before it builds anything.  It loads every
installed plug-in unless ``SGLANG_PLUGINS`` names some, and our receiver costs a second set of weights; so this plug-in
does nothing unless ``SGLANG_PLUGINS`` names ``weightcast``.
"""

from __future__ import annotations

import multiprocessing
import os
import sys

NAME = "weightcast"
# Folder of the ranks' sockets.  Scheduler processes inherit it.
FOLDER = "WEIGHTCAST_SGLANG_FOLDER"


def register() -> None:
    """Registers and applies our hooks in this process, if the user asked for them.

    SGLang only logs an error of a plug-in and serves without it, so any failure here ends the process instead.
    """
    wanted = {name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(",")}
    if NAME not in wanted:
        return
    try:
        _hook()
    except Exception as error:  # noqa: BLE001  SGLang would log it and serve without us
        words = f"{error} ({hint})" if (hint := getattr(error, "hint", None)) else str(error)
        kind = "" if type(error).__module__.startswith("weightcast.") else f"{type(error).__name__}: "
        sys.exit(f"weightcast cannot run in this SGLang: {kind}{words}")


def _hook() -> None:
    # Frameworks start SGLang's main process with multiprocessing as well.  Its own children get the folder from it.
    main = multiprocessing.parent_process() is None or FOLDER not in os.environ
    if not main and "sglang.srt.managers.scheduler" not in sys.modules:
        return  # the detokenizer, for one, needs no receiver
    from weightcast.plugins.hook_points import SGLANG

    SGLANG.check("ranks", *(("server",) if main else ()))
    from weightcast.plugins.sglang.rank import add_hooks

    add_hooks(main=main)
