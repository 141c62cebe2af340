"""Weights of a version, made from its number; the trainers send them and the tests compare engines with them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.helpers.toy_engine import toy_weights

Weights = Callable[[int], dict[str, torch.Tensor]]

# Of a Llama that every kind of engine can be: vLLM's attention on a CPU wants heads of 32.
SIZES: dict[str, int] = {
    "vocab_size": 288,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
}
LARGEST_BYTES = SIZES["vocab_size"] * SIZES["hidden_size"] * 4  # stock engines want whole tensors


def toy(version: int) -> dict[str, torch.Tensor]:
    """Makes the weights of the toy engine."""
    return toy_weights(seed=version)


def llama(version: int) -> dict[str, torch.Tensor]:
    """Makes the weights of the language model."""
    generator = torch.Generator().manual_seed(version)

    def random(*shape: int) -> torch.Tensor:
        if len(shape) == 1:
            return 1 + 0.2 * torch.randn(shape, generator=generator)
        return 0.3 * torch.randn(shape, generator=generator)

    vocab, hidden, wide = SIZES["vocab_size"], SIZES["hidden_size"], SIZES["intermediate_size"]
    heads = SIZES["num_attention_heads"] * SIZES["head_dim"]
    weights = {"model.embed_tokens.weight": random(vocab, hidden)}
    for layer in range(SIZES["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        weights |= {f"{at}.self_attn.{name}_proj.weight": random(heads, hidden) for name in "qkv"}
        weights[f"{at}.self_attn.o_proj.weight"] = random(hidden, heads)
        weights |= {f"{at}.mlp.{name}_proj.weight": random(wide, hidden) for name in ("gate", "up")}
        weights[f"{at}.mlp.down_proj.weight"] = random(hidden, wide)
        weights |= {f"{at}.{name}.weight": random(hidden) for name in ("input_layernorm", "post_attention_layernorm")}
    return weights | {"model.norm.weight": random(hidden), "lm_head.weight": random(vocab, hidden)}
