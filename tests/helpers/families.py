"""Small random models of every family that has a table, and the checkpoints that transformers writes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

# All widths differ, so that a transposed tensor has the wrong shape.
_TEXT: dict[str, Any] = {
    "vocab_size": 70,
    "hidden_size": 24,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
_EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 10,
    "num_experts": 5,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
}
_ROUTED: dict[str, Any] = {
    "moe_intermediate_size": 10,
    "n_routed_experts": 5,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_LATENT: dict[str, Any] = {
    "q_lora_rank": 14,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 9,
    "num_key_value_heads": 6,
}
_VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 16,
    "embed_dim": 16,
    "num_heads": 2,
    "intermediate_size": 20,
    "out_hidden_size": 24,
    "patch_size": 4,
    "mlp_ratio": 2,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "llama": _TEXT,
    "mistral": _TEXT,
    "qwen2": _TEXT | {"tie_word_embeddings": True},
    "qwen3": _TEXT,
    "qwen2_moe": _TEXT | _EXPERTS | {"shared_expert_intermediate_size": 16},
    "qwen3_moe": _TEXT | _EXPERTS,
    "mixtral": _TEXT | _EXPERTS,
    "glm4_moe": _TEXT | _ROUTED,
    "deepseek_v3": _TEXT | _ROUTED | _LATENT,
    "gpt_oss": _TEXT | _EXPERTS,
    "phi3": _TEXT,
    "qwen2_vl": {"text_config": _TEXT, "vision_config": _VISION},
    "qwen2_5_vl": {"text_config": _TEXT, "vision_config": _VISION | {"fullatt_block_indexes": [1]}},
    "qwen3_vl": {"text_config": _TEXT, "vision_config": _VISION | {"deepstack_visual_indexes": [0]}},
    "qwen3_vl_moe": {
        "text_config": _TEXT | _EXPERTS,
        "vision_config": _VISION | {"deepstack_visual_indexes": [0]},
    },
}
# transformers stacks the experts of these models and writes them one by one.
STACKED = ["qwen2_moe", "qwen3_moe", "mixtral", "glm4_moe", "deepseek_v3"]


def make(model_type: str, *, seed: int = 0, device: str = "cpu", **changes: Any) -> Any:
    """Makes a float32 model with random weights in every tensor."""
    settings = dict(SETTINGS[model_type])
    for name, value in changes.items():
        settings[name] = value
    config = AutoConfig.for_model(model_type, **settings)
    kind = AutoModelForImageTextToText if "vision_config" in settings else AutoModelForCausalLM
    torch.manual_seed(seed)
    with torch.device(device):
        model = kind.from_config(config).float().eval()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point() and device != "meta":
                tensor.normal_(0, 0.3)
    return model


def written(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    """The tensors that ``save_pretrained`` writes, the oracle for names and layouts.

    The experts of Qwen3-VL-MoE are an exception: transformers 5 transposes them when it loads them and saves them so.
    Published checkpoints, and the engines that read them, have the layout of transformers 4.
    """
    model.save_pretrained(folder)
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a dict
    if model.config.model_type == "qwen3_vl_moe":
        turned = {name: t.transpose(1, 2).contiguous() for name, t in found.items() if ".experts." in name}
        assert len(turned) == 4
        found |= turned
    return found
