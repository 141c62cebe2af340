"""The staging set inside vLLM's memory budget.

vLLM measures the model, subtracts it from the budget (``--gpu-memory-utilization``) and gives the rest to its KV cache.
The staging set is allocated right after that measurement and subtracted from the result, so vLLM sizes its KV cache
accordingly.  The measurement itself needs no correction, whatever the version, rank and compilation mode.
"""

from __future__ import annotations

from dataclasses import dataclass

from weightcast.errors import ConfigError
from weightcast.receiver.rank import StagingChoice
from weightcast.receiver.staging import Place

_KEPT_SHARE = 4  # ``auto`` leaves the KV cache at least a quarter of its size without staging


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The memory of one vLLM rank after loading its model and before allocating its KV cache.

    Attributes:
        cache_bytes: Size that vLLM would give its KV cache.
        least_bytes: KV cache of one request of the full context length.
        fixed_bytes: None if vLLM sizes the cache by its budget.  Otherwise the user set the cache's size, and this many
            bytes are free on the device beside it.
        on_host: True if vLLM runs on a CPU.
    """

    cache_bytes: int
    least_bytes: int
    fixed_bytes: int | None
    host_bytes: int
    on_host: bool

    def place(self, asked: StagingChoice, size_bytes: int) -> tuple[Place, str]:
        """Chooses the place of a staging set; also returns the reason if it is not the device.

        Raises:
            ConfigError: The place that the setting asks for has not enough memory.
        """
        if asked == "none":
            return "none", ""
        host_ok = size_bytes + size_bytes // 5 <= self.host_bytes
        if asked == "host":
            if not host_ok:
                raise ConfigError(
                    f"staging on the host takes {gib(size_bytes)}, and {gib(self.host_bytes)} are free",
                    hint="use staging none: an update that fails half way then quarantines the engine",
                )
            return "host", ""
        if self.fixed_bytes is not None:
            room, what = self.fixed_bytes, f"{gib(self.fixed_bytes)} are free beside a KV cache of a fixed size"
        else:
            kept = self.least_bytes if asked == "device" else max(self.least_bytes, self.cache_bytes // _KEPT_SHARE)
            room = self.cache_bytes - kept
            what = f"vLLM has {gib(self.cache_bytes)} for its KV cache, which needs {gib(kept)} of it"
        why = f"staging takes {gib(size_bytes)}, and {what}"
        if size_bytes <= room and (not self.on_host or host_ok):
            return "device", ""
        if asked == "device":
            raise ConfigError(
                f"no room for staging on the device: {why}",
                hint="use a higher --gpu-memory-utilization, a lower --max-model-len, or staging host",
            )
        if host_ok and not self.on_host:
            return "host", f"no room on the device: {why}"
        return "none", f"no room on the device or the host: {why}; {gib(self.host_bytes)} are free on the host"


def gib(size_bytes: int) -> str:
    """Formats a number of bytes as vLLM's log does."""
    return f"{size_bytes / (1 << 30):.2f} GiB"
