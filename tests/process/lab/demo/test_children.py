"""No process of the demo outlives it: real processes, real signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.helpers.procs import gone, wait_until_gone
from weightcast.errors import DeadlineExceeded, EngineFailure
from weightcast.lab.demo.children import ChildFailed, Children

SLEEPER = "import time; print('up', flush=True); time.sleep(600)"
PARENT = (
    "import subprocess, sys, time\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    "print(child.pid, flush=True)\n"
    "time.sleep(600)\n"
)


@pytest.fixture
def children(tmp_path):
    with Children(tmp_path) as group:
        yield group


def start(children, name, program, **options):
    return children.start(name, [sys.executable, "-c", program], env=os.environ, **options)


def next_line(children, child):
    return children.read_line(child, waiting_for="its first word", timeout_s=60.0)


def test_leaving_ends_every_child_and_grandchild(tmp_path):
    with Children(tmp_path) as children:
        child = start(children, "engine-0", PARENT, piped=True)
        grandchild = int(next_line(children, child))
        assert child.exit_code is None
        assert not gone(grandchild)
    wait_until_gone([child.process.pid])
    wait_until_gone([grandchild])


def test_an_error_on_the_way_ends_them_too(tmp_path):
    started = []

    def interrupted():
        with Children(tmp_path) as children:
            child = start(children, "engine-0", SLEEPER, piped=True)
            next_line(children, child)
            started.append(child.process.pid)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    wait_until_gone([started[0]])


def test_a_failing_child_is_named_with_the_end_of_its_log(children):
    healthy = start(children, "trainer-0", SLEEPER)
    broken = start(children, "engine-1", "import sys; print('out of tea', file=sys.stderr); sys.exit(3)")
    with pytest.raises(ChildFailed, match="engine-1 ended with exit code 3") as caught:
        children.wait([broken, healthy], timeout_s=30.0)
    assert "out of tea" in caught.value.tails["engine-1"]
    assert "trainer-0" not in caught.value.tails


def test_a_child_that_was_killed_is_named_with_the_signal(children):
    child = start(children, "engine-0", SLEEPER, piped=True)
    next_line(children, child)
    child.process.kill()
    with pytest.raises(ChildFailed, match="engine-0 was ended by SIGKILL"):
        children.wait([child], timeout_s=30.0)


def test_a_child_that_does_not_end_is_named(children):
    child = start(children, "trainer-1", SLEEPER)
    with pytest.raises(EngineFailure, match="trainer-1: still running"):
        children.wait([child], timeout_s=0.2)


def test_wait_returns_when_all_have_ended_well(children):
    child = start(children, "trainer-0", "print('bye')")
    children.wait([child], timeout_s=30.0)
    children.check()
    assert child.tail() == "bye"


def test_if_the_demo_itself_is_killed_its_children_end(tmp_path):
    program = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from weightcast.lab.demo.children import Children\n"
        f"children = Children(Path({str(tmp_path)!r}))\n"
        f"child = children.start('engine-0', [sys.executable, '-c', {SLEEPER!r}], env={{}}, piped=True)\n"
        "children.read_line(child, waiting_for='it', timeout_s=60.0)\n"
        "print(child.process.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as demo:
        assert demo.stdout is not None
        pid = int(demo.stdout.readline())
        assert not gone(pid)
        demo.send_signal(signal.SIGKILL)
    wait_until_gone([pid])


def test_what_is_told_is_heard_and_answered(children):
    child = start(children, "trainer-0", "print(input()[::-1])", piped=True)
    child.tell(b"abc")
    assert next_line(children, child) == b"cba\n"
    assert next_line(children, child) is None


def test_a_silent_child_is_named_with_what_was_waited_for(children):
    child = start(children, "engine-0", "import time; time.sleep(600)", piped=True)
    with pytest.raises(DeadlineExceeded, match=r"engine-0: waited 0\.2 s for its first word"):
        children.read_line(child, waiting_for="its first word", timeout_s=0.2)


def test_waiting_for_one_child_notices_another_that_fails(children):
    start(children, "engine-1", "raise SystemExit(4)")
    child = start(children, "engine-0", "import time; time.sleep(600)", piped=True)
    with pytest.raises(ChildFailed, match="engine-1 ended with exit code 4"):
        children.read_line(child, waiting_for="its first word", timeout_s=60.0)
