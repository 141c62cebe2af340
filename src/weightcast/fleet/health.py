"""The state machine of each target's health.  Probes and updates report events; nothing here does I/O.

    gone         nothing listens at the URL, or the target was never probed
    joining      the target answers and waits for its first full update: it is new or has restarted
    updating     a session is open on the target
    serving      the target acknowledged a whole version
    quarantined  the target is half written, silent, refuses or was left behind; the next full update heals it

A target is *active* only while it serves the fleet's version in full.  Only a completed update makes a target active;
an answer to a probe never does, because the target may have restarted with other weights.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import msgspec

TargetState = Literal["gone", "joining", "updating", "serving", "quarantined"]
HealthEvent = Literal["answered", "restarted", "silent", "lost", "opened", "committed", "broken"]

_ANY: Mapping[HealthEvent, TargetState] = {
    "restarted": "joining",
    "silent": "quarantined",
    "lost": "gone",
    "broken": "quarantined",
}
NEXT: Mapping[TargetState, Mapping[HealthEvent, TargetState]] = {
    "gone": {"answered": "joining", "silent": "gone", "lost": "gone", "broken": "gone"},
    "joining": {"answered": "joining", "opened": "updating", **_ANY},
    "updating": {"answered": "updating", "committed": "serving", **_ANY},  # `Fleet.kept` restores the state before
    "serving": {"answered": "serving", "opened": "updating", **_ANY},
    "quarantined": {"answered": "quarantined", "opened": "updating", **_ANY},
}


class TargetHealth(msgspec.Struct, frozen=True, kw_only=True):
    """Health of one target.

    Attributes:
        state: One of the states in the module's docstring.
        active: True if the target serves the fleet's version in full; only then may requests go there.
        version: Version that it serves, as far as is known.
        for_s: Seconds in this state.
        reason: Reason for this state; empty for a healthy target.
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
    before: TargetState = "joining"  # the current update
    version: int | None = None
    digest: str | None = None  # of the weights of that version, in the engine's words
    incarnation: Hashable = None
    reason: str = ""


class Fleet:
    """The health of every target, each ``gone`` until it answers.  Not thread-safe."""

    def __init__(self, urls: Iterable[str] = ()) -> None:
        self._entries: dict[str, _Entry] = {}
        self.version: int | None = None  # committed last; None before the first
        self.retarget(urls)

    @property
    def active(self) -> tuple[str, ...]:
        return tuple(url for url, entry in self._entries.items() if self._is_active(entry))

    def state(self, url: str) -> TargetState:
        """The state of one target; ``gone`` for an unknown URL."""
        return self._entries[url].state if url in self._entries else "gone"

    def retarget(self, urls: Iterable[str]) -> None:
        """Replaces the members.  A target that stays keeps its state; a new one is ``gone`` until it answers."""
        new = _Entry(state="gone", since=time.monotonic(), reason="has not answered yet")
        self._entries = {url: self._entries.get(url, new) for url in urls}

    def answered(
        self,
        url: str,
        *,
        version: int | None,
        incarnation: Hashable,
        digest: str | None = None,
        tells_version: bool = True,
        tells_digest: bool = True,
        shows_restart: bool = True,
    ) -> None:
        """Records that a target answered a probe.

        Args:
            version: Version that it reports; None if it reports none.
            incarnation: Identity of the engine's processes; a new value means a restart.
            digest: Model digest that it reports; None if its weights were never proven.
            tells_version: False if the engine never reports a version.
            tells_digest: False if the engine never reports a digest, even after an update that proves its weights.
            shows_restart: False if ``incarnation`` may stay the same after a restart.
        """
        entry = self._entries[url]
        other = entry.state != "gone" and incarnation != entry.incarnation
        # Another trainer has updated these processes.
        stray = entry.state == "serving" and version is not None and version != entry.version
        # The same for a trainer that numbers alike: one number does not make its weights ours.
        swapped = entry.state == "serving" and tells_digest and not stray and digest != entry.digest
        # The engine keeps its version stamp until its process ends.
        blank = entry.state == "serving" and version is None and tells_version
        unsure = entry.state == "serving" and not tells_version and not shows_restart
        reason = None
        if other:
            reason = "came back"
        elif stray:
            reason = f"says that it serves version {version}"
        elif blank:
            reason = f"no longer says that it serves version {entry.version}: it has restarted"
        elif swapped:
            ours, theirs = (f"the digest {one}" if one else "no digest" for one in (entry.digest, digest))
            reason = f"serves other weights as version {entry.version}: they have {theirs}, and ours had {ours}"
        elif unsure:
            reason = "cannot say whether it has restarted since its last update"
        self._move(
            url,
            "answered" if reason is None else "restarted",
            version=entry.version if version is None and entry.state == "serving" and reason is None else version,
            incarnation=incarnation,
            reason=reason,
        )

    def opened(self, url: str) -> None:
        """Records that a session was opened on the target."""
        entry = self._entries[url]
        self._move(url, "opened", before=entry.state)

    def committed(self, url: str, *, version: int, digest: str | None = None) -> None:
        """Records that the target acknowledged the version and passed the requested proof.

        ``digest`` is the model digest in its answer; None if it took none.
        """
        self.version = version
        self._move(url, "committed", version=version, digest=digest, reason="")

    def kept(self, url: str) -> None:
        """Records that the session ended and the target still serves its old version."""
        entry = self._entries[url]
        if entry.state == "updating":
            self._entries[url] = replace(entry, state=entry.before, since=time.monotonic())

    def broken(self, url: str, reason: str) -> None:
        """Records that the target is half written, refused, or was left behind by an update."""
        self._move(url, "broken", reason=reason)

    def silent(self, url: str, reason: str) -> None:
        """Records that the target passed a deadline."""
        self._move(url, "silent", reason=reason)

    def lost(self, url: str, reason: str) -> None:
        """Records that nothing listens at the URL any more."""
        self._move(url, "lost", reason=reason)

    def report(self) -> tuple[TargetHealth, ...]:
        """The health of every target, in order."""
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
        return entry.state == "serving" and entry.version is not None and entry.version == self.version

    def _move(self, url: str, event: HealthEvent, *, reason: str | None = None, **known: object) -> None:
        entry = self._entries[url]
        state = NEXT[entry.state].get(event)
        assert state is not None, f"{url}: {event} while {entry.state}"
        since = entry.since if state == entry.state else time.monotonic()
        if reason is None:
            reason = "waits for its first update" if state == "joining" and state != entry.state else entry.reason
        self._entries[url] = replace(entry, state=state, since=since, reason=reason, **known)  # type: ignore[arg-type]
