"""The commands that the scheduler sends to the ranks, and rank 0's answers.

Every rank runs every command, in the same order.  Tokens, positions and slots all come from the scheduler, so ranks
cannot disagree about them.  Only rank 0 computes logits and chooses tokens.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from weightcast.receiver.staging import StagingPlace
from weightcast.wire.engine_info import RankInfo
from weightcast.wire.layout import TensorSpec


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling settings of each row, as in ``GenerationRequest``.

    Attributes:
        uniform: Random number in [0, 1), the point of the cumulative distribution to choose.  It belongs to the
            request, so that a request's tokens do not depend on the rest of the batch.
        top_logprobs: Number of alternatives to report; 0 for none.
    """

    temperature: list[float]
    top_k: list[int]
    top_p: list[float]
    min_p: list[float]
    uniform: list[float]
    top_logprobs: list[int]


class SlotCopy(msgspec.Struct, frozen=True, array_like=True):
    """Copies the first `length` positions of slot `source` over slot `target`."""

    source: int
    target: int
    length: int


class Prefill(msgspec.Struct, frozen=True, kw_only=True, tag="prefill"):
    """Computes whole sequences into new slots and chooses the next token of each.

    Attributes:
        moves: Moves to make first, in order.
        first_slot: Slot of the first row; the other rows follow.
        twins: For each slot after those of `rows`, the index of the row with the same tokens.
        sampling: Settings of each row, then of each twin.
    """

    moves: list[SlotCopy]
    first_slot: int
    rows: list[list[int]]
    twins: list[int]
    sampling: Sampling


class Decode(msgspec.Struct, frozen=True, kw_only=True, tag="decode"):
    """Appends one token, at its position, to each slot from 0 on and chooses the next token of each."""

    moves: list[SlotCopy]
    tokens: list[int]
    positions: list[int]
    sampling: Sampling


class Score(msgspec.Struct, frozen=True, kw_only=True, tag="score"):
    """Computes the log-probability of each token given those before it; uses no slot."""

    rows: list[list[int]]


class DropCache(msgspec.Struct, frozen=True, kw_only=True, tag="drop"):
    """Drops all keys and values."""


class Sleep(msgspec.Struct, frozen=True, kw_only=True, tag="sleep"):
    """Frees the cache and moves the weights off the accelerator."""


class Wake(msgspec.Struct, frozen=True, kw_only=True, tag="wake"):
    """Undoes `Sleep`."""


class Describe(msgspec.Struct, frozen=True, kw_only=True, tag="describe"):
    """Asks each rank for its `Description`."""


class Ping(msgspec.Struct, frozen=True, kw_only=True, tag="ping"):
    """Does nothing; a dead rank does not answer."""


Command = Prefill | Decode | Score | DropCache | Sleep | Wake | Describe | Ping


class Chosen(msgspec.Struct, frozen=True, kw_only=True):
    """Rank 0's choice, one entry per row.

    Attributes:
        tokens: Chosen token; -1 where the logits were not finite.
        logprobs: Its natural log-probability in the model's own distribution, before temperature and filters.
        top: Likeliest tokens with their log-probabilities, likeliest first; empty if not requested.
    """

    tokens: list[int]
    logprobs: list[float]
    top: list[list[tuple[int, float]]]


class Scores(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to `Score`: for each row, one log-probability per token after the first."""

    rows: list[list[float]]


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to `Describe`.

    Attributes:
        ranks: Process, device and host of each rank.
        staging_bytes: Size of the staging set on rank 0.
        cache_bytes: Memory that rank 0 reserves for keys and values.
    """

    ranks: list[RankInfo]
    staging: StagingPlace
    staging_bytes: int
    specs: list[TensorSpec]
    dtype: str
    cache_bytes: int


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to commands without a result, and of ranks other than 0."""


T = TypeVar("T")

encode = msgspec.msgpack.Encoder().encode  # a command or an answer
decode_command = msgspec.msgpack.Decoder(Command).decode  # only our own scheduler makes commands


def decode_answer(data: bytes, kind: type[T]) -> T:
    """Decodes an answer of this type."""
    return msgspec.msgpack.decode(data, type=kind)
