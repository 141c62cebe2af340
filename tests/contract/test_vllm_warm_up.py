"""The batches that our plug-in runs at a start, against the tables of tuned kernels in vLLM's own package."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.engines.environment import engine_python
from tests.helpers.tuned_kernels import LARGEST, variants
from weightcast.plugins.vllm.start_up import batch_sizes


@pytest.mark.engine
@pytest.mark.short
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
