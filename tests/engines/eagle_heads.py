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

from tests.helpers.tiny import VOCAB, in_bfloat16, tiny_config, tiny_model, tiny_tokenizer

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


def made(
    root: Path,
    method: str,
    seed: int,
    *,
    copies: bool = False,
    several: bool = False,
    on_gpu: bool = False,
    **changes: Any,
) -> Weights:
    """Writes both checkpoints.

    Args:
        root: Folder for them.
        method: ``eagle`` or ``eagle3``.
        seed: Of the weights.
        copies: The head has a copy of the model's embeddings, as trainers of heads write it.
        several: An EAGLE 3 head foresees several tokens and not one, an EAGLE head three and not two.
        on_gpu: In bfloat16, with attention heads of a width that every kernel for GPUs takes.
        changes: To the configuration of both; layers are the model's.
    """
    layers = changes.pop("num_hidden_layers", 3)
    on_kernels = {"head_dim": 64, "max_position_embeddings": 1024}
    sizes: dict[str, Any] = SIZES | (on_kernels if on_gpu else {}) | changes
    model = tiny_model(root / "model", seed=seed, num_hidden_layers=layers, **sizes)
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
        tensors = _eagle(root / "head", sizes, embedding, signs, copies, several)
    else:
        tensors = _eagle3(root / "head", sizes, embedding, follows, copies, several)
    save_file(tensors, root / "head" / "model.safetensors", {"format": "pt"})
    if on_gpu:
        in_bfloat16(root / "model")
        in_bfloat16(root / "head")
        tensors = load_file(root / "head" / "model.safetensors")
    return Weights(model=root / "model", head=root / "head", tensors=tensors)


def sglang_head(root: Path, method: str, seed: int, *, several: bool = False, on_gpu: bool = False) -> Weights:
    """Checkpoints as SGLang takes them: heads compute with the model's embeddings, and ``fc`` of EAGLE has a bias."""
    found = made(root, method, seed, copies=True, several=several, on_gpu=on_gpu)
    if method == "eagle":
        found.tensors["fc.bias"] = (torch.randn(WIDTH) * 0.1).to(found.tensors["fc.weight"].dtype)
        save_file(found.tensors, found.head / "model.safetensors", {"format": "pt"})
        config = json.loads((found.head / "config.json").read_text())
        (found.head / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLMEagle"]}))
    return found


def lmdeploy_head(root: Path, method: str, seed: int, **changes: Any) -> Weights:
    """Checkpoints as LMDeploy takes them: for EAGLE 3, heads read three layers of the model, here the second alone."""
    settings = {"num_hidden_layers": 7, "max_position_embeddings": 4096, "pad_token_id": None}
    found = made(root, method, seed, **settings | changes)
    if method == "eagle3":
        found.tensors["fc.weight"] = torch.cat([found.tensors["fc.weight"], torch.zeros(WIDTH, WIDTH)], 1)
        save_file(found.tensors, found.head / "model.safetensors", {"format": "pt"})
    config = json.loads((found.head / "config.json").read_text())
    (found.head / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLM"]}))
    return found


def share(counts: list[tuple[int, int]]) -> float:
    """The accepted share of all tokens that a head has tried, from both numbers for each prompt."""
    return sum(accepted for accepted, _ in counts) / sum(tried for _, tried in counts)


def after(weights: Weights) -> list[int]:
    """The token that the model makes after each token."""
    found = {name: tensor.float() for name, tensor in weights.of_model.items()}
    states = torch.nn.functional.rms_norm(found["model.embed_tokens.weight"], (WIDTH,)) * found["model.norm.weight"]
    return (states @ found["lm_head.weight"].t()).argmax(1).tolist()


def follow(after_each: list[int], prompt: list[int], count: int) -> list[int]:
    """The tokens after a prompt."""
    tokens = [prompt[-1]]
    for _ in range(count):
        tokens.append(after_each[tokens[-1]])
    return tokens[1:]


def _eagle(
    folder: Path, sizes: dict[str, Any], embedding: torch.Tensor, signs: torch.Tensor, copies: bool, several: bool
) -> dict[str, torch.Tensor]:
    """An EAGLE head with embeddings of its own, turned, or with the model's; it has the model's ``lm_head``."""
    turn = torch.eye(WIDTH) if copies else torch.linalg.qr(torch.randn(WIDTH, WIDTH)).Q
    noise = 0.06 if several else 0.1  # of the vector of the step before
    layer = _layer(folder, sizes, "layers.0.", "EagleLlamaForCausalLM", WIDTH)
    del layer["layers.0.input_layernorm.weight"]
    return layer | {
        "embed_tokens.weight": embedding @ turn,
        "fc.weight": torch.cat([signs[:, None] * turn, torch.randn(WIDTH, WIDTH) * noise], 1),
    }


def _eagle3(
    folder: Path, sizes: dict[str, Any], embedding: torch.Tensor, follows: torch.Tensor, copies: bool, several: bool
) -> dict[str, torch.Tensor]:
    """An EAGLE 3 head with the model's embeddings, and an ``lm_head`` of its own for some of the words."""
    words = torch.randperm(VOCAB)[:DRAFT_WORDS].sort().values
    changes: dict[str, Any] = {
        "draft_vocab_size": DRAFT_WORDS,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1], "use_aux_hidden_state": True},
        "eagle_aux_hidden_state_layer_ids": [0, 1],  # where vLLM's second model runner looks
    }
    head = torch.empty(VOCAB, WIDTH)
    if several:
        changes["norm_before_residual"] = True  # so that a step forgets the vector of the step before
        head[follows] = embedding  # it foresees the token after the one that its attention reads
    else:
        head[follows[follows]] = embedding  # it foresees the token after the next one
    layer = _layer(folder, sizes, "midlayer.", "LlamaForCausalLMEagle3", 2 * WIDTH, **changes)
    if several:
        _read_own_token(layer, sizes)
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


def _read_own_token(layer: dict[str, torch.Tensor], sizes: dict[str, Any]) -> None:
    """Lets each position attend to itself alone, and read a part of its own token's embedding."""
    heads, kept, wide = sizes["num_attention_heads"], sizes["num_key_value_heads"], sizes["head_dim"]
    part = min(WIDTH // kept, wide)
    key, value = torch.zeros(kept, wide, 2 * WIDTH), torch.zeros(kept, wide, 2 * WIDTH)
    key[:, :, :WIDTH] = 0.4 * torch.randn(kept, wide, WIDTH)
    out = torch.zeros(WIDTH, heads, wide)
    for group in range(kept):
        read = range(group * part, (group + 1) * part)
        value[group, range(part), read] = 1.0
        out[read, group * heads // kept, range(part)] = 8.0
    layer["midlayer.self_attn.q_proj.weight"] = key.repeat_interleave(heads // kept, 0).flatten(0, 1)
    layer["midlayer.self_attn.k_proj.weight"] = key.flatten(0, 1)
    layer["midlayer.self_attn.v_proj.weight"] = value.flatten(0, 1)
    layer["midlayer.self_attn.o_proj.weight"] = out.flatten(1)


def _layer(
    folder: Path, sizes: dict[str, Any], prefix: str, architecture: str, inputs: int, **changes: Any
) -> dict[str, torch.Tensor]:
    """Writes the head's configuration; returns its layer, whose attention reads vectors of so many ``inputs``."""
    config = tiny_config(num_hidden_layers=1, **sizes)
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
