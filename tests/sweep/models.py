"""Tiny random models of many families, small enough for a laptop and wide enough for the kernels of real engines."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from tests.helpers.tiny import VOCAB, tiny_tokenizer

_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
_EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 64,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}
_ROUTED: dict[str, Any] = {
    "moe_intermediate_size": 64,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "head_dim": 64,
}
_TIED: dict[str, Any] = {"tie_word_embeddings": True}
_SLIDING: dict[str, Any] = {"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"]}
_FULL: dict[str, Any] = {"layer_types": ["full_attention", "full_attention"]}
_GPT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "n_embd": 128,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_chunk_size": 64,
}
_DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "partial_rotary_factor": 1.0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Settings of a family's tiny model.

    Attributes:
        settings: Arguments of the configuration.
        vision: It is a vision-language model.
        processor: Content of its processor's configuration files, by name; empty if the engine gets none.
        dtype: Dtype of the weights and of the engine.
    """

    settings: dict[str, Any]
    vision: bool = False
    processor: dict[str, dict[str, Any]] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32


def _text(**changes: Any) -> Family:
    return Family(settings=_TEXT | changes)


def _half(**changes: Any) -> Family:
    """Engines' kernels of some layers take bfloat16 only."""
    return Family(settings=_TEXT | changes, dtype=torch.bfloat16)


