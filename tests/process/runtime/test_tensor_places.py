"""Comparing the places of tensors where a disk has no room for machine code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# Many tensors, one of which moves and then changes its form; no file may grow.
_MANY_PLACES = """
import logging, resource, signal
import torch
logging.basicConfig(level=logging.INFO)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
from weightcast.runtime.tensor_places import TensorPlaces
for turn in range(2):
    tensors = [torch.randn(4, 4) for _ in range(1100)]
    places = TensorPlaces(tensors)
    assert places.addresses == tuple(tensor.data_ptr() for tensor in tensors)
    print(*places.compare(tensors))
    tensors[77] = tensors[77].clone()
    print(*places.compare(tensors))
    tensors[77] = tensors[77].view(16)
    print(places.compare(tensors)[1])
"""


@pytest.mark.parametrize("kept", ["nothing is kept", "what is kept was cut off"])
def test_a_disk_without_room_for_machine_code_changes_nothing(kept, tmp_path):
    pytest.importorskip("numba")
    command = [sys.executable, "-c", _MANY_PLACES]
    env = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    if kept != "nothing is kept":
        free = _MANY_PLACES.replace("resource.setrlimit", "print")
        subprocess.run([sys.executable, "-c", free], env=env, check=True, stdout=subprocess.DEVNULL)
        kept_files = [path for path in Path(tmp_path).rglob("*.nb[ic]")]
        assert kept_files
        for path in kept_files:
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "True True\nFalse True\nFalse\n" * 2), done.stderr
    told = [line for line in done.stderr.splitlines() if "numba cannot keep" in line]
    assert len(told) == 1, done.stderr
