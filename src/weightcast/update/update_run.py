"""One update, across its attempts: the targets that take part, what each phase took, and the report."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager

from weightcast.config import check_version
from weightcast.report import TargetReport, UpdateReport
from weightcast.transports.link import Link
from weightcast.transports.session import LinkSession, Outcome
from weightcast.update.members import Members
from weightcast.update.roster import Current, Roster
from weightcast.update.verify import Verifier
from weightcast.watch.events import AttemptStarted, short
from weightcast.watch.listeners import Events
from weightcast.wire.engine_info import EngineInfo
from weightcast.wire.messages import Open


class UpdateRun:
    """One update, which begins when this is made.

    Attributes:
        targets: The targets of the update; those that fail stay out of the attempts that follow.
        attempts: Number of attempts so far.
        unexplained: Number of attempts in which a group failed and no target is to blame.
    """

    def __init__(self, targets: Sequence[Link], version: int, events: Events, *, counts_on: bool = False) -> None:
        """With ``counts_on``, ``version`` is the lowest that it may have."""
        self.targets = tuple(targets)
        for link in self.targets:
            link.session, link.outcome = LinkSession(), Outcome()
        self.version = version
        self.attempts = self.unexplained = 0
        self._counts_on = counts_on
        self._events = events
        self._phases: dict[str, float] = {}
        self._on_head_s = 0.0  # sum of the phases that follow one another on this rank
        self._started = time.monotonic()

    @property
    def active(self) -> list[Link]:
        """The targets that have not failed: one that hangs would cost another deadline."""
        return [link for link in self.targets if link.outcome.failed is None]

    @property
    def switched(self) -> bool:
        """True if any target has switched."""
        return any(link.session.committed for link in self.targets)

    def settle_version(self, links: Sequence[Link]) -> dict[str, EngineInfo]:
        """Settles the version, now that targets were probed; returns the descriptions of those that answered."""
        infos: dict[str, EngineInfo] = {}
        for link in links:
            if isinstance(link.answer, EngineInfo):
                link.outcome.info = infos[link.url] = link.answer
        if self._counts_on:
            served = [info.version for info in infos.values() if info.version is not None]
            self.version = max((self.version, *(version + 1 for version in served)))
        check_version("version", self.version)
        return infos

    def tell_attempt(self, message: Open, links: Sequence[Link]) -> None:
        """Emits that an attempt asks these targets for a session."""
        self._events.emit(
            AttemptStarted(
                number=self.attempts,
                session=short(message.session),
                version=message.version,
                targets=tuple(link.url for link in links),
                at=time.monotonic(),
            )
        )

    def add_phase(self, name: str, seconds: float, *, beside: bool = False) -> None:
        """Adds to the time of a phase; no two run at once on this rank, unless another ran ``beside`` them."""
        self._phases[name] = self._phases.get(name, 0.0) + seconds
        if not beside:
            self._on_head_s += seconds

    @contextmanager
    def phase(self, name: str, bucket: int | None = None, so_far: tuple[int, int] = (0, 0)) -> Generator[None]:
        """Counts what runs within it as part of a phase; ``so_far`` is as for ``Events.step_ended``."""
        began = time.monotonic()
        try:
            yield
        except BaseException:
            so_far = (0, 0)  # a step that failed has sent no bucket
            raise
        finally:
            ended = time.monotonic()
            self.add_phase(name, ended - began)
            self._events.step_ended(name, began, ended, bucket=bucket, so_far=so_far)

    def report(
        self, links: Sequence[Link], members: Members, roster: Roster, verifier: Verifier, *, whole: bool
    ) -> UpdateReport:
        """Asks targets that have not switched, or have failed, what they serve, and reports the update as it is now.

        The ``links`` took part in the last attempt, which has sent the ``whole`` model or failed.
        """
        unsure = [link for link in self.targets if link.is_unsure]
        if unsure:
            with self.phase("recover"):
                roster.look(unsure, hasty=True)
        size_bytes, carriers = members.size_bytes, members.carriers
        rows = {link: _row(link, size_bytes, carriers.signature) for link in self.targets}
        digest, changed = verifier.digest, None
        moved_on = any(row.status == "serving" for row in rows.values())
        if moved_on:
            roster.current = Current(version=self.version, digest=digest)
            # A caller that is allowed older numbers goes back and counts again on purpose.
            kept = (self.version,) if members.config.allow_older else [n for n in roster.tried if n >= self.version]
            roster.tried = {one: roster.tried[one] for one in kept if one in roster.tried}
            changed = verifier.served()
        for link, row in rows.items():
            if link.session.committed is not None:
                link.start.digest = digest
            link.ended(row, version=self.version, moved_on=moved_on)
        seconds = time.monotonic() - self._started
        phases = self._phases | {"other": max(seconds - self._on_head_s, 0.0)}
        phases = {name: round(taken_s, 6) for name, taken_s in phases.items()}
        phases["stall"] = max((row.stall_s for row in rows.values()), default=0.0)
        return UpdateReport(
            version=self.version,
            transport=members.label(links),
            bytes=size_bytes if whole else min(carriers.sent_bytes, size_bytes),
            buckets=carriers.num_buckets,
            seconds=seconds,
            phases=phases,
            peak_extra_bytes=0,
            digest=digest,
            targets=tuple(rows.values()),
            unsummed=verifier.unsummed,
            changed_ratio=changed,
            cast={dtype: len(numbers) for dtype, numbers in members.plan.cast.items()},
        )


def _row(link: Link, size_bytes: int, together: object) -> TargetReport:
    """A target's row, with a note if its rates were low; ``together`` is as for ``UsualRates.look``."""
    legs = link.session.legs(link.outcome.plan, size_bytes)
    if link.session.committed is not None and (low := link.rates.look(link.url, legs, together)):
        link.outcome.notes.append(low)
    return link.row(legs)
