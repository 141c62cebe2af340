"""The fuzz target: an engine behind the decoders, and the checks that no input changes it or ends this process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.helpers.session_bench import Bench
from weightcast.comm import http
from weightcast.errors import WireError
from weightcast.wire.codec import decode, decode_ack, decode_info, decode_rank_ack, encode
from weightcast.wire.messages import Join, Open, Readback

_DECODERS: tuple[Callable[[bytes], Any], ...] = (decode, decode_ack, decode_rank_ack, decode_info)


@dataclass(slots=True)
class Target:
    """A real engine's floor with a small model, and how often what happened.

    Attributes:
        counts: Inputs, decoded messages by kind, messages that the engine took and refused.
    """

    bench: Bench = field(default_factory=Bench)
    counts: Counter[str] = field(default_factory=Counter[str])
    _before: Any = None
    _digests: Any = None

    def __post_init__(self) -> None:
        self._before = self.bench.engine.info()
        self._digests = self.bench.tell(Readback()).resident

    def feed(self, data: bytes) -> None:
        """Runs one input; raises if it has a forbidden effect."""
        self.counts["inputs"] += 1
        for read in _DECODERS:
            try:
                message = read(data)
            except WireError:
                continue
            assert read(encode(message)) == message, data
            self.counts[f"decoded {type(message).__name__}"] += 1
            # A Join would connect to any address that it names, so it is decoded but not executed.
            if read is decode and not isinstance(message, Join):
                self._tell(message)
        assert isinstance(http._words(data), str)

    def check(self) -> None:
        """Checks that nothing has changed, including every bit of every parameter."""
        assert self.bench.engine.info() == self._before
        assert self.bench.tell(Readback()).resident == self._digests
        assert not self.bench.hooks.paused

    def close(self) -> None:
        self.bench.close()

    def _tell(self, message: Any) -> None:
        engine = self.bench.engine
        ack = engine.apply(message)
        self.counts["taken" if ack.ok else "refused"] += 1
        assert ack.ok or ack.error
        assert not ack.failed_ranks, ack.error
        if isinstance(message, Open) and ack.ok:
            self.counts["sessions"] += 1
        elif engine.state == "updating" and self.counts["inputs"] % 50 == 0:
            # A session that an input has opened sees some more inputs, and ends.
            session = engine._steps.session
            assert session is not None
            engine.lease_lost(session.open.session)

    def end_session(self) -> None:
        """Closes the session that an input may have opened, which is the only change allowed."""
        session = self.bench.engine._steps.session
        if session is not None:
            self.bench.engine.lease_lost(session.open.session)
