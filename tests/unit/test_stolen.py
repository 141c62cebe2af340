"""What is run again, and what is not."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

TESTS = """
import time

count = {"first": 0}

def test_that_fails_once():
    count["first"] += 1
    time.sleep(0.05)
    assert count["first"] == 2

def test_that_fails_always():
    time.sleep(0.05)
    assert "this" == "that"
"""


@pytest.mark.parametrize(("stolen", "passed", "again"), [("time.monotonic()", 1, True), ("0.0", 0, False)])
def test_a_failure_on_a_machine_that_was_not_ours_is_looked_at_twice(pytester, stolen, passed, again):
    root = Path(__file__).parents[2]
    pytester.makeconftest(
        f"import sys, time; sys.path.insert(0, {str(root)!r})\n"
        "from tests import stolen\n"
        "from tests.stolen import pytest_runtest_protocol, pytest_terminal_summary\n"
        f"stolen.stolen_s = lambda: {stolen}\n"
    )
    pytester.makepyfile(TESTS)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=passed, failed=2 - passed)
    assert ("of the processors were taken by the host" in result.stdout.str()) is again
