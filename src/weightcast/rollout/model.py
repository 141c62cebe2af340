"""A transformers causal LM, sharded for tensor parallelism.

Heads and the MLP's inner width are divided among the ranks; embeddings, norms and the output head are whole on each.
The forward pass is transformers' own, except for the attention product and the two sums per layer.

`load_weights` takes a complete update under Hugging Face names, with views and `copy_` alone, so that a recorder can
learn which box of which tensor goes where.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import nn
from transformers import AttentionInterface, AutoModelForCausalLM, PretrainedConfig

from weightcast.errors import ConfigError
from weightcast.rollout.all_reduce import GroupReduce, Reduce, no_group
from weightcast.rollout.cache import SlotCache, cache_name
from weightcast.rollout.checkpoint import check_config, config_dtype, read_config, stored_tensors, weight_files
from weightcast.wire.layout import TensorSpec, dtype_name

ATTENTION = "weightcast"

_BY_OUTPUT = frozenset({"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"})
_BY_INPUT = frozenset({"o_proj", "down_proj"})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """The place of a checkpoint's tensor on this rank.

    Attributes:
        expert: Place in a stacked parameter; None if the parameter takes this tensor alone.
        shape: Unsharded shape of the tensor.
    """

    parameter: str
    expert: ExpertPart | None = None
    shape: tuple[int, ...]
    dim: int | None
    start: int
    length: int

    @property
    def local_shape(self) -> tuple[int, ...]:
        return tuple(self.length if dim == self.dim else size for dim, size in enumerate(self.shape))


class _SummedLinear(nn.Module):
    """A linear layer with some of the input columns; it sums over the ranks, then adds the bias once."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, reduce: Reduce) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self._reduce = reduce

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (..., local inputs) to (..., outputs)."""
        out = F.linear(x, self.weight)
        self._reduce(out)
        return out if self.bias is None else out.add_(self.bias)


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Grouped-query attention: causal over a whole prompt without a mask, or one token over the cache with one.

    Args:
        query: (batch, heads, tokens, head_dim).
        key: (batch, kv heads, length, head_dim), a view of the cache when decoding.
        value: The same shape.
        attention_mask: None for a prompt; (batch, 1, 1, length), added to the scores, when decoding.
    """
    batch, heads, tokens, head_dim = query.shape
    groups = heads // key.shape[1]
    if attention_mask is not None:
        # The heads that share keys become rows of one product, so that the cache is read once.
        query = query.reshape(batch, heads // groups, groups, head_dim)
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling)
        return out.reshape(batch, 1, heads, head_dim), None
    if groups > 1:
        shape = (batch, key.shape[1], groups, tokens, head_dim)
        key = key[:, :, None].expand(shape).reshape(batch, heads, tokens, head_dim)
        value = value[:, :, None].expand(shape).reshape(batch, heads, tokens, head_dim)
    out = F.scaled_dot_product_attention(query, key, value, is_causal=tokens > 1, scale=scaling)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, _attend)


