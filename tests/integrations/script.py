"""Runs a script of ``tests/integrations`` with the Python of another environment.

The script is run by its path, so ``import tests`` finds the environment's own package of that name, if it has one.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from tests.engines.environment import ROOT


def run_script(
    python: Path, name: str, *arguments: object, folder: Path, timeout_s: float = 600, **environment: str
) -> Any:
    """Returns the JSON document that the script prints last; fails with all that it printed if it fails.

    Args:
        python: Interpreter of the environment.
        name: Name of the script, without ``.py``.
        arguments: Its command line.
        folder: Its working directory, which is not the repository's: Ray's workers would import our ``tests`` there.
        timeout_s: Deadline, in seconds.
        **environment: More of its environment.
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith("WEIGHTCAST_")}
    env |= {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [str(python), str(ROOT / "tests" / "integrations" / f"{name}.py"), *map(str, arguments)],
        capture_output=True,
        text=True,
        env=env | environment,
        cwd=folder,
        timeout=timeout_s,
    )
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-12000:]}"
    documents = [line for line in done.stdout.splitlines() if line.startswith("{")]  # Ray prints workers' lines, too
    return json.loads(documents[-1])
