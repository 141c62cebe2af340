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


def register() -> None:
    """Registers and applies our hooks in this process, if the user asked for them.

    SGLang only logs an error of a plug-in and serves without it, so a failure here ends the process instead.
    """
    wanted = {name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(",")}
    if NAME not in wanted:
        return
    from weightcast.errors import WeightcastError, error_words
    from weightcast.plugins.sglang import hook_points

    main = multiprocessing.parent_process() is None
    if not main and "sglang.srt.managers.scheduler" not in sys.modules:
        return  # the detokenizer, for one, needs no receiver
    try:
        hook_points.check(main=main)
        from weightcast.plugins.sglang import hooks

        hooks.apply(main=main)
    except WeightcastError as error:
        sys.exit(f"weightcast cannot run in this SGLang: {error_words(error)}")
