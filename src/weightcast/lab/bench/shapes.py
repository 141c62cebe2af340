"""Tables of models: names and shapes of real checkpoints, and the engine's parameter for each tensor.

A table needs no weights, so it can describe a model that this machine could not hold.  Engines fuse tensors: query, key
and value are rows of one parameter, gate and up of another, and all experts of a layer are in two.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from weightcast.config import parse_size
from weightcast.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentPlace:
    """Place of one checkpoint tensor in an engine's parameters.

    Attributes:
        resident: Name of the engine's parameter.
        index: Index in dimension 0 of a stacked parameter; None if it is not stacked.
        row: First row in the parameter, or in the element of the stack.
    """

    name: str
    shape: tuple[int, ...]
    resident: str
    index: int | None = None
    row: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A model: the tensors of its checkpoint in order, and the shapes of the parameters that an engine keeps."""

    name: str
    places: tuple[ResidentPlace, ...]
    residents: dict[str, tuple[int, ...]]

    @property
    def size_bytes(self) -> int:
        """Bytes of one copy in bfloat16."""
        return 2 * sum(math.prod(place.shape) for place in self.places)


class _Table:
    def __init__(self, name: str) -> None:
        self.name = name
        self.places: list[ResidentPlace] = []
        self.residents: dict[str, tuple[int, ...]] = {}

    def alone(self, name: str, *shape: int) -> None:
        self.residents[name] = shape
        self.places.append(ResidentPlace(name=name, shape=shape, resident=name))

    def fused(self, resident: str, parts: dict[str, tuple[int, ...]]) -> None:
        row = 0
        for name, shape in parts.items():
            self.places.append(ResidentPlace(name=name, shape=shape, resident=resident, row=row))
            row += shape[0]
        self.residents[resident] = (row, *next(iter(parts.values()))[1:])

    def done(self) -> ModelShape:
        return ModelShape(name=self.name, places=tuple(self.places), residents=self.residents)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Decoder:
    """Sizes in a configuration that determine the shapes."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head: int
    inter: int
    vocab: int
    experts: int = 0
    qk_norm: bool = True
    tied: bool = False


def _decoder(name: str, config: _Decoder) -> ModelShape:
    table = _Table(name)
    hidden, head = config.hidden, config.head
    table.alone("model.embed_tokens.weight", config.vocab, hidden)
    for layer in range(config.layers):
        at = f"model.layers.{layer}."
        table.fused(
            at + "self_attn.qkv_proj.weight",
            {
                at + "self_attn.q_proj.weight": (config.heads * head, hidden),
                at + "self_attn.k_proj.weight": (config.kv_heads * head, hidden),
                at + "self_attn.v_proj.weight": (config.kv_heads * head, hidden),
            },
        )
        table.alone(at + "self_attn.o_proj.weight", hidden, config.heads * head)
        if config.qk_norm:
            table.alone(at + "self_attn.q_norm.weight", head)
            table.alone(at + "self_attn.k_norm.weight", head)
        if config.experts:
            _experts(table, at + "mlp.", config)
        else:
            table.fused(
                at + "mlp.gate_up_proj.weight",
                {
                    at + "mlp.gate_proj.weight": (config.inter, hidden),
                    at + "mlp.up_proj.weight": (config.inter, hidden),
                },
            )
            table.alone(at + "mlp.down_proj.weight", hidden, config.inter)
        table.alone(at + "input_layernorm.weight", hidden)
        table.alone(at + "post_attention_layernorm.weight", hidden)
    table.alone("model.norm.weight", hidden)
    if not config.tied:
        table.alone("lm_head.weight", config.vocab, hidden)
    return table.done()


def _experts(table: _Table, at: str, config: _Decoder) -> None:
    inter, hidden = config.inter, config.hidden
    table.alone(at + "gate.weight", config.experts, hidden)
    both, down = at + "experts.w13_weight", at + "experts.w2_weight"
    for expert in range(config.experts):
        name = f"{at}experts.{expert}."
        for part, row in (("gate_proj", 0), ("up_proj", inter)):
            table.places.append(
                ResidentPlace(name=f"{name}{part}.weight", shape=(inter, hidden), resident=both, index=expert, row=row)
            )
        table.places.append(
            ResidentPlace(name=f"{name}down_proj.weight", shape=(hidden, inter), resident=down, index=expert)
        )
    table.residents[both] = (config.experts, 2 * inter, hidden)
    table.residents[down] = (config.experts, hidden, inter)


def _equal(name: str, count: int, *shape: int) -> ModelShape:
    """Makes equal tensors that no engine fuses, 256 in a block."""
    table = _Table(name)
    for number in range(count):
        table.alone(f"blocks.{number // 256}.weight_{number % 256}", *shape)
    return table.done()


_QWEN3_8B: dict[str, Any] = dict(hidden=4096, heads=32, kv_heads=8, head=128, inter=12288, vocab=151936)
_LLAMA_70B: dict[str, Any] = dict(hidden=8192, heads=64, kv_heads=8, head=128, inter=28672, vocab=128256, qk_norm=False)

MODELS: dict[str, Callable[[], ModelShape]] = {
    "qwen3-8b": lambda: _decoder("qwen3-8b", _Decoder(layers=36, **_QWEN3_8B)),
    "qwen3-30b-a3b": lambda: _decoder(
        "qwen3-30b-a3b",
        _Decoder(layers=48, hidden=2048, heads=32, kv_heads=4, head=128, inter=768, vocab=151936, experts=128),
    ),
    "llama-70b-20-layers": lambda: _decoder("llama-70b-20-layers", _Decoder(layers=20, **_LLAMA_70B)),
    "many-65536": lambda: _equal("many-65536", 65536, 64, 512),
    "big-16": lambda: _equal("big-16", 16, 65536, 8192),
    # For machines without a GPU.
    "qwen3-0.6b-8-layers": lambda: _decoder(
        "qwen3-0.6b-8-layers",
        _Decoder(layers=8, hidden=1024, heads=16, kv_heads=8, head=128, inter=3072, vocab=32768, tied=True),
    ),
    "moe-4-layers": lambda: _decoder(
        "moe-4-layers",
        _Decoder(layers=4, hidden=512, heads=8, kv_heads=2, head=64, inter=192, vocab=8192, experts=64),
    ),
    "small-65536": lambda: _equal("small-65536", 65536, 8, 256),  # so small that the host's work for each shows
    "thin-400-layers": lambda: _decoder(
        "thin-400-layers", _Decoder(layers=400, hidden=64, heads=4, kv_heads=2, head=16, inter=128, vocab=512)
    ),
    "many-2048": lambda: _equal("many-2048", 2048, 64, 512),
    "tiny": lambda: _decoder("tiny", _Decoder(layers=2, hidden=64, heads=4, kv_heads=2, head=16, inter=128, vocab=512)),
    "tiny-moe": lambda: _decoder(
        "tiny-moe", _Decoder(layers=2, hidden=64, heads=4, kv_heads=2, head=16, inter=32, vocab=256, experts=4)
    ),
}


def model_shape(name: str) -> ModelShape:
    """Returns a model of the table, or ``dense-SIZE`` such as ``dense-256MiB``: equal layers of about that size.

    Raises:
        ConfigError: The name is unknown.
    """
    if name in MODELS:
        return MODELS[name]()
    if name.startswith("dense-"):
        return _dense(name, parse_size(name.removeprefix("dense-")))
    raise ConfigError(
        f"model {name!r} is unknown", hint=f"choose one of {', '.join(MODELS)}, or dense-SIZE such as dense-256MiB"
    )


def _dense(name: str, size_bytes: int) -> ModelShape:
    """Makes a dense decoder of about that size; a quarter of it is embeddings."""
    hidden = (
        4096 if size_bytes >= 8 << 30 else 2048 if size_bytes >= 1 << 30 else 1024 if size_bytes >= 128 << 20 else 256
    )
    heads, kv_heads, inter = max(1, hidden // 128), max(1, hidden // 512), 3 * hidden
    head = min(128, hidden)
    layer = 2 * hidden * (2 * heads * head + 2 * kv_heads * head + 3 * inter)
    vocab = max(64, size_bytes // 4 // (2 * hidden) // 64 * 64)
    layers = max(1, round((size_bytes - 2 * vocab * hidden) / layer))
    config = _Decoder(
        layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, head=head, inter=inter, vocab=vocab, tied=True
    )
    return _decoder(name, config)
