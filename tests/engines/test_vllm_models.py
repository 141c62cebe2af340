"""Real vLLM on this CPU with models that its loader or its kernels treat in ways of their own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.engines import forked
from tests.engines.test_vllm_cpu import PROMPTS
from tests.engines.vllm_server import IMPORTED, vllm, vllm_command
from tests.helpers.engines import Engine, push, status, weightcast
from tests.helpers.tiny import tiny_model, tiny_tokenizer

SMALL: dict[str, Any] = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
GPT_OSS: dict[str, Any] = SMALL | {
    "intermediate_size": 64,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"],
}
LATENT: dict[str, Any] = SMALL | {
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 160,
    "moe_intermediate_size": 64,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 256,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "topk_method": "noaux_tc",
    "num_nextn_predict_layers": 1,
}


def made(root: Path, family: str, **settings: Any) -> dict[str, Path]:
    """Two checkpoints of a random model, A and B."""
    folders = {name: root / name for name in "AB"}
    for seed, folder in enumerate(folders.values()):
        tiny_model(folder, family=family, seed=seed, **settings)
        tiny_tokenizer(folder)
    return folders


def verified(checkpoint: Path, engine: Engine) -> tuple[int, dict[str, Any]]:
    """``weightcast verify``: exit code and document."""
    done = weightcast("verify", checkpoint, "--at", engine.url, "--json")
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def scores(engine: Engine) -> list[list[float]]:
    """Log-probabilities of the prompts' tokens, by the engine."""
    return [engine.post("/weightcast/score", token_ids=prompt)["logprobs"] for prompt in PROMPTS]


def off_by(folder: Path, engine: Engine) -> float:
    """The largest difference between log-probabilities of the engine and of transformers, in nats."""
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    worst = 0.0
    for prompt in PROMPTS:
        found = engine.post("/weightcast/score", token_ids=prompt)["logprobs"]
        with torch.no_grad():
            logits = model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
        wanted = logits.gather(-1, torch.tensor(prompt[1:])[:, None])[:, 0]
        worst = max(worst, float((torch.tensor(found) - wanted).abs().max()))
    return worst


@pytest.mark.engine
def test_biases_of_experts_that_a_kernel_holds_are_updated_on_every_rank(tmp_path: Path) -> None:
    """gpt-oss on two ranks: the kernel holds bias objects, and the loader zeroes its source on the second rank."""
    folders = made(tmp_path, "gpt_oss", **GPT_OSS)
    with vllm(folders["A"], tmp_path, "--no-enable-prefix-caching", tp=2) as engine:
        assert off_by(folders["A"], engine) < 0.02
        assert off_by(folders["B"], engine) > 0.5
        (row,) = status(engine)
        assert row["staging"] == "device"
        code, found = verified(folders["A"], engine)
        assert (code, found["differences"], found["unreadable"]) == (0, [], [])
        for version, name, via in ((1, "B", "ipc"), (2, "A", "broadcast"), (3, "B", "ipc")):
            # Two of 37 tensors are computed while they load, the biases on the second rank.
            report = push(folders[name], [engine], version, "--via", via, "--bucket-bytes", "256KiB")
            (row,) = report["targets"]
            assert row["proof"] == "resident"
            assert (row["status"], row["version_after"], row["not_updated"]) == ("serving", version, [])
            assert off_by(folders[name], engine) < 0.02
        assert verified(folders["B"], engine)[0] == 0
        code, found = verified(folders["A"], engine)
        assert (code, found["unreadable"]) == (3, [])
        assert "model.norm.weight" in {difference["name"] for difference in found["differences"]}


@pytest.mark.engine_full
def test_latent_attention_is_staged_and_layers_that_are_skipped_may_come_or_stay_away(tmp_path: Path) -> None:
    """DeepSeek-V3 with a layer for multi-token prediction, which vLLM loads for a draft model only.

    vLLM and transformers differ on this random model, so a server that was started on the weights is the judge.
    """
    folders = made(tmp_path, "deepseek_v3", **LATENT)
    extra = {"model.layers.2.enorm.weight": (128,), "model.layers.2.eh_proj.weight": (128, 256)}
    full = {name: tmp_path / f"full-{name}" for name in folders}
    for name, folder in folders.items():
        shutil.copytree(folder, full[name])
        tensors = load_file(folder / "model.safetensors")
        tensors |= {other: torch.randn(shape) for other, shape in extra.items()}
        save_file(tensors, full[name] / "model.safetensors", metadata={"format": "pt"})
    with vllm(folders["B"], tmp_path, "--no-enable-prefix-caching") as engine:
        wanted = {"B": scores(engine)}
    with vllm(full["A"], tmp_path, "--no-enable-prefix-caching") as engine:
        wanted["A"] = scores(engine)
        assert wanted["A"] != wanted["B"]
        (row,) = status(engine)
        assert row["staging"] == "device"
        assert row["message"].startswith("2 tensors of the checkpoint are not kept by this engine: model.layers.2.")
        for version, name, folder in ((1, "B", full["B"]), (2, "A", folders["A"]), (3, "B", full["B"])):
            (row,) = push(folder, [engine], version)["targets"]
            assert (row["proof"], row["version_after"], row["not_updated"]) == ("resident", version, [])
            assert row["message"] == ""
            assert scores(engine) == wanted[name]
        for folder, kept in ((full["B"], sorted(extra)), (folders["B"], [])):
            code, found = verified(folder, engine)
            assert (code, sorted(found["not_kept"]), found["unreadable"]) == (0, kept, [])
        assert verified(full["A"], engine)[0] == 3


@pytest.mark.engine
def test_a_packed_convolution_is_packed_anew_in_place_and_moving_experts_are_refused(tmp_path: Path) -> None:
    (python, *_), environment = vllm_command(tmp_path, tmp_path, port=0)
    rig = Path(__file__).parent / "vllm_layers.py"
    done = forked.run(Path(python), [str(rig)], modules=IMPORTED, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "packed": [3, 8],
        "resident": True,
        "same objects": True,
        "computes with": True,
        "falls back to": True,
        "stale": "computes with other weights than it keeps in conv1d: parameters.weight is not derived",
        "names suffice": [True, False],
        "experts that move": "vLLM balances experts over ranks (enable_eplb): an update would write experts to places "
        "that they have left",
    }
