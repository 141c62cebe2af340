"""Runs a module of ``tests/integrations`` with the Python of another environment."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from tests.engines.environment import ROOT


def run_script(python: Path, module: str, *arguments: object, timeout_s: float = 600, **environment: str) -> Any:
    """Returns the JSON document that the module prints last; fails with all that it printed if it fails.

    Args:
        python: Interpreter of the environment.
        module: Name of the module below ``tests.integrations``.
        arguments: Its command line.
        timeout_s: Deadline, in seconds.
        **environment: More of its environment.
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith("WEIGHTCAST_")}
    env |= {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [str(python), "-m", f"tests.integrations.{module}", *map(str, arguments)],
        capture_output=True,
        text=True,
        env=env | environment,
        cwd=ROOT,
        timeout=timeout_s,
    )
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-12000:]}"
    return json.loads(done.stdout.splitlines()[-1])
