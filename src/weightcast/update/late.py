"""Brings late targets to the fleet's version with weights that other targets serve; the trainer sends nothing.

Only targets that are active may give.  One that was brought in may give to the next.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from weightcast.config import Target, UpdateConfig
from weightcast.errors import WeightcastError
from weightcast.fleet.roster import Current, Roster
from weightcast.report import TargetReport, UpdateReport
from weightcast.update.messages import Failure
from weightcast.update.peer_copy import PeerCopy, copy_from_peer, misfits
from weightcast.wire.engine_info import EngineInfo

log = logging.getLogger("weightcast.update.late")

TRANSPORT = "peer"  # in reports
_MOST_PEERS = 3  # a fleet of dead peers must not cost a deadline each


@dataclass(slots=True)
class Late:
    """Late targets: a row for each that serves the version now, and the reason for each of the others, by URL."""

    rows: list[TargetReport] = field(default_factory=list[TargetReport])
    failures: dict[str, str] = field(default_factory=dict[str, str])

    def report(self, current: Current, *, seconds: float) -> UpdateReport:
        """The report of a catch-up in which the trainer had nothing to send."""
        return UpdateReport(
            version=current.version,
            transport=TRANSPORT,
            bytes=0,
            buckets=0,
            seconds=seconds,
            phases={"stall": max((row.stall_s for row in self.rows), default=0.0)},
            peak_extra_bytes=0,
            digest=current.digest,
            targets=tuple(self.rows),
        )

    def explain(self, failure: Failure) -> Failure:
        """A failure of the trainer's part, with the words of the peers."""
        words = [f"{url} got nothing from its peers: {why}" for url, why in self.failures.items()]
        words += [f"{row.url} was brought in ({row.message})" for row in self.rows]
        return msgspec.structs.replace(failure, text="; ".join((failure.text, *words)))


def bring_in(
    behind: Sequence[str],
    targets: Mapping[str, Target],
    infos: Mapping[str, EngineInfo],
    roster: Roster,
    current: Current,
    config: UpdateConfig,
) -> Late:
    """Copies the current version into each late target that a peer can give it to, one after the other.

    ``infos`` are as of the last probe.  A peer must have proven the digest of ``current``.  The roster knows which
    targets may give, and is told of each that serves the version now.
    """
    done = Late()
    for number, url in enumerate(behind):
        peers = _peers(url, infos, roster, number)
        if not peers:
            done.failures[url] = "no other target of its kind, model and size serves the version"
            continue
        roster.opened(url)
        try:
            copy = _copy(targets[url], [targets[one] for one in peers], current, config)
        except WeightcastError as error:
            now = roster.look([url, *peers], hasty=True)[url]  # a peer that has died gives to nobody else
            roster.broke_off(url, str(error), whole=isinstance(now, EngineInfo) and now.state == "serving")
            log.warning("%s got no weights from its peers: %s", url, error)
            done.failures[url] = str(error)
            continue
        roster.look([url])
        if copy.passed_over:
            roster.look(peers, hasty=True)
        row = _row(copy)
        roster.ended(row, version=current.version, moved_on=False, digest=row.digest)
        if any(one.active for one in roster.health() if one.url == url):
            done.rows.append(row)
        else:
            done.failures[url] = "it has restarted since the copy"
    return done


def _peers(url: str, infos: Mapping[str, EngineInfo], roster: Roster, number: int) -> list[str]:
    """URLs of the targets that may give, first the one whose turn it is."""
    late = infos.get(url)
    active = [row.url for row in roster.health() if row.active and row.url in infos]
    alike = [one for one in active if late is not None and not misfits(url, late, one, infos[one])]
    turn = number % len(alike) if alike else 0
    return [*alike[turn:], *alike[:turn]][:_MOST_PEERS]


def _copy(target: Target, peers: Sequence[Target], current: Current, config: UpdateConfig) -> PeerCopy:
    assert current.digest is not None
    return copy_from_peer(
        target, peers, pause=config.pause, timeout_s=config.timeout_s, must_be=(current.version, current.digest)
    )


def _row(copy: PeerCopy) -> TargetReport:
    return TargetReport(
        url=copy.url,
        engine=copy.engine,
        version_before=copy.version_before,
        version_after=copy.version,
        digest=copy.digest,
        status="serving",
        proof="resident",
        proven=copy.proven,
        ranks=copy.ranks,
        digests_matched=copy.ranks,
        stall_s=copy.stall_s,
        not_updated=copy.not_updated,
        transport=TRANSPORT,
        message=f"copied from {copy.peer}",
        notes=tuple(f"a peer gave nothing: {why}" for why in copy.passed_over),
    )
