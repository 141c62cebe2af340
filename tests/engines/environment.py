"""A virtual environment for a real engine, made once and kept under the user's cache folder.

Its name carries a digest of its list, so a changed list makes a new one.  weightcast is not installed in it: what is
under test is found by path, with the entry points that ``pyproject.toml`` declares.

``python -m tests.engines.environment`` makes all of them.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
LISTS = Path(__file__).parent


def engine_python(name: str) -> Path:
    """The Python of an environment, which is made first if it is not there: minutes, and up to 2 GB.

    Args:
        name: Of a list beside this file, without ``.txt``.
    """
    text = (LISTS / f"{name}.txt").read_text()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "weightcast" / "engines"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    folder = cache / f"{name}-py{version}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    python = folder / "bin" / "python"
    ready = folder / ".ready"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two test runs at once make it once
        if not ready.exists():
            shutil.rmtree(folder, ignore_errors=True)
            venv.create(folder, with_pip=True)
            lines = [line for line in text.splitlines() if line and not line.startswith("#")]
            for step in "\n".join(lines).split("---\n"):
                pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
                subprocess.run([*pip, *step.split()], check=True)
            ready.touch()
    return python


def package_path(folder: Path) -> str:
    """A ``PYTHONPATH`` on which an engine finds the package under test and its entry points.

    Args:
        folder: Where the metadata may be written.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    metadata = folder / "weightcast-0.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: weightcast\nVersion: 0\n")
    groups = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items())
        for group, entries in project["entry-points"].items()
    ]
    (metadata / "entry_points.txt").write_text("\n".join(groups))
    return os.pathsep.join([str(ROOT / "src"), str(folder)])


if __name__ == "__main__":
    for listed in sorted(LISTS.glob("*.txt")):
        print(engine_python(listed.stem))
