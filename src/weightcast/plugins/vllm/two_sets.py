"""The interface of all that has two sets of weights in a vLLM worker, and gives memory back while vLLM sleeps."""

from __future__ import annotations

from abc import ABC, abstractmethod


class TwoSets(ABC):
    """Something with two sets of weights.  Its methods are called in this order, each for all of a worker."""

    @abstractmethod
    def fall_asleep(self, *, discard: bool) -> None:
        """Frees what waits, before vLLM frees its weights; unless they are discarded, ``restore`` brings them back.

        Raises:
            Refused: An update is under way.
        """

    def let_go(self) -> int:
        """Frees live weights that vLLM's sleep does not know; returns their bytes."""
        return 0

    def restore(self) -> None:  # noqa: B027  only some have such weights
        """Undoes ``let_go``; raises torch.OutOfMemoryError, and then nothing has changed."""

    @abstractmethod
    def wake(self) -> None:
        """Allocates what waits once all weights are back; without room for it, the next update tries again."""
