"""verl's own harness for checkpoint engines, from its package, with our engine in it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.helpers.tiny import tiny_model, tiny_tokenizer
from tests.integrations.environment import trainer_python
from tests.integrations.script import run_script

pytestmark = [pytest.mark.engine_full, pytest.mark.timeout(1500)]

HERE = Path(__file__).parent


def test_harness_of_verl_accepts_our_checkpoint_engine(tmp_path: Path) -> None:
    tiny_model(tmp_path)
    tiny_tokenizer(tmp_path)
    said = run_script(
        trainer_python("verl-0.9.1"),
        "verl_run",
        tmp_path,
        folder=tmp_path,
        timeout_s=1400,
        PYTHONPATH=f"{HERE.parents[1] / 'src'}{os.pathsep}{HERE}",  # Ray's workers import the platform too
        VERL_PLATFORM="cpu",
        VERL_ENGINE_DEVICE="cuda",  # verl registers its FSDP engine for GPUs only
        VERL_USE_EXTERNAL_MODULES="verl_cpu,weightcast.integrations.verl",
        RAY_worker_niceness="0",  # where other processes keep the CPUs busy, Ray's workers get nothing else
        RAY_memory_monitor_refresh_ms="0",  # it would end our actors for the memory that others use
        RAY_USAGE_STATS_ENABLED="0",
    )
    # Every rollout worker has compared every tensor with the model after each of the updates.
    assert said == {"verl": "0.9.1", "engine": "WeightcastCheckpointEngine", "updates": 3, "replicas": 2}
