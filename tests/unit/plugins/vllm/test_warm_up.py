"""The sizes of batches that are run at vLLM's start reach every kernel that a later batch can need."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.helpers.tuned_kernels import LARGEST, variants
from weightcast.plugins.vllm.start_up import batch_sizes, warm_up


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
