"""Another version of an engine over the packages of an environment: its wheel alone, without the gigabytes under it."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
from pathlib import Path


def overlay(python: Path, *wheels: str) -> Path:
    """A folder with these wheels and nothing that they need, to come first on the path; made if it is not there.

    Args:
        python: Of the environment; the folder is kept beside it.
        wheels: What pip calls them, with versions.
    """
    digest = hashlib.sha256("\n".join(wheels).encode()).hexdigest()[:8]
    # Not resolved: a virtual environment's Python is a link to the one that it was made with.
    environment = python.parent.parent
    folder = environment.parent / f"{environment.name}+{wheels[0].replace('==', '-')}-{digest}"
    with (folder.parent / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / ".ready").exists():
            shutil.rmtree(folder, ignore_errors=True)
            pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
            subprocess.run([*pip, "--target", str(folder), *wheels], check=True)
            (folder / ".ready").touch()
    return folder
