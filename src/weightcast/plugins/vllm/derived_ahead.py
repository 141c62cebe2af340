"""Derives for kernels a version that still waits, while the engine computes with the version before.

A commit then exchanges it with what kernels read now.  Without it, layers are derived while the engine stands still.
"""

from __future__ import annotations

import itertools
import logging
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch

from weightcast.digest.copies import bits
from weightcast.plugins.vllm.quantised_layers import QuantisedLayer, spoil
from weightcast.plugins.vllm.start_up import Budget
from weightcast.receiver.coverage import overlapping
from weightcast.receiver.staging import StagingSet
from weightcast.runtime.pace import slices
from weightcast.runtime.recorded_launches import LaunchRecorder, side_by_side
from weightcast.runtime.streams import wait_for_streams

log = logging.getLogger("vllm.weightcast")
_PACED_BYTES = 4 << 30  # of the loaded form; an H200 derives so much of a dense model in 6 ms, where a step takes 5


class DerivedAhead:
    """A second set of all that is derived, and its exchange with the one that kernels read."""

    def __init__(
        self,
        layers: Sequence[QuantisedLayer],
        waiting: StagingSet,
        *,
        in_order: bool,
        may_move: bool,
        after_move: Callable[[], object] = torch.cuda.empty_cache,
    ) -> None:
        """Allocates the second set.

        Args:
            waiting: Staging set of the loaded form, on the device, whose tensors stay at their addresses.
            in_order: As for ``StagingSet``, and so are ``may_move`` and ``after_move``.
        """
        self._layers = layers
        self._waiting = waiting
        self._names, derived = _named(layers)
        self._second = StagingSet(
            derived, "device", keep_storage=True, in_order=in_order, may_move=may_move, after_move=after_move
        )
        self._mapped_bytes = self._second.mapped_bytes
        self._recorders: Sequence[LaunchRecorder] = ()
        self._places: tuple[int, int] | None = None
        self._addresses: list[int] = []  # where all tensors lay when their work was recorded
        self._allocated = True
        # The contents, by their number in ``waiting``, of which the live derived tensors and the second ones are made.
        self._live, self._next = waiting.live_contents, -1

    @property
    def outside_bytes(self) -> int:
        """Memory of both sets that is not torch's, because a commit exchanges it by mapping."""
        return self._mapped_bytes + self._second.mapped_bytes

    def record(self, lanes: Iterable[tuple[QuantisedLayer, LaunchRecorder]]) -> str:
        """Records how a waiting version of each layer is derived; the name of one that cannot be, or nothing."""
        names = {id(tensor): name for name, tensor in self._waiting.lives.items()}
        recorders: dict[int, LaunchRecorder] = {}
        for layer, recorder in lanes:
            recorders[id(recorder)] = recorder
            waiting = {
                key: self._waiting.target(names[id(tensor)]) if id(tensor) in names else tensor
                for key, tensor in layer.loaded.items()
            }
            second = {path: self._second.target(self._names[layer.name, path]) for path in layer.derived}
            if not layer.record_ahead(recorder, waiting, second):
                return layer.name
        self._recorders = list(recorders.values())
        self._places = self._waiting.look(), self._second.look()
        self._addresses = self._addresses_now()
        return self._disturbed()

    def derive(self) -> None:
        """Derives the version that waits, if the tensors are where they were; waits for the device."""
        self._next = -1
        if not self._in_place():
            return
        missed: list[str] = []
        for layers in self._turns():
            with side_by_side(self._recorders):
                missed += [layer.name for layer in layers if not layer.derive_ahead()]
        wait_for_streams(*(tensor.device for tensor in self._second.lives.values()))
        if not missed:
            self._next = self._waiting.waiting_contents

    def exchange(self) -> bool:
        """Gives kernels what was derived of the loaded form that is live now; False if nothing was.

        After ``undo`` of a commit that means what was exchanged away.
        """
        if self._second.torn:
            self._second.undo()
        if self._waiting.live_contents != self._next:
            self._next = -1
            return False
        self._second.flip()
        self._live, self._next = self._next, self._live
        return True

    def derived_in_place(self) -> None:
        """Notes that the live loaded form was derived without the second set."""
        self._live = self._waiting.live_contents

    def drop(self) -> None:
        """Frees the second set for good."""
        self._places = None
        self._free()

    def fall_asleep(self, *, discard: bool) -> None:
        """Frees the second set until ``wake``; unless contents are discarded, ``restore`` brings live ones back."""
        if not discard:
            self._second.store()
        self._free()

    def let_go(self) -> int:
        """As ``StagingSet.let_go``, and so is ``restore``, for the live tensors."""
        return self._second.let_go()

    def restore(self) -> None:
        """Undoes ``let_go``; raises torch.OutOfMemoryError, and then nothing has changed."""
        self._second.restore()

    def wake(self) -> None:
        """Allocates the second set, once what it derives from is back.

        Without room for it layers are derived at the commit, and the next update tries again.
        """
        if self._places is None or self._allocated:
            return
        try:
            self._second.allocate()
        except torch.OutOfMemoryError as error:  # a colocated trainer may still be there
            log.warning("weightcast: layers are derived at the commit for now: %s", str(error).splitlines()[0])
            return
        self._allocated = True
        if self._addresses_now() != self._addresses:
            log.warning("weightcast: layers are derived at the commit from now on, as memory moved when vLLM woke up")
            self.drop()

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

    def _turns(self) -> Iterator[Sequence[QuantisedLayer]]:
        """The layers, in groups between which the engine's steps get their turn if it generates."""
        ends = list(itertools.accumulate(max(1, layer.own_bytes) for layer in self._layers))
        for part in slices(ends[-1], _PACED_BYTES):
            yield self._layers[bisect_right(ends, part.start) : bisect_right(ends, part.stop)]

    def _disturbed(self) -> str:
        """A layer that comes out wrong where all are derived side by side; the waiting weights are the live ones."""
        spoil(self._second.targets.values())
        self.derive()
        self._next = -1
        for layer in self._layers:
            for path, tensor in layer.derived.items():
                if not torch.equal(bits(tensor.data), bits(self._second.target(self._names[layer.name, path]))):
                    return layer.name
        return ""


def _named(layers: Sequence[QuantisedLayer]) -> tuple[dict[tuple[str, str], str], dict[str, torch.Tensor]]:
    """The derived tensors of all layers, each once, and the name that each path of a layer has there."""
    names: dict[tuple[str, str], str] = {}
    derived: dict[str, torch.Tensor] = {}
    first: dict[tuple[object, ...], str] = {}
    for layer in layers:
        for path, tensor in layer.derived.items():
            place = tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype
            name = names[layer.name, path] = first.setdefault(place, f"{layer.name} {path}")
            derived.setdefault(name, tensor)
    return names, derived


def all_derived(layers: Sequence[QuantisedLayer]) -> dict[str, torch.Tensor]:
    """All that is derived for these layers, each tensor once."""
    return _named(layers)[1]


def why_not_ahead(derived: Mapping[str, torch.Tensor], waiting: StagingSet, budget: Budget) -> str:
    """Why there can be no second set of what is derived; empty if there can be one.

    Two tensors that share memory would be exchanged twice.
    """
    if waiting.place != "device":
        return "new versions do not wait on the device"
    return overlapping(derived) or budget.place("auto", sum(tensor.nbytes for tensor in derived.values()))[1]
