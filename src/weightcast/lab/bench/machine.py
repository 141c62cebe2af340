"""Facts that accompany every figure: machine, versions, revision, command, date and load.

Host names, user names and addresses are left out, since results are published.
"""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

_PACKAGES = ("weightcast", "triton", "nvidia-nccl-cu13", "nvidia-nccl-cu12", "safetensors", "msgspec", "aiohttp")


def facts() -> dict[str, Any]:
    """Returns the facts that all figures of one run share, as plain JSON."""
    found: dict[str, Any] = {
        "command": shlex.join(["python", Path(sys.argv[0]).name, *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "revision": revision(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average": [round(value, 2) for value in os.getloadavg()],
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "gpus": [],
    }
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        found["gpus"] = [torch.cuda.get_device_name(index) for index in range(count)]
        found["cuda"] = str(torch.version.cuda)
        found["nccl"] = _nccl()
        found["environment"] = {key: value for key, value in sorted(os.environ.items()) if key.startswith("NCCL_")}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def revision() -> str:
    """Returns the commit of the sources, with ``+`` if they differ from it; without git, that of the environment."""
    told = os.environ.get("WEIGHTCAST_REVISION", "")
    if told:
        return told
    here = Path(__file__).parent
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=True)
        changed = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no", "--", "src", "benchmarks"],
            cwd=here.parents[3],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip()[:12] + ("+" if changed.stdout.strip() else "")


def _nccl() -> str:
    from torch.cuda import nccl

    version: Any = nccl.version()
    return ".".join(str(part) for part in version)


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
