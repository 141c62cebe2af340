"""The memory pool into which vLLM loads weights for its sleep mode, and what parameters leave there when they move.

torch frees no memory of such a pool.  So vLLM looks, when it has loaded a model, which segments of the pool are empty,
and frees them behind torch's back; this module does the same again.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from weightcast.plugins.vllm.rank_protocol import loads_into_pool, maps_weights

_TAG = "weights"
_ERRORS = (AttributeError, ImportError, IndexError, KeyError, TypeError, ValueError)
log = logging.getLogger("vllm.weightcast")


class WeightsPool:
    """Memory that parameters may leave: torch's own, or that pool."""

    def __init__(self, vllm_config: Any) -> None:
        """Logs the reason if vLLM's allocator is not as this class needs it; parameters then stay."""
        self.may_leave = maps_weights(vllm_config)
        self.freed_bytes = 0  # of the pool, which torch still counts
        self._pools: list[Any] = []
        if self.may_leave and loads_into_pool(vllm_config):
            try:
                self._look(getattr(vllm_config.model_config, "sleep_mode_backend", "cumem"))
            except _ERRORS as error:
                self.may_leave = False
                log.warning("weightcast: a commit exchanges contents, as vLLM's sleep mode is another one: %r", error)

    def free_left(self) -> None:
        """Frees what is empty; vLLM allocates no more from this pool."""
        torch.cuda.empty_cache()
        for segment in self._segments():
            data = self._allocator.pointer_to_data.get(segment["address"])  # torch also lists segments freed before
            if segment["allocated_size"] == 0 and data is not None and not data.is_asleep:
                self.freed_bytes += data.handle[1]
                self._release(self._allocator._python_free_callback(segment["address"]))

    def _look(self, backend: str) -> None:
        if backend != "cumem":
            raise ValueError(f"its backend is {backend}")
        from vllm.device_allocator import cumem  # pyright: ignore[reportMissingImports]

        self._allocator, self._release = cumem.CuMemAllocator.instance, cumem.unmap_and_release
        found = self._allocator.allocator_and_pools[_TAG]
        # Some versions keep every pool of a tag, others the last one.
        self._pools = [pool for pool, _ in ([found] if isinstance(found, tuple) else found)]
        used = [segment for segment in self._segments() if segment["allocated_size"]]
        for segment in used:
            data = self._allocator.pointer_to_data[segment["address"]]
            if data.tag != _TAG or data.is_asleep or data.handle[1] < segment["total_size"]:
                raise ValueError(f"a segment of {segment['total_size']} bytes is {data.handle[1:2]}, {data.tag}")
        if not used or not callable(self._allocator._python_free_callback):
            raise ValueError("its pool is empty")

    def _segments(self) -> list[dict[str, Any]]:
        return [segment for pool in self._pools for segment in pool.snapshot()]
