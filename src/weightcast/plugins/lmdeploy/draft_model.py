"""The EAGLE head of one LMDeploy worker, as a part of what an update writes.

Its tensors have the prefix ``draft.``.  An EAGLE 3 head without embeddings of its own gets the model's.  Its table
``d2t`` is no parameter: LMDeploy computes other numbers from it when it loads the head, which this module renews after
each switch.
"""

# LMDeploy is not installed where this is checked.
# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from weightcast.plugins.drafts import Draft, Weights
from weightcast.receiver.loader import residents_of
from weightcast.wire.layout import DRAFT_PREFIX

_MADE_OF_TABLE = "draft_id_to_target_id"


class DraftModel(Draft):
    """A head whose checkpoint is loaded.

    Attributes:
        module: LMDeploy's model of the head.
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
        super().__init__("LMDeploy", self.module, residents_of(self.module).get(_MADE_OF_TABLE))
        if getattr(proposer.specdecode_config.model_config.hf_config, "quantization_config", None):
            raise self._refused("the draft is quantised")
        of_model = {tensor.data_ptr() for tensor in residents_of(model).values() if tensor.numel()}
        own = {name: tensor for name, tensor in self._everything.items() if tensor.data_ptr() not in of_model}
        self._made = own.pop(_MADE_OF_TABLE, None)
        own |= self._tables()
        for name, places in self._destinations(checkpoint()).items():
            if places - own.keys():
                raise self._refused(f"the draft's {name} would be loaded into the model's {min(places - own.keys())}")
        self.residents = {f"{DRAFT_PREFIX}{name}": tensor for name, tensor in own.items()}
        self.check()

    def renew(self) -> None:
        """Computes from the table what LMDeploy computes from it.  This is a finisher."""
        if self._made is not None:
            self._made.copy_(self._computed())
            self._proposer._init_bitmask_translate_constants()

    def _words(self) -> list[Tensor]:
        if self._made is None:
            return []
        proposer = self._proposer
        return [proposer.draft_id_to_target_id, 32 * proposer._d2t_words + proposer._d2t_bits]

    def _load_own(self, weights: Weights) -> None:
        self._load(self.module, self._without_table(weights))
