"""fp8 in real vLLM with our plug-in's classes, on a CPU: what an update leaves equals what vLLM makes of the weights.

``vllm_fp8_rig`` says what is real there and what is put in from outside.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.engines import forked
from tests.engines.vllm_server import IMPORTED, vllm_command
from tests.helpers.fp8_checkpoints import EXPORTED, exported_checkpoint, fp8_checkpoint
from tests.helpers.tiny import in_bfloat16, tiny_model, tiny_tokenizer

pytestmark = [pytest.mark.engine]

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
EXPERTS: dict[str, Any] = SIZES | {
    "moe_intermediate_size": 128,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
# Case of the rig, family, kind of the checkpoint, vLLM's method that must be in use.
CASES: dict[str, tuple[str, str, str, str]] = {
    "blocks": ("blocks", "qwen3", "blocks", "Fp8LinearMethod"),
    "blocks, experts": ("blocks", "qwen3_moe", "blocks", "Fp8MoEMethod"),
    "swizzled scales": ("swizzled", "qwen3", "blocks", "Fp8LinearMethod"),
    "tensors": ("tensors", "qwen3", "tensors", "Fp8LinearMethod"),
    "tensors, experts": ("tensors", "qwen3_moe", "tensors", "Fp8MoEMethod"),
    "static activations": ("static", "qwen3", "static", "Fp8LinearMethod"),
    "exported blocks": ("blocks", "qwen3", "exported-blocks", "Fp8LinearMethod"),
    "exported blocks, experts": ("blocks", "qwen3_moe", "exported-blocks", "Fp8MoEMethod"),
    "exported tensors": ("tensors", "qwen3", "exported-tensors", "Fp8LinearMethod"),
    "exported scalars, experts": ("tensors", "qwen3_moe", "exported-scalars", "Fp8MoEMethod"),
    "exported tensors, experts": ("tensors", "qwen3_moe", "exported-tensors", "Fp8MoEMethod"),
    "exported channels": ("channels", "qwen3", "exported-channels", "CompressedTensorsLinearMethod"),
    "exported channels, experts": (
        "channels",
        "qwen3_moe",
        "exported-channels",
        "CompressedTensorsW8A8Fp8MoEMethod",
    ),
    "exported mxfp8": ("mxfp8-stored", "qwen3", "exported-mxfp8", "CompressedTensorsLinearMethod"),
    "exported mxfp8, experts": (
        "mxfp8-stored",
        "qwen3_moe",
        "exported-mxfp8",
        "CompressedTensorsW8A8Mxfp8MoEMethod",
    ),
    "exported nvfp4": ("nvfp4-stored", "qwen3", "exported-nvfp4", "CompressedTensorsLinearMethod"),
    "exported nvfp4, experts": (
        "nvfp4-stored",
        "qwen3_moe",
        "exported-nvfp4",
        "CompressedTensorsW4A4Nvfp4MoEMethod",
    ),
    "dummy": ("dummy", "qwen3", "tensors", "Fp8LinearMethod"),
    "online": ("online", "qwen3", "", "Fp8PerTensorOnlineLinearMethod"),
    "online, experts": ("online", "qwen3_moe", "", "Fp8PerTensorOnlineMoEMethod"),
    "online blocks": ("online-blocks", "qwen3", "", "Fp8PerBlockOnlineLinearMethod"),
    "online blocks, experts": ("online-blocks", "qwen3_moe", "", "Fp8PerBlockOnlineMoEMethod"),
    "online channels": ("online-channels", "qwen3", "", "Fp8PtpcOnlineLinearMethod"),
}
REFUSED: dict[str, tuple[str, str, str, str]] = {
    "mxfp8": ("mxfp8", "qwen3", "", "Mxfp8OnlineLinearMethod"),
    "mxfp8, another kernel": (
        "mxfp8-other",
        "qwen3",
        "exported-mxfp8",
        "CompressedTensorsW8A8Mxfp8 with the kernel SimpleNamespace, and not Marlin",
    ),
    "nvfp4, another kernel": (
        "nvfp4-other",
        "qwen3",
        "exported-nvfp4",
        "CompressedTensorsW4A4Fp4 with the kernel SimpleNamespace, and not Marlin",
    ),
    "nvfp4": ("nvfp4", "qwen3", "", "ModelOptNvFp4FusedMoE"),
    "static activations, experts": ("static", "qwen3_moe", "static", "experts with static scales of activations"),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The rig's words, by case."""
    folder = tmp_path_factory.mktemp("fp8")
    made: dict[tuple[str, str], list[Path]] = {}
    asked: list[list[str]] = []
    for case, family, kind, _ in (CASES | REFUSED).values():
        if (family, kind) not in made:
            made[family, kind] = [checkpoint(folder, family, kind, seed) for seed in (0, 1)]
        asked.append([case, *map(str, made[family, kind])])
    said = run("tests.engines.vllm_fp8_rig", json.dumps(asked))
    return dict(zip(CASES | REFUSED, said, strict=True))


