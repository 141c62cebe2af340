"""Where the tensors of a LoRA adapter belong in vLLM's layers: linear layers, and layers of experts.

vLLM keeps A and B of all adapters in stacked tensors of each layer, one row for each slot.  Those of experts have a
dimension more: ``w13`` has gate and up, as one or as two tensors, and ``w2`` has down.
"""

# vLLM is not installed where this is checked.
# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weightcast.errors import Refused
from weightcast.wire.layout import TensorSpec

_PROJECTIONS = (("w13", 0), ("w2", 0), ("w13", 1))  # gate, down and up, in the order of vLLM's names for an expert
_INTERLEAVED = "GptOssForCausalLM"  # rows of gate and up take turns


@dataclass(frozen=True, slots=True)
class LoraPlace:
    """Where a tensor of an adapter belongs, in a linear layer.

    Attributes:
        number: Which of the fused projections of the layer it belongs to.
        is_a: True for A, False for B.
    """

    layer: Any  # vLLM is not installed where types are checked
    path: str
    number: int
    is_a: bool

    @property
    def name(self) -> str:
        """A name that no other tensor's place has."""
        return f"{self.path}.lora_{'a' if self.is_a else 'b'}.{self.number}"

    @property
    def blocks(self) -> int:
        """The number of matrices that the tensor consists of, each with the adapter's rank."""
        return 1

    @property
    def most_rank(self) -> int:
        """The highest rank that vLLM was started for."""
        return int(self.layer.lora_a_stacked[self.number].shape[2])

    def part(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part of a whole tensor that this rank keeps, as a view."""
        layer = self.layer
        if layer.tp_size < 2:
            return tensor
        cut = layer.slice_lora_a if self.is_a else layer.slice_lora_b
        if layer.n_slices < 2:
            return cut(tensor)
        parts: list[torch.Tensor | None] = [None] * layer.n_slices
        parts[self.number] = tensor
        return cut(parts)[self.number]

    def memory(self, slot: int, spec: TensorSpec) -> dict[str, torch.Tensor]:
        """The parts of the slot where the tensor belongs, by name; what is left of the slot's rows stays zero."""
        rows, columns = self.part(torch.empty(spec.shape, device="meta")).shape
        stacked = self.layer.lora_a_stacked if self.is_a else self.layer.lora_b_stacked
        return {self.name: stacked[self.number][slot, 0, :rows, :columns]}

    def write(self, tensor: torch.Tensor, residents: Mapping[str, torch.Tensor]) -> None:
        """Copies this rank's part of the tensor into the memory of its place."""
        residents[self.name].copy_(self.part(tensor))

    def sizes(self) -> tuple[int, int]:
        """Inputs and outputs of the projection that the tensor adapts, of all ranks together."""
        from vllm.model_executor.layers.linear import QKVParallelLinear

        base = self.layer.base_layer
        if isinstance(base, QKVParallelLinear) and self.layer.n_slices > 1:
            heads = base.total_num_heads if self.number == 0 else base.total_num_kv_heads
            width = base.v_head_size if self.number == 2 and hasattr(base, "v_head_size") else base.head_size
            return int(base.input_size), int(heads * width)
        outputs = base.output_sizes[self.number] if self.layer.n_slices > 1 else base.output_size
        return int(base.input_size), int(outputs)


@dataclass(frozen=True, slots=True)
class ExpertPlace(LoraPlace):
    """Where a tensor of an adapter belongs, in a layer of experts.

    A tensor is A or B of one projection of one expert, or of all experts as PEFT stacks them for a parameter with
    three dimensions: A has the experts one below the other, and B has them side by side, once for each rank.

    Attributes:
        stack: ``w13`` or ``w2``.
        expert: Number of the expert; None for all.
        interleaved: True if the rows of gate and up take turns.
    """

    stack: str
    expert: int | None
    interleaved: bool

    @property
    def name(self) -> str:
        return f"{self._kept_in(self.number)}.{'all' if self.expert is None else self.expert}"

    @property
    def blocks(self) -> int:
        return int(self.layer.local_num_experts) if self.expert is None else 1

    @property
    def most_rank(self) -> int:
        return int(self._stacked("a")[0].shape[2])

    def memory(self, slot: int, spec: TensorSpec) -> dict[str, torch.Tensor]:
        """As ``LoraPlace.memory``: every expert of the layer has a part of the same tensors."""
        rank = spec.shape[0 if self.is_a else -1] // self.blocks
        return {
            self._kept_in(number): self._stacked()[number][slot].narrow(1 if self.is_a else 2, 0, rank)
            for number in self._numbers()
        }

    def write(self, tensor: torch.Tensor, residents: Mapping[str, torch.Tensor]) -> None:
        """As ``LoraPlace.write``, matrix by matrix: each copy is of a box, so that it can be recorded."""
        dim = 1 if self.is_a else 0  # along which ranks share a projection
        for number in self._numbers():
            for whole, matrix in self._matrices(residents[self._kept_in(number)], tensor):
                for target, source in self._halves(number, whole, matrix):
                    kept = target.shape[dim]
                    first = self.layer.tp_rank * kept if source.shape[dim] > kept else 0
                    target.copy_(source.narrow(dim, first, kept))

    def sizes(self) -> tuple[int, int]:
        """As ``LoraPlace.sizes``."""
        inputs, outputs = int(self._stacked("a")[0].shape[-1]), int(self._stacked("b")[0].shape[-2])
        if self.stack == "w2":
            return inputs * self.layer.tp_size, outputs
        both = len(self._stacked("b")) if self.expert is None else 1
        return inputs, outputs * self.layer.tp_size * both

    def _stacked(self, which: str = "") -> Sequence[torch.Tensor]:
        return getattr(self.layer, f"{self.stack}_lora_{which or ('a' if self.is_a else 'b')}_stacked")

    def _numbers(self) -> Sequence[int]:
        return range(len(self._stacked())) if self.expert is None else (self.number,)

    def _kept_in(self, number: int) -> str:
        return f"{self.path}.{self.stack}_lora_{'a' if self.is_a else 'b'}.{number}"

    def _matrices(self, memory: torch.Tensor, tensor: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs of a part of the memory and the part of the tensor that belongs there, before ranks share it."""
        if self.expert is not None:
            yield memory[self.expert], tensor
        elif self.is_a:
            yield from zip(memory.unbind(0), tensor.chunk(self.blocks), strict=True)
        else:
            for column, experts in zip(memory.unbind(-1), tensor.split(self.blocks, dim=1), strict=True):
                yield column.t(), experts

    def _halves(
        self, number: int, target: torch.Tensor, source: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Gate and up by themselves, where a B has both: each of them is shared among ranks."""
        if self.is_a or self.stack == "w2" or self.expert is not None or self.interleaved:
            yield target, source
        elif len(self._numbers()) > 1:
            yield target, source.chunk(2)[number]
        else:
            yield from zip(target.chunk(2), source.chunk(2), strict=True)


def place_of(manager: Any, fused: Mapping[str, tuple[str, int]], child: str, *, is_a: bool) -> LoraPlace | None:
    """The place of A or B of a module; None if this rank has no layer for it.

    Args:
        manager: vLLM's manager of adapters.
        fused: Path of the layer that a module is a part of, and the number of the part.

    Raises:
        Refused: vLLM has the layer, and cannot compute with this tensor in it, or weightcast cannot write it.
    """
    from vllm.lora.layers import FusedMoEWithLoRA
    from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA

    path, number = fused.get(child, (child, 0))
    above = [child]
    while above[-1]:
        above.append(above[-1].rpartition(".")[0])
    around = next((name for name in above if isinstance(manager.modules.get(name), FusedMoEWithLoRA)), None)
    if around is not None:
        return _expert_place(manager, around, child, number if child in fused else None, is_a=is_a)
    layer = manager.modules.get(path)
    if layer is None:
        return None
    parts = len(manager.packed_modules.get(path, (child,)))
    if not isinstance(layer, BaseLinearLayerWithLoRA) or layer.n_slices != parts:
        raise Refused(
            f"{child}: adapters of vLLM's {type(layer).__name__} cannot be sent by themselves",
            hint="adapt linear layers and experts only, or send the merged weights",
        )
    return LoraPlace(layer, path, number, is_a)


def check_complete(manager: Any, found: Mapping[str, set[str]]) -> None:
    """Checks that an adapter adapts whole layers of experts, as vLLM's slots need it.

    Args:
        found: Names of the adapter's modules, by path of the layer of experts.

    Raises:
        Refused: An expert or a projection is missing, or is there twice.
    """
    for path, has in found.items():
        stacked = {path, f"{path}.base_layer"}
        wants = stacked if has & stacked else set(manager.packed_modules[path])
        if has != wants:
            raise Refused(
                f"vLLM adapts every projection of every expert of a layer, or none, and the adapter has more or less: "
                f"{', '.join(sorted(has ^ wants)[:3])}",
                hint="adapt gate, up and down of all experts",
            )


def _expert_place(manager: Any, path: str, child: str, number: int | None, *, is_a: bool) -> ExpertPlace:
    from vllm.lora.layers import FusedMoE3DWithLoRA

    layer = manager.modules[path]
    interleaved = _INTERLEAVED in (getattr(manager.model.config, "architectures", None) or ())
    if layer.use_ep or getattr(layer, "enable_moe_shared_loras", False):
        flag = "--enable-expert-parallel" if layer.use_ep else "--enable-moe-shared-loras"
        raise Refused(
            f"{child}: adapters of experts have not been tried with vLLM's {flag}",
            hint=f"start vLLM without {flag}, or send the merged weights",
        )
    if number is not None:
        each = len(manager.packed_modules[path]) // layer.local_num_experts
        stack, part = _PROJECTIONS[number % each]
        return ExpertPlace(layer, path, part, is_a, stack, number // each, interleaved)
    one_tensor = isinstance(layer, FusedMoE3DWithLoRA)
    if child not in (path, f"{path}.base_layer"):
        raise Refused(
            f"{child} is an adapter of one expert, and vLLM keeps gate and up of this model as one",
            hint="start vLLM with --enable-mixed-moe-lora-format, or adapt the parameters gate_up_proj and down_proj",
        )
    if not one_tensor and (interleaved or len(layer.w13_lora_b_stacked) != 2):
        raise Refused(
            f"{child} has gate and up of all experts in a form that vLLM's {type(layer).__name__} does not keep",
            hint="start vLLM without --enable-mixed-moe-lora-format, or send the merged weights",
        )
    return ExpertPlace(layer, path, 0, is_a, "w2" if child == path else "w13", None, interleaved and one_tensor)
