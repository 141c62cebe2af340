"""Tests of the rule that repeats a test whose processor time was stolen."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

TESTS = """
import time
import pytest
from tests.helpers.stolen import Inexcusable

count = {}

def fail_once(name, error):
    if name == "never":
        raise Inexcusable  # pytest shows this line with every failure below
    count[name] = count.get(name, 0) + 1
    time.sleep(0.05)
    if count[name] == 1:
        raise error("late")

@pytest.mark.deadlines
def test_that_fails_once():
    fail_once("late", AssertionError)

@pytest.mark.deadlines
def test_that_fails_always():
    time.sleep(0.05)
    assert "this" == "that"

@pytest.mark.deadlines
def test_of_weights():
    fail_once("weights", Inexcusable)

def test_of_something_else():
    fail_once("else", AssertionError)
"""

ALL_IDLE = "time.monotonic() * psutil.cpu_count()"


def test_a_pulse_knows_for_how_long_nothing_ran(pytester):
    pytester.makepyfile(
        stopped=f"""
import os, signal, subprocess, sys, time
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from tests.helpers.stolen import standstill_s
time.sleep(0.2)
standstill_s()
again = subprocess.Popen(["sh", "-c", f"sleep 1.5; kill -CONT {{os.getpid()}}"])
os.kill(os.getpid(), signal.SIGSTOP)
again.wait()
time.sleep(0.2)
print(standstill_s() > 1.0, standstill_s() < 1.0)
"""
    )
    assert pytester.runpython("stopped.py").stdout.str() == "True True"


@pytest.mark.parametrize(
    ("stolen", "idle", "still", "passed", "again"),
    [
        pytest.param("time.monotonic()", "time.monotonic()", "0.0", 1, True, id="the host has the processors"),
        pytest.param("0.0", "0.0", "0.0", 1, True, id="other programs have the processors"),
        pytest.param("0.0", ALL_IDLE, "4.0", 1, True, id="the machine stood still"),
        pytest.param("0.0", ALL_IDLE, "0.0", 0, False, id="ours"),
    ],
)
def test_a_failure_on_a_machine_that_was_not_ours_is_looked_at_again(pytester, stolen, idle, still, passed, again):
    root = Path(__file__).parents[2]
    pytester.makeconftest(
        f"import psutil, sys, time; sys.path.insert(0, {str(root)!r})\n"
        "from tests.helpers import stolen\n"
        "from tests.helpers.stolen import pytest_runtest_protocol, pytest_terminal_summary\n"
        f"stolen.stolen_s = lambda: {stolen}\n"
        f"stolen.idle_s = lambda: {idle}\n"
        f"stolen.standstill_s = lambda: {still}\n"
        "def pytest_configure(config): config.addinivalue_line('markers', 'deadlines')\n"
    )
    pytester.makepyfile(TESTS)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=passed, failed=4 - passed)
    assert ("of the processors were taken by the host" in result.stdout.str()) is again
    assert result.stdout.str().count("test_that_fails_always: ") == (2 if again else 0)
