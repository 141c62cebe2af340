"""Runs under a Python that has vLLM: our slot of an adapter of experts beside the slot that vLLM's own loading fills.

The layers are vLLM's classes without their kernels.  Prints one JSON object of cases; ``test_vllm_lora_experts.py``
says what they have to be.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from vllm.lora import lora_model, model_manager
from vllm.lora.layers import FusedMoE3DWithLoRA, FusedMoEWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.model_manager import AdapterLRUCache, LRUCacheLoRAModelManager
from vllm.lora.peft_helper import PEFTHelper
from vllm.model_executor.layers.fused_moe.fused_moe_modular_method import FusedMoEModularMethod
from vllm.model_executor.layers.quantization.fp8 import Fp8MoEMethod

from weightcast.errors import ConfigError, EngineFailure, Refused
from weightcast.plugins.vllm.layer_kinds import kind_of
from weightcast.plugins.vllm.lora_slot import LoraSlot
from weightcast.receiver.coverage import uncovered
from weightcast.receiver.recorder import record_routes
from weightcast.wire.adapters import AdapterRequest
from weightcast.wire.layout import TensorSpec

EXPERTS, HIDDEN, INNER, RANK = 3, 10, 8, 4
PATH = "model.layers.0.mlp.experts"
PREFIX = f"base_model.model.{PATH}"
CONFIG = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["experts"], "bias": "none"}


def by_expert(rank: int = RANK) -> dict[str, torch.Tensor]:
    """An adapter with A and B of each projection of each expert."""
    found: dict[str, torch.Tensor] = {}
    for expert in range(EXPERTS):
        for name, sizes in {
            "gate_proj": (HIDDEN, INNER),
            "down_proj": (INNER, HIDDEN),
            "up_proj": (HIDDEN, INNER),
        }.items():
            found[f"{PREFIX}.{expert}.{name}.lora_A.weight"] = torch.randn(rank, sizes[0])
            found[f"{PREFIX}.{expert}.{name}.lora_B.weight"] = torch.randn(sizes[1], rank)
    return found


def stacked() -> dict[str, torch.Tensor]:
    """An adapter with A and B of two parameters that have all experts, as PEFT saves it."""
    return {
        f"{PREFIX}.base_layer.lora_A.weight": torch.randn(EXPERTS * RANK, HIDDEN),
        f"{PREFIX}.base_layer.lora_B.weight": torch.randn(2 * INNER, EXPERTS * RANK),
        f"{PREFIX}.lora_A.weight": torch.randn(EXPERTS * RANK, INNER),
        f"{PREFIX}.lora_B.weight": torch.randn(HIDDEN, EXPERTS * RANK),
    }


class Rig:
    """vLLM's manager of adapters with one layer of experts, on one of several ranks."""

    def __init__(
        self, kind: Any, *, rank: int, ranks: int, mixed: bool = False, family: str = "Any", **layer: Any
    ) -> None:
        self.layer = kind.__new__(kind)
        nn.Module.__init__(self.layer)
        inner = INNER // ranks
        parallel = SimpleNamespace(tp_size=ranks, tp_rank=rank, ep_rank=0, use_ep=layer.pop("use_ep", False))
        self.layer.moe_config = SimpleNamespace(
            hidden_dim=HIDDEN,
            num_experts=EXPERTS,
            num_local_experts=EXPERTS,
            intermediate_size_per_partition=inner,
            intermediate_size_per_partition_unpadded=inner,
            moe_parallel_config=parallel,
        )
        self.layer.base_layer = nn.Module()
        self.layer.tp_size, self.layer.tp_rank, self.layer.device = ranks, rank, "cpu"
        self.layer.enable_moe_shared_loras = False
        self.layer._w13_slices = 1 if kind is FusedMoE3DWithLoRA else 2
        config = SimpleNamespace(
            max_lora_rank=2 * RANK,
            max_loras=3,
            max_cpu_loras=3,
            fully_sharded_loras=False,
            lora_dtype=torch.float32,
            enable_moe_shared_loras=False,
        )
        architecture = SimpleNamespace(architectures=[family])
        self.layer.create_lora_weights(config.max_loras, config, architecture)
        for name, value in layer.items():
            setattr(self.layer, name, value)
        manager: Any = LRUCacheLoRAModelManager.__new__(LRUCacheLoRAModelManager)
        manager.model = SimpleNamespace(config=architecture)
        manager.lora_config, manager.modules = config, {PATH: self.layer}
        names = [f"{PATH}.{expert}.{name}_proj" for expert in range(EXPERTS) for name in ("gate", "down", "up")]
        manager.packed_modules = {} if kind is FusedMoE3DWithLoRA else {PATH: names}
        manager.is_pooling_model = manager._is_non_gated_moe = manager._enable_moe_shared_loras = False
        manager._classification_head = None
        manager._is_3d_moe_model = kind is FusedMoE3DWithLoRA
        manager._enable_mixed_moe_lora_format = mixed
        manager._registered_adapters = AdapterLRUCache(3, manager.deactivate_adapter)
        manager._active_adapters = AdapterLRUCache(3, manager._deactivate_adapter)
        manager.lora_index_to_id = [None] * 3
        self.manager = manager

    def slot(self, tensors: dict[str, torch.Tensor]) -> LoraSlot:
        specs = tuple(TensorSpec.of(name, tensor) for name, tensor in tensors.items())
        request = AdapterRequest(name="ours", config=CONFIG, specs=specs)
        return LoraSlot(self.manager.model, self.manager, request, 1, others=False)

    def compared(self, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        """Loads the same adapter in both ways, once more than needed: the first values must be gone."""
        slot = self.slot(tensors)
        specs = tuple(TensorSpec.of(name, tensor) for name, tensor in tensors.items())
        recording = record_routes(slot.load_weights, specs, slot.residents)
        missing = uncovered([route for routes in recording.routes.values() for route in routes], slot.residents)
        slot.load_weights((name, torch.full_like(tensor, 7)) for name, tensor in tensors.items())
        slot.load_weights(tensors.items())
        slot.check()
        lora = LoRAModel.from_lora_tensors(
            2, {name: tensor.clone() for name, tensor in tensors.items()}, PEFTHelper.from_dict(CONFIG), device="cpu"
        )
        lora.is_3d_lora_weight = f"{PREFIX}.lora_A.weight" in tensors
        self.manager.add_adapter(lora)
        self.manager.activate_adapter(2)
        ours, theirs = (self.manager.lora_index_to_id.index(lora_id) for lora_id in (1, 2))
        stacks = [
            stack for part in ("w13_lora_a", "w13_lora_b", "w2_lora_a", "w2_lora_b") for stack in self.all_of(part)
        ]
        return {
            "equal": all(torch.equal(stack[ours], stack[theirs]) for stack in stacks),
            "values": all(bool(stack[ours].any()) for stack in stacks),
            "enabled": self.layer.adapter_enabled.tolist(),
            "computed": sorted(recording.why),
            "uncovered": missing,
        }

    def all_of(self, part: str) -> Any:
        return getattr(self.layer, f"{part}_stacked")

    def changed(self) -> str:
        """Words of the check, if vLLM no longer counts the slot."""
        slot = self.slot(by_expert())
        self.layer.adapter_enabled[0] = 0
        try:
            slot.check()
        except EngineFailure as error:
            return str(error)
        return ""

    def refused(self, tensors: dict[str, torch.Tensor]) -> list[Any]:
        """Words of the refusal, and whether the slots are as they were."""
        try:
            self.slot(tensors)
        except Refused as error:
            return [f"{error} {error.hint}", self.manager.lora_index_to_id == [None] * 3]
        return ["", False]


def of_quantised_experts() -> str:
    """Words of the refusal at the start, for experts in fp8 below a LoRA wrapper."""
    method: Any = FusedMoEModularMethod.__new__(FusedMoEModularMethod)
    nn.Module.__init__(method)
    method.old_quant_method = Fp8MoEMethod.__new__(Fp8MoEMethod)
    try:
        kind_of("experts", SimpleNamespace(quant_method=method), torch.device("cpu"))
    except ConfigError as error:
        return str(error)
    return ""


def without(tensors: dict[str, torch.Tensor], part: str) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if part not in name}


