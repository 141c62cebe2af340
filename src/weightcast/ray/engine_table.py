"""The state of each engine: which are alive, and which serve the current version."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from weightcast.config import Target
from weightcast.ray.actors import Place
from weightcast.ray.bundles import Bundles
from weightcast.report import UpdateReport

State = Literal["starting", "waiting", "serving", "dead"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHealth:
    """The state of one engine.

    Attributes:
        state: ``serving`` the current version, ``waiting`` for it (just restarted, or left out of an update), or
            ``dead``.
    """

    number: int
    url: str
    state: State
    words: str = ""


class Member:
    """An engine: its actors, its URL and its state."""

    def __init__(self, number: int, bundles: Bundles) -> None:
        self.number = number
        self.bundles = bundles
        self.slots: list[Any] = []
        self.url = ""
        self.state: State = "dead"
        self.words = ""
        self.place: Place | None = None

    @property
    def name(self) -> str:
        where = f" ({self.url}, pid {self.place.pid} on {self.place.address})" if self.place is not None else ""
        return f"engine {self.number}{where}"


class EngineTable:
    """All engines; ``version`` is that of the last update that an engine serves, None before the first."""

    def __init__(self, places: Sequence[Bundles], *, api_key: str | None) -> None:
        self.members = [Member(number, bundles) for number, bundles in enumerate(places)]
        self.version: int | None = None
        self._api_key = api_key

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(member.url for member in self.members if member.state == "serving")

    def targets(self, *states: State) -> tuple[Target, ...]:
        """Returns the engines in one of these states."""
        return tuple(Target(member.url, api_key=self._api_key) for member in self.members if member.state in states)

    def in_state(self, *states: State) -> list[Member]:
        """Returns the members in one of these states."""
        return [member for member in self.members if member.state in states]

    def health(self) -> list[EngineHealth]:
        """Returns the state of every engine."""
        return [
            EngineHealth(number=member.number, url=member.url, state=member.state, words=member.words)
            for member in self.members
        ]

    def admit(self, report: UpdateReport | None) -> None:
        """Limits ``urls`` to the engines that serve an update's version; does nothing if ``report`` is None."""
        if report is None:
            return
        rows = {row.url: row for row in report.targets}
        moved = any(row.status == "serving" for row in report.targets)
        if moved:
            self.version = report.version
        for member in self.members:
            row = rows.get(member.url)
            if row is None or member.state == "dead":
                continue
            if row.status == "serving":
                member.state = "serving"
            elif (
                row.status in ("quarantined", "unknown") or moved
            ):  # an untouched engine serves an older version than the others
                member.state = "waiting"

    def admit_started(self) -> None:
        """Admits engines before the first update, with the weights that they were started with."""
        for member in self.members:
            if member.state == "waiting":
                member.state = "serving"
