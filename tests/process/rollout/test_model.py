"""Ranks of the reference model sum where shared memory has no room."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

# Two ranks, where /dev/shm has as little room as the first argument says; each sums numbers that fill all slots.
_SUMS = """
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
import torch
import torch.distributed as dist
from weightcast.rollout import all_reduce

store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))

def rank(number):
    mine = all_reduce.connect(f"127.0.0.1:{store.port}", rank=number, timeout_s=60)
    reduce = all_reduce.join(mine, rank=number, size=2, device=torch.device("cpu"), timeout_s=60)
    data = torch.full((700_000,), number + 1.0)
    reduce(data)
    return type(reduce).__name__, data.unique().tolist()

with ThreadPoolExecutor(2) as pool:
    print(*pool.map(rank, range(2)))
"""


_IN_OWN_MOUNTS = ["unshare", "--mount", *(() if os.geteuid() == 0 else ("--map-root-user",)), "sh", "-c"]


def _with_room(room: str) -> list[str]:
    return [*_IN_OWN_MOUNTS, f'mount -t tmpfs -o size={room} none /dev/shm && exec "$@"', "sh"]


@pytest.mark.skipif(
    shutil.which("unshare") is None or subprocess.run([*_with_room("1m"), "true"], capture_output=True).returncode != 0,
    reason="no mount namespaces here",
)
@pytest.mark.parametrize(
    ("room", "how"), [("16k", "GroupReduce"), ("3m", "GroupReduce"), ("64m", "SharedMemoryReduce")]
)
def test_ranks_sum_without_shared_memory_where_it_has_no_room(room, how):
    done = subprocess.run([*_with_room(room), sys.executable, "-c", _SUMS], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"('{how}', [3.0]) ('{how}', [3.0])\n"), done.stderr
