"""Runs inside vLLM's workers: notes the CUDA streams of forward passes and of exchanges of weights.

``--worker-extension-cls tests.vllm_streams.Streams`` adds methods for ``/collective_rpc`` to a server's workers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from weightcast.digest import exchange_kernel

_seen: dict[str, set[int]] = {"module": set(), "graph": set(), "exchange": set()}


def _noting(kind: str, do: Callable[..., Any]) -> Callable[..., Any]:
    def noted(*args: Any, **kwargs: Any) -> Any:
        _seen[kind].add(torch.cuda.current_stream().cuda_stream)
        return do(*args, **kwargs)

    return noted


class Streams:
    """Methods for vLLM's workers."""

    model_runner: Any

    def watch_streams(self) -> None:
        """Notes the stream of each call of the model, replay of a CUDA graph and exchange from now on."""
        model = self.model_runner.get_model()
        model.forward = _noting("module", model.forward)
        torch.cuda.CUDAGraph.replay = _noting("graph", torch.cuda.CUDAGraph.replay)
        exchange_kernel.Launch.run = _noting("exchange", exchange_kernel.Launch.run)

    def streams_seen(self) -> dict[str, list[int]]:
        """The handles of the streams by kind."""
        return {kind: sorted(streams) for kind, streams in _seen.items()}
