"""What the API server and a rank of one vLLM say to each other before the first weight message, and where they meet."""

from __future__ import annotations

from pathlib import Path

import msgspec

from weightcast.receiver.staging import Place
from weightcast.wire.layout import TensorSpec
from weightcast.wire.messages import Abort, Commit, Message


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """The first frame from a rank.

    Attributes:
        rank: Which of the engine's ranks, in the order of vLLM's workers.
        pid: Its process.
        device: UUID of its GPU, or ``"cpu"``.
        staging: Where a new version waits on this rank.
        specs: Every tensor of a full update, with the dtype that this rank keeps.
        places: Names of the tensors that this rank keeps a part of, or computes with.
    """

    rank: int
    pid: int
    device: str
    staging: Place
    specs: tuple[TensorSpec, ...]
    places: tuple[str, ...]


def meeting_place(folder: str, rank: int) -> str:
    """Path of the Unix socket where a rank listens."""
    return str(Path(folder) / f"rank-{rank}")


def needs_main(message: Message, committed: str) -> bool:
    """Must the rank's main thread carry this out, while nothing is generated?

    It is what switches weights: a commit, and the abort of a session that was committed (it switches back).
    The API server and the ranks both go by it.

    Args:
        message: What is to be done.
        committed: The session committed last; empty for none.
    """
    return isinstance(message, Commit) or (isinstance(message, Abort) and message.session == committed)
