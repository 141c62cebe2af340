"""Reads a model folder: its configuration, which it checks, and its weights on disk.

It imports only transformers' configurations, so that a process that only serves HTTP starts quickly.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from transformers import AutoConfig, PretrainedConfig

from weightcast.errors import ConfigError

SUPPORTED = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")


def read_config(model_dir: Path) -> PretrainedConfig:
    """Reads the configuration of a model folder; ``ConfigError`` if it is none, or of an unknown family."""
    path = model_dir / "config.json"
    if not path.is_file():
        raise ConfigError(f"{model_dir} is not a model folder: it has no config.json")
    try:
        config = cast(PretrainedConfig, AutoConfig.from_pretrained(model_dir))  # pyright: ignore[reportUnknownMemberType]
    except (ValueError, OSError, KeyError) as error:
        raise ConfigError(f"{path}: {str(error).splitlines()[0]}", hint=f"supported: {', '.join(SUPPORTED)}") from error
    if config.model_type not in SUPPORTED:
        raise ConfigError(
            f"{path}: the reference engine does not know model type {config.model_type!r}",
            hint=f"supported: {', '.join(SUPPORTED)}",
        )
    return config


def check_config(config: PretrainedConfig, *, tp_size: int, max_len: int | None = None) -> None:
    """Refuses a model that the reference engine would compute wrongly.

    Raises:
        ConfigError: The tensor-parallel degree does not divide the model, it attends over a sliding window, its weights
            are quantised, or the context exceeds the model's limit.
    """
    sizes = {
        "attention heads": int(config.num_attention_heads),
        "key-value heads": int(config.num_key_value_heads),
        "MLP width": int(config.intermediate_size),
    }
    if hasattr(config, "moe_intermediate_size"):
        sizes["experts' width"] = int(config.moe_intermediate_size)
    if tp_size < 1 or any(size % tp_size for size in sizes.values()):
        works = [n for n in range(1, min(sizes.values()) + 1) if not any(size % n for size in sizes.values())]
        raise ConfigError(
            f"tensor parallel degree {tp_size} does not divide "
            + " and ".join(f"{size} {name}" for name, size in sizes.items() if tp_size < 1 or size % tp_size),
            hint=f"degrees that work for this model: {', '.join(map(str, works))}",
        )
    window = getattr(config, "sliding_window", None)
    layer_types: list[str] = getattr(config, "layer_types", None) or []
    if config.model_type != "mistral" and "sliding_attention" not in layer_types:
        window = None
    longest = max_len or int(config.max_position_embeddings)
    if window is not None and longest > window:
        raise ConfigError(
            f"this model attends over a sliding window of {window} tokens, which the reference engine does not support",
            hint=f"limit the context to {window} tokens",
        )
    if max_len is not None and not 2 <= max_len <= int(config.max_position_embeddings):
        raise ConfigError(
            f"the model does not support a context of {max_len} tokens",
            hint=f"choose a context between 2 and {config.max_position_embeddings} tokens",
        )
    if getattr(config, "quantization_config", None):
        raise ConfigError("the reference engine serves unquantised weights only")


def config_dtype(config: PretrainedConfig) -> torch.dtype:
    """The dtype in a configuration; float32 if it has none."""
    dtype: Any = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype, None)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def parse_dtype(name: str) -> torch.dtype:
    """Finds a dtype for weights by torch's name; raises ``ConfigError`` if weights cannot be served in it."""
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}.get(name)
    if dtype is None:
        raise ConfigError(f"{name!r} is not a dtype for weights", hint="use float32, bfloat16 or float16")
    return dtype


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder; ``ConfigError`` if it has none, or their index cannot be read."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            table: dict[str, str] = json.loads(index.read_text())["weight_map"]
            return [folder / name for name in sorted(set(table.values()))]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{index} is not a safetensors index: {error}") from error
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{folder} has no safetensors files")
    return files


def stored_tensors(path: Path, expected: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields each name and tensor of one safetensors file, without tensors that the model computes itself."""
    opened: Any = safe_open(path, framework="pt", device="cpu")
    with opened as file:
        for name in file.keys():  # noqa: SIM118 - not a dict
            # Some checkpoints repeat the tied head or have rotary tables; the model computes both.
            if name in expected or not (name == "lm_head.weight" or name.endswith("rotary_emb.inv_freq")):
                yield name, file.get_tensor(name)
