"""A model folder: its configuration, what of it can be served, and its weights on disk.

Needs nothing of transformers that computes, so that a process that only serves HTTP starts quickly.
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
    """The configuration of a model folder.

    Raises:
        ConfigError: Not a model folder, or not a family that the reference engine knows.
    """
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
    """Refuse what would be computed wrongly.

    Raises:
        ConfigError: A tensor-parallel degree that does not divide the model, attention over a sliding
            window, quantised weights, or a context longer than the model was made for.
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
            f"this model attends over a sliding window of {window} tokens, which the reference engine does not do",
            hint=f"limit the context to {window} tokens",
        )
    if max_len is not None and not 2 <= max_len <= int(config.max_position_embeddings):
        raise ConfigError(
            f"a context of {max_len} tokens is outside what the model was made for",
            hint=f"between 2 and {config.max_position_embeddings}",
        )
    if getattr(config, "quantization_config", None):
        raise ConfigError("the reference engine serves unquantised weights only")


def config_dtype(config: PretrainedConfig) -> torch.dtype:
    """The dtype that a configuration names, float32 if it names none."""
    dtype: Any = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype, None)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def parse_dtype(name: str) -> torch.dtype:
    """A dtype that weights can be served in, by torch's name for it.

    Raises:
        ConfigError: There is no such dtype, or it does not hold weights.
    """
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}.get(name)
    if dtype is None:
        raise ConfigError(f"{name!r} is not a dtype for weights", hint="float32, bfloat16 or float16")
    return dtype


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder.

    Raises:
        ConfigError: There are none, or their index cannot be read.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            table: dict[str, str] = json.loads(index.read_text())["weight_map"]
            return [folder / name for name in sorted(set(table.values()))]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{index} is not a safetensors index: {error}") from error
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{folder} holds no safetensors")
    return files


def stored_tensors(path: Path, expected: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor of one safetensors file, one at a time; what a model computes by itself is left out.

    Args:
        path: The file.
        expected: Names that the model wants.
    """
    opened: Any = safe_open(path, framework="pt", device="cpu")
    with opened as file:
        for name in file.keys():  # noqa: SIM118 - not a dict
            # Some checkpoints repeat the tied head or carry rotary tables; the model computes both.
            if name in expected or not (name == "lm_head.weight" or name.endswith("rotary_emb.inv_freq")):
                yield name, file.get_tensor(name)
