"""The update that was committed last: its answer for a sender that lost it, and the way back."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from weightcast.errors import EngineFailure, Refused, error_words
from weightcast.receiver.engine_state import EngineState
from weightcast.receiver.executor import Executor
from weightcast.receiver.rank_answers import ResidentFold, costs, failures
from weightcast.wire.answers import Ack, RankAck
from weightcast.wire.messages import Open, Revert


@dataclass(slots=True, kw_only=True)
class LastCommit:
    """A committed session, and what it replaced: an engine at ``version``, not ``whole`` if it was quarantined."""

    open: Open
    answer: Ack
    reverted: Ack | None = None
    reason: str = ""
    version: int | None
    digest: str | None
    whole: bool

    def answer_again(self, state: EngineState) -> Ack:
        """The answer to a Commit whose first answer was lost."""
        if self.reverted is not None:
            raise Refused(f"version {self.open.version} was switched back to version {self.version}")
        if state.state == "quarantined":
            raise Refused(f"version {self.open.version} was switched to, and then: {state.message}")
        return self.answer

    def check_revertible(self, state: EngineState) -> None:
        """Refuses where no whole old version is kept."""
        if state.facts.staging == "none":
            raise Refused("this engine has no second set of weights to go back to", hint="send it a full update")
        if self.version is None or not self.whole:
            raise Refused("what was kept before was no whole version that is known", hint="send it a full update")
        if state.state == "quarantined":
            raise Refused(f"this engine is quarantined: {state.message}", hint="send it a full update")

    def revert(self, message: Revert, executor: Executor, state: EngineState) -> Ack:
        """Brings the replaced version back, proves it and resumes; the second time, repeats the answer.

        ``Refused`` says that no rank has switched.  After another error the engine is quarantined.
        """
        if self.reverted is not None:
            return self.reverted
        self.check_revertible(state)
        assert self.version is not None
        started = time.monotonic()
        what = f"going back from version {self.open.version} to {self.version}"
        hooks = state.hooks
        try:
            hooks.pause(self.open.pause, self.open.timeout_s)
        except Exception:  # the engine's hooks are other people's code; nothing has been switched
            hooks.resume()
            raise
        try:
            acks = executor.apply(message, timeout_s=self.open.timeout_s)
            kept = self._proven(acks, state)
            state.version, state.digest, state.message = self.version, self.digest, ""
            hooks.drop_caches()
            hooks.set_version(self.version)
            hooks.resume()
        except Refused:
            raise
        except Exception as error:  # no session is open that would end the pause
            state.quarantine(f"{what} failed: {error_words(error)}")
            raise
        self.reason = message.reason or "no reason given"
        self.reverted = state.ack(
            digest=kept,
            resident_ranks=len(acks),
            stall_s=time.monotonic() - started,
            **costs(acks),
        )
        return self.reverted

    def _proven(self, acks: Sequence[RankAck], state: EngineState) -> str:
        """The model digest of what is kept, which is that of before where that is known."""
        _, error = failures(acks)
        if error and all(ack.refused for ack in acks):
            state.hooks.resume()  # no rank has switched
            raise Refused(error)
        if error:
            raise EngineFailure(error)
        resident = ResidentFold().fold(acks)
        kept = resident.digest_of(state.facts.specs)
        if resident.broken or (self.digest is not None and kept != self.digest):
            raise EngineFailure(f"what is kept now has the digest {kept}, and {self.digest} was served before")
        return kept
