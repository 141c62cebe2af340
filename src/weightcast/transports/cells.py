"""Cells: the groups of bounded size into which the engine ranks of one update are divided.

All members of a process group fail together, so a group over every engine makes one engine's failure that of all.  A
cell has whole engines, a group of its own, and the sending trainer ranks as members.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar, runtime_checkable

from weightcast.transports.channel import Channel
from weightcast.transports.link import Link
from weightcast.transports.spec import TransportSpec

_Item = TypeVar("_Item")

MANY_RANKS = 256  # in a cell, where weights are sent once more for each cell
FEW_RANKS = 64  # where they are not


@runtime_checkable
class InCells(Protocol):
    """A transport in cells.  A cell that fails has its ``failure``, which is raised too."""

    @property
    def cells(self) -> Sequence[Channel]:
        """All cells."""
        ...


def divide(items: Iterable[_Item], ranks_of: Callable[[_Item], int], cell_ranks: int) -> list[list[_Item]]:
    """Divides engines into cells of at most ``cell_ranks`` members, in order; a larger engine is a cell by itself."""
    cells: list[list[_Item]] = []
    room = 0
    for item in items:
        ranks = ranks_of(item)
        if not cells or ranks > room:
            cells.append([])
            room = cell_ranks
        cells[-1].append(item)
        room -= ranks
    return cells


def most_ranks(spec: TransportSpec, asked: int | None, limit: int = MANY_RANKS) -> int:
    """Returns the most engine ranks in a cell of a transport: the caller's number, else ``limit`` and its own."""
    return asked or max(1, min(limit, spec.cells))


def cells_of(
    links: Sequence[Link], transport_of: Callable[[str], TransportSpec], most: Callable[[TransportSpec], int]
) -> tuple[tuple[str, ...], ...]:
    """URLs of the targets in each cell, of ``most`` ranks; none for targets whose transport makes no group."""
    found: list[tuple[str, ...]] = []
    ways = dict.fromkeys((transport_of(link.url), link.adapter.meeting) for link in links)
    for spec, meeting in ways:
        its = [link for link in links if transport_of(link.url) is spec and link.adapter.meeting == meeting]
        if spec.cells:
            cells = divide(its, lambda link: len(link.members), most(spec))
            found += (tuple(link.url for link in cell) for cell in cells)
    return tuple(found)
