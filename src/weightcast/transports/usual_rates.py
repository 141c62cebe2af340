"""The rates at which a target's legs have delivered, and a remark on an update in which they were far lower."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from statistics import median

import msgspec

from weightcast.report import LegReport, count_of, format_rate

log = logging.getLogger("weightcast.transports.usual_rates")

_KEPT = 16  # updates
_FEWEST = 3  # updates that say what is usual
# In 57 of the 58 rows of benchmarks/results that have five turns or more, no turn took twice as long as the median.
_FAR_BELOW = 0.5
# Smaller updates take as long as their messages, and a shorter loss may be the scheduler's.
_LEAST_BYTES = 16 << 20
_LEAST_LOSS_S = 0.25
_CAUSES = {
    "mapped": "what else uses the memory of this host and its GPUs",
    "buffer": "what else uses the memory of this host and its GPUs",
    "group": "what else uses the network between these ranks, and its errors",
    "rdma": "what else uses the network between these ranks, and its errors",
    "file": "what else uses the file system",
}


class UsualRates:
    """Compares each update of one target with the median of those before it, by the same legs.

    The first update is not counted, because it opens handles and connections.  A rate that stays low is usual after
    some updates.
    """

    def __init__(self) -> None:
        self._of: object = None
        self._seconds: deque[float] | None = None  # of the updates before; None before the first
        self._is_low = False

    def look(self, url: str, legs: Sequence[LegReport], together: object) -> str:
        """Counts an update that the target has taken whole; returns a remark, or nothing if its rates are as usual.

        ``together`` says which targets share the links: other rates are usual with others.  The remark is logged if
        the rates were not low in the update before.
        """
        of = together, tuple(msgspec.structs.replace(leg, seconds=0.0) for leg in legs)
        if of != self._of or self._seconds is None:
            self._of, self._seconds, self._is_low = of, deque(maxlen=_KEPT), False
            return ""
        before, seconds = tuple(self._seconds), max(leg.seconds for leg in legs)
        self._seconds.append(seconds)
        was_low, self._is_low = self._is_low, False
        if len(before) < _FEWEST or sum(leg.bytes for leg in legs) < _LEAST_BYTES:
            return ""
        usual = median(before)
        if seconds * _FAR_BELOW < usual or seconds - usual < _LEAST_LOSS_S:
            return ""
        self._is_low = True
        found = "; ".join(f"{leg}, and usually at {format_rate(leg.bytes / usual)}" for leg in legs)
        causes = ", ".join(dict.fromkeys(_CAUSES[leg.by] for leg in legs))
        remark = (
            f"low rate: {found} (the median of {count_of(len(before), 'update')}). Look at {causes}, and at what else "
            "the engine did; the report's timeline shows which rank took long"
        )
        if not was_low:
            log.warning("%s: %s", url, remark)
        return remark
