"""A GPU buffer as torch shares it, opened again and again by a process that knows nothing of us."""

from __future__ import annotations

import base64
import json
import subprocess
import sys

import msgspec
import pytest
import torch

from tests.gpu.memory import held_bytes
from weightcast.comm.ipc import SharedBuffer
from weightcast.comm.shared_buckets import SharedSlot

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(150)]

# One line in for each filling, one line out: the sum of what it sees.  The mapping is let go of each time.
OPENER = """
import base64, json, sys, torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor
torch.cuda.init()
for line in sys.stdin:
    h = json.loads(line)
    b = lambda key: base64.b64decode(h[key])
    tensor = rebuild_cuda_tensor(
        torch.Tensor, (h["size_bytes"],), (1,), 0, torch.UntypedStorage, torch.uint8, 0, b("handle"), h["size_bytes"],
        h["offset_bytes"], False, b("ref_counter"), h["ref_counter_offset"], b("event"), h["event_sync"])
    total = int(tensor.to(torch.int64).sum())
    del tensor
    torch.cuda.ipc_collect()
    print(total, flush=True)
"""


def test_each_filling_is_seen_and_nothing_grows(record):
    device = torch.device("cuda", 0)
    size = 64 << 20
    slot = SharedSlot(size, device, {"torch", "weightcast"})
    held: list[int] = []
    with subprocess.Popen(
        [sys.executable, "-c", OPENER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as opener:
        assert opener.stdin is not None
        assert opener.stdout is not None
        for value in range(1, 101):
            slot.data.fill_(value % 251)
            shared = slot.share(opens=1)
            handle = shared.torch[0]
            words = {
                name: base64.b64encode(data).decode() if isinstance(data, bytes) else data
                for name, data in ((field, getattr(handle, field)) for field in handle.__struct_fields__)
            }
            opener.stdin.write(json.dumps(words) + "\n")
            opener.stdin.flush()
            assert int(opener.stdout.readline()) == (value % 251) * size
            if value in (10, 100):
                amount, whose = held_bytes({opener.pid}, {0})
                held.append(amount)
        opener.stdin.close()
        assert opener.wait(timeout=60) == 0
    slot.close()
    record("held_bytes_after_10_and_100", held)
    record("held_by", whose)
    assert held[1] - held[0] < 8 << 20


# One line in for each handle, one line out: the sum of what it sees, or why it does not map it.
MAPPER = """
import sys, msgspec, torch
from weightcast.comm.ipc import Mapping, MappingFailed
from weightcast.wire.bucket_sources import MemoryHandle
torch.cuda.init()
for line in sys.stdin:
    try:
        mapping = Mapping(msgspec.json.decode(line, type=MemoryHandle), torch.device("cuda", 0))
        mapping.wait()
        print(int(mapping.data.to(torch.int64).sum()), flush=True)
        mapping.close()
    except MappingFailed as error:
        print(error, flush=True)
"""


def test_a_handle_that_reaches_beyond_its_allocation_is_refused():
    device = torch.device("cuda", 0)
    size = 64 << 20  # an allocation of its own in torch's allocator
    buffer, behind = SharedBuffer(size, device), SharedBuffer(size, device)
    buffer.data.fill_(1)
    behind.data.fill_(2)
    good = buffer.handle()
    cases = (
        (good, str(size)),
        (msgspec.structs.replace(good, size_bytes=size - 5, offset_bytes=good.offset_bytes + 5), str(size - 5)),
        (msgspec.structs.replace(good, size_bytes=size + 1), f"{size + 1} bytes from byte 0 on"),
        (msgspec.structs.replace(good, offset_bytes=good.offset_bytes + 1), f"the allocation has {size}"),
        (msgspec.structs.replace(good, size_bytes=1 << 46), f"the allocation has {size}"),
        (msgspec.structs.replace(good, size_bytes=1, offset_bytes=1 << 45), f"the allocation has {size}"),
    )
    with subprocess.Popen(
        [sys.executable, "-c", MAPPER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as mapper:
        assert mapper.stdin is not None
        assert mapper.stdout is not None
        for handle, says in cases:
            mapper.stdin.write(msgspec.json.encode(handle).decode() + "\n")
            mapper.stdin.flush()
            assert says in mapper.stdout.readline()
        mapper.stdin.close()
        assert mapper.wait(timeout=60) == 0
    buffer.close()
    behind.close()
