"""The members of one trainer's fleet: a client and the health of each.

A roster outlives updates and changes of membership.  A target that passed a deadline gets one more short wait,
and after that none until it answers.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from weightcast.comm import event_loop
from weightcast.comm.http import Client
from weightcast.config import Target
from weightcast.errors import ConfigError, DeadlineExceeded, TargetError, TargetUnreachable, WeightcastError
from weightcast.fleet.background_probe import BackgroundProbe, is_silence
from weightcast.fleet.health import Fleet, TargetHealth
from weightcast.report import TargetReport
from weightcast.wire.engine_info import EngineInfo

_SILENT_WAIT_S = 2.0
_CONNECTIONS = 2  # which a balancer gives to two engines in turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Current:
    """The fleet's weights, as committed last; ``digest`` is None with ``verify="none"``."""

    version: int
    digest: str | None


async def ask_afresh_on_loop(
    target: Target,
    recognise: Callable[[Client], Awaitable[EngineInfo]],
    *,
    timeout_s: float,
) -> EngineInfo:
    """Asks over new connections whether a URL leads to one engine, and returns its description.

    ConfigError says that it leads to several; a description that ``shows_restart`` is one by which that can be told.
    Only a balancer that keeps this process with one of them goes unnoticed.
    """
    clients = [Client(target, timeout_s=timeout_s) for _ in range(_CONNECTIONS)]
    try:
        # One after the other: the second need not send the table of tensors that the first has sent.
        infos = [await recognise(client) for client in clients]
    finally:
        for client in clients:
            client.close()
    named = dict.fromkeys(f"{info.engine} ({_identity(info)})" for info in infos)
    if len({info.incarnation for info in infos}) > 1:
        raise ConfigError(
            f"{target.url} leads to more than one engine: new connections reached {' and '.join(named)}; one URL must "
            "be one engine, or an update reaches only some of them",
            hint="name each engine by its own address, not by that of a balancer before several (a Kubernetes Service, "
            "for example)",
        )
    return infos[0]


def _identity(info: EngineInfo) -> str:
    pids = ", ".join(str(rank.pid) for rank in info.ranks if rank.pid)
    return f"instance {info.instance[:40]}" if info.instance else f"processes {pids}"


