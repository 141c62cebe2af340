"""The protocol between vLLM's API server and its ranks: the first frame, the socket, and the thread of each message."""

from __future__ import annotations

from pathlib import Path

import msgspec

from weightcast.receiver.staging import Place
from weightcast.wire.layout import TensorSpec
from weightcast.wire.messages import Abort, Commit, Message, Revert

# Experts move to other places and ranks while vLLM serves; routes and vLLM's own loader know only their first places.
EPLB_REFUSED = (
    "vLLM balances experts over ranks (enable_eplb): an update would write experts to places that they have left"
)
EPLB_HINT = "start vLLM without --enable-eplb"


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """The first frame from a rank.

    Attributes:
        rank: Number of the rank, in the order of vLLM's workers.
        pid: Process id.
        device: UUID of its GPU, or ``"cpu"``.
        staging: Place of the staging set.
        staging_bytes: Size of the staging set.
        specs: Every tensor of a full update, with the dtype that this rank keeps.
        places: Names of the tensors that this rank keeps a part of, or computes with.
        staging_note: The reason why the staging set is not on the device; empty if it is.
    """

    rank: int
    pid: int
    device: str
    staging: Place
    staging_bytes: int
    specs: tuple[TensorSpec, ...]
    places: tuple[str, ...]
    staging_note: str = ""


def draft_of(speculative: object) -> bool:
    """Returns True if vLLM's speculative configuration has a draft model; prompt lookup and suffix trees have none."""
    return speculative is not None and getattr(speculative, "method", None) not in ("ngram", "ngram_gpu", "suffix")


def socket_path(folder: str, rank: int) -> str:
    """Returns the path of the Unix socket where a rank listens."""
    return str(Path(folder) / f"rank-{rank}")


def needs_main(message: Message, committed: str) -> bool:
    """Returns whether the rank's main thread must carry out a message, while vLLM generates nothing.

    That is so for messages that switch weights: a commit, a revert, and the abort of a committed session.  The API
    server and the ranks must agree, so both call this function.

    Args:
        message: Message to carry out.
        committed: Session that was committed last; empty for none.
    """
    return isinstance(message, Commit | Revert) or (isinstance(message, Abort) and message.session == committed)