class ReferenceModel(nn.Module):
    """One rank's part of a causal LM, under Hugging Face's names; `config` is that of the whole model."""

    def __init__(self, config: PretrainedConfig, *, tp_rank: int, tp_size: int, reduce: Reduce) -> None:
        super().__init__()
        self.config = config
        self.tp_rank = tp_rank
        self.tp_size = tp_size
        with torch.device("meta"):
            whole: Any = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION)
        self.model: nn.Module = whole.model
        self.lm_head: nn.Module = whole.lm_head
        self._cache_name = cache_name(self.model)
        self.tied = bool(config.tie_word_embeddings)
        self._reduce = reduce
        self._places: dict[str, _Place] = {}
        self._parameters_by_name: dict[str, nn.Parameter] = {}
        self._host_copies: dict[str, torch.Tensor] = {}

    def materialise(self, *, dtype: torch.dtype, device: torch.device) -> None:
        """Allocates every parameter of this rank, uninitialised."""
        if self.tied:
            self.lm_head.register_parameter("weight", None)
        for prefix, module in list[tuple[str, nn.Module]](self.named_modules()):
            for leaf, whole in list(module.named_parameters(recurse=False)):
                name = f"{prefix}.{leaf}" if prefix else leaf
                if is_stacked(name, tuple(whole.shape)):
                    shape = local_shape(name, tuple(whole.shape), self.tp_size)
                    self._places.update(self._expert_places(name, tuple(whole.shape)))
                else:
                    place = self._place(name, tuple(whole.shape))
                    shape = place.local_shape
                    self._places[name] = place
                parameter = nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
                module.register_parameter(leaf, parameter)
                self._parameters_by_name[name] = parameter
        if self.tied:
            self.lm_head.register_parameter("weight", self._parameters_by_name["model.embed_tokens.weight"])
        if self.tp_size > 1:
            self._sum_outputs()
        # Rotary frequencies are computed, not loaded, and those made on the meta device have no values.
        with torch.device("cpu"):
            rotary = type(cast(nn.Module, self.model.rotary_emb))(self.config)
        self.model.rotary_emb = rotary.to(device)
        lost = [name for name, buffer in self.named_buffers() if buffer.is_meta]
        if lost:
            raise ConfigError(f"{self.config.model_type}: the buffers {', '.join(lost[:5])} have no values")
        self.eval()

    def _place(self, name: str, shape: tuple[int, ...]) -> _Place:
        owner, leaf = name.split(".")[-2:]
        dim = None
        if owner in _BY_OUTPUT:
            dim = 0
        elif owner in _BY_INPUT and leaf == "weight":
            dim = 1
        if dim is None or self.tp_size == 1:
            return _Place(parameter=name, shape=shape, dim=None, start=0, length=0)
        length = shape[dim] // self.tp_size
        return _Place(parameter=name, shape=shape, dim=dim, start=self.tp_rank * length, length=length)

    def _expert_places(self, name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, _Place]]:
        for part in parts(name, shape, self.tp_size):
            length = part.shape[part.dim] // self.tp_size
            yield (
                part.name,
                _Place(
                    parameter=name,
                    expert=part,
                    shape=part.shape,
                    dim=part.dim,
                    start=self.tp_rank * length,
                    length=length,
                ),
            )

    def _region(self, place: _Place) -> torch.Tensor:
        """The part of this rank's parameters that takes a tensor."""
        parameter, part = self._parameters_by_name[place.parameter], place.expert
        return parameter if part is None else parameter[part.expert, part.first_row : part.first_row + part.num_rows]

    def _sum_outputs(self) -> None:
        for module in list(self.modules()):
            if hasattr(module, "gate_up_proj") and hasattr(module, "down_proj"):  # experts, stacked
                module.register_forward_hook(self._sum_experts)
                continue
            for name, child in list(module.named_children()):
                if name in _BY_INPUT:
                    linear = cast(nn.Linear, child)
                    weight, bias = linear._parameters["weight"], linear._parameters["bias"]
                    setattr(module, name, _SummedLinear(cast(nn.Parameter, weight), bias, self._reduce))

    def _sum_experts(self, module: nn.Module, arguments: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        self._reduce(output)
        return output

    @property
    def head_dim(self) -> int:
        config = self.config
        return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)

    # -- weights

    def expected_weights(self) -> list[TensorSpec]:
        """Every tensor of a complete update: Hugging Face names, unsharded shapes, this engine's dtype."""
        return [
            TensorSpec(name=name, dtype=dtype_name(self._region(place).dtype), shape=place.shape)
            for name, place in self._places.items()
        ]

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Copies unsharded tensors, on any device and in any order, into this rank's parameters; returns their names.

        Raises:
            ConfigError: A name is unknown, or a shape is not the model's.  The tensors before it are loaded.
        """
        loaded: set[str] = set()
        for name, tensor in weights:
            place = self._places.get(name)
            if place is None:
                hint = "its output head is tied to the embedding" if self.tied and name == "lm_head.weight" else None
                raise ConfigError(f"{name} is not a weight of this {self.config.model_type} model", hint=hint)
            if tuple(tensor.shape) != place.shape:
                raise ConfigError(f"{name}: expected shape {place.shape}, got {tuple(tensor.shape)}")
            part = tensor if place.dim is None else tensor.narrow(place.dim, place.start, place.length)
            self._region(place).copy_(part)
            loaded.add(name)
        return loaded

    # -- forward

    @torch.inference_mode()
    def hidden(
        self,
        input_ids: torch.Tensor,
        *,
        position_ids: torch.Tensor,
        mask: torch.Tensor | None,
        cache: SlotCache | None,
    ) -> torch.Tensor:
        """Computes the last hidden states, (batch, tokens, hidden), the same on every rank.

        Args:
            input_ids: (batch, tokens), int64.
            position_ids: (batch, tokens), int64.
            mask: None for whole prompts, else (batch, 1, 1, length), added to the scores.
            cache: The cache after `start_prefill` or `start_decode`; None stores no keys and values.
        """
        output = self.model(
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=mask,
            use_cache=cache is not None,
            **{self._cache_name: cache},
        )
        return output.last_hidden_state

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Maps (rows, hidden) to (rows, vocabulary), float32."""
        return self.lm_head(hidden).float()

    # -- sleep

    @torch.no_grad()
    def offload(self) -> None:
        """Moves the weights from the accelerator to host memory; on a CPU they stay."""
        for name, parameter in self._parameters_by_name.items():
            if parameter.device.type == "cpu":
                continue
            host = torch.empty(parameter.shape, dtype=parameter.dtype, pin_memory=True)
            host.copy_(parameter)
            parameter.data = host
            self._host_copies[name] = host

    @torch.no_grad()
    def restore(self, device: torch.device) -> None:
        """Undoes `offload`.  The parameters have new storage afterwards."""
        for name, host in self._host_copies.items():
            self._parameters_by_name[name].data = host.to(device)
        self._host_copies.clear()


