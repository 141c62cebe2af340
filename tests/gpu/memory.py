"""GPU memory that processes hold, whoever else uses the GPUs.

``torch.cuda.mem_get_info`` counts everybody's, so a test that reads it cannot have another one beside it.
"""

from __future__ import annotations

import subprocess
from collections.abc import Collection

import psutil
import torch

ALL = "all processes on these GPUs"  # what was counted, where the driver does not say whose memory it is
THEIRS = "these processes"


def process_tree(pid: int) -> set[int]:
    """A process and all that it started."""
    root = psutil.Process(pid)
    return {root.pid, *(child.pid for child in root.children(recursive=True))}


def held_bytes(pids: Collection[int], gpus: Collection[int]) -> tuple[int, str]:
    """Bytes on all GPUs that these processes hold, and whose were counted."""
    asked = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    rows = [row.split(", ") for row in subprocess.check_output(asked, text=True).splitlines() if row.strip()]
    mine = [amount for pid, amount in rows if int(pid) in pids]
    if mine and all(amount.isdigit() for amount in mine):
        return sum(int(amount) << 20 for amount in mine), THEIRS
    return sum(total - free for free, total in map(torch.cuda.mem_get_info, gpus)), ALL
