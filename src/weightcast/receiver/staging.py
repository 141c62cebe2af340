"""Where a new version waits for its commit: a second set of parameters, on the device or on the host.

The set is made once, when the receiver is, and not during an update; so an update needs no more memory
than its buckets, and a model whose second set does not fit is known at the start and not in the middle.
After a flip it holds the old version, which is what a rollback needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch

from weightcast.errors import ConfigError

Place = Literal["device", "host", "none"]
_CHUNK_BYTES = 32 << 20
_HEADROOM = 1.2


def choose_place(asked: Literal["auto", "device", "host", "none"], *, size_bytes: int, device: torch.device) -> Place:
    """Where a second set of ``size_bytes`` may live.

    Raises:
        ConfigError: The place asked for has not enough free memory.
    """
    if asked == "none":
        return "none"
    need = int(size_bytes * _HEADROOM)
    on_device = device.type == "cuda" and torch.cuda.mem_get_info(device)[0] >= need
    on_host = _free_host_bytes() >= need
    fits: dict[str, bool] = {"device": on_device if device.type == "cuda" else on_host, "host": on_host}
    if asked != "auto":
        if not fits[asked]:
            raise ConfigError(
                f"a second set of weights needs {size_bytes} bytes on the {asked}, which are not free",
                hint="use staging none: an update that fails half way then quarantines the engine",
            )
        return asked
    if fits["device"]:
        return "device"
    return "host" if fits["host"] else "none"


class Staging:
    """The second set."""

    def __init__(self, residents: Mapping[str, torch.Tensor], place: Place, *, keep_storage: bool = False) -> None:
        """Allocate it.

        Args:
            residents: Live parameters and buffers by name; each once, none a view of another.  What an update leaves
                out of one of them keeps its value.
            place: ``device``, ``host`` (pinned where there is a GPU) or ``none`` (writes go to the live ones).
            keep_storage: A flip moves contents also on the device, for engines that remember addresses (captured
                graphs, packed views).
        """
        self.place: Place = place
        self._keep_storage = keep_storage
        self._live = dict(residents)
        self._waiting: dict[str, torch.Tensor] = {}
        self.allocate()

    def allocate(self) -> None:
        """Get the memory of the second set, where it is not there."""
        for name, tensor in self._live.items():
            if self.place == "none" or name in self._waiting:
                continue
            if self.place == "device":
                waiting = torch.empty_strided(
                    tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device=tensor.device
                )
            else:
                waiting = torch.empty_strided(
                    tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda"
                )
            self._waiting[name] = waiting.copy_(tensor.detach())  # rows that no update writes are in both sets

    def free(self) -> None:
        """Give back what it takes on the device; ``allocate`` before the next update."""
        if self.place == "device":
            self._waiting.clear()

    def abandon(self) -> None:
        """Let go of it, wherever it is, since somebody may write there for a while yet; ``allocate`` gets other memory.

        Whoever still writes must keep what is written to alive.
        """
        self._waiting.clear()

    @property
    def staged(self) -> bool:
        """True if live parameters stay untouched until ``flip``."""
        return self.place != "none"

    def target(self, name: str) -> torch.Tensor:
        """Where the new values of a parameter go."""
        return self._waiting[name] if self.staged else self._live[name]

    def live(self, name: str) -> torch.Tensor:
        """The live parameter."""
        return self._live[name]

    def flip(self) -> None:
        """Exchange the waiting set and the live one.  Twice is as if never.

        On the device only pointers move: the parameter objects stay, their storage changes, so captured graphs must be
        captured again (a finisher's task).  On the host, or if storage is to be kept, contents move, chunk by chunk.
        """
        if self.place == "device" and not self._keep_storage:
            for name, tensor in self._live.items():
                waiting = self._waiting[name]
                self._waiting[name] = tensor.data
                tensor.data = waiting
        elif self.place != "none":
            for name, tensor in self._live.items():
                _exchange(tensor.data, self._waiting[name])


def _exchange(live: torch.Tensor, waiting: torch.Tensor) -> None:
    first = live.view(-1) if live.is_contiguous() else None
    if first is None:
        old = live.clone()
        live.copy_(waiting)
        waiting.copy_(old)
        return
    second = waiting.view(-1)
    step = max(1, _CHUNK_BYTES // live.element_size())
    for start in range(0, first.numel(), step):
        old = first[start : start + step].clone()
        first[start : start + step].copy_(second[start : start + step])
        second[start : start + step].copy_(old)


def _free_host_bytes() -> int:
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        return 0
    return 0
