"""The weights that a model computes with: their sums, and how a new version takes their place and leaves it again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from weightcast.errors import EngineFailure, some
from weightcast.receiver.computed_sources import ComputedSources
from weightcast.receiver.resident_sums import ResidentSums
from weightcast.receiver.staging import StagingSet
from weightcast.wire.held import HeldSums

Finisher = Callable[[], object]


class ResidentVersions:
    """The live weights of one rank.

    Attributes:
        finishers: Run, each once, after a switch in either direction.
        known: Sums of what is live, by route and place; None if it was not read back since it was last written.
    """

    def __init__(
        self,
        staging: StagingSet,
        sums: ResidentSums,
        computing: ComputedSources,
        *,
        finishers: Sequence[Finisher],
        device: torch.device,
    ) -> None:
        """Reads nothing yet; ``sums`` are those of all that an update writes."""
        self._staging, self._device = staging, device
        self._sums = sums
        self._computing = computing
        self.finishers = tuple(finishers)
        self.known: HeldSums | None = None
        self._before: HeldSums | None = None
        self._finishing = False

    def know(self) -> None:
        """Sums the live weights if their sums are unknown, for the proof of ``undo``.  Waits for the device."""
        if self.known is None and self._staging.staged:
            self._read_back()

    def commit(self) -> None:
        """Makes the new version live and runs the finishers, each once.

        Raises:
            Exception: A copy or a finisher failed.  Call ``undo``; without staging there is nothing to go back to.
        """
        self._before, self.known = self.known, None
        self._finishing = False
        if self._staging.staged:
            self._computing.switch()
            self._staging.flip()
            self._computing.load()  # what that writes of the old version is in the staging set by now
        self._computing.settle()
        self._finishing = True
        self.finish()

    def undo(self) -> None:
        """Restores the weights that the last ``commit`` replaced, and proves it.

        If the commit came as far as the finishers, they run again for the old weights.  The proof compares sums taken
        before the commit.  If there are none, it is enough that nothing failed, or that only pointers moved.

        Raises:
            EngineFailure: The live weights differ from those before, or cannot be compared.
            Exception: A copy or a finisher failed.
        """
        torn = self._staging.torn and self._staging.moves_contents
        self._staging.undo()
        self._computing.undo()
        if self._finishing:
            self.finish()
            self._finishing = False
        before, self._before = self._before, None
        if before is None:
            if torn:
                raise EngineFailure(
                    "a copy failed during the switch, and the old weights had no digests to compare with after it",
                    hint='send a full update; verify="resident" takes these digests before each switch',
                )
            return
        found = self._read_back()
        if found != before:
            self.known = None
            parts = found.table
            if len(parts) == len(before.totals):
                parts = [parts[number] for number in (found.totals != before.totals).nonzero()[:, 0].tolist()]
            names = [part.spec.name for part in parts]
            raise EngineFailure(
                f"the undo did not restore these tensors: {some(list(dict.fromkeys(names)))}",
                hint="send a full update",
            )

    def finish(self) -> None:
        """Runs the finishers, which rebuild captured graphs, packed weights and all else that depends on parameters."""
        for finisher in self.finishers:
            finisher()

    def held(self) -> HeldSums:
        """Sums the live weights in terms of the source tensors; the sums are ``known`` from then on.

        A source that the model computes with is among them if it is known what it was; see ``ComputedSources``.
        """
        return self._computing.answer(self._read_back())

    def forget(self) -> None:
        """Called when someone else has written the weights."""
        self.known = None
        self._computing.forget()

    def _read_back(self) -> HeldSums:
        self._staging.look(forms=True)
        self.known = self._sums.held(self._staging.form, self._device, self._staging.lives)
        return self.known
