"""The members of one trainer's fleet.  A roster outlives updates and changes of membership."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from weightcast.comm import event_loop
from weightcast.comm.http import Client
from weightcast.config import Target
from weightcast.errors import DeadlineExceeded, TargetError
from weightcast.transports.health import TargetHealth
from weightcast.transports.link import Link
from weightcast.update.background_probe import BackgroundProbe
from weightcast.update.recognise import ask_afresh_on_loop
from weightcast.watch.listeners import Events
from weightcast.wire.engine_info import EngineInfo

_SILENT_WAIT_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Current:
    """The fleet's weights, as committed last; ``digest`` is None with ``verify="none"``."""

    version: int
    digest: str | None


class Roster:
    """The members.  Any thread may call ``health``; one thread calls the rest.

    A target that passed a deadline gets one more short wait, and after that none until it answers.

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
        events: Events | None = None,
    ) -> None:
        self._timeout_s = timeout_s
        self._silent_wait_s = min(_SILENT_WAIT_S, timeout_s / 2)
        self._recognise = recognise
        self._events = events if events is not None else Events()
        self._links: dict[Target, Link] = {}  # those of targets that are leaving too
        self._members: dict[str, Link] = {}
        self._probes = BackgroundProbe[EngineInfo](lambda url: recognise(self._members[url].client))
        self.current: Current | None = None
        self.trainer = secrets.token_hex(8)  # the last half of each session's id
        # By version, from the one that is served on: the digest of the weights that engines may have switched to.
        self.tried: dict[int, str | None] = {}
        self.set_members(targets)

    @property
    def links(self) -> tuple[Link, ...]:
        """All members, in order."""
        return tuple(self._members.values())

    @property
    def behind(self) -> list[Link]:
        """The members that answer and do not serve the current version."""
        version = self.current.version if self.current is not None else None
        return [link for link in self.links if not link.health.is_active(version) and link.health.state != "gone"]

    def link(self, url: str) -> Link:
        """A member."""
        return self._members[url]

    def set_members(self, targets: Iterable[Target], *, leaving: Iterable[Target] = ()) -> None:
        """Replaces the members and closes the clients of the others.  A target that stays keeps its link.

        Args:
            leaving: Targets that stay members until the next call.  A target whose options change (its key, for
                example) has both links until then; they begin with the same health.

        Raises:
            ConfigError: The options of a target are wrong; the members are unchanged.
        """
        chosen = (*leaving, *targets)
        links = {target: self._links.get(target) or self._new_link(target) for target in chosen}
        members = {target.url: links[target] for target in chosen}
        for url, link in self._members.items():
            if members.get(url) is not link:
                self._probes.forget(url)
        for target in self._links.keys() - links.keys():
            self._links[target].client.close()
        self._links, self._members = links, members

    def _new_link(self, target: Target) -> Link:
        link = Link(client=Client(target, timeout_s=self._timeout_s), events=self._events)
        before = self._members.get(target.url)
        if before is not None:
            link.health, link.silent = before.health, before.silent
        return link

    def check_one_engine_each(self) -> None:
        """Asks each member, once in its membership, whether its URL leads to one engine; ConfigError if to several."""

        async def check(link: Link) -> None:
            with suppress(TargetError, DeadlineExceeded):  # it does not answer, which the update will say
                await ask_afresh_on_loop(link.client.target, self._recognise, timeout_s=self._timeout_s)
                link.is_one = True

        async def check_all() -> None:
            await asyncio.gather(*(check(link) for link in self.links if not (link.is_one or link.silent)))

        event_loop.run(check_all())

    def ask(self, links: Iterable[Link]) -> float:
        """Starts probes without waiting and returns the moment, for the ``since`` of ``look``."""
        asked_at = time.monotonic()
        self._probes.ask_ahead([link.url for link in links], waited_s=0.0)
        event_loop.flush()
        return asked_at

    def ask_silent(self, links: Iterable[Link]) -> None:
        """Starts probes of those members that are silent; the next look does not wait for them."""
        silent = [link.url for link in links if link.silent and self._members.get(link.url) is link]
        self._probes.ask_ahead(silent, waited_s=self._silent_wait_s)

    def look(self, links: Sequence[Link], *, hasty: bool = False, since: float | None = None) -> None:
        """Probes members, and notes the ``answer`` of each in its link.

        Args:
            links: The members to probe.
            hasty: True waits only briefly, also for healthy targets.  A target that misses this short wait is not
                marked silent.
            since: Also accepts answers to probes that started at this moment or later; None starts new probes.
        """
        event_loop.run(self.look_on_loop(links, hasty=hasty, since=since))

    async def look_on_loop(self, links: Sequence[Link], *, hasty: bool = False, since: float | None = None) -> None:
        """As ``look``, on the event loop."""
        brief = {link.url for link in links if hasty or link.silent}
        patience_s = {link.url: self._silent_wait_s if link.url in brief else self._timeout_s for link in links}
        found = await self._probes.look_on_loop(patience_s, anew=patience_s.keys() - brief, since=since)
        for link in links:
            link.answered(found[link.url], waited=link.url not in brief)
        self.ask_silent(links)

    def health(self) -> tuple[TargetHealth, ...]:
        """The known health of every member, in order; sends nothing."""
        version = self.current.version if self.current is not None else None
        return tuple(link.health.row(link.url, version) for link in self.links)

    def close(self) -> None:
        """Closes every client.  Safe to call twice."""
        for url in self._members:
            self._probes.forget(url)
        for link in self._links.values():
            link.client.close()
