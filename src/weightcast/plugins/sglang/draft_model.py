"""The draft model of one SGLang rank, as a part of what an update writes.

Its tensors have the prefix ``draft.``.  SGLang loads a draft with all of its weights, and then puts the model's
embeddings, and for EAGLE the model's head, in the place of the draft's own.  The table ``d2t`` of an EAGLE 3 head is no
parameter: SGLang computes other numbers from it, once, which this module renews after each commit.
"""

# SGLang is not installed where this is checked.
# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from weightcast.errors import ConfigError, EngineFailure
from weightcast.plugins.drafts import Weights, plain_tensors
from weightcast.receiver.loader import residents_of
from weightcast.receiver.recorder import record_routes
from weightcast.wire.layout import DRAFT_PREFIX, TensorSpec

_TABLE = "d2t"
_HINT = "start SGLang without WEIGHTCAST_DRAFT=update, which leaves the draft as it is"


class DraftModel:
    """A draft whose checkpoint is loaded, and to which SGLang has not lent the model's layers yet.

    Attributes:
        residents: Tensors that an update writes, by name, with the prefix.
    """

    def __init__(self, runner: Any) -> None:
        """Learns what is the draft's own; changes nothing.

        Args:
            runner: SGLang's ``ModelRunner`` of the draft.

        Raises:
            ConfigError: This kind of draft cannot be updated.
        """
        self._runner = runner
        self._model: nn.Module = runner.model
        if getattr(runner.model_config, "quantization", None):
            raise ConfigError(f"the draft is quantised ({runner.model_config.quantization})", hint=_HINT)
        self._worker: Any = None
        everything = residents_of(self._model)
        lent = {name for name in _lent(self._model, eagle3=_is_eagle3(runner)) if name in everything}
        table = getattr(self._model, "hot_token_id", None)
        # SGLang leaves what it computed where the checkpoint was read.
        device = next(self._model.parameters()).device
        self._table = None if table is None else table.to(device) - torch.arange(len(table), device=device)
        self._skipped: frozenset[str] = frozenset()
        specs = [TensorSpec.of(name, tensor) for name, tensor in self._checkpoint()]
        before = plain_tensors(self._model)
        table_too = {} if self._table is None else {_TABLE: self._table}
        recording = record_routes(self._load, specs, everything | table_too)
        changed = [name for name, tensor in plain_tensors(self._model).items() if before.get(name) is not tensor]
        if changed or recording.why:
            what = f"keeps {changed[0]}" if changed else f"computes with {next(iter(recording.why))}"
            raise ConfigError(f"the loader of the draft {what}, which an update would not renew", hint=_HINT)
        places = {name: {route.parameter for route in routes} for name, routes in recording.routes.items()}
        self._skipped = frozenset(name for name, found in places.items() if found & lent)
        self._lent = lent
        self._own = {name: tensor for name, tensor in everything.items() if name not in lent}
        self.residents = {f"{DRAFT_PREFIX}{name}": tensor for name, tensor in (self._own | table_too).items()}

    def checkpoint(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Reads the draft's checkpoint: name with the prefix, and whole tensor in the dtype of its file."""
        return ((f"{DRAFT_PREFIX}{name}", tensor) for name, tensor in self._checkpoint())

    def load_weights(self, weights: Weights) -> None:
        """Gives the draft's loader its own tensors; their names have the prefix."""
        self._load((name.removeprefix(DRAFT_PREFIX), tensor) for name, tensor in weights)

    def attach(self, scheduler: Any) -> None:
        """Checks, now that SGLang is ready, that the draft computes with what an update writes.

        Raises:
            ConfigError: SGLang has put other tensors in the place of the draft's, or keeps a copy of the model's.
        """
        self._worker = getattr(scheduler.draft_worker, "draft_worker", None)
        if self._worker is None or self._worker.draft_runner.model is not self._model:
            raise ConfigError("SGLang's draft worker is not as this plug-in expects", hint=_HINT)
        of_model = {tensor.data_ptr() for tensor in residents_of(scheduler.tp_worker.model_runner.model).values()}
        live = dict(self._model.named_parameters()) | dict(self._model.named_buffers())
        for name, tensor in self._own.items():
            if name not in live or live[name].data_ptr() != tensor.data_ptr():
                raise ConfigError(f"SGLang has put another tensor in the place of the draft's {name}", hint=_HINT)
        for name in self._lent:
            if name in live and live[name].data_ptr() not in of_model:
                raise ConfigError(f"the draft computes with a {name} that is not the model's", hint=_HINT)
        if (self._worker.hot_token_id is None) != (self._table is None):
            raise ConfigError(f"SGLang does not take the draft's words from {_TABLE}", hint=_HINT)
        self.check()

    def renew(self) -> None:
        """Computes from the table what SGLang computes from it, in place.  This is a finisher."""
        for kept in self._words():
            kept.copy_(self._computed())

    def check(self) -> None:
        """Checks that SGLang computes with the table; raises ``EngineFailure`` if not."""
        if any(not torch.equal(kept, self._computed().to(kept.device)) for kept in self._words()):
            raise EngineFailure(f"SGLang translates the draft's words by another table than {DRAFT_PREFIX}{_TABLE}")

    def _words(self) -> list[torch.Tensor]:
        """The tensors that SGLang made of the table."""
        if self._table is None or self._worker is None:
            return []
        return [self._worker.hot_token_id, self._model.hot_token_id]  # pyright: ignore[reportReturnType]

    def _computed(self) -> torch.Tensor:
        assert self._table is not None
        return self._table + torch.arange(len(self._table), device=self._table.device)

    def _checkpoint(self) -> Iterator[tuple[str, torch.Tensor]]:
        read = getattr(self._runner.loader, "_get_all_weights", None)
        if read is None:
            raise ConfigError("the draft was started without a checkpoint", hint=_HINT)
        return read(self._runner.model_config, self._model)

    def _load(self, weights: Weights) -> None:
        self._model.load_weights(self._sorted(weights))  # type: ignore[operator]  SGLang's models all have it

    def _sorted(self, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            if self._table is not None and _TABLE in name:
                self._table.copy_(tensor)  # SGLang's own loader would put another tensor in the place of `hot_token_id`
            elif name not in self._skipped:
                yield name, tensor


def _is_eagle3(runner: Any) -> bool:
    return str(runner.server_args.speculative_algorithm).upper() == "EAGLE3"


def _lent(model: nn.Module, *, eagle3: bool) -> set[str]:
    """Names of the parameters in whose place SGLang will put the model's; ``attach`` checks that it did so."""
    config: Any = model.config
    embeddings, head = "model.embed_tokens.weight", "lm_head.weight"
    if not eagle3 or getattr(model, "load_lm_head_from_target", False):
        return {embeddings, head}
    wide = getattr(config, "target_hidden_size", config.hidden_size) != config.hidden_size
    return set() if wide else {embeddings}
