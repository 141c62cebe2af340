"""The folder of one server that our code in all its processes shares: sockets, module map, notes between them.

LMDeploy runs the file of a "custom module map" in every worker before it builds the model, whichever executor it has.
That is where our code gets into the workers; the map itself is empty.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from weightcast.errors import WeightcastError, error_words

# Path of the folder.  The engine process inherits it; workers read it from the module map.
FOLDER = "WEIGHTCAST_LMDEPLOY_FOLDER"

_WRITTEN = "written"

_MAP = """\
import sys
try:
    import weightcast
except ImportError:  # a Ray worker
    sys.path.append({parent!r})
from weightcast.plugins.lmdeploy import rank
rank.install({folder!r}, updates_draft={updates_draft})
MODULE_MAP = {{}}
"""


def folder_of_server() -> str:
    """Returns the folder, in the API server and in the engine process."""
    return os.environ[FOLDER]


def write_module_map(folder: str, *, updates_draft: bool) -> None:
    """Writes the file that LMDeploy runs in every worker; Ray's workers do not inherit the server's environment."""
    parent = str(Path(__file__).parents[3])
    Path(module_map(folder)).write_text(_MAP.format(parent=parent, folder=folder, updates_draft=updates_draft))


def module_map(folder: str) -> str:
    """Returns the path of the module map."""
    return str(Path(folder) / "module_map.py")


def note_failure(folder: str, error: WeightcastError) -> None:
    """Keeps the reason why a process could not start, for the launcher's last words; the first one stays.

    A process on another host does not have the folder.
    """
    with suppress(FileExistsError, FileNotFoundError):
        descriptor = os.open(_failure(folder), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(error_words(error))


def failure_words(folder: str) -> str:
    """Returns the reason; empty if there is none."""
    try:
        return Path(_failure(folder)).read_text()
    except FileNotFoundError:
        return ""


def note_written(folder: str) -> None:
    """Notes that a rank writes weights that did not come through our receiver."""
    Path(folder, _WRITTEN).touch()


def take_written(folder: str) -> bool:
    """Whether a rank has noted so since the last question."""
    try:
        Path(folder, _WRITTEN).unlink()
    except FileNotFoundError:
        return False
    return True


def _failure(folder: str) -> str:
    return str(Path(folder) / "failure")
