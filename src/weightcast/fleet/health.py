"""Which targets count: a state for each, moved by what probes and updates have seen.

    gone         nothing answers there, or it was never asked
    joining      it answers, and waits for its first full update: new, or come back
    updating     a session is open on it
    serving      it acknowledged a version, whole
    quarantined  half written, silent, refusing or left behind; the next full update heals it

A target is *active* only while it serves, in full, the version that the fleet is at.  What one generates that has not
answered, has come back with other processes or another version, or was left behind by an update, is unknown.  Only a
completed update makes a target active, never an answer alone.

Knows URLs, versions and what happened.  It asks nobody and knows no engine's words.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import msgspec

TargetState = Literal["gone", "joining", "updating", "serving", "quarantined"]
Event = Literal["answered", "restarted", "silent", "lost", "opened", "committed", "broken"]

NEXT: Mapping[TargetState, Mapping[Event, TargetState]] = {
    "gone": {"answered": "joining", "silent": "gone", "lost": "gone", "broken": "gone"},
    "joining": {
        "answered": "joining",
        "restarted": "joining",
        "silent": "quarantined",
        "lost": "gone",
        "opened": "updating",
        "broken": "quarantined",
    },
    "updating": {  # and "kept": whatever it was before
        "answered": "updating",
        "restarted": "joining",
        "silent": "quarantined",
        "lost": "gone",
        "committed": "serving",
        "broken": "quarantined",
    },
    "serving": {
        "answered": "serving",
        "restarted": "joining",
        "silent": "quarantined",
        "lost": "gone",
        "opened": "updating",
        "broken": "quarantined",
    },
    "quarantined": {
        "answered": "quarantined",
        "restarted": "joining",
        "silent": "quarantined",
        "lost": "gone",
        "opened": "updating",
        "broken": "quarantined",
    },
}


class TargetHealth(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one target.

    Attributes:
        url: The engine's URL.
        state: See the module.
        active: It serves the fleet's version in full: requests may go there.
        version: What it serves as far as is known.
        for_s: Seconds since it came into this state.
        reason: Why it is in this state; empty if all is well.
    """

    url: str
    state: TargetState
    active: bool
    version: int | None
    for_s: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    state: TargetState
    since: float
    before: TargetState = "joining"  # the update that is under way
    version: int | None = None
    incarnation: Hashable = None
    reason: str = ""


class Fleet:
    """The health of every target.  One thread at a time.

    Args:
        urls: The targets; all gone until they answer.
    """

    def __init__(self, urls: Iterable[str] = ()) -> None:
        self._entries: dict[str, _Entry] = {}
        self._version: int | None = None
        self.retarget(urls)

    @property
    def version(self) -> int | None:
        """What the fleet is at: the version committed last; None before the first."""
        return self._version

    @property
    def active(self) -> tuple[str, ...]:
        """Targets that serve the fleet's version in full, in order."""
        return tuple(url for url, entry in self._entries.items() if self._is_active(entry))

    def state(self, url: str) -> TargetState:
        """Of one target; ``gone`` if nobody knows it."""
        return self._entries[url].state if url in self._entries else "gone"

    def retarget(self, urls: Iterable[str]) -> None:
        """The members are these now.  Who stays keeps its state, who is new has not answered yet."""
        new = _Entry(state="gone", since=time.monotonic(), reason="has not answered yet")
        self._entries = {url: self._entries.get(url, new) for url in urls}

    def answered(self, url: str, *, version: int | None, incarnation: Hashable) -> None:
        """It answered a probe.

        Args:
            url: The target.
            version: What it says it serves; None if it cannot say.
            incarnation: Which processes it consists of, as far as it can say.  Others than before are a restart.
        """
        entry = self._entries[url]
        other = entry.state != "gone" and incarnation != entry.incarnation
        # The same processes with other weights than we gave them: somebody else did.
        stray = entry.state == "serving" and version is not None and version != entry.version
        self._move(
            url,
            "restarted" if other or stray else "answered",
            version=entry.version if version is None and entry.state == "serving" and not other else version,
            incarnation=incarnation,
            reason="came back" if other else f"says that it serves version {version}" if stray else None,
        )

    def opened(self, url: str) -> None:
        """A session was opened on it."""
        entry = self._entries[url]
        self._move(url, "opened", before=entry.state)

    def committed(self, url: str, *, version: int) -> None:
        """It acknowledged the version and whatever proof was asked for."""
        self._version = version
        self._move(url, "committed", version=version, reason="")

    def kept(self, url: str) -> None:
        """Its session ended, and it serves what it served before."""
        entry = self._entries[url]
        if entry.state == "updating":
            self._entries[url] = replace(entry, state=entry.before, since=time.monotonic())

    def broken(self, url: str, reason: str) -> None:
        """It is half written, refused, or was left behind by an update."""
        self._move(url, "broken", reason=reason)

    def silent(self, url: str, reason: str) -> None:
        """It let a deadline pass."""
        self._move(url, "silent", reason=reason)

    def lost(self, url: str, reason: str) -> None:
        """Nothing listens there any more."""
        self._move(url, "lost", reason=reason)

    def report(self) -> tuple[TargetHealth, ...]:
        """Every target, in order."""
        now = time.monotonic()
        return tuple(
            TargetHealth(
                url=url,
                state=entry.state,
                active=self._is_active(entry),
                version=entry.version,
                for_s=round(now - entry.since, 3),
                reason=entry.reason,
            )
            for url, entry in self._entries.items()
        )

    def _is_active(self, entry: _Entry) -> bool:
        return entry.state == "serving" and entry.version is not None and entry.version == self._version

    def _move(self, url: str, event: Event, *, reason: str | None = None, **known: object) -> None:
        entry = self._entries[url]
        state = NEXT[entry.state].get(event)
        assert state is not None, f"{url}: {event} while {entry.state}"
        since = entry.since if state == entry.state else time.monotonic()
        if reason is None:
            reason = "waits for its first update" if state == "joining" and state != entry.state else entry.reason
        self._entries[url] = replace(entry, state=state, since=since, reason=reason, **known)  # type: ignore[arg-type]
