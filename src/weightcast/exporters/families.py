"""Tables of names and layouts for models outside transformers: modules that trainers write or fuse, and remote code.

Models of transformers need a table only if the library's own conversion fails (``checkpoint_layout.py``).  Names that a
checkpoint already has pass through, so one table serves fused and unfused modules.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import partial
from typing import Any

from weightcast.errors import ConfigError
from weightcast.exporters.mapping import Family, Rule


def _heads(config: Any) -> tuple[int, int, int]:
    """Number of heads, number of key-value heads, width of a head."""
    heads = int(config.num_attention_heads)
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return heads, int(getattr(config, "num_key_value_heads", None) or heads), int(width)


def qkv_rows(config: Any) -> tuple[int, int, int]:
    """Rows of queries, keys and values, one after the other."""
    heads, kv_heads, width = _heads(config)
    return heads * width, kv_heads * width, kv_heads * width


def _hidden_at(dim: int, shape: tuple[int, ...], config: Any) -> bool:
    """True if the hidden width is this dimension of stacked experts, and not another."""
    hidden = config.hidden_size
    if len(shape) != 3 or (shape[1] == hidden) == (shape[2] == hidden):
        raise ConfigError(
            f"stacked experts {list(shape)} of a model of width {hidden} may be transposed or not",
            hint="pass a weightcast.exporters.mapping.Family whose rules say which",
        )
    return shape[dim] == hidden


_QKV = r"\1self_attn.q_proj.\2", r"\1self_attn.k_proj.\2", r"\1self_attn.v_proj.\2"
_DENSE = (
    Rule(match=r"(.*\.)self_attn\.qkv_proj\.(weight|bias)", names=_QKV, sizes=qkv_rows),
    Rule(match=r"(.*\.)gate_up_proj\.(weight|bias)", names=(r"\1gate_proj.\2", r"\1up_proj.\2")),
)
# transformers' own models of these families have no such names.
_FUSED = r".*\.(self_attn\.qkv_proj|gate_up_proj)\.(weight|bias)"
_EXPERTS = (
    Rule(
        match=r"(.*\.experts)\.gate_up_proj",
        names=(r"\1.{index}.gate_proj.weight", r"\1.{index}.up_proj.weight"),
        stacked=True,
    ),
    Rule(match=r"(.*\.experts)\.(gate|up|down)_proj", names=(r"\1.{index}.\2_proj.weight",), stacked=True),
)
# The checkpoint's experts are fused and transposed: [experts, hidden, 2 x width] and [experts, width, hidden].  Those
# of transformers 4 lie so too.
_FUSED_TRANSPOSED = (
    Rule(match=r"(.*\.experts\.gate_up_proj)", names=(r"\1",), transposed=True, unless=partial(_hidden_at, 1)),
    Rule(match=r"(.*\.experts\.down_proj)", names=(r"\1",), transposed=True, unless=partial(_hidden_at, 2)),
    *(
        Rule(match=match, names=(r"\1.gate_up_proj",), stack=2, part=(part, 2), transposed=True)
        for part, match in enumerate(
            (r"(.*\.experts)\.(\d+)\.gate_proj\.weight", r"(.*\.experts)\.(\d+)\.up_proj\.weight")
        )
    ),
    Rule(match=r"(.*\.experts)\.(\d+)\.down_proj\.weight", names=(r"\1.down_proj",), stack=2, transposed=True),
)

_BIAS = r".*\.e_score_correction_bias"
KEEPS_DTYPE = re.compile(_BIAS)  # in every family

FAMILIES = (
    Family(
        name="llama",
        model_types=frozenset({"llama", "mistral", "qwen2", "qwen3"}),
        rules=_DENSE,
        fused=_FUSED,
    ),
    Family(
        name="stacked-experts",
        model_types=frozenset({"qwen2_moe", "qwen3_moe", "glm4_moe", "deepseek_v3"}),
        rules=(*_EXPERTS, *_DENSE),
        keeps_dtype=_BIAS,
        fused=_FUSED,
    ),
    Family(
        name="qwen3-vl-moe",
        model_types=frozenset({"qwen3_vl_moe"}),
        rules=_FUSED_TRANSPOSED,
        # transformers transposes the experts when it loads them, and does not transpose them back when it saves.
        published=_FUSED_TRANSPOSED[:2],
    ),
)
PLAIN = Family(name="plain", model_types=frozenset())

_STACKED = re.compile(r".*experts\.[^.]+(\.weight)?")


def family_named(name: str) -> Family:
    """Finds a table by its name or the ``model_type`` of its models; raises ``ConfigError`` if there is none."""
    for family in (*FAMILIES, PLAIN):
        if name == family.name or name in family.model_types:
            return family
    known = sorted(set[str]().union(*(family.model_types for family in FAMILIES)))
    raise ConfigError(
        f"family={name!r} is not known", hint=f"choose one of plain, {', '.join(known)}, or pass a Family"
    )


def table_for(config: Any) -> Family | None:
    """The table for a model's configuration; None if no table lists its ``model_type``."""
    model_type = getattr(config, "model_type", None)
    return next((family for family in FAMILIES if model_type in family.model_types), None)


def family_of(config: Any, stored: Iterable[tuple[str, tuple[int, ...]]]) -> Family:
    """The table for a model's configuration; ``PLAIN`` if it has no ``model_type`` or an unknown one.

    Raises:
        ConfigError: The family is unknown and the model stacks its experts, which a checkpoint may have one by one.
    """
    model_type = getattr(config, "model_type", None)
    if not isinstance(model_type, str) or not model_type:
        return PLAIN
    table = table_for(config)
    if table is not None:
        return table
    stacked = next((name for name, shape in stored if len(shape) == 3 and _STACKED.fullmatch(name)), None)
    if stacked is not None:
        raise ConfigError(
            f"{stacked} holds several experts, and weightcast has no table of names for models of type {model_type!r}",
            hint='pass family="plain" to send names as they are, the name of a family that has the same layout, or a '
            "weightcast.exporters.mapping.Family of your own",
        )
    return PLAIN
