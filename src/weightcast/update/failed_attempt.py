"""A failed attempt of an update: which targets are to blame, and whether another attempt may do without them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from weightcast.config import UpdateConfig
from weightcast.errors import WeightcastError
from weightcast.transports.blame import only_its_group
from weightcast.transports.link import Link
from weightcast.update.culprits import culprits_of, suspects_of
from weightcast.update.members import Members
from weightcast.update.roster import Roster
from weightcast.update.update_run import UpdateRun

_REPEATS = 2  # of an attempt in which a group failed and no target is to blame


class FailedAttempt:
    """Why an attempt has failed.  Made before all groups are aborted, which makes others fail."""

    def __init__(
        self, run: UpdateRun, members: Members, links: Sequence[Link], roster: Roster, config: UpdateConfig
    ) -> None:
        """``links`` are the targets that took part."""
        self._run = run
        self._members = members
        self._links = links
        self._roster = roster
        self._config = config
        self._broken = [cell for cell in members.carriers.cells if cell.failure is not None]
        self._culprits: Mapping[Link, WeightcastError] = {}

    def find_culprits(self, error: WeightcastError) -> None:
        """Finds the targets that an error is about, once every session is ended."""
        moving = self._members.carriers.failed
        self._culprits = culprits_of(error, self._run.targets, self._links, self._roster, moving=moving)

    @property
    def _nothing_committed(self) -> bool:
        return not any(link.session.committed for link in self._links)

    @property
    def _may_do_without(self) -> bool:
        """True if the update may go on without a target."""
        return self._config.on_failure == "quarantine" and self._nothing_committed

    def repeats(self) -> bool:
        """True if a group failed, and another attempt may show whether a target is to blame.

        When it fails again and again, later groups are smaller and all targets of the group count as culprits.
        """
        only_groups = self._members.carriers.failed and all(map(only_its_group, self._culprits.values()))
        if not self._may_do_without or not only_groups:
            return False
        suspects = suspects_of(self._broken, self._links)
        if not suspects:
            return False
        self._run.unexplained += 1
        if self._run.unexplained <= _REPEATS:
            for link, failure in suspects.items():
                link.outcome.notes.append(f"the group of its cell failed, and the update began again: {failure}")
            return True
        self._members.divide_cells(self._broken)
        if len(suspects) < len(self._links):
            self._culprits = suspects  # all targets of the cells, if others remain
        return False

    def gives_way(self, *, repeats: bool) -> bool:
        """True if transports of culprits gave way to others, by which another attempt can reach them.

        The outcomes of the other culprits take their failures.  Without ``repeats`` no attempt may follow.
        """
        notes: Mapping[Link, str] = {}
        if repeats and self._nothing_committed and self._members.carriers.failed:
            notes = self._members.give_way(self._culprits, if_all=self._config.on_failure == "raise")
        for link, failure in self._culprits.items():
            if link in notes:
                link.outcome.notes.append(notes[link])
            else:
                link.outcome.failed = failure
        return bool(notes)

    def leaves_others(self) -> bool:
        """True if another attempt can go on without the culprits."""
        return self._may_do_without and bool(self._culprits) and any(not link.outcome.failed for link in self._links)
