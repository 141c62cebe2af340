"""LMDeploy's engine process ends with its ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from tests.helpers.clock import PATIENCE_S
from tests.helpers.harness import wait_for
from weightcast.plugins.lmdeploy.folder import failure_words

WATCHED = """
import multiprocessing, os, sys, threading, time
from weightcast.plugins.lmdeploy.mp_executor import _watch
context = multiprocessing.get_context("fork")
ranks = [context.Process(target=time.sleep, args=(600,), daemon=True) for _ in range(2)]
for rank in ranks:
    rank.start()
over = threading.Event()
threading.Thread(target=_watch, args=(ranks, over, sys.argv[1]), daemon=True).start()
print(*(rank.pid for rank in ranks), flush=True)
if sys.stdin.readline().strip() == "over":
    over.set()
    print("said", flush=True)
    sys.stdin.readline()
    sys.exit(0)
time.sleep(600)
"""


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def watched(folder: Path) -> tuple[subprocess.Popen[str], list[int]]:
    """An engine process with two ranks."""
    process = subprocess.Popen(
        [sys.executable, "-c", WATCHED, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, [int(pid) for pid in process.stdout.readline().split()]


def test_engine_process_ends_with_its_ranks_when_one_is_killed(tmp_path: Path) -> None:
    process, pids = watched(tmp_path)
    os.kill(pids[1], signal.SIGKILL)
    assert process.wait(PATIENCE_S) == 1
    assert failure_words(str(tmp_path)) == f"rank 1 (pid {pids[1]}) was killed by signal 9 (restart the engine)"
    wait_for(lambda: not any(map(lives, pids)), "the end of both ranks")
    process.communicate()


def test_rank_that_was_asked_to_end_is_no_failure(tmp_path: Path) -> None:
    process, pids = watched(tmp_path)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("over\n")
    process.stdin.flush()
    assert process.stdout.readline() == "said\n"
    os.kill(pids[0], signal.SIGKILL)
    wait_for(lambda: not lives(pids[0]), "the end of the rank")
    process.communicate("end\n", timeout=PATIENCE_S)
    assert process.returncode == 0
    assert failure_words(str(tmp_path)) == ""
