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
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import nn
from transformers import AttentionInterface, AutoModelForCausalLM, PretrainedConfig

from weightcast.errors import ConfigError
from weightcast.rollout.all_reduce import Reduce, no_group
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
        shape: Unsharded shape of the tensor.
        dim: Dimension that is divided among the ranks; None if each has the whole tensor.
        start: First index of this rank's part in that dimension.
        length: Size of this rank's part in that dimension.
        expert: Index in a parameter that stacks all experts of a layer; None if the parameter takes this tensor alone.
        first_row: First row of the expert that the tensor fills.
    """

    parameter: str
    shape: tuple[int, ...]
    dim: int | None
    start: int = 0
    length: int = 0
    expert: int | None = None
    first_row: int = 0

    @property
    def local_shape(self) -> tuple[int, ...]:
        return tuple(self.length if dim == self.dim else size for dim, size in enumerate(self.shape))


def _places(name: str, shape: tuple[int, ...], *, rank: int, size: int) -> Iterator[tuple[str, _Place]]:
    """Yields the checkpoint's tensors that fill a parameter, given by its unsharded shape, and their places."""
    owner, _, leaf = name.rpartition(".")

    def place(shape: tuple[int, ...], dim: int | None, *, expert: int | None = None, first_row: int = 0) -> _Place:
        dim = dim if size > 1 else None
        length = 0 if dim is None else shape[dim] // size
        return _Place(
            parameter=name,
            shape=shape,
            dim=dim,
            start=rank * length,
            length=length,
            expert=expert,
            first_row=first_row,
        )

    if not _is_stacked(name):
        which = owner.rpartition(".")[2]
        dim = 0 if which in _BY_OUTPUT else 1 if which in _BY_INPUT and leaf == "weight" else None
        yield name, place(shape, dim)
        return
    experts, rows, columns = shape
    for expert in range(experts):
        if leaf == "down_proj":
            yield f"{owner}.{expert}.down_proj.weight", place((rows, columns), 1, expert=expert)
            continue
        for number, which in enumerate(("gate_proj", "up_proj")):
            half = place((rows // 2, columns), 0, expert=expert, first_row=number * (rows // 2 // size))
            yield f"{owner}.{expert}.{which}.weight", half


def _is_stacked(name: str) -> bool:
    """True for a parameter of all experts of a layer: (experts, 2 x width, hidden) or (experts, hidden, width)."""
    return name.endswith((".experts.gate_up_proj", ".experts.down_proj"))


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
                places = dict(_places(name, tuple(whole.shape), rank=self.tp_rank, size=self.tp_size))
                self._places.update(places)
                shape = next(iter(places.values())).local_shape
                if _is_stacked(name):
                    shape = (whole.shape[0], shape[0] * len(places) // whole.shape[0], shape[1])
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

    def _region(self, place: _Place) -> torch.Tensor:
        """The part of this rank's parameters that takes a tensor."""
        parameter = self._parameters_by_name[place.parameter]
        if place.expert is None:
            return parameter
        return parameter[place.expert, place.first_row : place.first_row + place.local_shape[0]]

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
    group: Reduce | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    max_len: int | None = None,
) -> ReferenceModel:
    """Builds and loads one rank's part of the model in `model_dir`.

    Args:
        tp_size: Number of ranks; must divide heads, key-value heads and the MLP's width.
        group: A function that sums a tensor over the ranks in place.  None for one rank, or for a part of a model that
            is never run.
        dtype: Dtype of all weights; None for the checkpoint's own.
        max_len: The longest context to serve, in tokens; None for the model's own limit.

    Raises:
        ConfigError: The folder, the model or the degree cannot be served; the text says why.
    """
    folder = Path(model_dir)
    config = read_config(folder)
    check_config(config, tp_size=tp_size, max_len=max_len)
    model = ReferenceModel(config, tp_rank=tp_rank, tp_size=tp_size, reduce=group or no_group)
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
