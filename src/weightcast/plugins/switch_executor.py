"""The executor in an engine's API server, and the round in which all ranks agree to switch weights.

For engines whose ranks switch between two steps, at a mark that travels with the engine's own work (SGLang, LMDeploy).
"""

from __future__ import annotations

from weightcast.plugins.other_hosts import Reception
from weightcast.plugins.rank_sockets import SocketRanks, committed_after, switches_weights
from weightcast.wire.answers import RankAck
from weightcast.wire.messages import Commit, Message

# The first frame of a rank's answer to a message that switches weights.
READY, NOTHING = b"ready", b"nothing"
# The notes that follow.
GO, CANCEL = b"go", b"cancel"


class SwitchExecutor(SocketRanks):
    """Sends messages to all ranks.  None of them switches weights before all have said that they can."""

    def __init__(self, world_size: int, folder: str, reception: Reception | None = None) -> None:
        self._committed = ""
        super().__init__(world_size, folder, reception)

    def apply(self, message: Message, *, timeout_s: float) -> list[RankAck]:
        """Implements ``Executor.apply``."""
        switches = switches_weights(message, self._committed)
        self._committed = committed_after(message, self._committed)
        if not switches:
            return self._tell(message, timeout_s)
        return self._tell(message, timeout_s, lambda: self._agree(message, timeout_s))

    def why_not_now(self, timeout_s: float) -> str:
        """Called when all ranks are ready.  The reason why none of them may switch; empty if they may."""
        return ""

    def after_decision(self) -> None:
        """Called once the ranks have been told to switch."""

    def _agree(self, message: Message, timeout_s: float) -> None:
        """Waits until each rank has said whether it has something to switch; then lets all of them do so, or none."""
        try:
            said = self._replies(self._control, timeout_s, "its readiness to switch")
        except BaseException:
            self._note(CANCEL)
            raise
        ready = [frame == READY for frame in said]
        # A rank that refuses a commit has nothing to switch, and then nobody switches.  A rank may well have nothing to
        # take back.
        go = all(ready) if isinstance(message, Commit) else any(ready)
        why = self.why_not_now(timeout_s) if go else "not all ranks were ready to switch weights"
        self._note(CANCEL + why.encode() if why else GO)
        if not why:
            self.after_decision()
