"""``weightcast`` and ``python -m weightcast``; says what to install where the command line's packages are missing."""

from __future__ import annotations

import atexit
import gc
import sys

_MANY_OBJECTS = 10_000
_CLI_PACKAGES = frozenset({"typer", "rich", "click"})


def main() -> int:
    """Run the command line on ``sys.argv``.

    Returns:
        The exit code: 0 only on success.
    """
    # Torch's modules make some hundred thousand objects that live to the end: by default the collector walks them time
    # and again while they are imported, and once more at exit, which is a third of what a short command takes.
    gc.set_threshold(_MANY_OBJECTS)
    atexit.register(gc.freeze)
    try:
        from weightcast.cli.app import run
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in _CLI_PACKAGES:
            raise
        sys.stderr.write(f'the command line needs {error.name}: pip install "weightcast[cli]"\n')
        return 1
    return run()


if __name__ == "__main__":
    sys.exit(main())
