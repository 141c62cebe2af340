"""The work that a trainer rank does once for all updates by one plan.

A plan is kept as long as the tables of its buckets and the names of its zero-copy tensors stay alike, and as long as
the same engines are reached in the same way.  All that it has goes with it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

from weightcast.digest.bucket_sums import PlanSums
from weightcast.digest.sent import casts_of
from weightcast.update.finite import FiniteCheck
from weightcast.wire.bucket import run_sizes
from weightcast.wire.layout import BucketLayout, TensorSpec
from weightcast.wire.plans import UpdatePlan


class SendPlan:
    """The tables of an update, and what the buckets need on their way.

    Attributes:
        tables: The plan in the form of the wire.
        lent: Names of each bucket's zero-copy tensors, in order; empty if there are none.
        sums: The digest sums of the buckets.
        finite: The check of whole buckets for values that are not finite.
    """

    def __init__(
        self, specs: Sequence[TensorSpec], layouts: Sequence[BucketLayout], lent: Sequence[tuple[str, ...]]
    ) -> None:
        runs = tuple(run_sizes(layout, lent[number] if lent else ()) for number, layout in enumerate(layouts))
        self.tables = UpdatePlan(tuple(specs), layouts, runs)
        self.lent = lent
        self.sums = PlanSums(layouts)
        self.finite = FiniteCheck()
        self._kept: list[Sequence[TensorSpec]] = []
        self._casts: dict[str, set[str]] = {}

    def casts(self, kept: Iterable[Sequence[TensorSpec]]) -> dict[str, set[str]]:
        """As ``casts_of``; worked out again only if an engine keeps other tensors than before."""
        tables = list(kept)
        if len(tables) != len(self._kept) or not all(map(operator.is_, tables, self._kept)):
            self._casts, self._kept = casts_of(self.tables.specs, tables), tables
        return self._casts
