"""The EAGLE head of one LMDeploy worker, as a part of what an update writes.

Its tensors have the prefix ``draft.``.  An EAGLE 3 head without embeddings of its own gets the model's.  Its table
``d2t`` is no parameter: LMDeploy computes other numbers from it when it loads the head, which this module renews after
each switch.
"""

# LMDeploy is not installed where this is checked.
# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from weightcast.errors import ConfigError, EngineFailure
from weightcast.plugins.drafts import Weights, plain_tensors
from weightcast.receiver.loader import residents_of
from weightcast.receiver.recorder import record_routes
from weightcast.wire.layout import DRAFT_PREFIX, TensorSpec

_TABLE = "d2t"
_MADE_OF_TABLE = "draft_id_to_target_id"
_HINT = "start LMDeploy without WEIGHTCAST_DRAFT=update, which leaves the draft as it is"


class DraftModel:
    """A head whose checkpoint is loaded.

    Attributes:
        module: LMDeploy's model of the head.
        residents: Tensors that an update writes, by name, with the prefix.
    """

    def __init__(
        self,
        proposer: Any,
        model: nn.Module,
        *,
        load: Callable[[nn.Module, Weights], None],
        checkpoint: Callable[[], Weights],
    ) -> None:
        """Learns what is the head's own; writes the same weights once more.

        Args:
            proposer: LMDeploy's proposer, whose head has its weights.
            model: The model that it speculates for.
            load: Loads whole tensors into a model, as LMDeploy does at its start.
            checkpoint: Reads the head's checkpoint: name and whole tensor.

        Raises:
            ConfigError: This head cannot be updated.
        """
        self._proposer, self._load = proposer, load
        self.module: nn.Module = proposer.model
        if getattr(proposer.specdecode_config.model_config.hf_config, "quantization_config", None):
            raise ConfigError("the draft is quantised", hint=_HINT)
        of_model = {tensor.data_ptr() for tensor in residents_of(model).values() if tensor.numel()}
        everything = residents_of(self.module)
        own = {name: tensor for name, tensor in everything.items() if tensor.data_ptr() not in of_model}
        self._made = own.pop(_MADE_OF_TABLE, None)
        self._table = None if self._made is None else self._made - _places(self._made)
        table = {} if self._table is None else {_TABLE: self._table}
        specs = [TensorSpec.of(name, tensor) for name, tensor in checkpoint()]
        before = plain_tensors(self.module)
        recording = record_routes(self._load_own, specs, everything | table)
        changed = [name for name, tensor in plain_tensors(self.module).items() if before.get(name) is not tensor]
        if changed or recording.why:
            what = f"keeps {changed[0]}" if changed else f"computes with {next(iter(recording.why))}"
            raise ConfigError(f"the loader of the draft {what}, which an update would not renew", hint=_HINT)
        for name, routes in recording.routes.items():
            lent = {route.parameter for route in routes} - own.keys() - table.keys()
            if lent:
                raise ConfigError(f"the draft's {name} would be loaded into the model's {min(lent)}", hint=_HINT)
        self.residents = {f"{DRAFT_PREFIX}{name}": tensor for name, tensor in (own | table).items()}
        self.check()

    def load_weights(self, weights: Weights) -> None:
        """Gives the head's loader its own tensors; their names have the prefix."""
        self._load_own((name.removeprefix(DRAFT_PREFIX), tensor) for name, tensor in weights)

    def renew(self) -> None:
        """Computes from the table what LMDeploy computes from it.  This is a finisher."""
        if self._made is not None:
            self._made.copy_(self._computed())
            self._proposer._init_bitmask_translate_constants()

    def check(self) -> None:
        """Checks that LMDeploy computes with the table; raises ``EngineFailure`` if not."""
        if self._made is None:
            return
        words, bits = self._proposer._d2t_words, self._proposer._d2t_bits
        used = (self._proposer.draft_id_to_target_id, (32 * words + bits).to(self._made.device))
        if any(not torch.equal(numbers, self._computed()) for numbers in used):
            raise EngineFailure(f"LMDeploy translates the draft's words by another table than {DRAFT_PREFIX}{_TABLE}")

    def _computed(self) -> torch.Tensor:
        assert self._table is not None
        return self._table + _places(self._table)

    def _load_own(self, weights: Weights) -> None:
        self._load(self.module, self._without_table(weights))

    def _without_table(self, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            if self._table is not None and _TABLE in name:
                self._table.copy_(tensor)  # LMDeploy's own loader would change the tensor that it is given
            else:
                yield name, tensor


def _places(table: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(table), device=table.device, dtype=table.dtype)
