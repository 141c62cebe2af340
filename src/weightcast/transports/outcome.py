"""Each target's outcome of an update, with the proof that was reached.

The checks compare a target's answers with the digests of what was sent.  They send nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from weightcast.digest.definition import unequal
from weightcast.digest.sent import Sent
from weightcast.errors import VerificationFailed, WeightcastError
from weightcast.report import LegReport, TargetReport, TargetStatus
from weightcast.transports.blame import raise_together
from weightcast.transports.link import Link
from weightcast.wire.answers import Ack
from weightcast.wire.engine_info import EngineInfo

Proof = Literal["none", "received", "partial", "resident", "behaviour"]


@dataclass(slots=True)
class Outcome:
    """One target in one update, across attempts.

    Attributes:
        proof: Highest level of proof that was reached.
        digest: Returns the model digest at that level; empty without proof.  Called when the update is over.
        matched: Number of engine ranks that agree with it.
        proven: Number of tensors that were read back and equal what was sent.
        in_doubt: True if the answer to Commit was lost and the target could not be asked again.
        uncompared: True if its behaviour had to be compared with the trainer's and could not be.
        reverted: The target's answer to Revert; None if it was not switched back.
        ahead: True if the target serves the new version although others were switched back.
        transport: Name of the transport that reached the target in the last attempt; empty if none was tried.
        legs: As ``TargetReport.legs``, of that attempt.
    """

    info: EngineInfo | None = None
    failed: WeightcastError | None = None
    proof: Proof = "none"
    digest: Callable[[], str] = str
    matched: int = 0
    proven: int = 0
    committed: Ack | None = None
    in_doubt: bool = False
    uncompared: bool = False
    reverted: Ack | None = None
    ahead: bool = False
    notes: list[str] = field(default_factory=list[str])
    peak_extra_bytes: int = 0
    transport: str = ""
    legs: tuple[LegReport, ...] = ()
    message: str = ""

    @property
    def answers_otherwise(self) -> bool:
        """True if the target keeps what was sent, but its log-probabilities differ from the trainer's."""
        return isinstance(self.failed, VerificationFailed) and self.proof == "resident" and not self.uncompared

    def add(self, words: str) -> None:
        """Adds a remark for the report."""
        self.message = f"{words}; {self.message}" if self.message else words

    def received(self, ack: Ack, sent: Sent) -> None:
        """Records that the target received exactly what was sent, according to its answer to Close."""
        self.proof = "received"
        self.matched = ack.received_ranks
        self.digest = lambda: sent.digest

    def resident(self, link: Link, ack: Ack, digest: str, proven: int) -> None:
        """Records that the target keeps what was sent; VerificationFailed if it keeps something else.

        ``digest`` is the model digest that ``proven`` tensors must have together; empty for no proof.
        """
        self.committed = ack
        self.message = ack.message
        self.peak_extra_bytes = link.peak_extra_bytes
        if not digest:
            return
        if ack.digest != digest:
            raise VerificationFailed(
                f"{link.url} keeps something else than was sent: the digest of all is {ack.digest or 'missing'} there, "
                f"and {digest} here",
                url=link.url,
                names=(),
            )
        self.proof = "partial" if ack.unproven else "resident"
        self.proven = proven
        self.matched = ack.resident_ranks
        self.digest = lambda: digest
        if ack.unproven:
            self.add(f"{len(ack.unproven)} tensors cannot be read back, {ack.unproven[0]} among them")

    def row(self, url: str, now: EngineInfo | WeightcastError | None) -> TargetReport:
        """Returns the target's row in the report.

        ``now`` is the result of another probe, for a target that has not committed or has failed; None for others.
        """
        answer = self.reverted or self.committed
        status: TargetStatus = "serving" if answer is not None and self.reverted is None else "untouched"
        after = answer.version if answer is not None else None
        message = self.message
        if isinstance(now, EngineInfo):
            status = "quarantined" if now.state == "quarantined" else "unknown" if self.in_doubt else status
            after = now.version
            message = message or now.message
        elif now is not None:
            status = "unknown" if self.in_doubt else "quarantined"
            after = None
            message = str(now)
        if self.failed is not None:
            message = str(self.failed)
        if self.in_doubt:
            message = f"{message}; it is not known whether the engine has switched: send it a full update"
        if self.ahead or (isinstance(self.failed, VerificationFailed) and self.committed is not None):
            # The engine serves other weights than were sent, or than the other engines do, whatever state it reports.
            status = "quarantined" if self.reverted is None else status
        if self.reverted is not None and self.message and self.message not in message:
            message = f"{self.message}; {message}"
        info, ack, serving = self.info, self.committed, status == "serving"
        return TargetReport(
            url=url,
            engine=info.engine if info is not None else "unknown",
            version_before=info.version if info is not None else None,
            version_after=after,
            digest=(self.digest() if serving else "") or None,
            status=status,
            proof=self.proof if serving else "none",
            proven=self.proven if serving else 0,
            unproven=len(ack.unproven) if serving and ack is not None else 0,
            ranks=info.tp_size if info is not None else 0,
            digests_matched=self.matched if serving else 0,
            stall_s=ack.stall_s if ack is not None else 0.0,
            peak_extra_bytes=self.peak_extra_bytes,
            not_updated=ack.not_updated if ack is not None else (),
            transport=self.transport,
            legs=self.legs,
            message=message,
            notes=tuple(self.notes),
        )


