"""The targets of one trainer: a connection to each, what it is, and whether it counts.

Outlives updates and changes of membership.  A target that let a deadline pass is not waited for again until it answers:
asking it costs a moment once, and nothing after that.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from weightcast.comm.http import Client
from weightcast.config import Target
from weightcast.errors import TargetUnreachable, WeightcastError
from weightcast.fleet.health import Fleet, TargetHealth
from weightcast.fleet.lookout import Lookout, is_silence
from weightcast.report import TargetReport
from weightcast.wire.messages import EngineInfo

_GLANCE_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Current:
    """What the fleet is at.

    Attributes:
        version: Committed last.
        digest: Of the weights that were sent; None if nobody asked.
    """

    version: int
    digest: str | None


class Roster:
    """Who is in.  ``look`` and ``health`` may come from any thread; the rest from one.

    Args:
        targets: The members.
        timeout_s: How long one that has not disappointed yet may take to answer, in seconds.
        recognise: Asks an engine what it is.
    """

    def __init__(
        self, targets: Iterable[Target], *, timeout_s: float, recognise: Callable[[Client], EngineInfo]
    ) -> None:
        self._timeout_s = timeout_s
        self._glance_s = min(_GLANCE_S, timeout_s / 2)
        self._clients: dict[Target, Client] = {}
        self._members: dict[str, Target] = {}
        self._fleet = Fleet()
        self.current: Current | None = None
        self._silent: set[str] = set()
        self._lock = threading.Lock()
        self._lookout = Lookout[EngineInfo](lambda url: recognise(self.client(url)))
        self.set_members(targets)

    def client(self, url: str) -> Client:
        """The connection to a member."""
        return self._clients[self._members[url]]

    def knows(self, url: str, client: Client) -> bool:
        """True if this is still the connection to that member."""
        return url in self._members and self.client(url) is client

    def set_members(self, targets: Iterable[Target], *, leaving: Iterable[Target] = ()) -> None:
        """The members are these now; connections to the others end.

        Args:
            targets: From now on.
            leaving: Members until the next call.  One that is to be reached otherwise than before (by another key,
                say) has both connections until then.

        Raises:
            ConfigError: A target cannot be connected to as it says; nothing has changed.
        """
        targets, leaving = tuple(targets), tuple(leaving)
        members = {target.url: target for target in (*leaving, *targets)}
        kept = {*leaving, *targets}
        with self._lock:
            new = {target: Client(target, timeout_s=self._timeout_s) for target in kept - self._clients.keys()}
            for url, target in self._members.items():
                if members.get(url) != target:
                    self._lookout.forget(url)
            for target in self._clients.keys() - kept:
                self._clients.pop(target).close()
            self._clients |= new
            self._members = members
            self._silent &= set(members)
            self._fleet.retarget(members)

    def ask(self, urls: Iterable[str]) -> float:
        """Ask members what they are, and wait for none: the moment, for ``look``."""
        asked_at = time.monotonic()
        self._lookout.ask_ahead(urls, waited_s=0.0)
        return asked_at

    def look(
        self, urls: Sequence[str] | None = None, *, hasty: bool = False, since: float | None = None
    ) -> dict[str, EngineInfo | WeightcastError]:
        """What members are and serve now, or why they do not say.

        Args:
            urls: Whom to ask; None for all.
            hasty: Wait a moment, not a deadline, even for those of whom nothing bad is known.  It is not held against
                them: the next look that is not hasty waits for them as ever.
            since: Answers to questions that were put then or later will do; None asks now.
        """
        chosen = list(self._members if urls is None else urls)
        brief = set(chosen) if hasty else self._silent & set(chosen)
        patience_s = {url: self._glance_s if url in brief else self._timeout_s for url in chosen}
        found = self._lookout.look(patience_s, anew=patience_s.keys() - brief, since=since)
        with self._lock:
            for url, answer in found.items():
                if url in self._members:
                    self._note(url, answer, waited=url not in brief)
            silent = [url for url in found if url in self._silent and url in self._members]
        self._lookout.ask_ahead(silent, waited_s=self._glance_s)  # they have been waited for enough
        return found

    def fell_silent(self, url: str, reason: str) -> None:
        """It let a deadline pass."""
        with self._lock:
            self._silent.add(url)
            self._fleet.silent(url, reason)
        self._lookout.ask_ahead([url], waited_s=self._glance_s)  # it has been waited for enough

    def ended(self, row: TargetReport, *, version: int, moved_on: bool) -> None:
        """An update is over.

        Args:
            row: How a target came out of it.
            version: What it was an update to.
            moved_on: True if the update succeeded on some target: who still serves the old version is left behind.
        """
        with self._lock:
            fleet, url = self._fleet, row.url
            if row.status == "serving":
                if fleet.state(url) == "updating":  # else it has come back meanwhile, as another
                    fleet.committed(url, version=version)
            elif row.status == "quarantined" and fleet.state(url) not in ("quarantined", "gone"):
                fleet.broken(url, row.message)
            elif row.status == "untouched" and moved_on:
                fleet.broken(url, f"left behind: {row.message}" if row.message else "left behind")
            else:
                fleet.kept(url)

    def opened(self, url: str) -> None:
        """A session is open on it."""
        with self._lock:
            self._fleet.opened(url)

    def broke_off(self, url: str, reason: str, *, whole: bool) -> None:
        """An update of it ended early.

        Args:
            url: The target.
            reason: Why.
            whole: True if it has said that it still serves what it served before.
        """
        with self._lock:
            if self._fleet.state(url) != "updating":
                return
            if whole:
                self._fleet.kept(url)
            else:
                self._fleet.broken(url, reason)

    def health(self) -> tuple[TargetHealth, ...]:
        """Every member, in order, as far as is known; asks nobody."""
        with self._lock:
            return self._fleet.report()

    def close(self) -> None:
        """End every connection; safe to call twice."""
        for url in self._members:
            self._lookout.forget(url)
        for client in self._clients.values():
            client.close()

    def _note(self, url: str, answer: EngineInfo | WeightcastError, *, waited: bool) -> None:
        if isinstance(answer, EngineInfo):
            self._silent.discard(url)
            self._fleet.answered(url, version=answer.version, incarnation=_incarnation(answer))
        elif isinstance(answer, TargetUnreachable):
            if waited or not is_silence(answer):
                self._silent.add(url)
            (self._fleet.silent if is_silence(answer) else self._fleet.lost)(url, str(answer))
        else:
            self._fleet.broken(url, str(answer))


def _incarnation(info: EngineInfo) -> tuple[object, ...]:
    """Other processes are another engine, whatever its address."""
    return (info.kind, info.host_id, tuple((rank.pid, rank.device) for rank in info.ranks))
