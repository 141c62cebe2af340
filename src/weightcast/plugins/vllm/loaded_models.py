"""The model of one vLLM worker, and its draft model if an update writes that too, as one set of tensors.

The tensors of a draft model with a checkpoint of its own have the prefix ``draft.``.  vLLM's loaders see their own
names.  MTP layers (multi-token prediction) are tensors of the model's checkpoint, which the model's loader leaves out
and the draft's loader picks; they keep their names.

Other engines' drafts are a ``DraftModel``: the engine reads what the loader wrote, and a table that it copied.  Here a
draft has a loaded form of its own, may compute with layers of the model, and may have no checkpoint of its own.
"""

# vLLM is not installed where this is checked.
# pyright: reportMissingImports=false
from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from itertools import chain
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
from torch import nn
from vllm.model_executor.model_loader import get_model_loader

from weightcast.digest.definition import tensor_digest
from weightcast.errors import ConfigError
from weightcast.plugins.drafts import Weights, apart
from weightcast.plugins.vllm.rank_protocol import is_dummy
from weightcast.plugins.vllm.unpacked_model import UnpackedModel
from weightcast.receiver.recorder import RecordedLoad, record_routes
from weightcast.receiver.resident_versions import Finisher
from weightcast.wire.layout import DRAFT_PREFIX, TensorSpec
from weightcast.wire.routes import Route

_METHODS = ("draft_model", "eagle", "eagle3", "mtp")


