"""A virtual environment for a real engine, or a real trainer, made once and kept under the user's cache folder.

A list names what is asked for, and a file in ``requirements/`` the versions of all that comes with it (``make lock``).
The environment's name carries a digest of both, so a change makes a new one.  weightcast is not installed in it: what
is under test is found by path, with the entry points that ``pyproject.toml`` declares.

``python -m tests.engines.environment [NAME ...]`` makes all of them, or those named, and prints their Pythons.
``python -m tests.integrations.environment`` does the same for the trainers of ``tests/integrations``.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
LISTS = Path(__file__).parent
LOCKS = ROOT / "requirements"
# Packages that a torch for CUDA brings.
GPU_PACKAGE = re.compile(r"(nvidia|cuda|triton)\b")
# For the ``PYTHONPATH`` of engines on a CPU.  Never on a GPU: it forks where an engine asks for a new Python, and it is
# not what users run, so nothing that was timed with it counts.
QUICK = LISTS / "quick"


def engine_python(name: str, lists: Path = LISTS) -> Path:
    """The Python of an environment, which is made first if it is not there: minutes, and up to 2 GB.

    Args:
        name: Name of a list, without ``.txt``.
        lists: Folder of the lists.
    """
    text, locked = (lists / f"{name}.txt").read_text(), LOCKS / f"{name}.txt"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    digest = hashlib.sha256((text + locked.read_text()).encode()).hexdigest()[:8]
    with _made_once(f"{name}-py{version}-{digest}") as (folder, ready):
        python = folder / "bin" / "python"
        if not ready:
            venv.create(folder, with_pip=True)
            share_torch(python)
            for step in steps(text):
                pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
                # Most of it is never imported; the rest is compiled when it is.
                _run_locked([*pip, "--no-compile", *step], locked)
    return python


def steps(text: str) -> list[list[str]]:
    """The steps of a list: the options and requirements that pip gets at once."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [step.split() for step in "\n".join(lines).split("---\n")]


def _run_locked(pip: list[str], locked: Path) -> None:
    """Runs pip with a file of constraints, which it also gives to the builds of packages that come as sources."""
    path = str(locked.relative_to(ROOT))  # pip splits these variables at spaces, which the folder's own path may have
    environment = os.environ | {"PIP_CONSTRAINT": path, "PIP_BUILD_CONSTRAINT": path}
    subprocess.run(pip, check=True, cwd=ROOT, env=environment)


def share_torch(python: Path) -> None:
    """Link our own torch into an environment, or copy it; pip puts another there if the list wants another version.

    It saves most of the minute, and all of the gigabyte, that the list's first line costs otherwise.  A torch for CUDA
    needs some gigabytes of other packages, which are linked too.
    """
    ask = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    theirs = Path(subprocess.run(ask, check=True, capture_output=True, text=True).stdout.strip())
    found = _with_gpu_packages("torch")
    for file in (file for package in found.values() for file in package.files or ()):
        # Scripts name our own Python.  Compiled files are not always there.
        if ".." in file.parts or not (ours := Path(str(file.locate()))).exists():
            continue
        place = theirs / file
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            place.hardlink_to(ours)
        except OSError:  # another file system
            shutil.copy2(ours, place)


def _with_gpu_packages(name: str) -> dict[str, importlib.metadata.Distribution]:
    """An installed package and those for GPUs that it requires, and that these require, by name."""
    found: dict[str, importlib.metadata.Distribution] = {}
    waiting = [name]
    while waiting:
        if (name := waiting.pop()) in found:
            continue
        try:
            found[name] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # for other platforms, or of an extra
        needs = found[name].requires or ()
        waiting += [re.split(r"[^\w.-]", need)[0] for need in needs if GPU_PACKAGE.match(need)]
    return found


def engine_sources(package: str, version: str) -> Path:
    """A folder with the Python files of another version, for a ``PYTHONPATH``; the wheel is loaded once, not kept."""
    with _made_once(f"{package}-{version}-sources") as (folder, ready):
        if not ready:
            folder.mkdir()
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
            subprocess.run(
                [*pip, "--only-binary=:all:", "--dest", str(folder / "wheel"), f"{package}=={version}"], check=True
            )
            (wheel,) = (folder / "wheel").glob("*.whl")
            with zipfile.ZipFile(wheel) as content:
                content.extractall(folder, [name for name in content.namelist() if name.endswith(".py")])
            shutil.rmtree(folder / "wheel")
    return folder


@contextmanager
def _made_once(name: str) -> Generator[tuple[Path, bool]]:
    """A folder in the user's cache, and whether it is complete; it counts as complete when the block has ended."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "weightcast" / "engines"
    folder = cache / name
    ready = folder / ".ready"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two test runs at once make it once
        was_ready = ready.exists()
        if not was_ready:
            shutil.rmtree(folder, ignore_errors=True)
        yield folder, was_ready
        ready.touch()


def package_path(folder: Path, *more: Path) -> str:
    """A ``PYTHONPATH`` on which an engine finds the package under test and its entry points.

    Args:
        folder: Where the metadata may be written.
        more: Further folders, such as ``QUICK``.
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
    return os.pathsep.join(map(str, (ROOT / "src", folder, *more)))


def main(lists: Path = LISTS) -> None:
    """Makes the environments that the command line names, or all, and prints their Pythons."""
    wanted = sys.argv[1:] or sorted(path.stem for path in lists.glob("*.txt"))
    with ThreadPoolExecutor(max(2, (os.cpu_count() or 2) // 2)) as pool:
        for made in pool.map(lambda name: engine_python(name, lists), wanted):
            print(made)


if __name__ == "__main__":
    main()
