"""The slot of one LoRA adapter in a vLLM worker, which an update writes directly.

vLLM keeps A and B of every adapter in one tensor for each layer, with one slot for each adapter.  A slot is taken for
good here: vLLM neither evicts the adapter nor loads it from a folder.  The layers' own slicing says which part of a
tensor belongs on this rank.
"""

# vLLM is not installed where this is checked.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportPrivateUsage=false
from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from weightcast.errors import EngineFailure, Refused
from weightcast.plugins.vllm.lora_places import ExpertPlace, LoraPlace, check_complete, place_of
from weightcast.plugins.vllm.lora_wrappers import renames_of
from weightcast.wire.adapters import AdapterRequest
from weightcast.wire.layout import TensorSpec


class LoraSlot:
    """One adapter's place on one rank; ``residents`` is the memory that an update writes: parts of this rank only."""

    def __init__(self, model: Any, manager: Any, request: AdapterRequest, lora_id: int, *, others: bool) -> None:
        """Takes a free slot and empties it.

        Args:
            manager: vLLM's ``LRUCacheLoRAModelManager``.
            lora_id: Number by which vLLM's requests name the adapter.
            others: True if vLLM offers adapters from folders, for which a slot is left: it ends if a request finds
                none.

        Raises:
            Refused: vLLM cannot compute with this adapter, or has no slot for it.  Nothing has changed.
        """
        self._manager = manager
        self._id = lora_id
        self._rank = _check_config(request, manager.lora_config)
        self._places = _places(model, manager, request.specs)
        _check_shapes(request, self._places)
        self._index = _free_slot(manager, others=others)
        for layer in manager.modules.values():
            layer.reset_lora(self._index)
        self._experts = {place.path: place.layer for place in self._places.values() if isinstance(place, ExpertPlace)}
        for layer in self._experts.values():
            layer.adapter_enabled[self._index] = 1
        self.residents: dict[str, torch.Tensor] = {}
        for spec in request.specs:
            if spec.name in self._places:
                self.residents |= self._places[spec.name].memory(self._index, spec)
        self.keep()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copies each tensor into its place; a tensor without a layer on this rank is left out."""
        for name, tensor in weights:
            place = self._places.get(name)
            if place is not None:
                place.write(tensor, self.residents)

    def keep(self) -> None:
        """Tells vLLM that the adapter is loaded and in its slot; also after vLLM has forgotten all adapters."""
        from vllm.lora.lora_model import LoRAModel

        manager = self._manager
        manager._registered_adapters[self._id] = LoRAModel(self._id, self._rank, {})
        manager._active_adapters[self._id] = None
        manager.lora_index_to_id[self._index] = self._id
        manager._registered_adapters.pin(self._id)
        manager._active_adapters.pin(self._id)
        manager._last_mapping = None

    def check_slot(self) -> None:
        """Checks that vLLM still finds the adapter in its slot; raises ``EngineFailure`` if it does not."""
        found = self._manager.lora_index_to_id[self._index]
        if found != self._id or self._id not in self._manager._active_adapters:
            raise EngineFailure(f"vLLM has given the adapter's slot {self._index} to adapter {found}")

    def check(self) -> None:
        """Checks like ``check_slot``, and that nothing but the adapter is in the slot.

        Raises:
            EngineFailure: Another layer, or the padding of one, has values that no update sent.
        """
        self.check_slot()
        kept: dict[int, int] = {}
        for memory in self.residents.values():
            key = memory.untyped_storage().data_ptr()
            kept[key] = kept.get(key, 0) + int(torch.count_nonzero(memory))
        for path, layer in self._manager.modules.items():
            if hasattr(layer, "adapter_enabled") and bool(layer.adapter_enabled[self._index]) != (
                path in self._experts
            ):
                raise EngineFailure(f"vLLM has changed whether the adapter's slot counts in {path}")
            for stacked in _stacks(layer):
                if int(torch.count_nonzero(stacked[self._index])) != kept.get(stacked.untyped_storage().data_ptr(), 0):
                    raise EngineFailure(f"the adapter's slot has values in {path} that no update sent")

    def free(self) -> None:
        """Gives the slot back to vLLM."""
        self._manager.remove_adapter(self._id)
        if self._manager.lora_index_to_id[self._index] == self._id:
            self._manager.lora_index_to_id[self._index] = None


def manager_of(runner: Any) -> Any:
    """vLLM's manager of adapters, from its model runner.

    Raises:
        Refused: vLLM was started without adapters, or in a way that is not supported.
    """
    workers = getattr(runner, "lora_manager", None)
    manager = getattr(workers, "_adapter_manager", None)
    if manager is None:
        raise Refused("vLLM was started without LoRA", hint="start it with --enable-lora and --max-lora-rank N")
    if manager.lora_config.fully_sharded_loras:
        raise Refused(
            "vLLM shards adapters fully, which weightcast has not been tried with",
            hint="start vLLM without --fully-sharded-loras",
        )
    return manager


def _check_config(request: AdapterRequest, lora_config: Any) -> int:
    """Lets vLLM check PEFT's configuration; returns the rank."""
    from vllm.lora.peft_helper import PEFTHelper

    try:
        helper = PEFTHelper.from_dict(dict(request.config))
        helper.validate_legal(lora_config)
    except (ValueError, TypeError) as error:
        raise Refused(f"vLLM refuses the adapter {request.name}: {error}") from error
    return int(helper.r)


