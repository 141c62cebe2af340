"""Writes ``requirements/*.txt``: one version of each package, for our own and every other environment.

``make lock`` runs it.  pip gets these files as constraints.  One file serves every Python that we support.  A version
that a file has already stays as long as it is allowed; with ``--upgrade`` each package gets its newest.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from tests.engines.environment import GPU_PACKAGE, LISTS, LOCKS, ROOT, steps
from tests.integrations import environment as integrations

# Wanted by hatchling to build weightcast itself, which pip does in an environment of its own.
BUILD = ("editables",)


def own_requirements() -> list[str]:
    """Everything that ``make setup`` and ``make fuzz`` install, but for torch."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = pyproject["project"]
    extras = project["optional-dependencies"]
    wanted = [*pyproject["build-system"]["requires"], *BUILD, *project["dependencies"]]
    names, seen = ["dev", "docs", "fuzz"], set[str]()
    while names:
        if (name := names.pop()) not in seen:
            seen.add(name)
            for line in extras[name]:
                ours = re.match(r"weightcast\[(.+)\]", line)
                if ours is None:
                    wanted.append(line)
                else:
                    names += ours[1].split(",")
    return wanted


def listed_requirements(path: Path) -> list[str]:
    """Packages of an environment's list that bring others with them; the rest of the list has its versions."""
    return [line for step in steps(path.read_text()) if "--no-deps" not in step for line in step]


def lists() -> dict[str, Path]:
    """The lists of all engines and trainers, by name."""
    return {path.stem: path for folder in (LISTS, integrations.LISTS) for path in sorted(folder.glob("*.txt"))}


def lock(name: str, requirements: list[str], *options: str) -> None:
    """Writes one file.

    Args:
        requirements: Packages that are asked for, as pip takes them.
        options: More options for uv.
    """
    path = LOCKS / f"{name}.txt"
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--universal", "--python-version", "3.11"]
    command += ["--no-annotate", "--custom-compile-command", "make lock", "--output-file", str(path), *options, "-"]
    subprocess.run(command, input="\n".join(requirements), text=True, check=True, stdout=subprocess.DEVNULL)
    if name != "dev":  # those environments share our torch, with the packages of GPUs that it has brought
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(line for line in lines if not GPU_PACKAGE.match(line)))


def main() -> None:
    """Writes all files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("torch", help="the torch of our own environment, such as torch==2.13.0")
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions")
    arguments = parser.parse_args()
    options = ["--upgrade"] if arguments.upgrade else []
    LOCKS.mkdir(exist_ok=True)
    lock("dev", [arguments.torch, *own_requirements()], *options)
    for name, path in lists().items():
        lock(name, listed_requirements(path), *options)
    for path in LOCKS.glob("*.txt"):
        if path.stem not in {"dev", *lists()}:
            path.unlink()


if __name__ == "__main__":
    main()
