"""Memory and launches of one turn, from a sampling thread and a profiler, which slow the turn."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path

import torch
from torch.autograd import DeviceType

from weightcast.runtime.peak_memory import PeakMemory

_SAMPLE_S = 0.002


def held_bytes(device: torch.device) -> int:
    """Returns the memory in use without caches, in bytes: of all processes on a GPU, of this process on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    with PeakMemory(device):  # returns free heap memory to the kernel
        pass
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Peak:
    """Peak memory from ``start`` to ``stop``: of all processes on a GPU, of this process on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._before = self._least = 0
        self._memory: PeakMemory | None = None
        self._profile: torch.profiler.profile | None = None

    def start(self) -> None:
        """Starts watching."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()
            self._before = self._least = torch.cuda.mem_get_info(self._device)[0]
            self._thread = threading.Thread(target=self._sample, daemon=True)
            self._thread.start()
            activities = [torch.profiler.ProfilerActivity.CUDA]
            profile = torch.profiler.profile(activities=activities)
            with suppress(RuntimeError):  # some machines forbid profiling; then launches are not counted
                profile.__enter__()
                self._profile = profile
        else:
            self._memory = PeakMemory(self._device).__enter__()

    def stop(self) -> dict[str, int]:
        """Stops watching and returns the peak memory and the counts of launches."""
        if self._memory is not None:
            self._memory.__exit__(None, None, None)
            return {"peak_extra_bytes": self._memory.extra_bytes}
        assert self._thread is not None
        self._stop.set()
        self._thread.join()
        found = {"peak_extra_bytes": self._before - self._least}
        if self._profile is None:
            return found
        self._profile.__exit__(None, None, None)
        on_device = [event for event in self._profile.events() or () if event.device_type == DeviceType.CUDA]
        copies = sum(str(event.name).startswith(("Memcpy", "Memset")) for event in on_device)
        return {**found, "launches": len(on_device) - copies, "copies": copies}

    def _sample(self) -> None:
        while not self._stop.wait(_SAMPLE_S):
            self._least = min(self._least, torch.cuda.mem_get_info(self._device)[0])
