"""The sizes of batches that are run at vLLM's start reach every kernel that a later batch can need."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.engines.environment import engine_python
from weightcast.plugins.vllm.start_up import batch_sizes, warm_up

LARGEST = 16384
EXPERTS_OF_A_TOKEN = (1, 2, 6, 8)


def variants(sizes: Any, config: Callable[[int], object]) -> set[object]:
    """The kernels that these batches launch: Triton compiles one anew if 16 divides an argument or stops to."""
    return {(config(size), size * experts % 16 == 0, experts) for size in sizes for experts in EXPERTS_OF_A_TOKEN}


def untuned(size: int, experts: int) -> tuple[object, ...]:
    """The tile sizes of vLLM 0.25's kernel for experts in bfloat16 that nobody has tuned."""
    block = next((block for end, block in ((32, 16), (96, 32), (512, 64)) if size <= end), 128)
    return block, size <= 64, size // experts > 128, size <= 128, size <= 32


@pytest.mark.parametrize("captured", [0, 8, 512])
@pytest.mark.parametrize("experts", [8, 128])
def test_every_kernel_of_untuned_experts_is_compiled(captured, experts):
    def config(size: int) -> object:
        return untuned(size, experts)

    for largest in (2048, LARGEST):
        needed = variants(range(captured + 1, largest + 1), config)
        assert needed <= variants(batch_sizes(captured, largest), config)


def test_sizes_are_in_order_and_inside_of_what_vllm_can_run():
    assert batch_sizes(8, 8) == []
    assert batch_sizes(512, 513) == [513]
    assert batch_sizes(0, 3) == [3, 2, 1]
    assert batch_sizes(512, 600)[-1] == 513
    sizes = batch_sizes(512, 8192)
    assert sizes[0] == 8192
    assert sizes[-1] > 512
    assert sizes == sorted(sizes, reverse=True)
    assert len(sizes) < 50


@pytest.mark.engine
@pytest.mark.parametrize("captured", [0, 512])
def test_every_kernel_of_the_experts_that_vllm_has_tuned_is_compiled(captured):
    site = next(Path(engine_python("vllm-0.32.0-cpu")).parents[1].glob("lib/python*/site-packages"))
    files = sorted((site / "vllm/model_executor/layers/fused_moe/configs").glob("*NVIDIA_H*.json"))
    assert len(files) > 50
    sizes = batch_sizes(captured, LARGEST)
    every = range(captured + 1, LARGEST + 1)
    tables = {tuple(sorted(int(size) for size in json.loads(file.read_text()) if size.isdecimal())) for file in files}
    for tuned in tables:
        nearest = {size: min(tuned, key=lambda known: abs(known - size)) for size in every}
        assert variants(every, nearest.__getitem__) <= variants(sizes, nearest.__getitem__), tuned


@pytest.mark.parametrize(("eager", "least"), [(True, 1), (False, 9)])
def test_a_worker_runs_what_no_graph_covers(eager, least):
    ran: list[int] = []

    def run(size: int, *, skip_eplb: bool) -> None:
        assert skip_eplb
        ran.append(size)

    config = SimpleNamespace(
        model_config=SimpleNamespace(enforce_eager=eager),
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=[1, 2, 4, 8]),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=64),
    )
    warm_up(SimpleNamespace(vllm_config=config, model_runner=SimpleNamespace(_dummy_run=run), rank=0))
    assert (max(ran), min(ran)) == (64, least)
