"""Keeps running and waiting requests, gives each running one a cache slot, and builds the commands of a step.

It has no thread and knows no rank: the scheduler's lock guards it, and the scheduler sends its commands.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from weightcast.errors import ConfigError, Refused
from weightcast.rollout.commands import Chosen, Decode, Prefill, Sampling, SlotCopy
from weightcast.rollout.requests import FinishReason, Generation, GenerationRequest

EndedSequences = list[tuple["TokenSequence", FinishReason, str | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits on the requests of one engine.

    Attributes:
        max_len: Tokens of a request, prompt and answer together.
        max_waiting: Number of requests that may wait; more are refused.
        prefill_tokens: Prompt tokens in one step, padding included; one long prompt may have more.
    """

    max_batch: int = 32
    max_len: int = 2048
    max_waiting: int = 4096
    prefill_tokens: int = 2048

    def check(self, request: GenerationRequest, *, vocab_size: int) -> None:
        """Raises ``ConfigError`` if no engine with these limits could ever serve the request."""
        if not request.prompt:
            raise ConfigError("the prompt has no tokens")
        if len(request.prompt) >= self.max_len:
            raise ConfigError(
                f"the prompt has {len(request.prompt)} tokens; the context holds {self.max_len}, "
                "one of them for an answer"
            )
        room = self.max_len - len(request.prompt)
        if request.max_tokens is not None and not 1 <= request.max_tokens <= room:
            raise ConfigError(
                f"max_tokens is {request.max_tokens}; the context holds {self.max_len} tokens, of which the prompt "
                f"takes {len(request.prompt)} and leaves {room}"
            )
        check_tokens(request.prompt, vocab_size=vocab_size)


@dataclass(slots=True, eq=False, kw_only=True)
class TokenSequence:
    """One request in the batch.

    Attributes:
        tokens: Prompt, and answer so far.
        limit: Number of tokens at which the request ends.
        cached: Number of tokens in the cache.
    """

    generation: Generation
    tokens: list[int]
    limit: int
    stop: frozenset[int]
    stops_text: Callable[[int], bool] | None
    random: random.Random
    cached: int = 0


