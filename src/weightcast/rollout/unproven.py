"""Answers that wait for the proof of the weights that make them."""

from __future__ import annotations

from collections.abc import Iterable

from weightcast.rollout.requests import Generation


class Unproven:
    """The requests of an engine whose new weights are being read back; the scheduler's lock guards it.

    Attributes:
        version_before: Version of the weights before, which are proven.
    """

    def __init__(self, version_before: int, generations: Iterable[Generation]) -> None:
        self.version_before = version_before
        self._held: list[Generation] = []
        for generation in generations:
            self.hold(generation)

    def hold(self, generation: Generation) -> None:
        """Keeps what a request gets from now on from its reader."""
        generation.hold()
        self._held.append(generation)

    def let_go(self) -> None:
        """Gives readers what was held."""
        for generation in self._held:
            generation.let_go()

    def drop(self, why: str) -> list[Generation]:
        """Forgets what was held; returns the requests that had got something, which end with this error."""
        return [generation for generation in self._held if generation.drop(why)]
