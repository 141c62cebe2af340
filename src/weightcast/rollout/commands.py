"""What the scheduler tells the ranks, and what rank 0 answers.

Every rank runs every command, in the same order, and keeps nothing else that a decision hangs on:
tokens, positions and slots all come from the scheduler.  So ranks cannot disagree about what was
generated; only rank 0 computes logits and chooses tokens.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from weightcast.receiver.staging import Place
from weightcast.wire.layout import TensorSpec


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How to choose one token per row; every list has one entry per row.

    Attributes:
        temperature: 0 takes the likeliest token.
        top_k: Choose among this many; 0 for all.
        top_p: Choose among the likeliest that together reach this mass; 1 for all.
        uniform: In [0, 1): where in the cumulative distribution the choice falls.  The random numbers
            belong to the requests, so a request's tokens do not depend on who shares its batch.
        top_logprobs: How many alternatives to report; 0 for none.
    """

    temperature: list[float]
    top_k: list[int]
    top_p: list[float]
    uniform: list[float]
    top_logprobs: list[int]


class Move(msgspec.Struct, frozen=True, array_like=True):
    """Copy the first `length` positions of slot `source` over slot `target`."""

    source: int
    target: int
    length: int


class Prefill(msgspec.Struct, frozen=True, kw_only=True, tag="prefill"):
    """Compute whole sequences into new slots and choose the next token of each.

    Attributes:
        moves: To do first, in order.
        first_slot: Rows go to this slot and the ones after it.
        rows: Token ids.
        twins: For the slots after those of `rows`, in order: the index of the row that has the same tokens.
        sampling: One entry for each row, then for each twin.
    """

    moves: list[Move]
    first_slot: int
    rows: list[list[int]]
    twins: list[int]
    sampling: Sampling


class Decode(msgspec.Struct, frozen=True, kw_only=True, tag="decode"):
    """Append one token to each slot from 0 and choose the next of each.

    Attributes:
        moves: To do first, in order.
        tokens: The token of each slot.
        positions: Where it goes.
        sampling: One entry for each slot.
    """

    moves: list[Move]
    tokens: list[int]
    positions: list[int]
    sampling: Sampling


class Score(msgspec.Struct, frozen=True, kw_only=True, tag="score"):
    """Log-probability of each token given those before it; touches no slot."""

    rows: list[list[int]]


class DropCache(msgspec.Struct, frozen=True, kw_only=True, tag="drop"):
    """Forget all keys and values."""


class Sleep(msgspec.Struct, frozen=True, kw_only=True, tag="sleep"):
    """Free the cache and move the weights off the accelerator."""


class Wake(msgspec.Struct, frozen=True, kw_only=True, tag="wake"):
    """Undo `Sleep`."""


class Describe(msgspec.Struct, frozen=True, kw_only=True, tag="describe"):
    """What are you?"""


class Ping(msgspec.Struct, frozen=True, kw_only=True, tag="ping"):
    """Nothing: is everybody there?"""


Command = Prefill | Decode | Score | DropCache | Sleep | Wake | Describe | Ping


class Chosen(msgspec.Struct, frozen=True, kw_only=True):
    """Rank 0's choice, one entry per row.

    Attributes:
        tokens: The token; -1 where the logits were not finite.
        logprobs: Its natural log-probability in the model's own distribution, before temperature and filters.
        top: Likeliest tokens with their log-probabilities, likeliest first; empty where none were asked for.
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
        devices: For each rank, the UUID of its GPU or ``"cpu"``.
        hosts: For each rank, the boot id of its host.
        staging: Where a new version waits until it is committed.
        specs: Every tensor that a complete update holds.
        dtype: Of the weights.
        weight_bytes: Of rank 0's weights.
        cache_bytes: Reserved by rank 0 for keys and values.
    """

    devices: list[str]
    hosts: list[str]
    staging: Place
    specs: list[TensorSpec]
    dtype: str
    weight_bytes: int
    cache_bytes: int


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of commands without a result, and of ranks other than 0."""


T = TypeVar("T")

_decoder = msgspec.msgpack.Decoder(Command)
_encoder = msgspec.msgpack.Encoder()


def encode(value: Command | Chosen | Scores | Description | Done) -> bytes:
    """A command or an answer as bytes."""
    return _encoder.encode(value)


def decode_command(data: bytes) -> Command:
    """The command in `data`, which only our own scheduler makes."""
    return _decoder.decode(data)


def decode_answer(data: bytes, kind: type[T]) -> T:
    """The answer in `data`."""
    return msgspec.msgpack.decode(data, type=kind)
