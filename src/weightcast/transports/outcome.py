"""How each target came out of an update, and what was proven on it.

The checks compare what a target answered with what was sent; they ask nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from weightcast.errors import VerificationFailed, WeightcastError
from weightcast.report import TargetReport, TargetStatus
from weightcast.transports.digests import Sent
from weightcast.transports.link import Link
from weightcast.wire.digest import model_digest, unequal
from weightcast.wire.messages import Ack, EngineInfo

Proof = Literal["none", "received", "resident", "behaviour"]


@dataclass(slots=True)
class Outcome:
    """One target in one update, across attempts.

    Attributes:
        info: What it said when it was probed; None if it did not answer.
        failed: Why it dropped out, if it did.
        proof: Highest level reached.
        digests: Asked for when all is over: at that level, by tensor name.
        matched: Engine ranks that agree with it.
        committed: Its answer to the commit.
        peak_extra_bytes: Most extra memory of any of its ranks.
        message: Anything worth knowing.
    """

    info: EngineInfo | None = None
    failed: WeightcastError | None = None
    proof: Proof = "none"
    digests: Callable[[], Mapping[str, str]] = dict
    matched: int = 0
    committed: Ack | None = None
    peak_extra_bytes: int = 0
    message: str = ""

    def add(self, words: str) -> None:
        """Something more that is worth knowing."""
        self.message = f"{words}; {self.message}" if self.message else words

    def received(self, ack: Ack, sent: Sent) -> None:
        """What arrived is what was sent.

        Args:
            ack: The target's answer to Close.
            sent: What was sent.
        """
        self.proof = "received"
        self.matched = ack.received_ranks
        self.digests = lambda: sent.received

    def resident(self, link: Link, ack: Ack, expected: Mapping[str, str]) -> None:
        """What the target keeps is what was sent.

        Args:
            link: The target.
            ack: Its answer to Commit.
            expected: Digest by tensor name, in the dtype that it keeps; empty for no proof.

        Raises:
            VerificationFailed: It keeps something else.
        """
        self.committed = ack
        self.message = ack.message
        self.peak_extra_bytes = link.peak_extra_bytes
        if not expected:
            return
        wrong = unequal(expected, ack.resident)
        if wrong:
            raise VerificationFailed(
                f"{link.url} keeps something else than was sent: {', '.join(wrong[:6])}", url=link.url, names=wrong
            )
        self.proof = "resident"
        self.matched = ack.resident_ranks
        self.digests = lambda: ack.resident
        if ack.unproven:
            self.message = f"{len(ack.unproven)} tensors cannot be read back, {ack.unproven[0]} among them"

    def row(self, url: str, now: EngineInfo | WeightcastError | None) -> TargetReport:
        """The target's line in the report.

        Args:
            url: The target.
            now: For a target that has not committed, what it said when it was asked again.
        """
        status: TargetStatus = "serving" if self.committed is not None else "untouched"
        after = self.committed.version if self.committed is not None else None
        message = self.message
        if isinstance(now, EngineInfo):
            status = "quarantined" if now.state == "quarantined" else status
            after = now.version
            message = message or now.message
        elif now is not None:
            status = "quarantined"
            message = str(now)
        if self.failed is not None:
            message = str(self.failed)
        if isinstance(self.failed, VerificationFailed) and self.committed is not None:
            status = "quarantined"  # it serves something else than was sent, whatever it says of itself
        info, ack, serving = self.info, self.committed, status == "serving"
        digests = self.digests() if serving else {}
        return TargetReport(
            url=url,
            engine=info.engine if info is not None else "unknown",
            version_before=info.version if info is not None else None,
            version_after=after,
            digest=model_digest(digests) if digests else None,
            status=status,
            proof=self.proof if serving else "none",
            ranks=info.tp_size if info is not None else 0,
            digests_matched=self.matched if serving else 0,
            stall_s=ack.stall_s if ack is not None else 0.0,
            peak_extra_bytes=self.peak_extra_bytes,
            not_updated=ack.not_updated if ack is not None else (),
            message=message,
        )


def arrived(link: Link, ack: Ack, sent: Sent) -> bool:
    """Has every rank received exactly what was sent?

    Args:
        link: The target.
        ack: Its answer to Close.
        sent: What was sent.
    """
    same = ack.received_all == sent.of_all if ack.received_all else not unequal(sent.received, ack.received)
    return same and not ack.mismatched and ack.received_ranks == link.info.tp_size


def received_otherwise(link: Link, ack: Ack, sent: Sent) -> VerificationFailed:
    """What to raise where something else has arrived; nothing was switched.

    Args:
        link: The target.
        ack: Its answer to Close, by name.
        sent: What was sent.
    """
    names = unequal(sent.received, ack.received) or list(ack.mismatched)
    return VerificationFailed(
        f"{link.url} received something else than was sent: {', '.join(names[:6])} "
        f"({ack.received_ranks} of {link.info.tp_size} ranks agree)",
        url=link.url,
        names=names,
        hint="nothing was switched; a bit flipped on the way, or a buffer was reused too early",
    )


def check_alike(links: Sequence[Link]) -> None:
    """Engines that held the same weights before, and were sent the same, must hold the same now.

    Asks their own checksums, which compare only among themselves.  It finds an engine that has not loaded what its
    siblings have; it says nothing of what all of them have got wrong alike.

    Raises:
        VerificationFailed: One holds something else than its siblings.
    """
    alike: dict[tuple[str, int, str], Link] = {}
    for link in links:
        before = link.opened.checksum if link.opened is not None else ""
        after = link.committed.checksum if link.committed is not None else ""
        if not before or not after:
            continue
        first = alike.setdefault((link.info.engine, link.info.tp_size, before), link)
        assert first.committed is not None
        if first.committed.checksum != after:
            raise VerificationFailed(
                f"{link.url} and {first.url} held the same weights and were sent the same, and now hold different ones",
                url=link.url,
                names=(),
                hint="one of the two is wrong: their own checksums of all weights differ",
            )