class LoadedModels:
    """One or two models with the loaded form of their weights, and the checkpoints that they were started with."""

    def __init__(self, unpacked: UnpackedModel, checkpoint: CheckpointSpecs) -> None:
        self._parts: dict[str, tuple[UnpackedModel, CheckpointSpecs]] = {"": (unpacked, checkpoint)}
        # Tensors of the model's checkpoint that the draft's loader gets too.
        self._of_both: frozenset[str] = frozenset()
        # Tensors of the draft's checkpoint in whose place vLLM computes with the model's, and the routes they had.
        self._lent: dict[str, list[Route]] = {}

    def add_draft(self, draft: nn.Module, model: nn.Module, vllm_config: Any, device: torch.device) -> None:
        """Loads the draft's checkpoint once more, as it was done for the model; the draft may share layers with it.

        Raises:
            ConfigError: This kind of draft cannot be updated.
        """
        speculative = vllm_config.speculative_config
        check_draft(speculative)
        in_checkpoint = speculative.method == "mtp"
        if in_checkpoint and speculative.draft_model_config.model != vllm_config.model_config.model:
            raise ConfigError(
                "the draft has a checkpoint of its own, and weightcast updates MTP layers of the model's only",
                hint='leave "draft" out of --additional-config',
            )
        config = SimpleNamespace(model_config=speculative.draft_model_config, load_config=_load_config(vllm_config))
        checkpoint = CheckpointSpecs(config, draft)
        if checkpoint.dummy:
            raise ConfigError(
                "a draft model with random weights (--load-format dummy) cannot be updated",
                hint="start vLLM with the draft's checkpoint",
            )
        shared = {id(layer) for layer in model.modules()}
        own = {name for name, layer in draft.named_modules() if id(layer) not in shared}
        checkpoint.read_specs()
        unpacked = UnpackedModel(draft, device=device, layers=own)
        if unpacked.quantised_bytes:
            raise ConfigError(
                "the draft model is quantised, and vLLM's memory has no room for the form that an update loads",
                hint='use a draft in bfloat16, or leave "draft" out of --additional-config',
            )
        lent = {name.rpartition(".")[2] for name, layer in draft.named_modules() if id(layer) in shared and name}
        if in_checkpoint:
            self._of_both = _picked(self._recorded(unpacked, checkpoint.specs))
        elif any(not lent.isdisjoint(spec.name.split(".")) for spec in checkpoint.specs):
            self._lent = _lent_layers(self._recorded(unpacked, checkpoint.specs), checkpoint.specs, lent)
        checkpoint.specs.clear()
        weights = checkpoint.weights()
        if in_checkpoint:
            unpacked.load_weights((name, tensor) for name, tensor in weights if name in self._of_both)
            checkpoint.specs.clear()  # they are the model's
            checkpoint.heads.clear()
        else:
            unpacked.load_weights((name, tensor) for name, tensor in weights if name not in self._lent)
        unpacked.check_layouts()
        unpacked.spot_check()
        self._parts[DRAFT_PREFIX] = unpacked, checkpoint

    @property
    def unpacked(self) -> UnpackedModel:
        """The model itself, which alone may have quantised layers."""
        return self._parts[""][0]

    @property
    def specs(self) -> list[TensorSpec]:
        return [
            msgspec.structs.replace(spec, name=f"{prefix}{spec.name}")
            for prefix, (_, checkpoint) in self._parts.items()
            for spec in checkpoint.specs
        ]

    @property
    def residents(self) -> dict[str, torch.Tensor]:
        """Tensors that ``load_weights`` writes."""
        return {
            f"{prefix}{name}": tensor
            for prefix, (unpacked, _) in self._parts.items()
            for name, tensor in unpacked.residents.items()
        }

    @property
    def constants(self) -> frozenset[str]:
        """Buffers that no update needs to write."""
        return frozenset(
            f"{prefix}{name}" for prefix, (unpacked, _) in self._parts.items() for name in unpacked.constants
        )

    @property
    def heads(self) -> dict[str, str]:
        """As ``CheckpointSpecs.heads``."""
        return {
            f"{prefix}{name}": digest
            for prefix, (_, checkpoint) in self._parts.items()
            for name, digest in checkpoint.heads.items()
        }

    @property
    def finishers(self) -> tuple[Finisher, ...]:
        """Bring the loaded forms into the models, and look at some of each layer."""
        return tuple(do for unpacked, _ in self._parts.values() for do in (unpacked.pack, unpacked.spot_check))

    @property
    def checks(self) -> tuple[Finisher, ...]:
        """Look at every element of each layer."""
        return tuple(unpacked.check for unpacked, _ in self._parts.values())

    def values_of(self, names: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Reads some tensors of the checkpoints once more; none of random weights."""
        for prefix, (_, checkpoint) in self._parts.items():
            own = {name.removeprefix(prefix) for name in names if name.startswith(prefix)}
            if own and not checkpoint.dummy:
                yield from ((f"{prefix}{name}", tensor) for name, tensor in checkpoint.values_of(own))

    def load_weights(self, weights: Weights) -> None:
        """Gives each model's loader its own tensors, in their order; those of the draft come after the model's."""
        if self._of_both:
            pairs = list(weights)
            self._parts[""][0].load_weights(pairs)
            picked = [(name, tensor) for name, tensor in pairs if name in self._of_both]
            if picked:
                self._parts[DRAFT_PREFIX][0].load_weights(picked)
            return
        first, second = apart(weights) if DRAFT_PREFIX in self._parts else (weights, ())
        if (of_model := _unless_empty(first)) is not None:
            self._parts[""][0].load_weights(of_model)
        if (of_draft := _unless_empty(second)) is not None:
            named = ((name.removeprefix(DRAFT_PREFIX), tensor) for name, tensor in of_draft)
            self._parts[DRAFT_PREFIX][0].load_weights(pair for pair in named if pair[0] not in self._lent)

    def copies(self, routes: Mapping[str, Sequence[Route]]) -> dict[str, str]:
        """Names of the draft's tensors that vLLM replaced by the model's, each with the name of the model's.

        ``routes`` are those of all tensors on this rank.

        Raises:
            ConfigError: No single tensor of the model goes where the draft's would have gone.
        """
        found: dict[str, str] = {}
        for name, places in self._lent.items():
            same = [source for source, other in routes.items() if _places(other) == _places(places)]
            if len(same) != 1:
                raise _instead(name, places[0].parameter)
            found[f"{DRAFT_PREFIX}{name}"] = same[0]
        return found

    def _recorded(self, draft: UnpackedModel, specs: Sequence[TensorSpec]) -> RecordedLoad:
        """Where the draft's loader puts tensors: into its own parameters, which have the prefix, or the model's."""
        model = self._parts[""][0]

        def load(weights: Weights) -> None:
            with model.unpacked():
                draft.load_weights(weights)

        own = {f"{DRAFT_PREFIX}{name}": tensor for name, tensor in draft.residents.items()}
        return record_routes(load, specs, model.residents | own)


def _load_config(vllm_config: Any) -> Any:
    try:
        from vllm.model_executor.model_loader.utils import get_draft_load_config
    except ImportError:  # version 0.25.1
        return vllm_config.speculative_config.draft_load_config or vllm_config.load_config
    return get_draft_load_config(vllm_config)


def _unless_empty(weights: Weights) -> Weights | None:
    rest = iter(weights)
    first = next(rest, None)
    return None if first is None else chain((first,), rest)


def _places(routes: Sequence[Route]) -> frozenset[Route]:
    return frozenset(msgspec.structs.replace(route, source="") for route in routes)


def _instead(name: str, layer: str) -> ConfigError:
    return ConfigError(
        f"the draft's checkpoint has {name}, and vLLM computes with the model's {layer} instead",
        hint="take the tensor out of the draft's checkpoint",
    )


def _lent_layers(recording: RecordedLoad, specs: Sequence[TensorSpec], lent: Set[str]) -> dict[str, list[Route]]:
    """The draft's tensors that its loader would put into layers that vLLM lends from the model, and their routes.

    vLLM lends a layer that the draft's checkpoint has too if both had the same values at the start.  ``lent`` are the
    last parts of the names of these layers.

    Raises:
        ConfigError: A tensor goes into layers of both, or the loader computes with it.
    """
    found: dict[str, list[Route]] = {}
    for spec in specs:
        routes = recording.routes.get(spec.name, [])
        into = [route for route in routes if not route.parameter.startswith(DRAFT_PREFIX)]
        suspected = not lent.isdisjoint(spec.name.split("."))
        if (into and len(into) != len(routes)) or (suspected and spec.name in recording.why):
            raise _instead(spec.name, min(lent))
        if into:
            found[spec.name] = into
    return found


def _picked(recording: RecordedLoad) -> frozenset[str]:
    """Names of the tensors that the draft's loader puts into the draft's own parameters, and nowhere else.

    It would put others, such as a head of an MTP layer, into layers that vLLM lends from the model.  Those are the
    model's to load.

    Raises:
        ConfigError: The loader computes weights, so that it does not show where they go.
    """
    if recording.why:
        name, why = next(iter(recording.why.items()))
        raise ConfigError(
            f"the loader of the MTP layers computes with {name}: {why}",
            hint='leave "draft" out of --additional-config',
        )
    own = {
        name: {route.parameter.startswith(DRAFT_PREFIX) for route in routes}
        for name, routes in recording.routes.items()
    }
    found = frozenset(name for name, which in own.items() if which == {True})
    mixed = [name for name, which in own.items() if which == {True, False}]
    if mixed or not found:
        what = f"{mixed[0]} goes into layers of both" if mixed else "no tensor of the checkpoint is theirs alone"
        raise ConfigError(
            f"the MTP layers cannot be told from the model's: {what}", hint='leave "draft" out of --additional-config'
        )
    return found


def draft_model_of(runner: Any) -> nn.Module | None:
    """The draft model of one of vLLM's model runners; None if an update can reach none."""
    find = getattr(runner, "get_draft_model", None)
    if find is not None:
        return find()
    # Version 0.25.1 has no such method; its second runner has a speculator in the place of a drafter.
    proposer = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
    draft: Any = getattr(proposer, "model", None)
    if not isinstance(draft, nn.Module) and hasattr(draft, "unwrap"):
        draft = draft.unwrap()  # from what captures its CUDA graphs
    return draft if isinstance(draft, nn.Module) else None


def check_draft(speculative: Any) -> None:
    """Checks that an update can write the kind of draft in a ``SpeculativeConfig``; raises ``ConfigError`` if not."""
    method = getattr(speculative, "method", None)
    if method not in _METHODS:
        what = "vLLM was started without a draft model" if method is None else f"drafts by {method} cannot be updated"
        raise ConfigError(what, hint=f'leave "draft" out of --additional-config, or use one of {", ".join(_METHODS)}')
    if getattr(speculative, "parallel_drafting", False):
        raise ConfigError(
            "a draft with parallel drafting keeps values that it computed from its first weights",
            hint="start vLLM without parallel drafting",
        )


class CheckpointSpecs:
    """The tensors of the checkpoint that vLLM was started with, known once ``weights`` has been read to its end.

    Attributes:
        specs: The tensors of a full update, in the order of the checkpoint.
        left_out: Names of the tensors that no update contains.
        heads: Digests of tensors with a row for each word, by name, if vLLM may drop one that equals another.
        dummy: True if vLLM was started with random weights, so that the checkpoint's values are not in the model.
    """

    def __init__(self, vllm_config: Any, model: nn.Module, *, not_updated: str = "") -> None:
        """Reads nothing yet.  ``not_updated`` is the setting of this name."""
        self._config = vllm_config.model_config
        self._load_config = vllm_config.load_config
        self._model = model
        self.dummy = is_dummy(vllm_config)
        self._not_updated = not_updated
        self.specs: list[TensorSpec] = []
        self.left_out: list[str] = []
        self.heads: dict[str, str] = {}

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields every tensor; ``ConfigError`` without a checkpoint.  vLLM maps files: unused bytes are not read."""
        words = self._config.get_vocab_size() if self._may_tie() else -1
        config = dataclasses.replace(self._load_config, load_format="auto") if self.dummy else self._load_config
        loader = get_model_loader(config)
        if not hasattr(loader, "get_all_weights"):
            raise ConfigError(f"load format {self._load_config.load_format} has no checkpoint to read")
        try:
            for name, tensor in loader.get_all_weights(self._config, self._model):
                if self._not_updated and re.fullmatch(self._not_updated, name):
                    self.left_out.append(name)
                    yield name, tensor
                    continue
                self.specs.append(TensorSpec.of(name, tensor))
                if tensor.ndim == 2 and tensor.shape[0] == words:
                    self.heads[name] = tensor_digest(tensor)
                yield name, tensor
        except (RuntimeError, OSError) as error:
            if not self.dummy:
                raise
            raise _no_names(f"{self._config.model} has no readable checkpoint: {error}") from error
        if not self.specs and not self.left_out:
            raise _no_names("vLLM was started without a checkpoint")
        self._check_left_out()

    def values_of(self, names: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Reads some tensors of the checkpoint once more."""
        specs, heads, left_out = [*self.specs], dict(self.heads), [*self.left_out]
        try:
            yield from ((name, tensor) for name, tensor in self.weights() if name in names)
        finally:
            self.specs[:], self.heads, self.left_out = specs, heads, left_out

    def _check_left_out(self) -> None:
        if not self._not_updated:
            return
        setting = f"the setting not_updated, {self._not_updated!r},"
        hint = "it is a regular expression for whole names of the checkpoint's tensors"
        if not self.left_out or not self.specs:
            raise ConfigError(f"{setting} matches {'every' if self.left_out else 'no'} tensor", hint=hint)
        if self.dummy:
            raise ConfigError(
                f"{setting} would leave random weights in {self.left_out[0]} (--load-format dummy)",
                hint="start vLLM with the checkpoint's weights",
            )

    def read_specs(self) -> None:
        """Reads names, dtypes and shapes only."""
        for _ in self.weights():
            pass

    def _may_tie(self) -> bool:
        """Returns whether vLLM may drop a stored head because it equals the word embeddings."""
        text = self._config.hf_config.get_text_config()
        untied = getattr(self._config, "word_embeddings_untied_by_checkpoint", False)
        return bool(untied or getattr(text, "tie_word_embeddings", False))


def _no_names(why: str) -> ConfigError:
    return ConfigError(
        f"{why}, so the names of its weights are unknown",
        hint="start vLLM from a folder with the checkpoint's safetensors files; with --load-format dummy "
        "weightcast reads their headers only",
    )