def main() -> None:
    torch.manual_seed(0)
    lora_model.PIN_MEMORY = model_manager.PIN_MEMORY = False  # there is no GPU
    two, three = FusedMoEWithLoRA, FusedMoE3DWithLoRA
    said: dict[str, Any] = {}
    for rank, ranks in ((0, 1), (0, 2), (1, 2)):
        where = f"{rank} of {ranks}"
        at = {"rank": rank, "ranks": ranks}
        said[f"by expert, {where}"] = Rig(two, **at).compared(by_expert())
        said[f"stacked, {where}"] = Rig(three, **at).compared(stacked())
        said[f"stacked, interleaved, {where}"] = Rig(three, family="GptOssForCausalLM", **at).compared(stacked())
        said[f"stacked, in layers for both, {where}"] = Rig(two, mixed=True, **at).compared(stacked())
    alone = {"rank": 0, "ranks": 1}
    said["quantised"] = of_quantised_experts()
    said["changed"] = Rig(two, **alone).changed()
    other = by_expert(2)
    uneven = {name: other[name] if ".2.up_proj." in name else tensor for name, tensor in by_expert().items()}
    said["refused"] = {
        "an expert is missing": Rig(two, **alone).refused(without(by_expert(), ".1.")),
        "a projection is missing": Rig(two, **alone).refused(without(by_expert(), "up_proj")),
        "gate and up are missing": Rig(three, **alone).refused(without(stacked(), "base_layer")),
        "both forms": Rig(two, **alone).refused(by_expert() | stacked()),
        "ranks": Rig(two, **alone).refused(uneven),
        "too high a rank": Rig(two, **alone).refused(by_expert(16)),
        "by expert, where gate and up are one": Rig(three, **alone).refused(by_expert()),
        "interleaved, in layers for both": Rig(two, family="GptOssForCausalLM", **alone).refused(stacked()),
        "experts on other ranks": Rig(two, use_ep=True, **alone).refused(by_expert()),
        "shared": Rig(two, enable_moe_shared_loras=True, **alone).refused(by_expert()),
        "another model": Rig(two, **alone).refused(
            {name: torch.cat((tensor, tensor), -1) for name, tensor in by_expert().items()}
        ),
    }
    print("RIG " + json.dumps(said))


main()
