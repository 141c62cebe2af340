"""An engine's answers: an ``Ack`` to every message, combined from one ``RankAck`` of each engine rank."""

from __future__ import annotations

from typing import Literal

import msgspec

from weightcast.wire.fields import Count, Digest, Rank, RankSteps, Text, Version
from weightcast.wire.held import HeldSums, HeldTable
from weightcast.wire.layout import Size

MAPPING_FAILED = 421  # HTTP status of an answer with the cause ``mapping``
GROUP_FAILED = 424  # HTTP status of an answer with the cause ``group``
UNKNOWN_BLOB = 428  # HTTP status of an answer to a message whose tables must be sent in full

State = Literal["serving", "updating", "quarantined"]
# Bytes read where trainer ranks keep their weights, bytes read out of their buffers, and bytes that came in messages.
Taken = tuple[Size, Size, Size]
NOTHING_TAKEN: Taken = (0, 0, 0)
Cause = Literal["engine", "group", "mapping"]


class RankAck(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Answer of one engine rank.

    Attributes:
        rank: Tensor-parallel rank.
        ok: False if the rank refused or failed; ``error`` says why.
        refused: True if the rank refused before it changed anything.
        cause: The part that failed: the rank itself, its process group (another member is to blame), or the mapping or
            remote reading of trainer memory (another transport may work).
        touched: True if this session may have changed live parameters.
        missing: Names of source tensors that did not arrive whole.
        not_updated: Names of parameters and buffers that no source tensor writes.
        parts: Parts of the source tensors that this rank keeps, in the dtypes that it keeps.
        sums: Sums of these parts, 8 bytes each (``HeldSums``).  After Close they were taken as the parts were copied;
            what the loader computes with was summed whole as it arrived.
        taken: After Close: what this rank has taken of its share, if it receives no more than that.
        part: After ReadChunk: bytes of the chunk, from the rank that was asked.  After TellBoxes: the boxes, encoded.
        chunks: After Fetch: number of chunks that this rank fetches in all.
        load_s: Seconds spent on copies since the last answer.
        verify_s: Seconds spent on digests since the last answer.
        peak_extra_bytes: Most extra memory since the session opened, in bytes, measured.
        steps: What the rank did since the last answer, on the clock of its host.
    """

    rank: Rank
    ok: bool = True
    error: str = ""
    refused: bool = False
    cause: Cause = "engine"
    touched: bool = False
    missing: tuple[str, ...] = ()
    not_updated: tuple[str, ...] = ()
    parts: HeldTable = ()
    sums: bytes = b""
    taken: Taken = NOTHING_TAKEN
    part: bytes = b""
    chunks: Count = 0
    load_s: float = 0.0
    verify_s: float = 0.0
    peak_extra_bytes: int = 0
    steps: RankSteps = ()

    def __post_init__(self) -> None:
        if len(self.sums) != 8 * len(self.parts):
            raise ValueError(f"{len(self.sums)} bytes are not the sums of {len(self.parts)} parts")

    @property
    def held(self) -> HeldSums:
        """The sums of the parts."""
        return HeldSums.of_bytes(self.parts, self.sums)


class Ack(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Answer of one engine to one message.

    Attributes:
        cause: The part that failed on every rank that failed; ``engine`` if there are several.
        version: Version that the engine serves now; None before the first one is known.
        closed: True in the answer to the last bucket that Open announced, which answers Close as well.
        received: After a Close that asks for it: digest by name of each tensor that the ranks copied together.
        suspects: With ``received``: by name of a tensor, the ranks that may be at fault if it is not what was sent;
            without a tensor of which all ranks may be.
        taken: After Close: ``RankAck.taken`` of each rank; empty if every rank receives all.
        digest: After Close: model digest of all that was announced and is kept, as the ranks copied it.  After a Commit
            with a digest, and after Revert: model digest of what the ranks keep together.
        resident: After Readback: digest by name of each tensor that the ranks keep together.
        resident_ranks: After Commit: number of ranks that keep exactly what was expected.
        mismatched: Names of tensors whose digests differ between ranks or from what was expected.
        load_s: Seconds that the slowest rank spent on copies.
        verify_s: Seconds that the slowest rank spent on digests.
        stall_s: After Commit: seconds in which the engine generated nothing.
        peak_extra_bytes: Most extra memory of any rank since the session opened, in bytes.
        checksum: After Commit: the engine's own digest of all its weights, which is comparable only among engines of
            one kind, version and size; empty if the engine has none.
        heard: Time at which the engine's server had read the message, in seconds of its monotonic clock; None if it
            does not say.
        answered: Time at which it had the answer, likewise.
        steps: What the ranks and the server did for this message, on the clocks of their hosts.
    """

    ok: bool
    error: str = ""
    failed_ranks: tuple[Rank, ...] = ()
    cause: Cause = "engine"
    state: State = "serving"
    version: Version | None = None
    ranks: Count = 0
    closed: bool = False
    received: dict[str, Digest] = {}
    suspects: dict[str, tuple[Rank, ...]] = {}
    taken: tuple[Taken, ...] = ()
    digest: Digest = ""
    resident: dict[str, Digest] = {}
    resident_ranks: Count = 0
    mismatched: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    not_updated: tuple[str, ...] = ()
    load_s: float = 0.0
    verify_s: float = 0.0
    stall_s: float = 0.0
    peak_extra_bytes: int = 0
    message: Text = ""
    checksum: Digest = ""
    heard: float | None = None
    answered: float | None = None
    steps: RankSteps = ()