class Roster:
    """The members.  Any thread may call ``look`` and ``health``; one thread calls the rest.

    Args:
        timeout_s: Deadline of a probe of a target that is not known to be silent, in seconds.
        recognise: Probes one engine, on the event loop.
    """

    def __init__(
        self,
        targets: Iterable[Target],
        *,
        timeout_s: float,
        recognise: Callable[[Client], Awaitable[EngineInfo]],
    ) -> None:
        self._timeout_s = timeout_s
        self._silent_wait_s = min(_SILENT_WAIT_S, timeout_s / 2)
        self._clients: dict[Target, Client] = {}
        self._members: dict[str, Target] = {}
        self._fleet = Fleet()
        self.current: Current | None = None
        self.trainer = secrets.token_hex(8)  # the last half of each session's id
        # By version, from the one that is served on: the digest of the weights that engines may have switched to.
        self.tried: dict[int, str | None] = {}
        self._silent: set[str] = set()
        self._lock = threading.Lock()
        self._recognise = recognise
        self._checked: set[Target] = set()  # members whose URL leads to one engine
        self._probes = BackgroundProbe[EngineInfo](lambda url: recognise(self.client(url)))
        self.set_members(targets)

    @property
    def urls(self) -> tuple[str, ...]:
        """URLs of all members, in order."""
        return tuple(self._members)

    def client(self, url: str) -> Client:
        """The client of a member."""
        return self._clients[self._members[url]]

    def knows(self, url: str, client: Client) -> bool:
        """True if this is still the client of that member."""
        return url in self._members and self.client(url) is client

    def set_members(self, targets: Iterable[Target], *, leaving: Iterable[Target] = ()) -> None:
        """Replaces the members and closes the clients of the others.

        Args:
            leaving: Targets that stay members until the next call.  A target whose options change (its key, for
                example) has both clients until then.

        Raises:
            ConfigError: The options of a target are wrong; the members are unchanged.
        """
        targets, leaving = tuple(targets), tuple(leaving)
        members = {target.url: target for target in (*leaving, *targets)}
        kept = {*leaving, *targets}
        with self._lock:
            new = {target: Client(target, timeout_s=self._timeout_s) for target in kept - self._clients.keys()}
            for url, target in self._members.items():
                if members.get(url) != target:
                    self._probes.forget(url)
            for target in self._clients.keys() - kept:
                self._clients.pop(target).close()
            self._clients |= new
            self._checked &= kept
            self._members = members
            self._silent &= set(members)
            self._fleet.retarget(members)

    def check_one_engine_each(self) -> None:
        """Asks each member, once in its membership, whether its URL leads to one engine; ConfigError if to several."""
        members = self._members.items()
        urls = [url for url, target in members if target not in self._checked and url not in self._silent]

        async def check(url: str) -> None:
            target = self._members[url]
            with suppress(TargetError, DeadlineExceeded):  # it does not answer, which the update will say
                await ask_afresh_on_loop(target, self._recognise, timeout_s=self._timeout_s)
                self._checked.add(target)

        async def check_all() -> None:
            await asyncio.gather(*map(check, urls))

        event_loop.run(check_all())

    def ask(self, urls: Iterable[str]) -> float:
        """Starts probes without waiting and returns the moment, for the ``since`` of ``look``."""
        asked_at = time.monotonic()
        self._probes.ask_ahead(urls, waited_s=0.0)
        event_loop.flush()
        return asked_at

    def look(
        self, urls: Sequence[str] | None = None, *, hasty: bool = False, since: float | None = None
    ) -> dict[str, EngineInfo | WeightcastError]:
        """Probes members; returns the info or the error of each.

        Args:
            urls: Members to probe; None for all.
            hasty: True waits only briefly, also for healthy targets.  A target that misses this short wait is not
                marked silent.
            since: Also accepts answers to probes that started at this moment or later; None starts new probes.
        """
        return event_loop.run(self.look_on_loop(urls, hasty=hasty, since=since))

    async def look_on_loop(
        self, urls: Sequence[str] | None = None, *, hasty: bool = False, since: float | None = None
    ) -> dict[str, EngineInfo | WeightcastError]:
        """As ``look``, on the event loop."""
        chosen = list(self._members if urls is None else urls)
        brief = set(chosen) if hasty else self._silent & set(chosen)
        patience_s = {url: self._silent_wait_s if url in brief else self._timeout_s for url in chosen}
        found = await self._probes.look_on_loop(patience_s, anew=patience_s.keys() - brief, since=since)
        with self._lock:
            for url, answer in found.items():
                if url in self._members:
                    self._record(url, answer, waited=url not in brief)
            silent = [url for url in found if url in self._silent and url in self._members]
        self._probes.ask_ahead(silent, waited_s=self._silent_wait_s)  # the next look does not wait for them
        return found

    def fell_silent(self, url: str, reason: str) -> None:
        """Records that a member passed a deadline."""
        with self._lock:
            if url not in self._members:
                return
            self._silent.add(url)
            self._fleet.silent(url, reason)
        self._probes.ask_ahead([url], waited_s=self._silent_wait_s)  # the next look does not wait for it

    def ended(self, row: TargetReport, *, version: int, moved_on: bool, digest: str | None) -> None:
        """Records the end of an update of one target; ``digest`` is as in ``Fleet.committed``.

        If the update ``moved_on``, it succeeded on some target; a target with the old version is then left behind.
        """
        with self._lock:
            fleet, url = self._fleet, row.url
            if row.status == "serving":
                if fleet.state(url) == "updating":  # otherwise the target has restarted meanwhile
                    fleet.committed(url, version=version, digest=digest)
            elif row.status in ("quarantined", "unknown") and fleet.state(url) not in ("quarantined", "gone"):
                fleet.broken(url, row.message)
            elif row.status == "untouched" and moved_on:
                fleet.broken(url, f"left behind: {row.message}" if row.message else "left behind")
            else:
                fleet.kept(url)

    def opened(self, url: str) -> None:
        """Records that a session was opened on a member, unless that is known, or the member is gone since."""
        with self._lock:
            if self._fleet.state(url) not in ("updating", "gone"):
                self._fleet.opened(url)

    def broke_off(self, url: str, reason: str, *, whole: bool) -> None:
        """Records that an update of one target failed; ``whole`` if it has confirmed that it serves its old version."""
        with self._lock:
            if self._fleet.state(url) != "updating":
                return
            if whole:
                self._fleet.kept(url)
            else:
                self._fleet.broken(url, reason)

    def health(self) -> tuple[TargetHealth, ...]:
        """The known health of every member, in order; sends nothing."""
        with self._lock:
            return self._fleet.report()

    def close(self) -> None:
        """Closes every client.  Safe to call twice."""
        for url in self._members:
            self._probes.forget(url)
        for client in self._clients.values():
            client.close()

    def _record(self, url: str, answer: EngineInfo | WeightcastError, *, waited: bool) -> None:
        if isinstance(answer, EngineInfo):
            self._silent.discard(url)
            self._fleet.answered(
                url,
                version=answer.version,
                incarnation=answer.incarnation,
                digest=answer.digest,
                tells_version=answer.tells_version,
                tells_digest=answer.has_receiver,
                shows_restart=answer.shows_restart,
            )
        elif isinstance(answer, TargetUnreachable):
            if waited or not is_silence(answer):
                self._silent.add(url)
            (self._fleet.silent if is_silence(answer) else self._fleet.lost)(url, str(answer))
        else:
            self._fleet.broken(url, str(answer))
