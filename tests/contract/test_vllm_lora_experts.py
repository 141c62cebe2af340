"""Adapters of experts from memory, in the slots that vLLM's own loading fills from the same tensors."""

from __future__ import annotations

from typing import Any

import pytest

from tests.contract.test_vllm_stock import PLAYED, rig_output

pytestmark = [pytest.mark.engine]

RANKS = ("0 of 1", "0 of 2", "1 of 2")
FORMS = ("by expert", "stacked", "stacked, interleaved", "stacked, in layers for both")


@pytest.fixture(scope="module", params=PLAYED)
def said(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return rig_output("vllm_lora_rig.py", request.param, tmp_path_factory.mktemp("stand-ins"))


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("form", FORMS)
def test_slots_are_those_that_vllm_fills_itself(said: dict[str, Any], form: str, rank: str) -> None:
    same = {"equal": True, "values": True, "enabled": [1, 1, 0, 0]}
    assert said[f"{form}, {rank}"] == same | {"computed": [], "uncovered": []}


def test_a_slot_that_vllm_no_longer_counts_is_noticed(said: dict[str, Any]) -> None:
    assert "whether the adapter's slot counts in model.layers.0.mlp.experts" in said["changed"]


def test_quantised_experts_are_refused_by_their_own_method(said: dict[str, Any]) -> None:
    assert (
        "does not support: Fp8MoEMethod inside FusedMoEModularMethod, as vLLM has it with --enable" in said["quantised"]
    )


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("an expert is missing", "more or less: model.layers.0.mlp.experts.1.down_proj"),
        ("a projection is missing", "more or less: model.layers.0.mlp.experts.0.up_proj"),
        ("gate and up are missing", "more or less: model.layers.0.mlp.experts.base_layer"),
        ("both forms", "more or less: model.layers.0.mlp.experts.0.down_proj"),
        ("ranks", "one rank for each projection"),
        ("too high a rank", "--max-lora-rank 16"),
        ("by expert, where gate and up are one", "--enable-mixed-moe-lora-format"),
        ("interleaved, in layers for both", "without --enable-mixed-moe-lora-format"),
        ("experts on other ranks", "without --enable-expert-parallel"),
        ("shared", "without --enable-moe-shared-loras"),
        ("another model", "10 inputs and 8 outputs"),
    ],
)
def test_what_vllm_cannot_keep_is_refused_by_name(said: dict[str, Any], case: str, words: str) -> None:
    text, as_before = said["refused"][case]
    assert words in text
    assert as_before
