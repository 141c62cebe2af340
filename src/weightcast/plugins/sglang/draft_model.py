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

from weightcast.plugins.drafts import TABLE, Draft, Weights
from weightcast.receiver.loader import residents_of
from weightcast.wire.layout import DRAFT_PREFIX


class DraftModel(Draft):
    """A draft whose checkpoint is loaded, and to which SGLang has not lent the model's layers yet."""

    def __init__(self, runner: Any) -> None:
        """Learns what is the draft's own; changes nothing.

        Args:
            runner: SGLang's ``ModelRunner`` of the draft.

        Raises:
            ConfigError: This kind of draft cannot be updated.
        """
        super().__init__("SGLang", runner.model, getattr(runner.model, "hot_token_id", None))
        self._runner = runner
        if getattr(runner.model_config, "quantization", None):
            raise self._refused(f"the draft is quantised ({runner.model_config.quantization})")
        self._worker: Any = None
        self._skipped: frozenset[str] = frozenset()
        self._lent = _lent(self._model, eagle3=_is_eagle3(runner)) & self._everything.keys()
        places = self._destinations(self._checkpoint())
        self._skipped = frozenset(name for name, found in places.items() if found & self._lent)
        self._own = {name: tensor for name, tensor in self._everything.items() if name not in self._lent}
        self.residents = {f"{DRAFT_PREFIX}{name}": tensor for name, tensor in (self._own | self._tables()).items()}

    def checkpoint(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Reads the draft's checkpoint: name with the prefix, and whole tensor in the dtype of its file."""
        return ((f"{DRAFT_PREFIX}{name}", tensor) for name, tensor in self._checkpoint())

    def attach(self, scheduler: Any) -> None:
        """Checks, now that SGLang is ready, that the draft computes with what an update writes.

        Raises:
            ConfigError: SGLang has put other tensors in the place of the draft's, or keeps a copy of the model's.
        """
        self._worker = getattr(scheduler.draft_worker, "draft_worker", None)
        if self._worker is None or self._worker.draft_runner.model is not self._model:
            raise self._refused("SGLang's draft worker is not as this plug-in expects")
        of_model = {tensor.data_ptr() for tensor in residents_of(scheduler.tp_worker.model_runner.model).values()}
        live = dict(self._model.named_parameters()) | dict(self._model.named_buffers())
        for name, tensor in self._own.items():
            if name not in live or live[name].data_ptr() != tensor.data_ptr():
                raise self._refused(f"SGLang has put another tensor in the place of the draft's {name}")
        for name in self._lent:
            if name in live and live[name].data_ptr() not in of_model:
                raise self._refused(f"the draft computes with a {name} that is not the model's")
        if (self._worker.hot_token_id is None) != (self._table is None):
            raise self._refused(f"SGLang does not take the draft's words from {TABLE}")
        self.check()

    def renew(self) -> None:
        """Computes from the table what SGLang computes from it, in place.  This is a finisher."""
        for kept in self._words():
            kept.copy_(self._computed())

    def _words(self) -> list[torch.Tensor]:
        """The tensors that SGLang made of the table."""
        if self._table is None or self._worker is None:
            return []
        return [self._worker.hot_token_id, self._model.hot_token_id]  # pyright: ignore[reportReturnType]

    def _checkpoint(self) -> Iterator[tuple[str, torch.Tensor]]:
        read = getattr(self._runner.loader, "_get_all_weights", None)
        if read is None:
            raise self._refused("the draft was started without a checkpoint")
        return read(self._runner.model_config, self._model)

    def _load_own(self, weights: Weights) -> None:
        own = ((name, tensor) for name, tensor in self._without_table(weights) if name not in self._skipped)
        self._model.load_weights(own)  # type: ignore[operator]  SGLang's models all have it


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
