"""Derives all quantised layers of a model: side by side, where their work is recorded."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from weightcast.plugins.vllm.quantised_layers import QuantisedLayer
from weightcast.runtime.recorded_launches import Recorder, side_by_side

log = logging.getLogger("vllm.weightcast")


class Derivation:
    """Makes the tensors that kernels read of the form that was loaded, for all quantised layers."""

    def __init__(self, layers: Sequence[QuantisedLayer]) -> None:
        """Derives them one by one until ``record``."""
        self._layers = layers
        self._recorders: Sequence[Recorder] = ()

    def run(self) -> None:
        """Derives every layer; raises as ``QuantisedLayer.derive``.  The model must be paused."""
        with side_by_side(self._recorders):
            for layer in self._layers:
                layer.derive()

    def record(self, recorders: Sequence[Recorder]) -> int:
        """Records how layers are derived, once all tensors are where they stay; returns how many could be recorded.

        vLLM's methods launch small kernels for each expert, which leave most of a GPU idle.  So layers of different
        recorders are derived at the same time.  If they shared memory of vLLM's own they could disturb one another;
        that is tried here, and then they are derived one by one.
        """
        taken = [0] * len(recorders)
        recorded = 0
        for layer in self._layers:
            least = taken.index(min(taken))
            taken[least] += layer.own_bytes
            recorded += layer.record(recorders[least])
        self._recorders = recorders
        for layer in self._layers:
            layer.spoil()
        self.run()
        differs = [layer.name for layer in self._layers if layer.first_difference()]
        if differs:
            log.warning("weightcast: layers are derived one by one, since side by side %s came out wrong", differs[0])
            self._recorders = ()
            self.run()
        return recorded
