"""How long to sleep between looks at something that nobody announces: soon again at first, later less often."""

from __future__ import annotations

import time

_SHORTEST_S = 5e-5
_LONGEST_S = 2e-3
_SHARE = 1 / 16  # what is seen too late is at most this part of what was waited for


class Looks:
    """Sleeps between looks, from the moment it is made."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def sleep(self) -> None:
        """Until the next look."""
        time.sleep(min(max((time.monotonic() - self._began) * _SHARE, _SHORTEST_S), _LONGEST_S))
