"""Runs inside vLLM's workers on a CPU, which then map weights as on a GPU and free them while vLLM sleeps.

``--worker-extension-cls tests.vllm_mapped.Mapped`` does it: vLLM imports this before it loads a model.  A worker that
reads weights while they sleep ends.
"""

from __future__ import annotations

import torch

from tests.mapped import HostMapper
from weightcast.plugins.vllm import weights_pool
from weightcast.receiver import staging

_mapper = HostMapper()
_create = _mapper.create
staging.mapper_of = lambda device: _mapper
weights_pool.maps_weights = lambda vllm_config: True


def _no_room(size_bytes: int) -> int:
    raise torch.OutOfMemoryError(f"{size_bytes} bytes were asked for, and another process has them")


class Mapped:
    """Methods for ``/collective_rpc``."""

    def mapped_bytes(self) -> int:
        """Memory of both copies of the weights."""
        return sum(_mapper.live.values())

    def fill_memory(self, full: bool) -> None:
        """Takes all memory, or gives it back."""
        _mapper.create = _no_room if full else _create  # type: ignore[method-assign]
