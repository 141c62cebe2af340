"""The setting ``not_updated`` without vLLM: a stand-in of its loader gives the tensors of a checkpoint."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from weightcast.errors import ConfigError

NAMES = ("model.visual.a", "model.layers.0.b", "model.visual.c", "lm_head.weight")


@dataclasses.dataclass
class LoadConfig:
    load_format: str = "auto"


@pytest.fixture
def specs_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes ``CheckpointSpecs`` of a vLLM that was started with a load format."""
    names = ("vllm", "vllm.model_executor", "vllm.model_executor.model_loader")
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    loader = SimpleNamespace(get_all_weights=lambda config, model: ((name, torch.ones(2)) for name in NAMES))
    monkeypatch.setattr(sys.modules[names[-1]], "get_model_loader", lambda config: loader, raising=False)
    ours = "weightcast.plugins.vllm.loaded_models"
    monkeypatch.delitem(sys.modules, ours, raising=False)
    module = importlib.import_module(ours)
    monkeypatch.delitem(sys.modules, ours)

    def made(not_updated: str, load_format: str = "auto") -> Any:
        text = SimpleNamespace(tie_word_embeddings=False)
        model_config = SimpleNamespace(hf_config=SimpleNamespace(get_text_config=lambda: text), model="folder")
        config = SimpleNamespace(model_config=model_config, load_config=LoadConfig(load_format))
        return module.CheckpointSpecs(config, nn.Module(), not_updated=not_updated)

    return made


def test_tensors_that_no_update_contains_are_loaded_at_the_start_and_not_expected_later(specs_of: Any) -> None:
    found = specs_of(r"model\.visual\..*")
    assert [name for name, _ in found.weights()] == list(NAMES)
    assert [spec.name for spec in found.specs] == ["model.layers.0.b", "lm_head.weight"]
    assert found.left_out == ["model.visual.a", "model.visual.c"]


@pytest.mark.parametrize(
    ("not_updated", "load_format", "words"),
    [
        (r"visual\..*", "auto", r"'visual\\\\\..\*', matches no tensor"),
        (".*", "auto", "'.\\*', matches every tensor"),
        (r"model\.visual.*", "dummy", r"would leave random weights in model\.visual\.a"),
    ],
)
def test_a_setting_that_cannot_be_meant_is_refused(
    specs_of: Any, not_updated: str, load_format: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        specs_of(not_updated, load_format).read_specs()
