"""Our plug-in's hook points against the real packages of SGLang, and against one that has changed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.engines.forked import run
from tests.engines.sglang_server import IMPORTED, PLAYED, sglang_command

pytestmark = [pytest.mark.engine]

REGISTER = """
import os, sys
import sglang.srt.managers.scheduler, sglang.srt.managers.scheduler_components.request_receiver as module
{change}
from sglang.srt.plugins import load_plugins
load_plugins()
import pkgutil, sglang
from sglang.srt.plugins.hook_registry import HookRegistry
from weightcast.plugins import hook_points as points
places = [points.RUNNER + ".load_model", points.SCHEDULER + ".__init__", points.RECEIVER + "._pull_raw_reqs",
          points.SCHEDULER + "._maybe_namespace_elastic_radix_cache", points.UPDATER + ".release_memory_occupation",
          points.UPDATER + ".resume_memory_occupation", points.ENGINE + "._launch_subprocesses",
          points.HTTP + "_setup_and_run_http_server"]
print(sglang.__version__, sum(hasattr(pkgutil.resolve_name(place), "__wrapped__") for place in places))
"""

# Another plug-in, which comes after ours, hooks the same function.
ANOTHER = """
import sglang.srt.managers.scheduler
from sglang.srt.plugins import hook_registry, load_plugins
load_plugins()
from weightcast.plugins.sglang import endpoints
from sglang.srt.entrypoints.engine import Engine
registry, called = hook_registry.HookRegistry, []
target = "sglang.srt.entrypoints.engine.Engine._launch_subprocesses"
registry.register(target, lambda *_, **__: called.append("another"), hook_registry.HookType.BEFORE)
registry.apply_hooks()
class Settings:
    enable_lora = True
try:
    Engine._launch_subprocesses(server_args=Settings())
except Exception as error:
    print(called, error)
"""

# A framework starts SGLang's own main process with multiprocessing.
CHILD = """
import multiprocessing, os, runpy, sys
def child():
    from sglang.srt.plugins import load_plugins
    import sglang.srt.managers.scheduler
    load_plugins()
    from sglang.srt.entrypoints import http_server
    print("hooked", hasattr(http_server._setup_and_run_http_server, "__wrapped__"), flush=True)
    print("folder", os.path.isdir(os.environ["WEIGHTCAST_SGLANG_FOLDER"]), flush=True)
process = multiprocessing.get_context("fork").Process(target=child)
process.start()
process.join()
print("ended", process.exitcode)
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
    hooks.note_loop()
    await asyncio.to_thread(hooks.pause, "abort", 60.0)
    print(manager.is_pause, waiting.abort_requested, len(sent), all(m.abort_all and not m.rid for m in sent))

asyncio.run(main())
"""


def load(version: str, change: str = "", script: str = REGISTER) -> subprocess.CompletedProcess[str]:
    """Loads plug-ins as SGLang's main process does, after a change to SGLang; or runs another script."""
    (python, *_), environment = sglang_command(Path("/nowhere"), 1, (), 0, receiver=True, version=version)
    return run(Path(python), ["-c", script.format(change=change)], modules=IMPORTED, env=environment)


@pytest.mark.parametrize("version", PLAYED)
def test_every_hook_takes(version: str) -> None:
    done = load(version)
    assert done.returncode == 0, done.stderr[-3000:]
    said = done.stdout.splitlines()[-1]
    assert said == f"{version} 8"


@pytest.mark.parametrize("version", PLAYED)
def test_a_plug_in_that_comes_later_keeps_its_own_hooks(version: str) -> None:
    done = load(version, script=ANOTHER)
    assert done.returncode == 0, done.stderr[-3000:]
    said = done.stdout.splitlines()[-1]
    assert said.startswith("['another'] not shown to be right with weightcast's receiver: LoRA adapters"), said


@pytest.mark.parametrize("version", PLAYED)
def test_a_main_process_that_multiprocessing_started_is_hooked_as_one(version: str) -> None:
    done = load(version, script=CHILD)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-3:] == ["hooked True", "folder True", "ended 0"], done.stdout + done.stderr[-2000:]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("import sglang.srt.plugins.hook_registry as other; del other.HookType", "ImportError: cannot import name"),
        ("import sglang.srt.plugins.hook_registry as other; del other.HookRegistry._patched", "AttributeError: "),
        ("sys.modules['weightcast.plugins.sglang.rank'] = None", "ModuleNotFoundError: import of weightcast"),
    ],
)
def test_an_error_that_is_not_ours_ends_the_start_too(change: str, words: str) -> None:
    """SGLang would log it and serve without the receiver."""
    done = load("0.5.23", change)
    assert done.returncode == 1, done.stdout
    [said] = [line for line in done.stderr.splitlines() if line.startswith("weightcast cannot run in this SGLang: ")]
    assert words in said


def test_an_sglang_without_a_hook_point_does_not_start_and_says_why() -> None:
    done = load("0.5.23", "del module.SchedulerRequestReceiver._pull_raw_reqs")
    assert done.returncode == 1
    [said] = [line for line in done.stderr.splitlines() if line.startswith("weightcast cannot run in this SGLang: ")]
    assert "SGLang 0.5.23 is not as this plug-in expects" in said
    assert "SchedulerRequestReceiver._pull_raw_reqs is missing" in said
    assert "use SGLang 0.5.17 or 0.5.23" in said


@pytest.mark.parametrize("version", PLAYED)
def test_a_request_that_waits_in_the_api_server_is_not_aborted(version: str) -> None:
    """SGLang 0.5.17 marks all requests that it knows, and ends those that wait without a finish reason later."""
    done = load(version, script=ABORT)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "True False 3 True"
