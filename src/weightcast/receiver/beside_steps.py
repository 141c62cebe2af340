"""Weight messages beside the steps of an engine that generates on another thread of the same process."""

from __future__ import annotations

import sys

import torch

from weightcast.receiver.rank import WeightReceiver
from weightcast.wire.answers import RankAck
from weightcast.wire.messages import Announce, Message

_SWITCH_INTERVAL_S = 5e-5


def share_interpreter() -> None:
    """Lets threads beside an engine's have the interpreter in time.

    An engine whose loop runs in Python keeps it, and Python's own interval of 5 ms passes before each step of another
    thread.  On one H200, SGLang took 6 s for an update of 16 GB that way.
    """
    sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_INTERVAL_S))


class OwnStream:
    """A CUDA stream for copies and sums, so that no step waits until they are over; nothing on other devices."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None

    def apply(self, receiver: WeightReceiver, message: Message) -> RankAck:
        """Carries out one weight message, as ``WeightReceiver.apply``, while the stream is current."""
        if self._device.type != "cuda":
            return receiver.apply(message)
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        # What was loaded at the start or woke up was written on the default stream, and a switch or a read-back must
        # see it.  Steps of an engine may be there too: they write no weights, and no bucket waits for them.
        if not isinstance(message, Announce):
            self._stream.wait_stream(torch.cuda.default_stream(self._device))
        with torch.cuda.stream(self._stream):
            return receiver.apply(message)
