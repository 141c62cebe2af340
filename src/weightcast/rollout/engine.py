"""One reference engine: its scheduler, tokenizer and weight receiver."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from prometheus_client import CollectorRegistry

from weightcast.errors import Refused
from weightcast.receiver.session import SessionHandler
from weightcast.rollout.scheduler import Scheduler
from weightcast.rollout.text import TextTokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutEngine:
    """The parts of one engine that its server needs.

    Attributes:
        receiver: The weight receiver; None for an engine whose weights never change.
        registry: Prometheus registry with the receiver's metrics.
    """

    scheduler: Scheduler
    text: TextTokenizer
    model: str
    receiver: SessionHandler | None = None
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)

    @property
    def state(self) -> Literal["serving", "paused", "asleep", "updating", "quarantined", "failed"]:
        """The state that a client should know first: failures and quarantine win over pauses."""
        stats = self.scheduler.stats()
        receiver = self.receiver.state if self.receiver is not None else "serving"
        if stats.state == "failed":
            return "failed"
        if receiver == "quarantined":
            return "quarantined"
        if stats.state == "asleep":
            return "asleep"
        return receiver if receiver == "updating" else stats.state

    def score(self, token_ids: Sequence[int]) -> Sequence[float]:
        """Log-probability of each token but the first, under one version; ``Refused`` while an update pauses it."""
        if self.receiver is not None and self.receiver.state == "quarantined":
            raise Refused("this engine is quarantined: its weights may be a mixture of two versions")
        return self.scheduler.score(token_ids, during_update=False)
