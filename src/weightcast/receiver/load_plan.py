"""The work that an engine rank does once for all updates by one plan."""

from __future__ import annotations

from weightcast.digest.bucket_sums import PlanSums
from weightcast.receiver.bucket_plan import BucketPlan
from weightcast.receiver.scattered_plan import ExchangePlan, ScatteredPlan
from weightcast.wire.plans import UpdatePlan


class LoadPlan:
    """The copies and sums of one plan's buckets.  All that a rank remembers of them is here, and goes with the plan.

    What depends on where parameters lie is checked against their form, or kept by their addresses.

    Attributes:
        hash: Hash of the plan; empty for buckets that come without one.
        sums: Sums of whole buckets.
        buckets: Copies of whole buckets, by number.
        scattered: Copies out of several places, by how the parts come and the number of the bucket.
        exchanges: Messages with parts, by whether they are read and the number of the bucket.
        legs: Messages beside parts in memory, by the trainer ranks with memory and the number of the bucket.
    """

    def __init__(self, plan: UpdatePlan | None = None) -> None:
        self.hash = plan.hash if plan is not None else ""
        self.sums = PlanSums(plan.layouts if plan is not None else ())
        self.buckets: dict[int, BucketPlan] = {}
        self.scattered: dict[tuple[str, int], ScatteredPlan] = {}
        self.exchanges: dict[tuple[bool, int], ExchangePlan] = {}
        self.legs: dict[tuple[tuple[int, ...], int], ExchangePlan] = {}

    def is_of(self, plan: UpdatePlan | None) -> bool:
        """True if updates by this plan find here what they need."""
        return self.hash == (plan.hash if plan is not None else "")
