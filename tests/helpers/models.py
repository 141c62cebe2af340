"""Small models with the loaders that engines have: fused, sliced, stacked, computed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from weightcast.wire.bucket import Bucket
from weightcast.wire.layout import Packing, TensorSpec, plan_buckets

Weights = dict[str, torch.Tensor]


def weights_of(seed: int, *, heads: int = 4, experts: int = 2) -> Weights:
    """A trainer's weights: attention, experts, a norm, an embedding, a scalar, a counter."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    weights = {
        "embed.weight": random(10, 8),
        "q.weight": random(2 * heads, 8),
        "k.weight": random(heads, 8),
        "v.weight": random(heads, 8),
        "o.weight": random(8, 2 * heads),
        "norm.weight": random(8).to(torch.bfloat16),
        "scale": random(),
        "steps": torch.tensor([seed, seed + 1]),
    }
    for expert in range(experts):
        weights[f"experts.{expert}.gate.weight"] = random(6, 8)
        weights[f"experts.{expert}.up.weight"] = random(6, 8)
        weights[f"experts.{expert}.down.weight"] = random(8, 6)
    return weights


def specs_of(weights: Weights) -> list[TensorSpec]:
    return [TensorSpec.of(name, tensor) for name, tensor in weights.items()]


class FusedModel(nn.Module):
    """One tensor-parallel rank with fused q, k, v, stacked experts, a padded embedding and a buffer of its own."""

    PAD = -7.0

    def __init__(
        self, *, tp_rank: int = 0, tp_size: int = 1, dtype: torch.dtype = torch.float32, experts: int = 2
    ) -> None:
        super().__init__()
        self.tp_rank, self.tp_size = tp_rank, tp_size

        def parameter(*shape: int, of: torch.dtype = dtype) -> nn.Parameter:
            return nn.Parameter(torch.full(shape, self.PAD, dtype=of), requires_grad=False)

        self.embed = parameter(12, 8)
        self.qkv = parameter(16 // tp_size, 8)
        self.o = parameter(8, 8 // tp_size)
        self.norm = parameter(8, of=torch.bfloat16)
        self.scale = parameter(of=torch.float32)
        self.w13 = parameter(experts, 12 // tp_size, 8)
        self.w2 = parameter(experts, 8, 6 // tp_size)
        self.register_buffer("steps", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("requests_served", torch.tensor([123]))  # the engine's own, in no checkpoint
        self.register_buffer("cache", torch.zeros(3), persistent=False)

    def part(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        size = tensor.shape[dim] // self.tp_size
        return tensor.narrow(dim, self.tp_rank * size, size)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.load_one(name, tensor)

    def load_one(self, name: str, tensor: torch.Tensor) -> None:
        head = name.split(".")[0]
        match head:
            case "embed":
                self.embed[: tensor.shape[0]].copy_(tensor)
            case "q" | "k" | "v":
                rows = self.part(tensor, 0)
                start = {"q": 0, "k": 8 // self.tp_size, "v": 12 // self.tp_size}[head]
                self.qkv[start : start + rows.shape[0]].copy_(rows)
            case "o":
                self.o.copy_(self.part(tensor, 1))
            case "norm":
                self.norm.copy_(tensor)
            case "scale":
                self.scale.data.copy_(tensor)
            case "steps":
                self.steps.copy_(tensor)
            case "experts":
                _, expert, which, _ = name.split(".")
                if which == "down":
                    self.w2[int(expert)].copy_(self.part(tensor, 1))
                else:
                    rows = self.part(tensor, 0)
                    start = 0 if which == "gate" else rows.shape[0]
                    self.w13[int(expert), start : start + rows.shape[0]].copy_(rows)
            case _:
                raise KeyError(name)


class ScalingModel(FusedModel):
    """A loader that computes: the norm is kept plus one."""

    def load_one(self, name: str, tensor: torch.Tensor) -> None:
        if name == "norm.weight":
            self.norm.copy_(tensor.float() + 1)
        else:
            super().load_one(name, tensor)


def buckets_of(weights: Weights, *, bucket_bytes: int, alignment: int = 16) -> list[Bucket]:
    """The weights as filled buckets."""
    layouts = plan_buckets(specs_of(weights), bucket_bytes=bucket_bytes, packing=Packing(alignment_bytes=alignment))
    return [
        fill(Bucket(layout, torch.empty(max(layout.size_bytes, 1), dtype=torch.uint8)), weights) for layout in layouts
    ]


def fill(bucket: Bucket, weights: Weights) -> Bucket:
    for slot, view in bucket.views():
        tensor = weights[slot.spec.name]
        view.copy_(tensor.narrow(0, slot.first_row, slot.num_rows) if tensor.dim() else tensor)
    return bucket


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def differing(model: nn.Module, wanted: dict[str, torch.Tensor], but: Sequence[str] = ()) -> list[str]:
    """Names of the tensors that differ from the wanted ones."""
    return [name for name, tensor in state(model).items() if name not in but and not torch.equal(tensor, wanted[name])]
