"""An adapter of experts as trainers have it whose experts are layers of their own; PEFT need not be installed."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

PROJECTIONS = ["gate_proj", "up_proj", "down_proj"]


def train(model: Any, seed: int) -> None:
    """Gives every adapter other values, as a step of training does."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if "lora_" in path:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)


class Adapted(nn.Module):
    """A layer with an adapter, with the attributes that PEFT's have; the layer itself stays elsewhere."""

    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.base_layer = nn.Identity()
        self.lora_A = nn.ModuleDict({"default": nn.Linear(inputs, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, outputs, bias=False)})
        self.scaling = {"default": 2.0}

    def delta(self) -> torch.Tensor:
        return self.scaling["default"] * self.lora_B["default"].weight @ self.lora_A["default"].weight


class ExpertAdapters(nn.Module):
    """An adapter with A and B of each projection of each expert, as trainers save it whose experts are layers."""

    def __init__(self, base: Any, *, seed: int, rank: int = 4) -> None:
        super().__init__()
        config: dict[str, Any] = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": PROJECTIONS}
        self.peft_config = {"default": SimpleNamespace(to_dict=lambda: config)}
        for path, experts in base.named_modules():
            if not hasattr(experts, "gate_up_proj"):
                continue
            count, both, inputs = experts.gate_up_proj.shape
            for expert in range(count):
                for name, sizes in {
                    "gate_proj": (inputs, both // 2),
                    "up_proj": (inputs, both // 2),
                    "down_proj": (both // 2, inputs),
                }.items():
                    place: nn.Module = self
                    for part in (*path.split("."), str(expert)):
                        if not hasattr(place, part):
                            place.add_module(part, nn.Module())
                        place = getattr(place, part)
                    place.add_module(name, Adapted(*sizes, rank))
        train(self, seed)

    def save(self, folder: Path) -> None:
        """Writes the adapter as PEFT does."""
        folder.mkdir()
        tensors = {
            f"base_model.model.{path.replace('.default.', '.')}": tensor.cpu()
            for path, tensor in self.state_dict().items()
        }
        save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
        (folder / "adapter_config.json").write_text(json.dumps(self.peft_config["default"].to_dict()))

    def merged(self, base: Any) -> Any:
        """A copy of the model that computes with the adapter."""
        model = copy.deepcopy(base)
        with torch.no_grad():
            for path, experts in self.named_modules():
                if not path.endswith(".experts"):
                    continue
                target: Any = model.get_submodule(path)
                for number, expert in experts.named_children():
                    parts: Any = dict(expert.named_children())
                    both = torch.cat((parts["gate_proj"].delta(), parts["up_proj"].delta()))
                    target.gate_up_proj[int(number)] += both
                    target.down_proj[int(number)] += parts["down_proj"].delta()
        return model
