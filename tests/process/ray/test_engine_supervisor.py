"""The keeper of an engine: both end together, whoever is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.helpers.clock import PATIENCE_S
from tests.helpers.procs import gone, wait_until_gone


def keeper(code: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "weightcast.ray.engine_supervisor", sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


@pytest.mark.parametrize(("end", "code"), [("sys.exit(3)", 3), ("os.kill(os.getpid(), 9)", 137)])
def test_the_keeper_ends_as_its_engine_does(end, code):
    with keeper(f"import os, sys; {end}") as process:
        assert process.wait(PATIENCE_S) == code


def test_the_engine_ends_when_the_pipe_closes_with_what_it_started():
    # Whoever holds the other end may have been killed; the engine's child ignores what it is told.
    child = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(99)"
    )
    code = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {child!r}], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(99)
"""
    with keeper(code) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        os.kill(process.pid, signal.SIGTERM)  # a stray signal is not the end
        assert not gone(pid)
        process.stdin.close()
        assert process.wait(PATIENCE_S) == 128 + signal.SIGTERM
    wait_until_gone([pid])


def test_the_engine_ends_with_a_keeper_that_is_killed():
    # Ray does so when a job ends before its engines are closed.
    with keeper("import os, time; print(os.getpid(), flush=True); time.sleep(99)") as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.kill()
    wait_until_gone([pid])
