"""Real vLLM on this CPU with MTP layers of the model's own checkpoint, which an update writes with the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.engines.test_vllm_cpu import COUNT, PROMPTS
from tests.engines.test_vllm_draft import UPDATE, share
from tests.engines.vllm_server import vllm
from tests.helpers.engines import push, verify
from tests.helpers.tiny import VOCAB, greedy, tiny_tokenizer
from weightcast import Target, WeightUpdater
from weightcast.errors import ConfigError

pytestmark = [pytest.mark.engine]

WIDTH, LAYERS = 128, 2
MTP = f"model.layers.{LAYERS}."
SETTINGS: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 160,
    "moe_intermediate_size": 64,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "partial_rotary_factor": 0.5,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
    "tie_word_embeddings": False,
    "norm_topk_prob": True,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "head_dim": 64,
}
FAMILIES = {"glm4_moe": SETTINGS, "deepseek_v3": SETTINGS | LATENT | {"topk_method": "noaux_tc"}}
SPECULATIVE = ["--speculative-config", json.dumps({"method": "mtp", "num_speculative_tokens": 1})]


def checkpoint(folder: Path, seed: int, *, useful: bool, family: str = "glm4_moe") -> list[list[int]]:
    """Writes a model with an MTP layer; returns what transformers answers with the model.

    In the model and in a useful MTP layer, a token depends on the one before it alone, so that the layer foresees it.
    """
    torch.manual_seed(seed)
    # The last layer of the checkpoint is the MTP's; transformers loads the others.
    config = AutoConfig.for_model(family, **FAMILIES[family], num_hidden_layers=LAYERS + 1)
    model: Any = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn_like(parameter) * 0.2)
            if name.endswith(("o_proj.weight", "down_proj.weight", "experts.down_proj")):
                # Enough of each layer to tell sets of weights apart, too little to change a token.
                parameter.mul_(1e-4)
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    eye = torch.eye(WIDTH)
    tensors |= {
        f"{MTP}enorm.weight": torch.ones(WIDTH),
        f"{MTP}hnorm.weight": torch.ones(WIDTH),
        f"{MTP}eh_proj.weight": torch.cat([eye, 0 * eye], 1) if useful else torch.randn(WIDTH, 2 * WIDTH) * 0.2,
        f"{MTP}shared_head.norm.weight": torch.ones(WIDTH),
        # vLLM computes with the model's head and embeddings instead of these, and never with them.
        f"{MTP}shared_head.head.weight": torch.randn(VOCAB, WIDTH),
        f"{MTP}embed_tokens.weight": torch.randn(VOCAB, WIDTH),
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    saved = json.loads((folder / "config.json").read_text())
    saved |= {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(saved))
    tiny_tokenizer(folder)
    model.model.layers = model.model.layers[:LAYERS]
    model.config.num_hidden_layers = LAYERS
    return [greedy(model, prompt, COUNT) for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("family", "tp"),
    [
        ("glm4_moe", 1),
        pytest.param("glm4_moe", 2, marks=pytest.mark.engine_full),
        pytest.param("deepseek_v3", 1, marks=pytest.mark.engine_full),
    ],
)
def test_mtp_layers_are_updated_with_the_model(tmp_path: Path, family: str, tp: int) -> None:
    said = {
        name: checkpoint(tmp_path / name, seed, useful=useful, family=family)
        for seed, (name, useful) in enumerate({"A": False, "B": True, "C": False}.items())
    }
    with vllm(tmp_path / "A", tmp_path, *SPECULATIVE, *UPDATE, tp=tp) as engine:
        assert share(engine, said["A"]) < 0.3
        info = engine.info()
        lent = {f"{MTP}shared_head.head.weight", f"{MTP}embed_tokens.weight"}
        assert {spec["name"] for spec in info["optional"]} == lent
        assert not any("draft" in hazard for hazard in info["hazards"])
        tensors = load_file(tmp_path / "B" / "model.safetensors")
        without = {name: tensor for name, tensor in tensors.items() if not name.startswith(MTP)}
        with pytest.raises(ConfigError, match=rf"missing {MTP}"):
            WeightUpdater.connect(without, [Target(engine.url)])
        assert share(engine, said["A"]) < 0.3
        for version, (name, via) in enumerate((("B", "ipc"), ("C", "broadcast"), ("B", "broadcast")), 1):
            [row] = push(tmp_path / name, [engine], version, "--via", via, "--bucket-bytes", "128KiB")["targets"]
            assert (row["proof"], row["version_after"], row["not_updated"]) == ("resident", version, [])
            accepted = share(engine, said[name])
            assert (accepted > 0.9) if name == "B" else (accepted < 0.3), f"version {version}: {accepted}"
            assert verify(tmp_path / name, engine) == (0, set())
        code, differing = verify(tmp_path / "C", engine)
        assert code != 0
        assert f"{MTP}eh_proj.weight" in differing
        assert not lent & differing


@pytest.mark.engine_full
def test_mtp_layers_that_are_kept_are_named(tmp_path: Path) -> None:
    said = {name: checkpoint(tmp_path / name, seed, useful=True) for seed, name in enumerate("AB")}
    with vllm(tmp_path / "A", tmp_path, *SPECULATIVE) as engine:
        assert share(engine, said["A"]) > 0.9
        [row] = push(tmp_path / "B", [engine], 1)["targets"]
        assert row["not_updated"] == ["the draft model"]
        share(engine, said["B"])
        assert any("the draft model keeps the weights" in hazard for hazard in engine.info()["hazards"])
