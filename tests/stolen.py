"""A test of deadlines that fails while the host keeps the processors from this machine is run once more.

Tests with the mark ``deadlines`` hold limits of a few seconds, over a dozen processes.  On a virtual machine whose host
gives the processors to others for half of the time ("steal") a limit that was passed says nothing about the code.  So
it counts if the machine was ours, or if it comes again; what was run again is listed at the end.  Wrong
weights are ``Inexcusable`` and count at once, and so does every failure of a test without the mark.
"""

from __future__ import annotations

import time

import psutil
import pytest
from _pytest.runner import runtestprotocol

TOO_MUCH = 0.15  # of all processors, over the time of the test
_AGAIN = "run again"


class Inexcusable(AssertionError):
    """A failure that no lack of time explains, above all wrong weights."""


def stolen_s() -> float:
    """Seconds of processors that the host has kept to itself since this machine started."""
    return getattr(psutil.cpu_times(), "steal", 0.0)


def _raised(report: pytest.TestReport) -> str:
    """The error; not the code around it, which may name others."""
    crash = getattr(report.longrepr, "reprcrash", None)
    return report.longreprtext if crash is None else crash.message.partition(":")[0]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    """As pytest does it; twice if need be."""
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    before, begin = stolen_s(), time.monotonic()
    reports = runtestprotocol(item, log=False, nextitem=nextitem)
    share = (stolen_s() - before) / ((time.monotonic() - begin) * (psutil.cpu_count() or 1))
    failed = next((report for report in reports if report.failed), None)
    excusable = item.get_closest_marker("deadlines") is not None and share > TOO_MUCH
    if failed is not None and excusable and Inexcusable.__name__ not in _raised(failed):
        first = failed.longreprtext.strip().splitlines()[-1]
        item.user_properties.append((_AGAIN, f"{share:.0%} of the processors were taken by the host: {first}"))
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Lists the tests that were run again, with their first errors."""
    lines = [
        f"{report.nodeid}: {value}"
        for kind in ("passed", "failed")
        for report in terminalreporter.stats.get(kind, ())
        for name, value in report.user_properties
        if name == _AGAIN and report.when == "call"
    ]
    if lines:
        terminalreporter.section(_AGAIN)
        for line in lines:
            terminalreporter.line(line)
