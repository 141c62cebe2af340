"""Runs the model at vLLM's start on batches of all sizes that kernels distinguish, so that none is compiled later.

Triton compiles vLLM's kernel for experts once for each tile size, which depends on the number of tokens in a batch, and
once more for numbers of tokens that 16 does not divide.  vLLM's own warm-up covers the sizes of its CUDA graphs and the
largest batch.  An update makes batches of other sizes: ``retract`` computes all running requests again, and requests
that waited for a switch begin together.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

log = logging.getLogger("vllm.weightcast")

# Distance of sizes up to a number of tokens.  vLLM's tuned tile sizes are for numbers of tokens that lie further apart.
_STEPS = ((64, 8), (256, 32), (1024, 128), (4096, 256), (16384, 1024), (1 << 20, 4096))


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
    """Runs a worker's model on these sizes; called on every rank before vLLM captures graphs."""
    config = worker.vllm_config
    captured = 0 if config.model_config.enforce_eager else _largest_captured(config.compilation_config)
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


def _largest_captured(compilation: Any) -> int:
    return max(map(int, getattr(compilation, "cudagraph_capture_sizes", None) or ()), default=0)
