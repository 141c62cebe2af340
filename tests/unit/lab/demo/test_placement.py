"""Where the demo puts its processes, and what it refuses to be asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from weightcast.errors import ConfigError
from weightcast.lab.demo.placement import place
from weightcast.lab.demo.settings import DemoConfig


@pytest.mark.parametrize("mode", ["colocated", "disaggregated"])
def test_without_gpus_two_trainers_and_engines_of_degree_1_and_3(mode):
    placement = place(mode, num_gpus=0)
    assert placement.device == "cpu"
    assert placement.trainers == 2
    assert [engine.tp for engine in placement.engines] == [1, 3]


@pytest.mark.parametrize("num_gpus", range(1, 9))
def test_colocated_engines_share_gpus_with_trainers(num_gpus):
    placement = place("colocated", num_gpus=num_gpus)
    assert placement.device == "cuda"
    assert len(set(placement.trainer_gpus)) == placement.trainers  # nccl takes a GPU once
    for engine in placement.engines:
        assert len(engine.gpus) == engine.tp
        assert set(engine.gpus) <= set(placement.trainer_gpus) <= set(range(num_gpus))


@pytest.mark.parametrize("num_gpus", range(2, 9))
def test_disaggregated_processes_share_no_gpu(num_gpus):
    placement = place("disaggregated", num_gpus=num_gpus)
    used = [*placement.trainer_gpus, *(gpu for engine in placement.engines for gpu in engine.gpus)]
    assert placement.device == "cuda"
    assert len(set(used)) == len(used)
    assert set(used) <= set(range(num_gpus))


def test_one_gpu_is_not_enough_for_disaggregated_and_the_reader_is_told():
    placement = place("disaggregated", num_gpus=1)
    assert placement.device == "cpu"
    assert "one GPU" in placement.note


@pytest.mark.parametrize(
    "wrong",
    [
        {"steps": 0},
        {"modes": ()},
        {"modes": ("colocated", "colocated")},
        {"modes": ("sideways",)},
        {"device": "tpu"},
        {"model": Path("/nowhere")},
        {"ready_timeout_s": 0.0},
    ],
)
def test_config_refuses(wrong):
    with pytest.raises(ConfigError):
        DemoConfig(**wrong)
