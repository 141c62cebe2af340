"""Tests of the fork server that all workers of a test run share."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import psutil

from tests.helpers import fork_server
from tests.helpers.commands import context, parents

ANOTHER_WORKER = """
import json, multiprocessing, signal, sys
from tests.helpers.fork_server import use

use(json.loads(sys.argv[1]))
process = multiprocessing.get_context("forkserver").Process(target=signal.pause)
process.start()
print(process.pid, flush=True)
sys.stdin.read()
process.kill()
process.join()
print(process.exitcode, flush=True)
"""


def test_processes_of_two_workers_come_from_one_server() -> None:
    mine = context.Process(target=signal.pause)
    mine.start()
    try:
        server = psutil.Process(mine.pid).ppid()
        with subprocess.Popen(
            [sys.executable, "-c", ANOTHER_WORKER, json.dumps(fork_server.start())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        ) as worker:
            assert worker.stdin is not None
            assert worker.stdout is not None
            theirs = int(worker.stdout.readline())
            assert psutil.Process(theirs).ppid() == server
            worker.stdin.close()
            assert int(worker.stdout.readline()) == -signal.SIGKILL
        assert psutil.pid_exists(server), "it has users left"
    finally:
        mine.kill()
        mine.join()


def _tells_the_server_of_a_child(pipe: Connection) -> None:
    child = context.Process(target=signal.pause)
    child.start()
    pipe.send((psutil.Process().ppid(), psutil.Process(child.pid).ppid()))
    child.kill()
    child.join()


def test_processes_of_a_parent_come_from_the_same_server() -> None:
    ours, theirs = parents.Pipe()
    parent = parents.Process(target=_tells_the_server_of_a_child, args=(theirs,))
    parent.start()
    theirs.close()
    mine, childs = ours.recv()
    assert mine == childs
    parent.join()
    assert parent.exitcode == 0


def test_a_process_writes_where_its_starter_writes(capfd) -> None:
    started = context.Process(target=print, args=("said by the process",))
    started.start()
    started.join()
    assert capfd.readouterr().out == "said by the process\n"