def run(*words: str) -> Any:
    """The last line that a module prints in vLLM's environment, as JSON."""
    (python, *_), environment = vllm_command(Path(), Path(), port=0)
    done = forked.run(Path(python), ["-m", *words], modules=IMPORTED, env=environment | {"VLLM_PLUGINS": ""})
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return json.loads(done.stdout.splitlines()[-1])


def checkpoint(folder: Path, family: str, kind: Any, seed: int) -> Path:
    wide = folder / f"{family}-{seed}"
    if not wide.exists():
        tiny_model(wide, family=family, seed=seed, **(EXPERTS if family == "qwen3_moe" else SIZES))
        tiny_tokenizer(wide)
        in_bfloat16(wide)
    if not kind:
        return wide
    target = folder / f"{family}-{kind}-{seed}"
    if kind in EXPORTED:
        exported_checkpoint(wide, target, EXPORTED[kind])
    else:
        fp8_checkpoint(wide, target, kind)
    return target


@pytest.mark.parametrize("name", CASES)
def test_an_update_leaves_what_vllm_makes_of_the_weights(outcomes: dict[str, dict[str, Any]], name: str) -> None:
    said, (case, _, _, method) = outcomes[name], CASES[name]
    assert method in said["methods"]
    assert said["unlike a fresh model"] == []
    assert said["changed by the update"] > 20
    assert (said["computed"], said["not updated"], said["skipped"]) == ([], [], [])
    assert said["before the commit"] == [], "a staged version was seen"
    assert said["after the undo"] == []
    assert said["second time"] == []
    assert said["moved"] == [], "captured graphs hold addresses"
    if case != "dummy":
        assert said["changed at the start"] == []


@pytest.mark.parametrize("name", ["tensors", "online", "online, experts", "swizzled scales"])
def test_a_kernel_with_other_weights_is_found(outcomes: dict[str, dict[str, Any]], name: str) -> None:
    assert "computes with other weights than it keeps in model.layers.0" in outcomes[name]["stale"]


@pytest.mark.parametrize("name", ["blocks", "blocks, experts"])
def test_blocks_need_no_second_form(outcomes: dict[str, dict[str, Any]], name: str) -> None:
    assert outcomes[name]["beside"] == 0


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_proven_is_refused_by_name(outcomes: dict[str, dict[str, Any]], name: str) -> None:
    said = outcomes[name]["refused"]
    assert "in a way that weightcast does not support" in said
    assert REFUSED[name][3] in said


def test_exports_are_bit_for_bit_those_of_vllm_and_compressed_tensors() -> None:
    said = run("tests.engines.fp8_formats_rig")
    different = {"channels that divide, vllm", "mxfp8 with ties, vllm"}
    assert {name for name, wrong in said.items() if wrong} == different
    assert len(said) == 10
