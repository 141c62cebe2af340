"""Makes a tiny model of every causal-LM and vision-language class of transformers, from its default configuration."""

from __future__ import annotations

import contextlib
import copy
import functools
import re
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from transformers.models.auto import modeling_auto as auto

MAX_ELEMENTS = 400_000_000
_LAYERS = [
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "depth",
    "encoder_layers",
    "decoder_layers",
    "num_encoder_layers",
    "num_decoder_layers",
    "depths",
    "num_attention_layers",
]
_WIDTHS: dict[str, Any] = {
    **dict.fromkeys(
        [
            "hidden_size",
            "n_embd",
            "d_model",
            "embed_dim",
            "dim",
            "word_embed_proj_dim",
            "out_hidden_size",
            "hidden_dim",
            "projection_dim",
            "width",
            "text_hidden_size",
            "image_embed_dim",
        ],
        64,
    ),
    **dict.fromkeys(
        ["num_attention_heads", "n_head", "num_heads", "encoder_attention_heads", "decoder_attention_heads"],
        4,
    ),
    **dict.fromkeys(["num_key_value_heads", "num_kv_heads", "num_global_key_value_heads"], 2),
    **dict.fromkeys(["v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "mamba_n_heads", "mamba_num_heads"], 8),
    **dict.fromkeys(["head_dim", "kv_lora_rank", "global_head_dim", "mamba_d_head", "mamba_head_dim"], 16),
    "q_lora_rank": 24,
    "n_inner": 96,
    "mlp_dim": 96,
}
_DEPTHS: dict[str, Any] = {
    **dict.fromkeys(
        [
            "intermediate_size",
            "ffn_dim",
            "encoder_ffn_dim",
            "decoder_ffn_dim",
            "ffn_hidden_size",
            "prefix_dense_intermediate_size",
            "intermediate_size_mlp",
            "ffn_intermediate_size",
            "d_ff",
        ],
        96,
    ),
    **dict.fromkeys(
        [
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
            "expert_ffn_hidden_size",
            "moe_shared_expert_intermediate_size",
        ],
        48,
    ),
    **dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts"], 4),
    **dict.fromkeys(["num_experts_per_tok", "top_k_experts", "moe_k", "moe_topk", "zero_expert_num"], 2),
    **dict.fromkeys(["n_group", "topk_group", "num_expert_group"], 1),
    "moe_num_experts": [4, 4],
    "vocab_size_per_layer_input": 128,
    "hidden_size_per_layer_input": 16,
}
_SMALL: dict[str, Any] = {
    "vocab_size": 256,
    "unpadded_vocab_size": 250,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 128,
    "n_positions": 128,
    "pad_token_id": 0,
    "moe_layer_start_index": 1,
    # Tokens of images and of sounds, one range after the other in the vocabulary.
    "image_token_offset": 64,
    "audio_token_offset": 128,
    "codebook_size": 64,
}


class CannotBeTiny(Exception):
    """The class does not build from its configuration's defaults, or is too large for a test."""


def class_names() -> list[str]:
    """Every causal-LM and image-text-to-text class of the installed version.

    The names are looked up in a list: asking for the classes would import hundreds of models, in every collection.
    """
    tables = [
        auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        getattr(auto, "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES", {}),
    ]
    known = set(dir(transformers))
    found: dict[str, None] = {}
    for table in tables:
        for value in table.values():
            for name in value if isinstance(value, tuple | list) else [value]:
                if name in known:
                    found[name] = None
    return list(found)


def make(class_name: str) -> Any:
    """Makes a model with random weights in every tensor, as small as its configuration allows.

    Raises:
        CannotBeTiny: No size works.
    """
    kind = getattr(transformers, class_name)
    errors: list[str] = []
    for level in range(4):
        try:
            model = _build(kind, level)
            with tempfile.TemporaryDirectory() as folder:
                model.config.save_pretrained(folder)  # some configurations are checked only here
        except Exception as error:  # noqa: BLE001  # defaults of a configuration fail in every way
            errors.append(f"{type(error).__name__}: {' '.join(str(error).split())[:100]}")
            continue
        fill(model)
        return model
    raise CannotBeTiny(f"{class_name}: {errors}")


def fill(model: Any) -> None:
    """Writes random values into every parameter and buffer."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in {id(t): t for t in [*model.parameters(), *model.buffers()]}.values():
            if tensor.is_floating_point():
                dtype = torch.float32 if tensor.numel() < 3e7 else torch.bfloat16
                tensor.copy_(torch.rand(tensor.shape, generator=generator, dtype=dtype))
            elif tensor.dtype in (torch.int64, torch.int32) and tensor.numel():
                tensor.copy_(torch.randint(0, 99, tensor.shape, generator=generator))


def stays_in_float32(model: Any, name: str) -> bool:
    """True if transformers loads this tensor in float32 into a model of bfloat16."""
    return any(re.search(rf"(^|\.){part}($|\.)", name) for part in model._keep_in_fp32_modules_strict)


def written(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    """The tensors that ``save_pretrained`` writes."""
    model.save_pretrained(folder)
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


@functools.cache
def no_init() -> Any:
    try:
        from transformers.initialization import no_init_weights
    except ImportError:  # transformers 4
        from transformers.modeling_utils import no_init_weights
    return no_init_weights


def _build(kind: Any, level: int) -> Any:
    config = _shrink(_mend(kind.config_class()), level)
    attempts = [config]
    with contextlib.suppress(Exception):  # some configurations do not read their own dictionary
        attempts.insert(0, type(config).from_dict(config.to_dict()))
    error: Exception | None = None
    for attempt in attempts:
        try:
            with torch.device("meta"):
                size = sum(p.numel() for p in kind(copy.deepcopy(attempt)).parameters())
            if size > MAX_ELEMENTS:
                raise CannotBeTiny(f"{size} elements")
            torch.set_default_dtype(torch.bfloat16 if size > 3e7 else torch.float32)
            with no_init()():
                model = kind(copy.deepcopy(attempt))
            model.tie_weights()  # no_init skips it
            return model
        except Exception as caught:  # noqa: BLE001
            error = caught
        finally:
            torch.set_default_dtype(torch.float32)
    assert error is not None
    raise error


def _shrink(config: Any, level: int) -> Any:
    """Level 0 shrinks everything, 1 keeps widths, 2 shrinks layers and vocabulary, 3 layers only."""
    table = dict(_SMALL) if level < 3 else {"first_k_dense_replace": 1}
    table |= {"n_input_layers": 1, "n_recurrent_layers": 0, "n_output_layers": 1}  # two in all, as in _LAYERS
    table |= _DEPTHS if level < 2 else {}
    table |= _WIDTHS if level < 1 else {}
    for name, value in list(vars(config).items()):
        if isinstance(value, transformers.PretrainedConfig):
            _shrink(value, level)
        elif name in _LAYERS:
            if isinstance(value, int) and value >= 2:
                for other, items in list(vars(config).items()):
                    if isinstance(items, list | tuple) and len(items) == value and other not in _LAYERS:
                        kinds = [items[0], *[x for x in items if x != items[0]][:1], items[-1]]
                        _set(config, other, list(kinds[:2]))
            _set(config, name, [2] * len(value) if isinstance(value, list | tuple) else 2)
        elif name in table and value is not None:
            new = table[name]
            if isinstance(value, list | tuple):
                new = new[: len(value)] if isinstance(new, list) else [new] * len(value)
            elif isinstance(new, list):
                new = new[0]
            if name == "pad_token_id" or type(new) is not type(value) or isinstance(new, list) or new < value:
                _set(config, name, new)
        elif name == "kv_channels" and level < 1:
            _set(config, name, 16)
    return config


def _mend(config: Any) -> Any:
    """Fills in fields that some defaults leave out."""
    for value in list(vars(config).values()):
        if isinstance(value, transformers.PretrainedConfig):
            _mend(value)
    rope = _get(config, "rope_parameters", 0)
    if rope is None or (isinstance(rope, dict) and rope.get("rope_theta", 0) is None):
        _set(config, "rope_parameters", {"rope_type": "default", "rope_theta": 10000.0})
    if _get(config, "num_key_value_heads", 0) is None:
        _set(config, "num_key_value_heads", _get(config, "num_attention_heads", None))
    if not _get(config, "head_dim", 1) and _get(config, "hidden_size", None):
        _set(config, "head_dim", config.hidden_size // config.num_attention_heads)
    if _get(config, "mlp_layer_types", 0) is None:
        _set(config, "mlp_layer_types", ["dense", "sparse"])
    if _get(config, "layer_types", 0) is None and "lfm2" in config.model_type:
        _set(config, "layer_types", ["conv", "full_attention"])
    absent = {"deepstack_layer_map": [], "token_budget": 64, "compress_ratio": 4, "shared_expert_intermediate_size": 48}
    for name, value in absent.items():
        talker = "talker_text" in config.model_type and _get(config, name, 0) == 0
        if _get(config, name, 0) is None or talker:
            _set(config, name, value)
    if _get(config, "vocabulary_map", 0) is None:
        _set(config, "vocabulary_map", {"<image>": 1, **{f"IMGIMG{c}Z": 4 + n for n, c in enumerate("ABCDEF")}})
    absent = {"n_group": 1, "topk_group": 1, "is_decoder": True, "n_shared_experts": 1, "n_routed_experts": 4}
    for name, value in absent.items():
        if _get(config, name, 0) in (None, False):
            _set(config, name, value)
    return config


def _get(config: Any, name: str, default: Any) -> Any:
    try:
        return getattr(config, name, default)
    except Exception:  # noqa: BLE001  configurations raise errors of several kinds where a value differs by layer
        return default


def _set(config: Any, name: str, value: Any) -> None:
    with contextlib.suppress(Exception):  # a strict configuration refuses the value, so the default stays
        setattr(config, name, value)
