"""Runs ``weightcast`` and ``python -m weightcast``; names the extra to install if a package is missing."""

from __future__ import annotations

import atexit
import gc
import sys

_MANY_OBJECTS = 10_000
_CLI_PACKAGES = frozenset({"typer", "rich", "click"})


def main() -> int:
    """Run the command line on ``sys.argv``; return the exit code, which is 0 only on success."""
    # Importing torch makes some hundred thousand lasting objects.  By default the garbage collector walks them often
    # during the import and once more at exit, which takes a third of the time of a short command.
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
