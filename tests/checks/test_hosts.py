"""Hosts on one machine (``tests/helpers/hosts.py``) do not outlive the process that made them for long."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.hosts import cannot, hosts

pytestmark = pytest.mark.skipif(bool(cannot()), reason=cannot())
MAKES_AND_WAITS = """
import sys
from pathlib import Path
from tests.helpers.hosts import hosts
with hosts(["alpha", "beta"], Path(sys.argv[1])):
    print("ready", flush=True)
    sys.stdin.read()
"""


def made_by(pid: int) -> set[str]:
    links = {link for link in os.listdir("/sys/class/net") if link == f"wcb{pid}"}
    spaces = os.listdir("/run/netns") if os.path.isdir("/run/netns") else []
    return links | {space for space in spaces if space.startswith(f"wc-{pid}-")}


def start(folder: Path) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", MAKES_AND_WAITS, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    assert made_by(process.pid) == {f"wcb{process.pid}", f"wc-{process.pid}-2", f"wc-{process.pid}-3"}
    return process


def end(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    process.send_signal(number)
    process.communicate()


def test_hosts_of_a_killed_process_go_with_the_next_ones_and_those_of_a_living_one_stay(tmp_path) -> None:
    living, killed = start(tmp_path), start(tmp_path)
    try:
        end(killed, signal.SIGKILL)
        assert made_by(killed.pid)
        with hosts(["gamma"], tmp_path):
            assert not made_by(killed.pid)
            assert len(made_by(living.pid)) == 3
        assert not made_by(os.getpid())
    finally:
        living.communicate()
    assert not made_by(living.pid)
