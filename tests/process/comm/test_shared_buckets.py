"""A buffer as torch's own multiprocessing shares it, opened by a process that knows nothing of us."""

from __future__ import annotations

import gc
import os
import subprocess
import sys

import msgspec
import pytest
import torch
from torch.multiprocessing.reductions import rebuild_storage_filename

from weightcast.comm import shared_buckets
from weightcast.comm.ipc import Mapping, SharedBuffer
from weightcast.comm.shared_buckets import Shared, SharedSlot, make_slots
from weightcast.errors import ConfigError

CPU = torch.device("cpu")
# What an engine's unpickler runs: torch's own rebuilding, which takes back the count that the sharing added.
OPEN = """
import sys, torch
from torch.multiprocessing.reductions import rebuild_storage_filename
for manager, name, size in zip(*[iter(sys.argv[1:])] * 3):
    storage = rebuild_storage_filename(torch.UntypedStorage, manager.encode(), name.encode(), int(size))
    print(int(torch.empty(0, dtype=torch.uint8).set_(storage).to(torch.int64).sum()))
    del storage
"""


def open_elsewhere(*handles):
    words = [word for one in handles for word in (one.manager.decode(), one.handle.decode(), str(one.size_bytes))]
    done = subprocess.run([sys.executable, "-c", OPEN, *words], capture_output=True, text=True, check=True, timeout=600)
    return [int(line) for line in done.stdout.split()]


def segment(shared):
    return "/dev/shm/" + shared.torch[0].handle.decode().lstrip("/")


def test_other_processes_see_each_filling():
    slot = SharedSlot(4096, CPU, {"torch"})
    try:
        for value in (3, 5):
            slot.data.fill_(value)
            shared = msgspec.json.decode(msgspec.json.encode(slot.share(opens=2)), type=Shared)
            assert shared.memory is None
            assert open_elsewhere(*shared.torch) == [value * 4096] * 2
    finally:
        slot.close()
    assert not os.path.exists(segment(shared))


def test_segment_that_was_never_opened_leaves_no_name():
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
        assert open_elsewhere(*shared.torch) == [7 * 4096]
        assert shared.memory is not None
        mapping = Mapping(shared.memory)
        assert mapping.data.unique().tolist() == [7]
        mapping.close()
    finally:
        slot.close()


@pytest.mark.parametrize("ways", [{"weightcast"}, {"weightcast", "torch"}])
def test_buffer_is_shared_only_in_the_ways_asked_for(ways):
    slot = SharedSlot(64, CPU, ways)
    try:
        assert slot.share(opens=0).torch == ()
    finally:
        slot.close()


@pytest.mark.parametrize("opened", [0, 1, 2])
def test_a_view_that_outlives_its_slot_does_no_harm(opened: int) -> None:
    """An error's traceback holds such views; torch ends the process if the name is gone before the memory."""
    slot = SharedSlot(1000, torch.device("cpu"), ("torch",))
    shared = slot.share(opens=2)
    name = f"/dev/shm/{shared.torch[0].handle.decode().lstrip('/')}"
    engine = [
        rebuild_storage_filename(torch.UntypedStorage, item.manager, item.handle, item.size_bytes)
        for item in shared.torch[:opened]
    ]
    view = slot.data[3:9]
    slot.close()
    assert os.path.exists(name)
    del view, slot
    gc.collect()
    assert not os.path.exists(name)
    del engine
    gc.collect()


def footprint() -> tuple[int, int]:
    """Descriptors and named segments of this process."""
    descriptors = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    files = [os.readlink(descriptor) for descriptor in descriptors if os.path.islink(descriptor)]
    mine = [name for name in os.listdir("/dev/shm") if name.startswith(f"torch_{os.getpid()}_")]
    return sum("memfd:weightcast" in name for name in files), len(mine)


@pytest.mark.parametrize("ways", [{"weightcast"}, {"weightcast", "torch"}, {"weightcast", "ring"}])
@pytest.mark.parametrize("good", [0, 1, 2])
def test_slots_that_cannot_all_be_made_leave_nothing_behind(monkeypatch, ways, good):
    made: list[SharedBuffer] = []

    def allocate(size_bytes: int, device: torch.device) -> SharedBuffer:
        if len(made) == good:
            raise ConfigError("no room")
        made.append(SharedBuffer(size_bytes, device))
        return made[-1]

    monkeypatch.setattr(shared_buckets, "SharedBuffer", allocate)
    gc.collect()
    before = footprint()
    with pytest.raises(ConfigError, match="no room"):
        make_slots(3, 4096, CPU, ways)
    gc.collect()
    assert footprint() == before
    assert len(made) == good
    monkeypatch.undo()
    slots = make_slots(3, 4096, CPU, ways)
    assert len(slots) == 3
    for slot in slots:
        slot.close()