def arrived(link: Link, ack: Ack, sent: Sent, *, kept_only: bool = False) -> bool:
    """Returns True if every rank received exactly what was sent.

    With ``kept_only`` ranks receive no more than they keep, so only tensors that the engine keeps are compared: by one
    digest, or by name where Close asked for that.
    """
    if kept_only and not ack.received:
        same = ack.received_all == sent.digest_received(link.info.specs)
    elif kept_only:
        kept = {spec.name for spec in link.info.specs}
        same = not unequal({name: digest for name, digest in sent.received.items() if name in kept}, ack.received)
    elif ack.received_all:
        same = ack.received_all == sent.of_all
    else:
        same = not unequal(sent.received, ack.received)
    return same and not ack.mismatched and ack.received_ranks == link.info.tp_size


def received_otherwise(link: Link, ack: Ack, sent: Sent, *, gathers: bool) -> VerificationFailed:
    """Returns the error for a target that received something else; no target has switched.

    ``ack`` answers Close by name.  ``gathers`` says that buckets are gathered from several trainer ranks, so that the
    gather may be at fault.
    """
    names = unequal(sent.received, ack.received) or list(ack.mismatched)
    what = "the trainer ranks hold" if gathers else "was sent"
    where = "; the gather among trainer ranks or the transfer to this engine is at fault" if gathers else ""
    return VerificationFailed(
        f"{link.url} received something else than {what}: {', '.join(names[:6])} "
        f"({ack.received_ranks} of {link.info.tp_size} ranks agree){where}",
        url=link.url,
        names=names,
        hint="no engine has switched; a bit flipped in the transfer, or a buffer was reused too early",
    )


def check_alike(links: Sequence[Link]) -> None:
    """Checks that engines with the same weights before the update have the same weights after it.

    It compares the engines' own checksums, which are comparable only among engines of one kind, version and size.  So
    it finds an engine that has not loaded what the others have, but no error that all of them share.  It raises
    VerificationFailed, or TargetsFailed for several.
    """
    alike: dict[tuple[str, int, str], Link] = {}
    wrong = list[VerificationFailed]()
    for link in links:
        before = link.opened.checksum if link.opened is not None else ""
        after = link.committed.checksum if link.committed is not None else ""
        if not before or not after:
            continue
        first = alike.setdefault((link.info.engine, link.info.tp_size, before), link)
        assert first.committed is not None
        if first.committed.checksum != after:
            words = f"{link.url} and {first.url} had the same weights before this update and have different ones now"
            hint = "one of the two has not loaded what was sent: their own checksums of all weights differ"
            wrong.append(VerificationFailed(words, url=link.url, names=(), hint=hint))
    raise_together(wrong)
