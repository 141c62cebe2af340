"""Wheels over the packages of an environment: another version of an engine without the gigabytes under it, and ours."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.engines.environment import QUICK, package_path

# Ray, and what it needs that an engine's environment may not have.
RAY = (
    "ray==2.60.0",
    "attrs==26.1.0",
    "jsonschema==4.26.0",
    "jsonschema-specifications==2025.9.1",
    "msgpack==1.2.4",
    "protobuf==7.36.2",
    "referencing==0.37.0",
    "rpds-py==2026.9.1",
)
RAY_SETTINGS = {
    "RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES": str(256 << 20),
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",  # Ray would end our workers for the memory that others use
    "RAY_worker_niceness": "0",
    "RAY_enable_worker_prestart": "0",
}

# weightcast brings it: pip installs it beside an engine that lacks it.  The servers' own HTTP uses it then, too.
HTTP_PARSER = "httptools==0.9.0"
# So is its HTTP client, which ranks need to copy weights from a peer.  vLLM and SGLang bring it, and LMDeploy too, but
# not the part of it that our list has.
HTTP_CLIENT = (
    "aiohttp==3.14.5",
    "aiohappyeyeballs==2.7.1",
    "aiosignal==1.4.0",
    "attrs==26.1.0",
    "frozenlist==1.8.0",
    "multidict==7.2.1",
    "propcache==0.5.4",
    "yarl==1.25.1",
)


# Web frameworks for servers: the oldest that our reference engine takes; the last Starlette that reads a path from the
# Host header; the first FastAPI in which an included router is one entry; and the newest, which a fresh install gets.
OLDEST_WEB = ("fastapi==0.115.0", "starlette==0.37.2")
HOST_WEB = ("fastapi==0.136.3", "starlette==0.52.1")
LAZY_WEB = ("fastapi==0.137.0", "starlette==0.52.1")
NEWEST_WEB = ("fastapi==0.165.0", "starlette==1.10.0", "opentelemetry-api==1.45.2")

NIXL = "nixl-cu13==1.5.1"  # works on a CPU


def with_wheels(environment: Mapping[str, str], python: Path, wheels: Sequence[str]) -> dict[str, str]:
    """The environment of a process that finds these wheels too, each without what it needs."""
    path = [*(str(overlay(python, wheel)) for wheel in wheels), environment["PYTHONPATH"]]
    return {**environment, "PYTHONPATH": os.pathsep.join(path)}


def receiver_path(python: Path, folder: Path) -> str:
    """A ``PYTHONPATH`` on which an engine finds the package under test as after ``pip install weightcast``.

    Args:
        python: Of the environment.
        folder: Where the metadata may be written.
    """
    return os.pathsep.join((package_path(folder, QUICK), str(overlay(python, HTTP_PARSER))))


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
