"""A test of deadlines that fails while others have the processors is run again, twice at most.

Tests with the mark ``deadlines`` hold limits of a few seconds, over a dozen processes.  On a virtual machine whose host
gives the processors to others for half of the time ("steal") or stops the machine for seconds, and beside other
programs that leave no processor idle, a limit that was passed says nothing about the code.  So it counts if there was
time left over, or if it comes every time; what was run again is listed at the end.  Wrong weights are ``Inexcusable``
and count at once, and so does every failure of a test without the mark.
"""

from __future__ import annotations

import functools
import threading
import time

import psutil
import pytest
from _pytest.runner import runtestprotocol

TOO_MUCH = 0.15  # share of all processors that the host took, over the time of the test
TOO_LITTLE = 0.1  # share that was idle
TOO_LONG_S = 1.0  # for which nothing ran
TRIES = 3
_BEAT_S = 0.05
_AGAIN = "run again"


class Inexcusable(AssertionError):
    """A failure that no lack of time explains, above all wrong weights."""


def stolen_s() -> float:
    """Seconds of processors that the host has kept to itself since this machine started."""
    return getattr(psutil.cpu_times(), "steal", 0.0)


def idle_s() -> float:
    """Seconds in which processors had nothing to do since this machine started."""
    times = psutil.cpu_times()
    return times.idle + getattr(times, "iowait", 0.0)


class Pulse:
    """A thread that wakes twenty times a second and knows how late it ever was.

    A machine that its host stops counts neither stolen time nor work, so only a clock shows the pause.
    """

    def __init__(self) -> None:
        self._latest_s = 0.0
        threading.Thread(target=self._beat, name="pulse", daemon=True).start()

    def latest_s(self) -> float:
        """The longest delay since the last call, in seconds."""
        latest_s, self._latest_s = self._latest_s, 0.0
        return latest_s

    def _beat(self) -> None:
        while True:
            began = time.monotonic()
            time.sleep(_BEAT_S)
            self._latest_s = max(self._latest_s, time.monotonic() - began - _BEAT_S)


@functools.cache
def _pulse() -> Pulse:
    """Begins with the first test: a process that only imports this, and forks others, must have one thread."""
    return Pulse()


def standstill_s() -> float:
    """The longest time for which this process could not run, since the last call, in seconds."""
    return _pulse().latest_s()


def _raised(report: pytest.TestReport) -> str:
    """The error; not the code around it, which may name others."""
    crash = getattr(report.longrepr, "reprcrash", None)
    return report.longreprtext if crash is None else crash.message.partition(":")[0]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    """As pytest does it; several times if need be."""
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for left in reversed(range(TRIES)):
        standstill_s()
        stolen_before, idle_before, began = stolen_s(), idle_s(), time.monotonic()
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
        processors_s = (time.monotonic() - began) * (psutil.cpu_count() or 1)
        stolen, idle = (stolen_s() - stolen_before) / processors_s, (idle_s() - idle_before) / processors_s
        failed = next((report for report in reports if report.failed), None)
        still_s = standstill_s()
        busy = stolen > TOO_MUCH or idle < TOO_LITTLE or still_s > TOO_LONG_S
        excusable = busy and item.get_closest_marker("deadlines") is not None
        if failed is None or not left or not excusable or Inexcusable.__name__ in _raised(failed):
            break
        words = failed.longreprtext.strip().splitlines()[-1]
        shares = (
            f"{stolen:.0%} of the processors were taken by the host, {max(idle, 0.0):.0%} were idle, nothing ran for "
            f"{still_s:.1f} s"
        )
        item.user_properties.append((_AGAIN, f"{shares}: {words}"))
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