# By ``config.model_type`` of transformers, in the order of the table.
FAMILIES: dict[str, Family] = {
    "llama": _text(),
    "mistral": _text(sliding_window=None),
    "ministral3": _text(),
    "qwen2": _text(**_TIED),
    "qwen3": _text(),
    "gemma": _text(**_TIED),
    "gemma2": _text(**_TIED, **_SLIDING, query_pre_attn_scalar=32),
    "gemma3_text": _text(**_TIED, **_SLIDING, query_pre_attn_scalar=32),
    "phi": _text(num_key_value_heads=4),
    "phi3": _text(sliding_window=None),
    "starcoder2": _text(sliding_window=None),
    "stablelm": _text(),
    "gpt2": Family(settings=_GPT),
    "gpt_bigcode": Family(settings=_GPT),
    "gptj": Family(settings=_GPT | {"rotary_dim": 32}),
    "gpt_neox": _text(),
    "opt": _text(num_key_value_heads=4, ffn_dim=192, word_embed_proj_dim=128),
    "bloom": Family(settings={"vocab_size": VOCAB, "hidden_size": 128, "n_layer": 2, "n_head": 4}),
    "falcon": Family(
        settings={name: value for name, value in _TEXT.items() if name not in ("head_dim", "num_key_value_heads")}
    ),
    "mpt": Family(settings={"vocab_size": VOCAB, "d_model": 128, "n_heads": 4, "n_layers": 2, "max_seq_len": 256}),
    "olmo": _text(num_key_value_heads=4),
    "olmo2": _text(),
    "olmo3": _text(**_SLIDING),
    "granite": _text(),
    "cohere": _text(**_TIED),
    "cohere2": _text(**_TIED, **_SLIDING),
    "glm": _text(partial_rotary_factor=0.5),
    "glm4": _text(partial_rotary_factor=0.5),
    "exaone4": _text(**_SLIDING),
    "smollm3": _text(**_FULL, no_rope_layers=[1, 0]),
    "seed_oss": _text(),
    "ernie4_5": _text(),
    "hunyuan_v1_dense": _text(),
    "nemotron": _text(),
    "persimmon": _text(num_key_value_heads=4),
    "arcee": _text(),
    "apertus": _text(),
    "helium": _text(),
    "mixtral": _text(num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    "qwen2_moe": _text(**_EXPERTS, shared_expert_intermediate_size=64),
    "qwen3_moe": _text(**_EXPERTS),
    "olmoe": _text(**_EXPERTS, num_key_value_heads=4),
    "flex_olmo": _text(**_EXPERTS, num_key_value_heads=4),
    "phimoe": _text(num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    "granitemoe": _text(**_EXPERTS),
    "granitemoeshared": _text(**_EXPERTS, shared_intermediate_size=64),
    "gpt_oss": _text(**_EXPERTS, **_SLIDING),
    "deepseek_v2": _text(**_ROUTED, **_LATENT, topk_method="greedy"),
    "deepseek_v3": _text(**_ROUTED, **_LATENT, topk_method="noaux_tc"),
    "glm4_moe": _text(**_ROUTED, partial_rotary_factor=0.5),
    "glm4_moe_lite": _text(**_ROUTED, **_LATENT, mlp_layer_types=["dense", "sparse"]),
    "dots1": _text(**_ROUTED, **_FULL),
    "ernie4_5_moe": _text(**_EXPERTS, moe_num_experts=4, moe_k=2, moe_num_shared_experts=1),
    "hunyuan_v1_moe": _text(num_experts=4, moe_topk=[2, 2], num_shared_expert=[1, 1]),
    "minimax_m2": _text(num_local_experts=4, num_experts_per_tok=2, rotary_dim=32, scoring_func="sigmoid"),
    "afmoe": _text(
        **_EXPERTS,
        **_SLIDING,
        score_func="sigmoid",
        route_norm=True,
        route_scale=1.0,
        num_shared_experts=1,
        num_dense_layers=1,
    ),
    "lfm2": _text(conv_dim=128, block_dim=128, layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False),
    "lfm2_moe": _text(**_EXPERTS, layer_types=["conv", "full_attention"], num_dense_layers=1),
    "qwen3_next": _half(**_EXPERTS, **_DELTA, shared_expert_intermediate_size=64),
    "qwen3_5_text": _half(**_DELTA),
    "qwen3_5_moe_text": _half(**_EXPERTS, **_DELTA, shared_expert_intermediate_size=64),
    "mamba": Family(settings={"vocab_size": VOCAB, "hidden_size": 128, "num_hidden_layers": 2, "state_size": 16}),
    "mamba2": Family(
        settings={
            "vocab_size": VOCAB,
            "hidden_size": 128,
            "num_hidden_layers": 2,
            "state_size": 16,
            "num_heads": 8,
            "head_dim": 32,
            "n_groups": 1,
            "chunk_size": 64,
        }
    ),
    "falcon_mamba": Family(settings={"vocab_size": VOCAB, "hidden_size": 128, "num_hidden_layers": 2}),
    "bamba": _text(**_MAMBA, attn_layer_indices=[1]),
    "falcon_h1": _text(**_MAMBA, mamba_d_ssm=256),
    "granitemoehybrid": _text(**_EXPERTS, **_MAMBA, layer_types=["mamba", "attention"], shared_intermediate_size=64),
    "jamba": _text(num_experts=4, num_experts_per_tok=2, attn_layer_period=2, attn_layer_offset=1),
    "zamba2": _text(mamba_ngroups=1, n_mamba_heads=8, layers_block_type=["mamba", "hybrid"]),
    "nemotron_h": _text(
        **_ROUTED,
        layers_block_type=["mamba", "attention", "moe"],
        num_hidden_layers=3,
        mamba_num_heads=8,
        mamba_head_dim=32,
        ssm_state_size=16,
        n_groups=1,
    ),
}
_VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 128,
    "embed_dim": 128,
    "num_heads": 4,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 192,
    "out_hidden_size": 128,
    "patch_size": 14,
    "image_size": 56,
}
_IMAGES: dict[str, Any] = {"image_token_id": 300, "video_token_id": 301, "image_token_index": 300}


def _sees(text: str, vision: dict[str, Any], changes: dict[str, Any], **outer: Any) -> Family:
    config = _TEXT | {"model_type": text} | changes
    settings = _IMAGES | {"text_config": config, "vision_config": _VISION | vision} | outer
    return Family(settings=settings, vision=True, dtype=torch.bfloat16 if changes is _DELTA else torch.float32)


def _sections(*sections: int) -> dict[str, Any]:
    """Widths of M-RoPE's parts; together they are half of the width that rotates."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections)}}


_CLIP = {"model_type": "clip_vision_model", "patch_size": 14}
_SIGLIP = {"model_type": "siglip_vision_model", "patch_size": 14}
FAMILIES |= {
    "qwen2_vl": _sees("qwen2_vl_text", {"mlp_ratio": 2, "hidden_size": 128}, _sections(4, 6, 6)),
    "qwen2_5_vl": _sees("qwen2_5_vl_text", {"fullatt_block_indexes": [1]}, _sections(4, 6, 6)),
    "qwen3_vl": _sees("qwen3_vl_text", {"deepstack_visual_indexes": [0]}, {}),
    "qwen3_vl_moe": _sees("qwen3_vl_moe_text", {"deepstack_visual_indexes": [0]}, _EXPERTS),
    "qwen3_5": _sees("qwen3_5_text", {}, _DELTA),
    "llava": _sees("llama", _CLIP, {}),
    "llava_next": _sees("llama", _CLIP, {}),
    "llava_onevision": _sees("qwen2", _SIGLIP, {}),
    "mistral3": _sees("mistral", {"model_type": "pixtral"}, {"sliding_window": None}),
    "gemma3": _sees("gemma3_text", _SIGLIP, _SLIDING | {"query_pre_attn_scalar": 32}, mm_tokens_per_image=4),
    "paligemma": _sees("gemma", _SIGLIP | {"projection_dim": 128}, _TIED, projection_dim=128),
    "aya_vision": _sees("cohere2", _SIGLIP, _TIED | _SLIDING),
    "internvl": _sees("qwen2", {"image_size": [56, 56], "patch_size": [14, 14]}, {}),
    "idefics3": _sees("llama", {}, {}, scale_factor=2),
    "smolvlm": _sees("llama", {}, {}, scale_factor=2),
    "glm4v": _sees("glm4v_text", {}, _sections(4, 6, 6)),
}


def _qwen(image: str, video: str, processor: str, patch: int) -> dict[str, dict[str, Any]]:
    both = {"patch_size": patch, "temporal_patch_size": 2, "merge_size": 2, "processor_class": processor}
    both |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "size": {"shortest_edge": 3136, "longest_edge": 12544}}
    return {
        "preprocessor_config.json": both | {"image_processor_type": image},
        "video_preprocessor_config.json": both | {"video_processor_type": video},
    }


_CROPS = {"size": {"height": 56, "width": 56}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
_PROCESSORS = {
    "qwen2_vl": _qwen("Qwen2VLImageProcessor", "Qwen2VLVideoProcessor", "Qwen2VLProcessor", 14),
    "qwen2_5_vl": _qwen("Qwen2VLImageProcessor", "Qwen2VLVideoProcessor", "Qwen2_5_VLProcessor", 14),
    "qwen3_vl": _qwen("Qwen2VLImageProcessor", "Qwen3VLVideoProcessor", "Qwen3VLProcessor", 14),
    "qwen3_vl_moe": _qwen("Qwen2VLImageProcessor", "Qwen3VLVideoProcessor", "Qwen3VLProcessor", 14),
    "qwen3_5": _qwen("Qwen2VLImageProcessor", "Qwen3VLVideoProcessor", "Qwen3VLProcessor", 14),
    "gemma3": {
        "preprocessor_config.json": _CROPS
        | {"image_processor_type": "Gemma3ImageProcessor", "processor_class": "Gemma3Processor", "image_seq_length": 4}
    },
    "llava": {
        "preprocessor_config.json": {"image_processor_type": "CLIPImageProcessor", "processor_class": "LlavaProcessor"}
        | {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}},
        "processor_config.json": {"processor_class": "LlavaProcessor", "patch_size": 14, "image_token": "<image>"}
        | {"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    },
}
FAMILIES |= {family: replace(FAMILIES[family], processor=found) for family, found in _PROCESSORS.items()}
_MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<image>", "<image_soft_token>")
_MORE_MARKS = ("<start_of_image>", "<end_of_image>")


def build(family: str, seed: int) -> Any:
    """Makes a model with random weights.

    Raises:
        Exception: transformers does not take these settings.
    """
    tiny = FAMILIES[family]
    config = AutoConfig.for_model(family, **tiny.settings)
    kind = AutoModelForImageTextToText if tiny.vision else AutoModelForCausalLM
    torch.manual_seed(seed)
    model = kind.from_config(config).float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if not tensor.is_floating_point():
                continue
            noise = torch.randn(tensor.shape, generator=generator)
            if "norm" in name and name.endswith("weight") and tensor.dim() == 1:
                tensor.copy_(1 + 0.2 * noise)
            elif name.endswith(("A_log", "dt_bias", ".D", "running_mean", "running_var")):
                tensor.add_(0.1 * noise.abs())
            else:
                tensor.copy_((0.2 if tensor.dim() > 1 else 0.1) * noise)
    return model.to(tiny.dtype)


def save(model: Any, folder: Path) -> None:
    """Writes the checkpoint and a tokenizer."""
    model.generation_config.eos_token_id = 1
    model.save_pretrained(folder)
    tiny_tokenizer(folder)
    processor = FAMILIES[model.config.model_type].processor if model.config.model_type in FAMILIES else {}
    for name, content in processor.items():
        (folder / name).write_text(json.dumps(content))
    if processor:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        # The ids of the marks are not those of the configuration: nobody sends an image.
        tokenizer.add_special_tokens({"additional_special_tokens": [*_MARKS, *_MORE_MARKS]})
        marks = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
        tokenizer.init_kwargs |= {"extra_special_tokens": marks}
        tokenizer.save_pretrained(folder)