class ContinuousBatch:
    """Running and waiting requests of one engine, with counters.

    Attributes:
        waiting: Requests without a cache slot, oldest first.
        running: Requests with a slot; the position in the list is the slot.
    """

    def __init__(self, limits: Limits) -> None:
        self.waiting: deque[TokenSequence] = deque()
        self.running: list[TokenSequence] = []
        self.steps = self.prompt_tokens = self.generated_tokens = 0
        self.finished: dict[str, int] = {}
        self._limits = limits
        self._moves: list[SlotCopy] = []

    def add(self, generation: Generation, *, stop: frozenset[int], stops_text: Callable[[int], bool] | None) -> None:
        """Queues a request; ``stops_text`` takes each new token and tells whether its text ends the request.

        Raises:
            Refused: Too many requests wait already.
        """
        if len(self.waiting) >= self._limits.max_waiting:
            raise Refused(f"{len(self.waiting)} requests are waiting already", hint="send fewer requests at once")
        request = generation.request
        room = self._limits.max_len - len(request.prompt)
        self.waiting.append(
            TokenSequence(
                generation=generation,
                tokens=list(request.prompt),
                limit=len(request.prompt) + (request.max_tokens or room),
                stop=stop,
                stops_text=stops_text,
                random=random.Random(request.seed),
            )
        )

    def admit(self) -> list[TokenSequence]:
        """Takes requests off the queue, oldest first, as many as fit into the batch and into one prefill step."""
        admitted: list[TokenSequence] = []
        unique: set[tuple[int, ...]] = set()
        longest = 0
        while self.waiting and len(self.running) + len(admitted) < self._limits.max_batch:
            tokens = tuple(self.waiting[0].tokens)
            width = max(longest, len(tokens))
            rows = len(unique | {tokens})
            if admitted and rows * width > self._limits.prefill_tokens:
                break
            unique.add(tokens)
            longest = width
            admitted.append(self.waiting.popleft())
        return admitted

    def prefill(self, admitted: Sequence[TokenSequence]) -> tuple[Prefill, list[TokenSequence]]:
        """Gives admitted requests their slots; returns the command, and the requests in the order of its answer."""
        # Requests with the same tokens are computed once; the cache rows of the others are copies.
        rows: dict[tuple[int, ...], TokenSequence] = {}
        twins: list[TokenSequence] = []
        for sequence in admitted:
            if rows.setdefault(tuple(sequence.tokens), sequence) is not sequence:
                twins.append(sequence)
        order = [*rows.values(), *twins]
        index = {tokens: place for place, tokens in enumerate(rows)}
        command = Prefill(
            moves=self._take_moves(),
            first_slot=len(self.running),
            rows=[list(tokens) for tokens in rows],
            twins=[index[tuple(sequence.tokens)] for sequence in twins],
            sampling=_sampling(order),
        )
        self.running += order
        self.prompt_tokens += sum(len(sequence.tokens) for sequence in order)
        return command, order

    def decode(self) -> tuple[Decode, list[TokenSequence]]:
        """Builds one decode step for every running request; returns the same as ``prefill``."""
        command = Decode(
            moves=self._take_moves(),
            tokens=[sequence.tokens[-1] for sequence in self.running],
            positions=[sequence.cached for sequence in self.running],
            sampling=_sampling(self.running),
        )
        return command, self.running

    def take(self, sequences: Sequence[TokenSequence], chosen: Chosen, *, version: int) -> EndedSequences:
        """Gives each request of a step the token that was chosen for it; returns the complete ones, for ``end``."""
        ended: EndedSequences = []
        for sequence, token, logprob, top in zip(sequences, chosen.tokens, chosen.logprobs, chosen.top, strict=True):
            sequence.cached = len(sequence.tokens)
            if token < 0:
                ended.append((sequence, "error", f"version {version} gives logits that are not finite"))
                continue
            sequence.tokens.append(token)
            sequence.generation.add(token, logprob, top, version=version)
            if token in sequence.stop or (sequence.stops_text is not None and sequence.stops_text(token)):
                ended.append((sequence, "stop", None))
            elif len(sequence.tokens) >= sequence.limit:
                ended.append((sequence, "length", None))
        self.steps += 1
        self.generated_tokens += len(chosen.tokens)
        return ended

    def end(self, ended: EndedSequences, *, version: int) -> None:
        """Removes running requests that are complete."""
        for sequence, reason, error in ended:
            self._remove_running(sequence)
            self._finish(sequence, reason, version, error)

    def end_aborted(self, request_ids: AbstractSet[str], *, version: int) -> None:
        """Ends the requests with these ids, with the tokens that they have; ignores unknown ids."""
        for sequence in [*self.running, *self.waiting] if request_ids else ():
            if sequence.generation.request.request_id in request_ids:
                if sequence in self.running:
                    self._remove_running(sequence)
                else:
                    self.waiting.remove(sequence)
                self._finish(sequence, "abort", version)

    def end_all(self, reason: FinishReason, *, version: int, error: str | None = None) -> None:
        """Ends every request, running or waiting."""
        for sequence in [*self.running, *self.waiting]:
            self._finish(sequence, reason, version, error)
        self.running.clear()
        self.waiting.clear()
        self._moves.clear()

    def retract(self) -> None:
        """Puts running requests back at the head of the queue; prefill recomputes their cache."""
        for sequence in reversed(self.running):
            sequence.cached = 0
            self.waiting.appendleft(sequence)
        self.running.clear()
        self._moves.clear()

    def _remove_running(self, sequence: TokenSequence) -> None:
        """Moves the last slot into the gap."""
        slot = self.running.index(sequence)
        last = self.running.pop()
        if last is not sequence:
            self.running[slot] = last
            self._moves.append(SlotCopy(len(self.running), slot, last.cached))

    def _take_moves(self) -> list[SlotCopy]:
        moves, self._moves = self._moves, []
        return moves

    def _finish(self, sequence: TokenSequence, reason: FinishReason, version: int, error: str | None = None) -> None:
        self.finished[reason] = self.finished.get(reason, 0) + 1
        sequence.generation.finish(reason, version=version, error=error)


def check_tokens(tokens: Iterable[int], *, vocab_size: int) -> None:
    """Raises ``ConfigError`` unless all token ids are the model's."""
    if any(not 0 <= token < vocab_size for token in tokens):
        raise ConfigError(f"token ids go from 0 to {vocab_size - 1}")


def _sampling(sequences: Sequence[TokenSequence]) -> Sampling:
    requests = [sequence.generation.request for sequence in sequences]
    return Sampling(
        temperature=[request.temperature for request in requests],
        top_k=[request.top_k for request in requests],
        top_p=[request.top_p for request in requests],
        min_p=[request.min_p for request in requests],
        uniform=[sequence.random.random() for sequence in sequences],
        top_logprobs=[request.top_logprobs for request in requests],
    )
