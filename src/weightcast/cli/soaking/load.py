"""Generation load, and a second opinion on every answer that is sampled from it.

Knows the OpenAI endpoint and which weights belong to which version; knows nothing of updates and faults.
"""

from __future__ import annotations

import itertools
import queue
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from weightcast.cli.soaking.versions import Versions
from weightcast.comm.http import Client
from weightcast.config import Target
from weightcast.errors import DeadlineExceeded, WeightcastError

_LONGEST_PROMPT = 12
_LONGEST_ANSWER = 48
_TOLERANCE = 5e-3  # nats, between two float32 implementations
_WAITING = 64
_RETRY_S = 0.1


class _Span(msgspec.Struct):
    version: int
    tokens: int


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float]


class _Choice(msgspec.Struct):
    token_ids: list[int]
    logprobs: _Logprobs
    weight_versions: list[_Span]
    finish_reason: str | None = None


class _Reply(msgspec.Struct):
    choices: list[_Choice]


_replies = msgspec.json.Decoder(_Reply)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One greedy completion: tokens, their log-probabilities, and how many in a row came from which version."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    spans: list[tuple[int, int]]


class Load:
    """Clients that ask all the time; answers go to ``Judge``."""

    def __init__(
        self, where: Callable[[], list[str]], judge: Judge, *, clients: int, vocab: int, seed: int, timeout_s: float
    ) -> None:
        """Start to ask.

        Args:
            where: URLs of the engines that are up now.
            judge: Who looks at the answers.
            clients: How many ask at once.
            vocab: Token ids go up to this.
            seed: Of the prompts.
            timeout_s: An answer that takes longer is a hang.
        """
        self._where = where
        self._judge = judge
        self._vocab = vocab
        self._timeout_s = timeout_s
        self._stopped = threading.Event()
        self.asked = self.dropped = self.hangs = 0
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._ask, args=(number, random.Random(f"{seed}/{number}")), daemon=True)
            for number in range(clients)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Ask no more; returns when the last answer is in."""
        self._stopped.set()
        for thread in self._threads:
            thread.join(2 * self._timeout_s)

    def _ask(self, number: int, random_: random.Random) -> None:
        url, client = "", None
        while not self._stopped.is_set():
            urls = self._where()
            if not urls:
                time.sleep(_RETRY_S)
                continue
            if urls[number % len(urls)] != url:
                url = urls[number % len(urls)]
                if client is not None:
                    client.close()
                client = Client(Target(url), timeout_s=self._timeout_s)
            assert client is not None
            prompt = [random_.randrange(2, self._vocab) for _ in range(random_.randrange(1, _LONGEST_PROMPT))]
            body = {
                "prompt": prompt,
                "max_tokens": random_.randrange(2, _LONGEST_ANSWER),
                "temperature": 0,
                "ignore_eos": True,
                "logprobs": 0,
                "return_token_ids": True,
            }
            try:
                reply = _replies.decode(client.post_json("/v1/completions", msgspec.json.encode(body)))
            except DeadlineExceeded:
                # Of an engine that was killed or taken away meanwhile nobody wants an answer.
                self._count(hangs=url in self._where(), dropped=True)
                continue
            except (WeightcastError, msgspec.MsgspecError):
                self._count(dropped=True)
                time.sleep(_RETRY_S)
                continue
            self._count()
            for choice in reply.choices:
                spans = [(span.version, span.tokens) for span in choice.weight_versions]
                answer = Answer(
                    prompt=prompt, tokens=choice.token_ids, logprobs=choice.logprobs.token_logprobs, spans=spans
                )
                if answer.tokens:
                    self._judge.consider(answer)
        if client is not None:
            client.close()

    def _count(self, *, hangs: bool = False, dropped: bool = False) -> None:
        with self._lock:
            self.asked += 1
            self.hangs += hangs
            self.dropped += dropped


class Judge:
    """Recomputes answers with the weights of the versions that they claim."""

    def __init__(self, versions: Versions, modes: Mapping[int, str]) -> None:
        """Start to look.

        Args:
            versions: A model of its own.
            modes: Pause mode of the update to each version: it says what became of the cache.
        """
        self._versions = versions
        self._modes = modes
        self._waiting: queue.Queue[Answer | None] = queue.Queue(_WAITING)
        self.checked = self.spanning = 0
        self.wrong: list[str] = []
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def consider(self, answer: Answer) -> None:
        """Look at an answer some time, unless too many wait already."""
        try:
            self._waiting.put_nowait(answer)
        except queue.Full:
            return

    def finish(self) -> None:
        """Return when all that wait have been looked at."""
        self._waiting.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (answer := self._waiting.get()) is not None:
            why = self.verdict(answer)
            self.checked += 1
            self.spanning += len(answer.spans) > 1
            if why:
                self.wrong.append(why)

    def verdict(self, answer: Answer) -> str:
        """Why the answer cannot have come from the versions that it claims; empty if it can."""
        claimed = [version for version, _ in answer.spans]
        if sum(count for _, count in answer.spans) != len(answer.tokens) or len(answer.logprobs) != len(answer.tokens):
            return f"{len(answer.tokens)} tokens, {len(answer.logprobs)} log-probabilities, spans {answer.spans}"
        if sorted(set(claimed)) != claimed:
            return f"versions {claimed} do not count up"
        # Between two spans there may have been versions that gave no token, each with its own mode.
        kept = [self._kept(before, after) for before, after in itertools.pairwise(claimed)]
        tries = [[]]
        for options in kept:
            tries = [[*one, option] for one in tries for option in options]
        worst = min(self._difference(answer, one) for one in tries)
        return "" if worst <= _TOLERANCE else f"spans {answer.spans}: off by {worst:.4f} nats"

    def _kept(self, before: int, after: int) -> list[bool]:
        modes = {self._modes[version] for version in range(before + 1, after + 1) if version in self._modes}
        return [kept for kept, mode in ((True, "in_place"), (False, "retract")) if mode in modes] or [True, False]

    def _difference(self, answer: Answer, kept: list[bool]) -> float:
        """How far the reported log-probabilities are from greedy ones, in nats; the cache is kept where said."""
        model: Any = self._versions.model
        cache: Any = None
        start, worst = 0, 0.0
        for number, (version, count) in enumerate(answer.spans):
            self._versions.set(version)
            seen = [*answer.prompt, *answer.tokens[: start + count - 1]]
            if cache is None or not kept[number - 1]:
                cache, fed = None, 0
            else:
                fed = len(answer.prompt) + start - 1
            with torch.no_grad():
                output = model(torch.tensor([seen[fed:]]), past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            logprobs = output.logits[0, -count:].float().log_softmax(-1)
            tokens = torch.tensor(answer.tokens[start : start + count])
            reported = torch.tensor(answer.logprobs[start : start + count])
            chosen = logprobs.gather(-1, tokens[:, None])[:, 0]
            best = logprobs.max(-1).values
            worst = max(worst, float((best - chosen).max()), float((chosen - reported).abs().max()))
            start += count
        return worst


def mode_counts(modes: Mapping[int, str]) -> dict[str, int]:
    """How many updates went by each pause mode."""
    return dict(sorted(Counter(modes.values()).items()))
