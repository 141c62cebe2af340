"""A receiver whose engine generates on another thread of the same process, and stands still while weights switch."""

from __future__ import annotations

from weightcast.receiver.rank import WeightReceiver
from weightcast.runtime.pace import Pace, paced
from weightcast.runtime.steps import StepCounter, share_interpreter
from weightcast.runtime.streams import OwnStream
from weightcast.wire.answers import RankAck
from weightcast.wire.messages import Announce, Commit, Message

# Of what an engine of a large model lets come between two of its steps, which are longer.
_SHARE = 0.25


class BesideSteps:
    """Carries out messages on a stream of their own and in slices, so that no step waits behind copies and sums."""

    def __init__(self, receiver: WeightReceiver, steps: StepCounter) -> None:
        self._receiver = receiver
        self._steps = steps
        self._pace = Pace(steps, share=_SHARE)
        self._stream = OwnStream(receiver.device)
        if receiver.device.type == "cuda":  # elsewhere it is the processor that threads share
            share_interpreter()

    def apply(self, message: Message) -> RankAck:
        """As ``WeightReceiver.apply``."""
        if isinstance(message, Commit):  # the engine is paused, until its weights were read back
            self._steps.stand_still(goes_on=False)
            self._pace.restart()
        # Steps write no weights, but a switch or a read-back must see what was loaded at the start or woke up.
        with self._stream.current(behind=not isinstance(message, Announce)), paced(self._pace):
            return self._receiver.apply(message)
