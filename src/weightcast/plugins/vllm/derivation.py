"""Derives all layers of a vLLM model: side by side where that is recorded, and ahead of a commit where there is room.

Ahead means: a second set of all that is derived takes what comes from a version that still waits, while the engine
computes with the version before.  A commit then exchanges it with what kernels read now.  Without it, layers are
derived while the engine stands still.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import torch

from weightcast.digest.copies import bits
from weightcast.plugins.vllm.start_up import Budget
from weightcast.plugins.vllm.twin_layer import TwinLayer, spoil
from weightcast.plugins.vllm.two_sets import TwoSets
from weightcast.receiver.coverage import overlapping
from weightcast.receiver.staging import StagingSet
from weightcast.runtime.recorded_launches import LaunchRecorder, side_by_side
from weightcast.runtime.streams import wait_for_streams
from weightcast.runtime.tensor_places import TensorPlaces

log = logging.getLogger("vllm.weightcast")


class Derivation(TwoSets):
    """Makes the live form of the loaded one, for all layers of a model.

    Attributes:
        layers: Those layers.
        derived: All that is derived for them, each tensor once, by name.
    """

    def __init__(self, layers: Sequence[TwinLayer]) -> None:
        """Derives them one by one, and at the commit, until ``record``."""
        self.layers = layers
        self.derived: dict[str, torch.Tensor] = {}
        self._names: dict[tuple[str, str], str] = {}  # of each path of a layer in ``derived``
        first: dict[tuple[object, ...], str] = {}
        for layer in layers:
            for path, tensor in layer.derived.items():
                place = tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype
                name = self._names[layer.name, path] = first.setdefault(place, f"{layer.name} {path}")
                self.derived.setdefault(name, tensor)
        self._recorders: Sequence[LaunchRecorder] = ()
        self._waiting = self._second = StagingSet({}, "none")
        self._mapped_bytes = 0
        self._places: tuple[TensorPlaces, TensorPlaces] | None = None  # None if nothing is derived ahead
        self._addresses: list[int] = []  # where all tensors lay when their work was recorded
        self._allocated = True
        # The contents, by their number in ``_waiting``, of which the live derived tensors and the second ones are made.
        self._live = self._next = -1

    @property
    def derives_ahead(self) -> bool:
        """True if a commit finds what is derived ready."""
        return self._places is not None

    @property
    def outside_bytes(self) -> int:
        """Memory of both sets that is not torch's, because a commit exchanges it by mapping."""
        return self._mapped_bytes + self._second.mapped_bytes

    def add_second_set(
        self,
        waiting: StagingSet,
        *,
        in_order: bool,
        may_move: bool,
        after_move: Callable[[], object] = torch.cuda.empty_cache,
    ) -> None:
        """Allocates the second set, so that ``record`` can record how it is derived.

        Args:
            waiting: Staging set of the loaded form, on the device, whose tensors stay at their addresses.
            in_order: As for ``StagingSet``, and so are ``may_move`` and ``after_move``.
        """
        self._waiting = waiting
        self._second = StagingSet(
            self.derived, "device", keep_storage=True, in_order=in_order, may_move=may_move, after_move=after_move
        )
        self._mapped_bytes = self._second.mapped_bytes
        self._live = waiting.live_contents

    @torch.no_grad()
    def record(self, recorders: Sequence[LaunchRecorder]) -> int:
        """Records how layers are derived, once all tensors are where they stay; returns how many could be recorded.

        vLLM's methods launch small kernels for each expert, which leave most of a GPU idle.  So layers of different
        recorders are derived at the same time.  If they shared memory of vLLM's own they could disturb one another;
        that is tried here, and then they are derived one by one.

        Only recordings can derive ahead, since vLLM's methods belong to the thread that computes.
        """
        taken = [0] * len(recorders)
        recorded = 0
        lanes: list[tuple[TwinLayer, LaunchRecorder]] = []
        for layer in self.layers:
            least = taken.index(min(taken))
            taken[least] += layer.own_bytes
            lanes.append((layer, recorders[least]))
            recorded += layer.record(recorders[least])
        self._recorders = recorders
        spoil(self.derived.values())
        self.run()
        differs = next((layer.name for layer in self.layers if layer.first_difference()), "")
        if differs:
            log.warning("weightcast: layers are derived one by one, since side by side %s came out wrong", differs)
            self._recorders = ()
            self.run()
        if self._second.lives:
            every = recorded == len(self.layers) and not differs
            failed = self._record_ahead(lanes) if every else "a layer"
            if failed:
                log.info("weightcast: layers are derived at the commit, since %s cannot be derived ahead of it", failed)
                self._drop()
        return recorded

    def run(self) -> None:
        """Derives every layer, or takes what was derived ahead of the loaded form that is live now.

        After ``undo`` of a commit that is what was exchanged away.  It raises as ``TwinLayer.derive``, and the model
        must be paused.
        """
        if self._second.torn:
            self._second.undo()
        if self._waiting.live_contents == self._next:
            self._second.flip()
            self._live, self._next = self._next, self._live
            return
        self._next = -1
        with side_by_side(self._recorders):
            for layer in self.layers:
                layer.derive()
        self._live = self._waiting.live_contents

    @torch.no_grad()
    def run_ahead(self) -> None:
        """Derives the version that waits, if tensors are where they were when that was recorded.

        The model may compute meanwhile.  It waits for the device.
        """
        self._next = -1
        if not self._in_place():
            return
        with side_by_side(self._recorders):
            missed = [layer.name for layer in self.layers if not layer.derive_ahead()]
        wait_for_streams(*(tensor.device for tensor in self._second.lives.values()))
        if not missed:
            self._next = self._waiting.waiting_contents

    def fall_asleep(self, *, discard: bool) -> None:
        """Implements ``TwoSets.fall_asleep`` for the second set."""
        if not discard:
            self._second.store()
        self._free()

    def let_go(self) -> int:
        """Implements ``TwoSets.let_go`` for the live tensors that were moved."""
        return self._second.let_go()

    def restore(self) -> None:
        """Implements ``TwoSets.restore``."""
        self._second.restore()

    def wake(self) -> None:
        """Implements ``TwoSets.wake``.

        Without room for what it derives from, or for the second set, layers are derived at the commit for now.
        """
        if self._places is None or self._allocated or len(self._waiting.targets) < len(self._waiting.lives):
            return
        try:
            self._second.allocate()
        except torch.OutOfMemoryError as error:  # a colocated trainer may still be there
            log.warning("weightcast: layers are derived at the commit for now: %s", str(error).splitlines()[0])
            return
        self._allocated = True
        if self._addresses_now() != self._addresses:
            log.warning("weightcast: layers are derived at the commit from now on, as memory moved when vLLM woke up")
            self._drop()

    def _record_ahead(self, lanes: Sequence[tuple[TwinLayer, LaunchRecorder]]) -> str:
        """Records how a waiting version of each layer is derived; the name of one that cannot be, or nothing.

        A layer may also come out wrong where all are derived side by side.  The waiting weights are the live ones here.
        """
        names = {id(tensor): name for name, tensor in self._waiting.lives.items()}
        seconds = {
            layer.name: {path: self._second.target(self._names[layer.name, path]) for path in layer.derived}
            for layer in self.layers
        }
        for layer, recorder in lanes:
            waiting = {
                key: self._waiting.target(names[id(tensor)]) if id(tensor) in names else tensor
                for key, tensor in layer.loaded.items()
            }
            if not layer.record_ahead(recorder, waiting, seconds[layer.name]):
                return layer.name
        self._places = self._waiting.look(), self._second.look()
        self._addresses = self._addresses_now()
        spoil(self._second.targets.values())
        self.run_ahead()
        self._next = -1
        for layer in self.layers:
            for path, tensor in layer.derived.items():
                if not torch.equal(bits(tensor.data), bits(seconds[layer.name][path])):
                    return layer.name
        return ""

    def _drop(self) -> None:
        """Frees the second set for good."""
        self._places = None
        self._free()

    def _free(self) -> None:
        self._next = -1
        self._allocated = False
        self._second.free()

    def _in_place(self) -> bool:
        """True if all tensors are where they were when their work was recorded."""
        self.wake()
        if self._places is None or not self._allocated:
            return False
        now = self._waiting.look(), self._second.look()
        if now != self._places and self._addresses_now() != self._addresses:
            return False
        self._places = now
        return True

    def _addresses_now(self) -> list[int]:
        sets = (self._waiting.lives, self._waiting.targets, self._second.lives, self._second.targets)
        return [tensor.data_ptr() for tensors in sets for tensor in tensors.values()]


def why_not_ahead(derived: Mapping[str, torch.Tensor], waiting: StagingSet, budget: Budget) -> str:
    """Why there can be no second set of what is derived; empty if there can be one.

    Two tensors that share memory would be exchanged twice.
    """
    if waiting.place != "device":
        return "new versions do not wait on the device"
    return overlapping(derived) or budget.place("auto", sum(tensor.nbytes for tensor in derived.values()))[1]
