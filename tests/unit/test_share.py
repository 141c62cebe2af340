"""A buffer as torch's own multiprocessing shares it, opened by a process that knows nothing of us."""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec
import pytest
import torch

from weightcast.comm.ipc import Mapping
from weightcast.comm.share import Shared, SharedSlot

CPU = torch.device("cpu")
# What an engine's unpickler runs: torch's own rebuilding, which takes back the count that the sharing added.
OPEN = """
import sys, torch
from torch.multiprocessing.reductions import rebuild_storage_filename
manager, name, size = sys.argv[1].encode(), sys.argv[2].encode(), int(sys.argv[3])
storage = rebuild_storage_filename(torch.UntypedStorage, manager, name, size)
print(int(torch.empty(0, dtype=torch.uint8).set_(storage).to(torch.int64).sum()))
"""


def open_elsewhere(handle):
    command = [sys.executable, "-c", OPEN, handle.manager.decode(), handle.handle.decode(), str(handle.size_bytes)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=100).stdout)


def segment(shared):
    return "/dev/shm/" + shared.torch[0].handle.decode().lstrip("/")


def test_other_processes_see_each_filling():
    slot = SharedSlot(4096, CPU, {"torch"})
    try:
        for value in (3, 5):
            slot.data.fill_(value)
            shared = msgspec.json.decode(msgspec.json.encode(slot.share(opens=2)), type=Shared)
            assert shared.memory is None
            assert [open_elsewhere(handle) for handle in shared.torch] == [value * 4096] * 2
    finally:
        slot.close()
    assert not os.path.exists(segment(shared))


def test_a_segment_that_nobody_opened_leaves_no_name():
    slot = SharedSlot(4096, CPU, {"torch"})
    shared = slot.share(opens=3)
    assert os.path.exists(segment(shared))
    slot.close()
    slot.close()
    assert not os.path.exists(segment(shared))


def test_both_ways_carry_the_same_bytes():
    slot = SharedSlot(4096, CPU, {"torch", "weightcast"})
    try:
        slot.data.fill_(7)
        shared = slot.share(opens=1)
        assert open_elsewhere(shared.torch[0]) == 7 * 4096
        assert shared.memory is not None
        mapping = Mapping(shared.memory)
        assert mapping.data.unique().tolist() == [7]
        mapping.close()
    finally:
        slot.close()


@pytest.mark.parametrize("ways", [{"weightcast"}, {"weightcast", "torch"}])
def test_nothing_is_shared_in_a_way_that_nobody_asked_for(ways):
    slot = SharedSlot(64, CPU, ways)
    try:
        assert slot.share(opens=0).torch == ()
    finally:
        slot.close()