def _places(model: Any, manager: Any, specs: Iterable[TensorSpec]) -> dict[str, LoraPlace]:
    from vllm.lora.utils import parse_fine_tuned_lora_name

    mapper = renames_of(model)
    fused = {
        child: (path, number)
        for path, children in manager.packed_modules.items()
        for number, child in enumerate(children)
    }
    found: dict[str, LoraPlace] = {}
    names: dict[str, str] = {}
    of_experts: dict[str, set[str]] = {}
    for spec in specs:
        try:
            child, is_a = parse_fine_tuned_lora_name(spec.name, mapper)
        except ValueError as error:
            raise Refused(f"vLLM has no place for {spec.name}: {error}") from error
        place = place_of(manager, fused, child, is_a=is_a)
        if place is None:
            continue
        other = names.setdefault(place.name, spec.name)
        if other != spec.name:
            raise Refused(f"{spec.name} and {other} have one place in vLLM, {place.name}")
        found[spec.name] = place
        if isinstance(place, ExpertPlace):
            of_experts.setdefault(place.path, set()).add(child)
    check_complete(manager, of_experts)
    return found


def _check_shapes(request: AdapterRequest, places: dict[str, LoraPlace]) -> None:
    """Checks the tensors against the layers that they adapt, and that each A has its B."""
    shapes = {spec.name: spec.shape for spec in request.specs}
    ranks: dict[tuple[str, int, str], int] = {}
    for name, place in places.items():
        other = name.replace(".lora_A.", ".lora_B.") if place.is_a else name.replace(".lora_B.", ".lora_A.")
        if other not in shapes:
            raise Refused(f"{name} has no {other}")
        rows = shapes[name][0 if place.is_a else -1]
        inputs, outputs = place.sizes()
        want = (rows, inputs) if place.is_a else (outputs, rows)
        if shapes[name] != want or shapes[other][-1 if place.is_a else 0] != rows or rows % place.blocks:
            raise Refused(
                f"{name} has shape {list(shapes[name])}, and {place.path} has {inputs} inputs and {outputs} outputs",
                hint="is it an adapter of the model that this engine serves?",
            )
        rank = rows // place.blocks
        if rank > place.most_rank:
            raise Refused(
                f"{name} has rank {rank}, and vLLM was started for ranks up to {place.most_rank}",
                hint=f"start vLLM with --max-lora-rank {rank} or more",
            )
        if isinstance(place, ExpertPlace):
            known = ranks.setdefault((place.path, place.number, place.stack), rank)
            if known != rank:
                raise Refused(
                    f"{name} has rank {rank}, and another expert of {place.path} has rank {known}: vLLM keeps one "
                    "rank for each projection",
                    hint="train all experts with one rank",
                )


def _stacks(layer: Any) -> Iterator[torch.Tensor]:
    """The tensors of a layer that have the slots of all adapters, one after the other.

    Layers of experts name the experts of each slot in lists beside them, and have other names for the tensors.
    """
    experts = hasattr(layer, "w13_lora_a_stacked")
    for part in ("w13_lora_a", "w13_lora_b", "w2_lora_a", "w2_lora_b") if experts else ("lora_a", "lora_b"):
        found = getattr(layer, f"{part}_stacked")
        yield from (found,) if isinstance(found, torch.Tensor) else found


def _free_slot(manager: Any, *, others: bool) -> int:
    """The number of a slot without an adapter; vLLM drops one that it can load again, if it has to."""
    slots: list[int | None] = manager.lora_index_to_id
    pinned = set(manager._active_adapters.pinned_items)
    others = others or any(lora_id not in pinned for lora_id in manager.list_adapters())
    if len(pinned) + others >= len(slots):
        kept = " and one slot is left for the adapters that vLLM loads from folders" if others else ""
        raise Refused(
            f"vLLM has {len(slots)} slots for adapters; {len(pinned)} are taken{kept}",
            hint=f"start vLLM with --max-loras {len(slots) + 1}, or DELETE an adapter of weightcast",
        )
    if None not in slots:
        manager._active_adapters.remove_oldest()
    return slots.index(None)
