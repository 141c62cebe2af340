"""Runs inside vLLM's workers: notes the CUDA streams of forward passes and of exchanges of weights.

``--worker-extension-cls tests.helpers.vllm_streams.Streams`` adds methods for ``/collective_rpc`` to the workers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from weightcast.digest import exchange_kernel
from weightcast.runtime.mapped_memory import CudaMapper

_seen: dict[str, set[int]] = {"module": set(), "graph": set(), "exchange": set()}
_mappings = {"made": 0, "while a stream worked": 0}


def _noting(kind: str, do: Callable[..., Any]) -> Callable[..., Any]:
    def noted(*args: Any, **kwargs: Any) -> Any:
        _seen[kind].add(torch.cuda.current_stream().cuda_stream)
        return do(*args, **kwargs)

    return noted


def _watching(unmap: Callable[..., None]) -> Callable[..., None]:
    def watched(*args: Any) -> None:
        streams = {stream for kind in _seen.values() for stream in kind}
        _mappings["made"] += 1
        _mappings["while a stream worked"] += not all(
            torch.cuda.ExternalStream(stream).query() if stream else torch.cuda.default_stream().query()
            for stream in streams
        )
        unmap(*args)

    return watched


class Streams:
    """Methods for vLLM's workers."""

    model_runner: Any

    def watch_streams(self) -> None:
        """Notes each call of the model, replay of a CUDA graph, exchange and mapping from now on."""
        model = self.model_runner.get_model()
        model.forward = _noting("module", model.forward)
        torch.cuda.CUDAGraph.replay = _noting("graph", torch.cuda.CUDAGraph.replay)
        exchange_kernel.Launch.run = _noting("exchange", exchange_kernel.Launch.run)
        CudaMapper.unmap = _watching(CudaMapper.unmap)

    def streams_seen(self) -> dict[str, list[int]]:
        """The handles of the streams by kind."""
        return {kind: sorted(streams) for kind, streams in _seen.items()}

    def mappings_seen(self) -> dict[str, int]:
        """How often memory was unmapped, and how often while one of those streams had work to do."""
        return _mappings
