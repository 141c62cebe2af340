"""The health of one target, as a state machine.  Probes and updates report events; nothing here does I/O.

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
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import msgspec

from weightcast.wire.engine_info import EngineInfo

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
    "updating": {"answered": "updating", "committed": "serving", **_ANY},  # `LinkHealth.kept` restores the state before
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
class LinkHealth:
    """The recorded health of one target, ``gone`` until it answers.  Each event returns another value.

    Attributes:
        since: Beginning of the state, as ``time.monotonic``.
        before: State before the update that runs.
        digest: Digest of the weights of ``version``, in the engine's words.
        incarnation: Identity of the engine's processes.
    """

    state: TargetState = "gone"
    since: float = field(default_factory=time.monotonic)
    before: TargetState = "joining"
    version: int | None = None
    digest: str | None = None
    incarnation: Hashable = None
    reason: str = "has not answered yet"

    def answered(self, info: EngineInfo) -> LinkHealth:
        """The target answered a probe."""
        version, serving = info.version, self.state == "serving"
        # Another trainer has updated these processes.
        stray = serving and version is not None and version != self.version
        reason = None
        if self.state != "gone" and info.incarnation != self.incarnation:
            reason = "came back"
        elif stray:
            reason = f"says that it serves version {version}"
        elif serving and version is None and info.tells_version:
            # The engine keeps its version stamp until its process ends.
            reason = f"no longer says that it serves version {self.version}: it has restarted"
        elif serving and info.has_receiver and info.digest != self.digest:
            # A trainer that numbers alike has updated them: one number does not make its weights ours.
            ours, theirs = (f"the digest {one}" if one else "no digest" for one in (self.digest, info.digest))
            reason = f"serves other weights as version {self.version}: they have {theirs}, and ours had {ours}"
        elif serving and not info.tells_version and not info.shows_restart:
            reason = "cannot say whether it has restarted since its last update"
        return self._moved(
            "answered" if reason is None else "restarted",
            version=self.version if version is None and serving and reason is None else version,
            incarnation=info.incarnation,
            reason=reason,
        )

    def opened(self) -> LinkHealth:
        """A session was opened on the target."""
        return self._moved("opened", before=self.state)

    def committed(self, version: int, digest: str | None = None) -> LinkHealth:
        """The target acknowledged the version and passed the requested proof.

        ``digest`` is the model digest in its answer; None if it took none.
        """
        return self._moved("committed", version=version, digest=digest, reason="")

    def kept(self) -> LinkHealth:
        """The session ended and the target still serves its old version."""
        if self.state != "updating":
            return self
        return replace(self, state=self.before, since=time.monotonic())

    def broken(self, reason: str) -> LinkHealth:
        """The target is half written, refused, or was left behind by an update."""
        return self._moved("broken", reason=reason)

    def silent(self, reason: str) -> LinkHealth:
        """The target passed a deadline."""
        return self._moved("silent", reason=reason)

    def lost(self, reason: str) -> LinkHealth:
        """Nothing listens at the URL any more."""
        return self._moved("lost", reason=reason)

    def is_active(self, fleet_version: int | None) -> bool:
        """True if the target serves this version, which was committed last, in full; None before the first update."""
        return self.state == "serving" and self.version is not None and self.version == fleet_version

    def row(self, url: str, fleet_version: int | None) -> TargetHealth:
        """The target's row; ``fleet_version`` is as for ``is_active``."""
        return TargetHealth(
            url=url,
            state=self.state,
            active=self.is_active(fleet_version),
            version=self.version,
            for_s=round(time.monotonic() - self.since, 3),
            reason=self.reason,
        )

    def _moved(self, event: HealthEvent, *, reason: str | None = None, **known: object) -> LinkHealth:
        state = NEXT[self.state].get(event)
        assert state is not None, f"{event} while {self.state}"
        since = self.since if state == self.state else time.monotonic()
        if reason is None:
            reason = "waits for its first update" if state == "joining" and state != self.state else self.reason
        return replace(self, state=state, since=since, reason=reason, **known)  # type: ignore[arg-type]
