"""Finds the targets that an attempt failed because of."""

from __future__ import annotations

from collections.abc import Sequence

from weightcast.errors import WeightcastError
from weightcast.protocols import Cell
from weightcast.transports.blame import engine_of, failures_of, only_its_group
from weightcast.transports.link import Link
from weightcast.update.roster import Roster
from weightcast.wire.engine_info import EngineInfo


def culprits_of(
    error: WeightcastError, targets: Sequence[Link], links: Sequence[Link], roster: Roster, *, moving: bool
) -> dict[Link, WeightcastError]:
    """Returns the targets that an error is about, each with its own failure; none if it is the trainer's own.

    If it says only that a group failed, a target that does not answer is to blame.  Of the ``targets`` of the update,
    the ``links`` took part in the attempt, and ``moving`` says that it failed where they were to be reached.
    """
    named = {engine_of(failure): failure for failure in failures_of(error)}
    found = {link: named[link.url] for link in targets if link.url in named}
    if not all(map(only_its_group, found.values())) or not (found or moving):
        return found
    roster.look(links, hasty=True)
    gone: dict[Link, WeightcastError] = {}
    for link in links:
        if not isinstance(link.answer, EngineInfo):
            assert link.answer is not None
            gone[link] = link.answer
        elif link.answer.state == "quarantined" and link.answer.staging != "none":
            gone[link] = error  # one without staging is half written, whoever is to blame
    return gone or found


def suspects_of(broken: Sequence[Cell], links: Sequence[Link]) -> dict[Link, WeightcastError]:
    """Returns the targets of cells that have failed, each with the failure of its cell."""
    failures = {url: cell.failure for cell in broken for url in cell.urls}
    return {link: failure for link in links if (failure := failures.get(link.url)) is not None}
