"""Folders of the disk transport that killed trainers left."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.unit.transports.test_disk import SPECS
from weightcast.transports.disk import DiskCarrier

KILLED = """
import os, sys
from tests.unit.transports.test_disk import SPECS
from weightcast.transports.disk import DiskCarrier
transport = DiskCarrier([], specs=SPECS, folder=sys.argv[1], timeout_s=5)
transport.connect()
if sys.argv[2] == "complete":
    transport._left_bytes = 0
    transport._publish()
print("up", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("how_far", ["begun", "complete"])
def test_only_folders_of_killed_trainers_are_deleted(tmp_path, how_far):
    for name in (".weightcast-0123456789abcdef.part", "weightcast-0123456789abcdef", "weightcast-mine"):
        (tmp_path / name).mkdir()
    others = set(tmp_path.iterdir())
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path), how_far], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == b"up\n"
        [left] = set(tmp_path.iterdir()) - others
        DiskCarrier([], specs=SPECS, folder=str(tmp_path), timeout_s=5).close()
        assert (left / "model.safetensors").exists()  # its owner lives
        trainer.kill()
    assert left.exists()
    DiskCarrier([], specs=SPECS, folder=str(tmp_path), timeout_s=5).close()
    assert set(tmp_path.iterdir()) == others
