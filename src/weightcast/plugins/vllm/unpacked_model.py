"""One vLLM model with the loaded form of its weights, in which an update is staged, read back and reverted.

The loaded form is put into the model while ``load_weights`` runs, and the live form is derived from it after a commit.
A tensor that a kernel holds by reference, such as the biases of experts, gets new contents and never a new object.
"""

# vLLM is not installed where this is checked.
# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from weightcast.errors import ConfigError
from weightcast.plugins.vllm.derivation import Derivation
from weightcast.plugins.vllm.layer_kinds import (
    EXPERTS_IN_PLACE,
    QUANTISED,
    keep_cache_scales,
    kind_of,
    made_with,
)
from weightcast.plugins.vllm.lora_wrappers import without_wrappers
from weightcast.plugins.vllm.twin_layer import TwinLayer
from weightcast.plugins.vllm.weight_copies import AttentionCopies, OutsideReferences
from weightcast.receiver.loader import residents_of


class UnpackedModel:
    """One rank's vLLM model, with the loaded form of its weights.

    Attributes:
        derivation: Derives the live form of all layers.
        residents: Tensors that ``load_weights`` writes, by name.
        constants: Names of tensors that no update needs to write.
    """

    def __init__(self, model: nn.Module, *, device: torch.device, layers: Collection[str] | None = None) -> None:
        """Finds the layers that change their weights, and allocates the loaded form of those.

        Args:
            layers: Names of the modules that are its own; None for all of them.

        Raises:
            ConfigError: A layer transforms its weights in a way that is not supported.
        """
        self._model = model
        keep_cache_scales(model)
        twins = [
            twin
            for name, module in model.named_modules()
            if layers is None or name in layers
            if (twin := _twin_layer(name, module, device)) is not None
        ]
        self.derivation = Derivation(twins)
        self._outside = OutsideReferences(model)
        self._attention = AttentionCopies(model)
        with self.unpacked():
            self.residents = {
                name: tensor
                for name, tensor in residents_of(model).items()
                if layers is None or name.rpartition(".")[0] in layers
            }
        unread = (f"{layer.name}.{key}" for layer in twins for key in layer.unread)
        with without_wrappers(model):  # as the residents are named
            self.constants = frozenset((*_constants(model), *unread))

    @property
    def as_loaded(self) -> bool:
        """True if each layer computes with what the loader has written, so no value has to be read once more."""
        return not self.derivation.layers

    @property
    def quantised_bytes(self) -> int:
        """Memory that the loaded form of quantised layers takes beside the live one."""
        return sum(layer.own_bytes for layer in self.derivation.layers if layer.kind is QUANTISED)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> object:
        """Calls the model's own ``load_weights`` on the loaded form."""
        with self.unpacked():
            return self._model.load_weights(weights)  # type: ignore[operator]  vLLM's models all have it

    @torch.no_grad()
    def pack(self) -> None:
        """Derives the live form of the loaded one.  This is a finisher: the model must be paused."""
        self.derivation.run()
        self._attention.renew()

    def fill_randomly(self) -> None:
        """Fills the loaded form with small random values and packs it, as vLLM fills its own with ``dummy``.

        Raises:
            ConfigError: The kernels of experts may keep another layout than the checkpoint's.  Random weights cannot
                show it, as ``check_layouts`` does.
        """
        for layer in self.derivation.layers:
            if layer.kind is EXPERTS_IN_PLACE:
                raise ConfigError(
                    f"with --load-format dummy the layout of experts in {layer.name} cannot be checked",
                    hint="start vLLM with --moe-backend triton, or without --load-format dummy",
                )
            layer.fill_randomly()
        self.pack()

    @torch.no_grad()
    def check_layouts(self) -> None:
        """Checks, after loading the first weights once more, that the model is as vLLM made it from them.

        Raises:
            ConfigError: The kernels of experts have changed the layout, so an update would mix experts up; or what is
                derived for a layer is not what vLLM derived.
        """
        for layer in self.derivation.layers:
            layer.check_start()

    def spot_check(self) -> None:
        """Checks like ``check``, with a few columns of each linear layer."""
        self.check(few=True)

    @torch.no_grad()
    def check(self, *, few: bool = False) -> None:
        """Checks that the model computes with every element of the loaded weights; ``EngineFailure`` names a layer."""
        self._outside.check()
        self._attention.check()
        for layer in self.derivation.layers:
            layer.check(few=few)

    @contextmanager
    def unpacked(self) -> Generator[None]:
        """Puts the loaded form into the layers.  The model must not compute meanwhile."""
        with ExitStack() as stack:
            stack.enter_context(without_wrappers(self._model))
            for layer in self.derivation.layers:
                stack.enter_context(layer.unpacked())
            yield


def _twin_layer(name: str, module: nn.Module, device: torch.device) -> TwinLayer | None:
    """Makes the twin of a module; None if its kernels read what the loader writes."""
    if getattr(module, "quant_method", None) is None or not dict(module.named_parameters(recurse=False)):
        return None
    kind = kind_of(name, module, device)
    if kind is None:
        return None
    # Expert maps, biases of routers.
    from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS

    made, buffers = made_with(module)
    return TwinLayer(name, module, kind, made=made, always=frozenset(SKIP_TENSORS) | buffers.keys(), device=device)


def _constants(model: nn.Module) -> Iterator[str]:
    """Yields the names of buffers that come from the model's configuration.  A checkpoint may have them too."""
    for prefix, module in model.named_modules():
        made = made_with(module)[1]
        for name, _ in module.named_buffers(recurse=False):
            if name in made or name.startswith("_"):  # vLLM's scales of an unquantised cache
                yield f"{prefix}.{name}" if prefix else name
