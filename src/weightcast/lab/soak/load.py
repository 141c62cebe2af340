"""Generation load, and a check that recomputes a sample of the answers with the weights of their versions."""

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

from weightcast.comm.http import Client
from weightcast.config import Target
from weightcast.errors import DeadlineExceeded, WeightcastError
from weightcast.lab.soak.versions import Versions
from weightcast.rollout.cache import cache_name

_LONGEST_PROMPT = 12
_LONGEST_ANSWER = 48
_TOLERANCE = 5e-3  # difference of two float32 implementations, in nats
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
    """One greedy completion: tokens, their log-probabilities, and the runs of tokens of one version."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    spans: list[tuple[int, int]]


class Load:
    """Clients that send one request after another and pass the answers to ``Judge``."""

    def __init__(
        self, where: Callable[[], list[str]], judge: Judge, *, clients: int, vocab: int, seed: int, timeout_s: float
    ) -> None:
        """Starts the clients.  ``where`` returns the engines that are up; an answer after ``timeout_s`` is a hang."""
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
        """Stops the clients and waits for their last answers."""
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
                # The engine was killed or removed meanwhile, so its failure is no error.
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
        """Starts the thread that recomputes answers.

        ``versions`` is a model for this judge alone.  ``modes``: pause mode of the update to each version, which says
        whether the KV cache was kept.
        """
        self._versions = versions
        self._modes = modes
        self._waiting: queue.Queue[Answer | None] = queue.Queue(_WAITING)
        self.checked = self.spanning = 0
        self.wrong: list[str] = []
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def consider(self, answer: Answer) -> None:
        """Queues an answer to be checked, unless the queue is full."""
        try:
            self._waiting.put_nowait(answer)
        except queue.Full:
            return

    def finish(self) -> None:
        """Waits until every queued answer has been checked."""
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
        """Returns why the answer cannot come from the versions that it claims; empty if it can."""
        claimed = [version for version, _ in answer.spans]
        if sum(count for _, count in answer.spans) != len(answer.tokens) or len(answer.logprobs) != len(answer.tokens):
            return f"{len(answer.tokens)} tokens, {len(answer.logprobs)} log-probabilities, spans {answer.spans}"
        if sorted(set(claimed)) != claimed:
            return f"versions {claimed} do not count up"
        # Versions that gave no token may lie between two spans, each with its own pause mode.
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
        """Returns the largest difference in nats between reported and greedy log-probabilities.

        ``kept`` says for each change of version whether the KV cache was kept.
        """
        model: Any = self._versions.model
        name = cache_name(model)
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
                output = model(torch.tensor([seen[fed:]]), use_cache=True, **{name: cache})
            cache = output[name]
            logprobs = output.logits[0, -count:].float().log_softmax(-1)
            tokens = torch.tensor(answer.tokens[start : start + count])
            reported = torch.tensor(answer.logprobs[start : start + count])
            chosen = logprobs.gather(-1, tokens[:, None])[:, 0]
            best = logprobs.max(-1).values
            worst = max(worst, float((best - chosen).max()), float((chosen - reported).abs().max()))
            start += count
        return worst


def mode_counts(modes: Mapping[int, str]) -> dict[str, int]:
    """Counts the updates by pause mode."""
    return dict(sorted(Counter(modes.values()).items()))
