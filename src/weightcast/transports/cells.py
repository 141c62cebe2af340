"""Cells: the groups of bounded size into which the engine ranks of one update are divided.

All members of a process group fail together, so a group over every engine makes one engine's failure that of all.  A
cell has whole engines, a group of its own, and the sending trainer ranks as members.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

from weightcast.protocols import Meeting

_Item = TypeVar("_Item")

MANY_RANKS = 256  # in a cell, where weights are sent once more for each cell
FEW_RANKS = 64  # where they are not


class Member(NamedTuple):
    """A target in cells, with the number of its ranks that join a group."""

    url: str
    meeting: Meeting
    ranks: int


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


def most_ranks(cells: int, asked: int | None, limit: int = MANY_RANKS) -> int:
    """Returns the most engine ranks in a cell: the caller's number, else the lower of ``limit`` and the transport's."""
    return asked or max(1, min(limit, cells))


def cells_of(
    groups: Iterable[tuple[int, Sequence[Member]]], asked: int | None, limit: int = MANY_RANKS
) -> tuple[tuple[str, ...], ...]:
    """URLs of the targets in each cell.

    The groups have ``TransportSpec.cells`` and the targets of a transport, which are in no cell if it makes no group.
    """
    found: list[tuple[str, ...]] = []
    for most, members in groups:
        if not most:
            continue
        for meeting in dict.fromkeys(member.meeting for member in members):
            its = [member for member in members if member.meeting == meeting]
            cells = divide(its, lambda member: member.ranks, most_ranks(most, asked, limit))
            found += (tuple(member.url for member in cell) for cell in cells)
    return tuple(found)
