"""Tiny models with EAGLE and EAGLE 3 heads, for the engines that speculate with them.

In these models and heads a token depends on the one before it almost alone.  So a head of the same weights foresees
most tokens, a head of other weights few, and the number of accepted tokens shows which head an engine computes with.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.tiny import VOCAB, tiny_config, tiny_model, tiny_tokenizer

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 160,
}
WIDTH = SIZES["hidden_size"]
DRAFT_WORDS = 400  # an EAGLE 3 head may know fewer words than the model


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """A model and its head: the folders, and the head's tensors."""

    model: Path
    head: Path
    tensors: dict[str, torch.Tensor]

    @property
    def of_model(self) -> dict[str, torch.Tensor]:
        return load_file(self.model / "model.safetensors")


def made(root: Path, method: str, seed: int, *, copies: bool = False) -> Weights:
    """Writes both checkpoints.  The head may have a copy of the model's embeddings, as trainers of heads write it.

    An EAGLE 3 head foresees one token, an EAGLE head several.
    """
    model = tiny_model(root / "model", seed=seed, num_hidden_layers=3, **SIZES)
    follows = torch.randperm(VOCAB)  # the token after each token
    embedding = torch.randn(VOCAB, WIDTH)
    signs = torch.randint(2, (WIDTH,)) * 2.0 - 1  # of the last norm, which other heads do not have
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(embedding)
        model.lm_head.weight[follows] = embedding * signs
        model.model.norm.weight.copy_(signs)
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.mul_(1e-3)  # enough to tell sets of weights apart, too little to change a token
    model.save_pretrained(root / "model")
    tiny_tokenizer(root / "model")
    if method == "eagle":
        tensors = _eagle(root / "head", embedding, signs, copies)
    else:
        tensors = _eagle3(root / "head", embedding, follows, copies)
    save_file(tensors, root / "head" / "model.safetensors", {"format": "pt"})
    return Weights(model=root / "model", head=root / "head", tensors=tensors)


def _eagle(folder: Path, embedding: torch.Tensor, signs: torch.Tensor, copies: bool) -> dict[str, torch.Tensor]:
    """An EAGLE head with embeddings of its own, turned, or with the model's; it has the model's ``lm_head``."""
    turn = torch.eye(WIDTH) if copies else torch.linalg.qr(torch.randn(WIDTH, WIDTH)).Q
    layer = _layer(folder, "layers.0.", "EagleLlamaForCausalLM", WIDTH)
    del layer["layers.0.input_layernorm.weight"]
    return layer | {
        "embed_tokens.weight": embedding @ turn,
        "fc.weight": torch.cat([signs[:, None] * turn, torch.randn(WIDTH, WIDTH) * 0.1], 1),
    }


def _eagle3(folder: Path, embedding: torch.Tensor, follows: torch.Tensor, copies: bool) -> dict[str, torch.Tensor]:
    """An EAGLE 3 head with the model's embeddings, and an ``lm_head`` of its own for some of the words."""
    words = torch.randperm(VOCAB)[:DRAFT_WORDS].sort().values
    head = torch.empty(VOCAB, WIDTH)
    head[follows[follows]] = embedding  # it foresees the token after the next one
    changes = {
        "draft_vocab_size": DRAFT_WORDS,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1], "use_aux_hidden_state": True},
    }
    layer = _layer(folder, "midlayer.", "LlamaForCausalLMEagle3", 2 * WIDTH, **changes)
    known = torch.zeros(VOCAB, dtype=torch.bool)
    known[words] = True
    tensors = {
        "midlayer.hidden_norm.weight": torch.ones(WIDTH),
        "fc.weight": torch.cat([torch.eye(WIDTH), torch.randn(WIDTH, WIDTH) * 0.05], 1),
        "norm.weight": torch.ones(WIDTH),
        "lm_head.weight": head[words].contiguous(),
        "d2t": words - torch.arange(DRAFT_WORDS),
        "t2d": known,
    }
    return layer | tensors | ({"embed_tokens.weight": embedding.clone()} if copies else {})


def _layer(folder: Path, prefix: str, architecture: str, inputs: int, **changes: Any) -> dict[str, torch.Tensor]:
    """Writes the head's configuration; returns its layer, whose attention reads vectors of so many ``inputs``."""
    config = tiny_config(num_hidden_layers=1, **SIZES)
    folder.mkdir()
    config.save_pretrained(folder)
    saved = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(saved | {"architectures": [architecture]} | changes))
    heads, kept = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    shapes = {
        "self_attn.q_proj": (heads, inputs),
        "self_attn.k_proj": (kept, inputs),
        "self_attn.v_proj": (kept, inputs),
        "self_attn.o_proj": (WIDTH, heads),
        "mlp.gate_proj": (config.intermediate_size, WIDTH),
        "mlp.up_proj": (config.intermediate_size, WIDTH),
        "mlp.down_proj": (WIDTH, config.intermediate_size),
    }
    tensors = {f"{prefix}{name}.weight": torch.randn(shape) * 0.1 for name, shape in shapes.items()}
    return tensors | {
        f"{prefix}{name}.weight": 1 + 0.1 * torch.randn(WIDTH)
        for name in ("input_layernorm", "post_attention_layernorm")
    }
