"""Our plug-in's hook points against the real packages of SGLang, and against one that has changed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.engines.environment import QUICK, engine_python, package_path
from tests.engines.overlays import overlay
from tests.engines.sglang_server import OVERLAYS, PLAYED, STANDINS

pytestmark = [pytest.mark.engine]

REGISTER = """
import os, sys
import sglang.srt.managers.scheduler, sglang.srt.managers.scheduler_components.request_receiver as module
{change}
from sglang.srt.plugins import load_plugins
load_plugins()
import sglang
from sglang.srt.plugins.hook_registry import HookRegistry
print(sglang.__version__, len(HookRegistry._patched), sorted(HookRegistry._patched))
"""

ABORT = """
import asyncio, threading
from types import SimpleNamespace
from sglang.srt.managers import tokenizer_manager as module
from weightcast.plugins.sglang.engine_hooks import SglangHooks

sent = []
module.sock_send = lambda socket, message: sent.append(message)

class Lock:
    looks = 0
    async def is_locked(self):
        self.looks += 1
        return self.looks < 3  # two looks find a request that runs

class Manager(module.TokenizerManager):
    is_pause = False  # a property of the server's state in 0.5.23

async def main():
    manager = object.__new__(Manager)
    waiting = SimpleNamespace(abort_requested=False, abort_sent=False)
    vars(manager).update(
        is_pause_cond=asyncio.Condition(), model_update_lock=Lock(), rid_to_state={{"held": waiting}},
        child_rid_to_logical_rid={{}}, tokenizer_ipc_name=None, send_to_scheduler=None, enable_metrics=False,
    )
    hooks = SglangHooks(manager)
    hooks.set_loop(asyncio.get_running_loop())
    await asyncio.to_thread(hooks.pause, "abort", 60.0)
    print(manager.is_pause, waiting.abort_requested, len(sent), all(m.abort_all and not m.rid for m in sent))

asyncio.run(main())
"""


def load(folder: Path, version: str, change: str = "", script: str = REGISTER) -> subprocess.CompletedProcess[str]:
    """Loads plug-ins as SGLang's main process does, after a change to SGLang; or runs another script."""
    python = engine_python("sglang-0.5.23-cpu")
    path = [str(overlay(python, *OVERLAYS[version]))] if version in OVERLAYS else []
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([*path, str(STANDINS), package_path(folder, QUICK)]),
        "SGLANG_PLUGINS": "weightcast",
        "SGLANG_USE_CPU_ENGINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        [str(python), "-c", script.format(change=change)], capture_output=True, text=True, env=environment
    )


@pytest.mark.parametrize("version", PLAYED)
def test_every_hook_takes(version: str, tmp_path: Path) -> None:
    done = load(tmp_path, version)
    assert done.returncode == 0, done.stderr[-3000:]
    said = done.stdout.splitlines()[-1]
    assert said.startswith(f"{version} 7 "), said


def test_an_sglang_without_a_hook_point_does_not_start_and_says_why(tmp_path: Path) -> None:
    done = load(tmp_path, "0.5.23", "del module.SchedulerRequestReceiver._pull_raw_reqs")
    assert done.returncode == 1
    [said] = [line for line in done.stderr.splitlines() if line.startswith("weightcast cannot run in this SGLang: ")]
    assert "SGLang 0.5.23 is not as this plug-in expects" in said
    assert "SchedulerRequestReceiver._pull_raw_reqs is missing" in said
    assert "use SGLang 0.5.17 or 0.5.23" in said


@pytest.mark.parametrize("version", PLAYED)
def test_a_request_that_waits_in_the_api_server_is_not_aborted(version: str, tmp_path: Path) -> None:
    """SGLang 0.5.17 marks all requests that it knows, and ends those that wait without a finish reason later."""
    done = load(tmp_path, version, script=ABORT)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "True False 3 True"
