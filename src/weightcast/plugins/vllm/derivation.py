"""Derives all quantised layers of a model: side by side where their work is recorded, ahead where there is room."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from weightcast.plugins.vllm.derived_ahead import DerivedAhead
from weightcast.plugins.vllm.quantised_layers import QuantisedLayer
from weightcast.runtime.recorded_launches import LaunchRecorder, side_by_side

log = logging.getLogger("vllm.weightcast")


class Derivation:
    """Makes the tensors that kernels read of the form that was loaded, for all quantised layers.

    Attributes:
        ahead: The second set of what is derived, for what waits; None if layers are derived at the commit.
    """

    def __init__(self, layers: Sequence[QuantisedLayer]) -> None:
        """Derives them one by one until ``record``."""
        self._layers = layers
        self._recorders: Sequence[LaunchRecorder] = ()
        self.ahead: DerivedAhead | None = None

    def run(self) -> None:
        """Derives every layer; raises as ``QuantisedLayer.derive``.  The model must be paused."""
        if self.ahead is not None and self.ahead.exchange():
            return
        with side_by_side(self._recorders):
            for layer in self._layers:
                layer.derive()
        if self.ahead is not None:
            self.ahead.derived_in_place()

    def run_ahead(self) -> None:
        """Derives what waits for a commit, so that ``run`` need not; nothing without a recording for that."""
        if self.ahead is not None:
            self.ahead.derive()

    def record(self, recorders: Sequence[LaunchRecorder], ahead: DerivedAhead | None = None) -> int:
        """Records how layers are derived, once all tensors are where they stay; returns how many could be recorded.

        vLLM's methods launch small kernels for each expert, which leave most of a GPU idle.  So layers of different
        recorders are derived at the same time.  If they shared memory of vLLM's own they could disturb one another;
        that is tried here, and then they are derived one by one.

        With ``ahead``, which only a recording can do since vLLM's methods belong to the thread that computes, how a
        version that waits is derived is recorded too.
        """
        taken = [0] * len(recorders)
        recorded = 0
        lanes: list[tuple[QuantisedLayer, LaunchRecorder]] = []
        for layer in self._layers:
            least = taken.index(min(taken))
            taken[least] += layer.own_bytes
            lanes.append((layer, recorders[least]))
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
        if ahead is not None:
            self._record_ahead(ahead, lanes, every=recorded == len(self._layers) and not differs)
        return recorded

    def _record_ahead(
        self, ahead: DerivedAhead, lanes: Sequence[tuple[QuantisedLayer, LaunchRecorder]], *, every: bool
    ) -> None:
        failed = ahead.record(lanes) if every else "a layer"
        if failed:
            log.info("weightcast: layers are derived at the commit, since %s cannot be derived ahead of it", failed)
            ahead.drop()
        else:
            self.ahead = ahead
