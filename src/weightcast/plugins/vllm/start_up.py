"""At vLLM's start: the staging set inside vLLM's memory budget, and batches of all sizes that kernels distinguish.

vLLM measures the model, subtracts it from the budget (``--gpu-memory-utilization``) and gives the rest to its KV cache.
The staging set is allocated right after that measurement and subtracted from the result, so vLLM sizes its KV cache
accordingly.  The measurement itself needs no correction, whatever the version, rank and compilation mode.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from weightcast.errors import ConfigError
from weightcast.receiver.rank import StagingChoice
from weightcast.receiver.staging import StagingPlace

_KEPT_SHARE = 4  # ``auto`` leaves the KV cache at least a quarter of its size without staging
log = logging.getLogger("vllm.weightcast")

# Distance of sizes up to a number of tokens.  vLLM's tuned tile sizes are for numbers of tokens that lie further apart.
_STEPS = ((64, 8), (256, 32), (1024, 128), (4096, 256), (16384, 1024), (1 << 20, 4096))


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

    def place(self, asked: StagingChoice, size_bytes: int) -> tuple[StagingPlace, str]:
        """Chooses the place of a staging set, with the reason if not the device; ``ConfigError`` without room."""
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


def batch_sizes(captured: int, largest: int) -> list[int]:
    """Returns sizes in tokens to run, the largest first.

    Args:
        captured: Largest batch that vLLM pads to the size of a CUDA graph; 0 without graphs.
        largest: Largest batch that vLLM schedules.
    """
    found = {size for size in (*range(1, 17), *_steps(largest)) if captured < size <= largest}
    found |= {size for size in (captured + 1, captured + 2) if size <= largest}
    found |= {size - 1 for size in found if size - 1 > captured}
    return sorted(found | ({largest} if largest > captured else set()), reverse=True)


def warm_up(worker: Any) -> None:
    """Runs a worker's model on these sizes, so that no kernel is compiled later; called before vLLM captures graphs.

    Triton compiles vLLM's kernel for experts once for each tile size, which depends on the number of tokens in a batch,
    and once more for numbers of tokens that 16 does not divide.  vLLM's own warm-up covers the sizes of its CUDA graphs
    and the largest batch.  An update makes batches of other sizes: ``retract`` computes all running requests again, and
    requests that waited for a switch begin together.
    """
    config = worker.vllm_config
    sizes = getattr(config.compilation_config, "cudagraph_capture_sizes", None) or ()
    captured = 0 if config.model_config.enforce_eager else max(map(int, sizes), default=0)
    sizes = batch_sizes(captured, int(config.scheduler_config.max_num_batched_tokens))
    for size in sizes:
        worker.model_runner._dummy_run(size, skip_eplb=True)
    if sizes:
        log.info(
            "weightcast: rank %d ran %d sizes of batches from %d to %d tokens, so that kernels are compiled before "
            "requests come",
            int(worker.rank),
            len(sizes),
            sizes[-1],
            sizes[0],
        )


def _steps(largest: int) -> Iterator[int]:
    size = 0
    for end, step in _STEPS:
        while size < min(end, largest):
            size += step
            yield size