def build_model(
    model_dir: Path | str,
    *,
    tp_rank: int = 0,
    tp_size: int = 1,
    group: Reduce | dist.ProcessGroup | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    max_len: int | None = None,
) -> ReferenceModel:
    """Builds and loads one rank's part of the model in `model_dir`.

    Args:
        tp_size: Number of ranks; must divide heads, key-value heads and the MLP's width.
        group: A function that sums a tensor over the ranks in place, or a process group.  None for one rank, or for a
            part of a model that is never run.
        dtype: Dtype of all weights; None for the checkpoint's own.
        max_len: The longest context to serve, in tokens; None for the model's own limit.

    Raises:
        ConfigError: The folder, the model or the degree cannot be served; the text says why.
    """
    folder = Path(model_dir)
    config = read_config(folder)
    check_config(config, tp_size=tp_size, max_len=max_len)
    reduce = GroupReduce(group) if isinstance(group, dist.ProcessGroup) else group or no_group
    model = ReferenceModel(config, tp_rank=tp_rank, tp_size=tp_size, reduce=reduce)
    model.materialise(dtype=dtype or config_dtype(config), device=torch.device(device))
    load_checkpoint(model, folder)
    return model


def load_checkpoint(model: ReferenceModel, folder: Path) -> None:
    """Loads a model from safetensors, one tensor at a time, cast to the model's dtype.

    Raises:
        ConfigError: There are no safetensors, a file is unreadable, or its tensors are not the model's.
    """
    expected = {spec.name for spec in model.expected_weights()}
    loaded: set[str] = set()
    for path in weight_files(folder):
        try:
            loaded |= model.load_weights(stored_tensors(path, expected))
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from error
    missing = sorted(expected - loaded)
    if missing:
        raise ConfigError(f"{folder} lacks {len(missing)} of {len(expected)} tensors: {', '.join(missing[:5])}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPart:
    """The place of one expert's weight from a checkpoint in a stacked parameter.

    Attributes:
        shape: Unsharded shape of the weight.
        dim: Dimension of the weight that is cut.
        first_row: First row of the expert that the weight fills.
        num_rows: Number of rows that it fills.
    """

    name: str
    shape: tuple[int, int]
    dim: int
    expert: int
    first_row: int
    num_rows: int


def is_stacked(name: str, shape: tuple[int, ...]) -> bool:
    """True for a parameter that holds all experts of a layer."""
    return len(shape) == 3 and name.endswith((".experts.gate_up_proj", ".experts.down_proj"))


def local_shape(name: str, shape: tuple[int, ...], tp_size: int) -> tuple[int, int, int]:
    """Shape of a rank's part of a stacked parameter, (experts, 2 x width, hidden) or (experts, hidden, width)."""
    experts, rows, columns = shape
    if name.endswith("gate_up_proj"):
        return experts, rows // tp_size, columns
    return experts, rows, columns // tp_size


def parts(name: str, shape: tuple[int, ...], tp_size: int) -> Iterator[ExpertPart]:
    """Yields the weights that fill a stacked parameter, given by its shape without tensor parallelism."""
    prefix, leaf = name.rsplit(".", 1)
    experts, rows, columns = shape
    for expert in range(experts):
        if leaf == "down_proj":
            yield ExpertPart(
                name=f"{prefix}.{expert}.down_proj.weight",
                shape=(rows, columns),
                dim=1,
                expert=expert,
                first_row=0,
                num_rows=rows,
            )
            continue
        width = rows // 2
        for number, which in enumerate(("gate_proj", "up_proj")):
            yield ExpertPart(
                name=f"{prefix}.{expert}.{which}.weight",
                shape=(width, columns),
                dim=0,
                expert=expert,
                first_row=number * (width // tp_size),
                num_rows=width // tp_size,
            )
