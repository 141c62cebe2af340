"""Virtual environments of the trainers, as ``tests/engines/environment.py`` makes those of engines.

``python -m tests.integrations.environment [NAME ...]`` makes all of them, or those named, and prints their Pythons.
"""

from __future__ import annotations

from pathlib import Path

from tests.engines.environment import engine_python, main

LISTS = Path(__file__).parent


def trainer_python(name: str) -> Path:
    """The Python of an environment, which is made first if it is not there.

    Args:
        name: Name of a list beside this file, without ``.txt``.
    """
    return engine_python(name, LISTS)


if __name__ == "__main__":
    main(LISTS)
