"""A small module with a tensor of each kind, the bytes that its export has, and log-probabilities."""

from __future__ import annotations

import torch
from torch import nn

from tests.helpers.exports import raw


class Tiny(nn.Module):
    """Odd sizes, tied weights, two dtypes, buffers of both kinds, a scalar and an empty tensor."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(13, 6)
        self.layers = nn.ModuleList([nn.Linear(6, 6, bias=layer == 0) for layer in range(3)])
        self.layers[1].to(torch.bfloat16)
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("scale", torch.randn(()))
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.arange(12).reshape(3, 4) % 2 == 0)
        self.register_buffer("cache", torch.randn(9), persistent=False)
        self.register_buffer("empty", torch.empty(0, 5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        x = self.layers[0](x)
        x = self.layers[1](x.to(torch.bfloat16)).float()
        x = self.norm(self.layers[2](x).transpose(1, 2)).transpose(1, 2)
        return self.head(x * self.scale)


def expected(model: nn.Module, wire_dtype: torch.dtype | None = None) -> dict[str, bytes]:
    cast = {}
    for name, tensor in model.state_dict().items():
        floating = tensor.is_floating_point() and wire_dtype is not None
        cast[name] = raw(tensor.to(wire_dtype) if floating else tensor)
    return cast


def reference_logprobs(model: nn.Module, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([tokens]))
    return torch.log_softmax(logits[0, :-1].float(), -1).gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0]
