"""Results of GPU runs as JSON: ``--results DIR`` collects what tests measure, with versions and command."""

from __future__ import annotations

import fcntl
import json
import platform
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from weightcast import __version__

pytest.register_assert_rewrite("tests.gpu.servers")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--results", default=None, metavar="DIR", help="keep what GPU tests measure, as JSON, in DIR")


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Iterator[Callable[[str, Any], None]]:
    """``record(name, value)``: keep a figure of this test."""
    kept: dict[str, Any] = {}

    def keep(name: str, value: Any) -> None:
        kept[name] = value

    yield keep
    folder = request.config.getoption("--results")
    if folder is None or not kept:
        return
    file = Path(folder) / "gpu-e2e.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests may run in several processes
        everything = json.loads(file.read_text()) if file.exists() else {"machine": machine(), "tests": {}}
        everything["tests"][re.sub(r"^.*::", "", request.node.nodeid)] = kept
        file.write_text(json.dumps(everything, indent=1) + "\n")


def machine() -> dict[str, Any]:
    """Versions, devices and the command, for whoever reads the figures later."""
    import transformers

    return {
        "command": "make gpu-test " + " ".join(arg for arg in sys.argv[1:] if arg.startswith("--results")),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "nccl": ".".join(str(part) for part in torch.cuda.nccl.version()),
        "transformers": transformers.__version__,
        "weightcast": __version__,
    }
