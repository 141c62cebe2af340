"""Runs inside vLLM's workers on a CPU, which then map weights as on a GPU and free them while vLLM sleeps.

``--worker-extension-cls tests.helpers.vllm_mapped.Mapped`` does it: vLLM imports this before it loads a model.  A
worker that reads weights while they sleep ends.
"""

from __future__ import annotations

import functools
import gc

import torch

from tests.helpers.mapped import HostMapper
from weightcast.plugins.vllm import weights_pool
from weightcast.receiver import staging
from weightcast.runtime.mapped_memory import MappedPair

_mapper = HostMapper()
_create = _mapper.create
staging.mapper_of = lambda device: _mapper
weights_pool.maps_weights = lambda vllm_config: True


def _create_in(room_bytes: int, size_bytes: int) -> int:
    if sum(_mapper.live.values()) + size_bytes > room_bytes:
        raise torch.OutOfMemoryError(f"{size_bytes} bytes were asked for, and another process has them")
    return _create(size_bytes)


class Mapped:
    """Methods for ``/collective_rpc``."""

    def mapped_bytes(self) -> int:
        """Memory of both copies of the weights."""
        return sum(_mapper.live.values())

    def leave_room(self, copies: float) -> None:
        """Takes all memory but that of so many copies of the weights."""
        [backend] = [engine for engine in gc.get_objects() if type(engine) is MappedPair]
        _mapper.create = functools.partial(_create_in, int(copies * backend.size_bytes))  # type: ignore[method-assign]
