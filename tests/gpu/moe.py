"""A model of the shape of Qwen3-30B-A3B, sharded as a trainer has it, and as a folder that an engine starts on."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Shard

from tests.helpers.tiny import tiny_tokenizer


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a mixture of experts, Qwen3-30B-A3B's unless told otherwise."""

    layers: int = 48
    hidden: int = 2048
    heads: int = 32
    key_value_heads: int = 4
    head_dim: int = 128
    experts: int = 128
    width: int = 768
    vocabulary: int = 151936

    def dense(self) -> dict[str, tuple[int, ...]]:
        """Shapes of a layer's tensors other than its experts, by name."""
        query, key_value = self.heads * self.head_dim, self.key_value_heads * self.head_dim
        return {
            "self_attn.q_proj.weight": (query, self.hidden),
            "self_attn.k_proj.weight": (key_value, self.hidden),
            "self_attn.v_proj.weight": (key_value, self.hidden),
            "self_attn.o_proj.weight": (self.hidden, query),
            "self_attn.q_norm.weight": (self.head_dim,),
            "self_attn.k_norm.weight": (self.head_dim,),
            "mlp.gate.weight": (self.experts, self.hidden),
            "input_layernorm.weight": (self.hidden,),
            "post_attention_layernorm.weight": (self.hidden,),
        }

    def parameters(self) -> int:
        """How many numbers it has."""
        dense = sum(torch.Size(sizes).numel() for sizes in self.dense().values())
        ends = (2 * self.vocabulary + 1) * self.hidden
        return ends + self.layers * (dense + 3 * self.experts * self.width * self.hidden)

    def config(self) -> dict[str, Any]:
        """As Hugging Face has it."""
        return {
            "model_type": "qwen3_moe",
            "architectures": ["Qwen3MoeForCausalLM"],
            "dtype": "bfloat16",
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "intermediate_size": 3 * self.hidden,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.key_value_heads,
            "head_dim": self.head_dim,
            "num_experts": self.experts,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": self.width,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": False,
            "bos_token_id": 0,
            "eos_token_id": 1,
        }


def sharded(shape: Shape, *, fsdp: int, ep: int, device: torch.device, seed: int = 0) -> nn.Module:
    """Experts over an axis of their own, their rows over the other; everything else over all ranks. Random."""
    kind = device.type
    mesh = init_device_mesh(kind, (ep, fsdp), mesh_dim_names=("ep", "fsdp"))
    everybody = init_device_mesh(kind, (ep * fsdp,))
    model = nn.Module()
    model.config = SimpleNamespace(model_type="qwen3_moe", hidden_size=shape.hidden)
    generator = torch.Generator(device=device).manual_seed(seed * 1000 + dist.get_rank())

    def put(path: str, sizes: tuple[int, ...], over: DeviceMesh, placements: list[Placement]) -> None:
        """A parameter of which this rank makes its own part only."""
        *steps, last = path.split(".")
        owner: nn.Module = model
        for step in steps:
            if not hasattr(owner, step):
                owner.add_module(step, nn.Module())
            owner = getattr(owner, step)
        local = list(sizes)
        for dim, placement in enumerate(placements):
            assert isinstance(placement, Shard)
            local[placement.dim] //= over.size(dim)
        tensor = torch.empty(local, dtype=torch.bfloat16, device=device).normal_(std=0.02, generator=generator)
        placed = DTensor.from_local(tensor, over, placements, run_check=False)
        owner.register_parameter(last, nn.Parameter(placed, requires_grad=False))

    rows: list[Placement] = [Shard(0)]
    cut: list[Placement] = [Shard(0), Shard(1)]
    put("model.embed_tokens.weight", (shape.vocabulary, shape.hidden), everybody, rows)
    for layer in range(shape.layers):
        at = f"model.layers.{layer}"
        for name, sizes in shape.dense().items():
            put(f"{at}.{name}", sizes, everybody, rows)
        put(f"{at}.mlp.experts.gate_up_proj", (shape.experts, 2 * shape.width, shape.hidden), mesh, cut)
        put(f"{at}.mlp.experts.down_proj", (shape.experts, shape.hidden, shape.width), mesh, cut)
    put("model.norm.weight", (shape.hidden,), everybody, rows)
    put("lm_head.weight", (shape.vocabulary, shape.hidden), everybody, rows)
    return model


def zeros(folder: Path, shape: Shape) -> None:
    """A checkpoint of nothing but zeros, one file for each layer, in holes: it takes no room and no time."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(shape.config()))
    tiny_tokenizer(folder)
    ends = {
        "model.embed_tokens.weight": (shape.vocabulary, shape.hidden),
        "model.norm.weight": (shape.hidden,),
        "lm_head.weight": (shape.vocabulary, shape.hidden),
    }
    files = {"ends": ends}
    for layer in range(shape.layers):
        at = f"model.layers.{layer}"
        tensors = {f"{at}.{name}": sizes for name, sizes in shape.dense().items()}
        for expert in range(shape.experts):
            for name in ("gate_proj", "up_proj"):
                tensors[f"{at}.mlp.experts.{expert}.{name}.weight"] = (shape.width, shape.hidden)
            tensors[f"{at}.mlp.experts.{expert}.down_proj.weight"] = (shape.hidden, shape.width)
        files[f"layer-{layer:02}"] = tensors
    index: dict[str, str] = {}
    for stem, tensors in files.items():
        header: dict[str, Any] = {}
        end = 0
        for name, sizes in tensors.items():
            begin, end = end, end + 2 * torch.Size(sizes).numel()
            header[name] = {"dtype": "BF16", "shape": sizes, "data_offsets": [begin, end]}
            index[name] = f"{stem}.safetensors"
        words = json.dumps(header).encode()
        words += b" " * (-len(words) % 8)
        with (folder / f"{stem}.safetensors").open("wb") as file:
            file.write(struct.pack("<Q", len(words)) + words)
            file.truncate(8 + len(words) + end)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
