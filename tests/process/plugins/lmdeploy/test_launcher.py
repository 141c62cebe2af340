"""The launcher of LMDeploy with our plug-in, without LMDeploy."""

from __future__ import annotations

import subprocess
import sys


def test_the_launcher_takes_only_lmdeploys_server() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "weightcast.plugins.lmdeploy", "chat", "m"], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "serve api_server MODEL" in done.stderr


def test_the_launcher_without_lmdeploy_says_so() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "weightcast.plugins.lmdeploy", "serve", "api_server", "m"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "weightcast cannot run in this LMDeploy: this is LMDeploy of an unknown version" in done.stderr
