"""Looks whether somebody who did not answer does now, without waiting for it.

A question stays out until it is answered, from one look to the next.  So one that stands still costs a moment when it
is first asked and nothing after that; one that has come back is seen at the next look.

Knows names and a question.  What the answer means is the caller's business.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from weightcast.errors import DeadlineExceeded, TargetUnreachable, WeightcastError

Answer = TypeVar("Answer")


@dataclass(slots=True)
class _Question(Generic[Answer]):
    asked_at: float
    answer: list[Answer | WeightcastError]


class Lookout(Generic[Answer]):
    """Asks many at once, and one never twice at a time.

    Args:
        ask: The question to one of them; blocks, and raises a ``WeightcastError`` if it cannot be answered.
    """

    def __init__(self, ask: Callable[[str], Answer]) -> None:
        self._ask = ask
        self._out: dict[str, _Question[Answer]] = {}
        self._news = threading.Condition()

    def look(
        self, patience_s: Mapping[str, float], *, anew: Collection[str] = ()
    ) -> dict[str, Answer | WeightcastError]:
        """What each of them answers now.

        Args:
            patience_s: Whom to ask, and how long to wait for each, in seconds, counted from when the question was
                put, which may have been at an earlier look.
            anew: Of them, those for whom it counts from now, whenever the question was put.

        Returns:
            The answer, or what went wrong; ``TargetUnreachable`` for one who has not answered so far.
        """
        with self._news:
            now = time.monotonic()
            for url in patience_s:
                self._put(url, now)
            while True:
                waiting = [url for url in patience_s if not self._out[url].answer]
                ends = [(now if url in anew else self._out[url].asked_at) + patience_s[url] for url in waiting]
                left_s = max(ends, default=0.0) - time.monotonic()
                if left_s <= 0:
                    break
                self._news.wait(left_s)
            return {url: self._take(url) for url in patience_s}

    def ask_ahead(self, urls: Iterable[str], *, waited_s: float) -> None:
        """Put the question now, for a later look.

        Args:
            urls: Whom to ask.
            waited_s: How long they count as having been waited for already, in seconds.
        """
        with self._news:
            for url in urls:
                self._put(url, time.monotonic() - waited_s)

    def forget(self, url: str) -> None:
        """Whatever is still to come from there does not count."""
        with self._news:
            self._out.pop(url, None)

    def _take(self, url: str) -> Answer | WeightcastError:
        question = self._out[url]
        if question.answer:
            del self._out[url]
            return question.answer[0]
        return TargetUnreachable(
            f"{url}: has not answered for {time.monotonic() - question.asked_at:.1f} s",
            url=url,
            hint="something listens there and says nothing: is the engine stopped, or swamped?",
        )

    def _put(self, url: str, asked_at: float) -> None:
        question = self._out.get(url)
        if question is not None and not question.answer:
            return
        # New, or answered some time ago, which says little about now.
        self._out[url] = question = _Question[Answer](asked_at, [])
        # A daemon: it blocks in Python's own sockets, and nobody must wait for it at the end.
        threading.Thread(target=self._run, args=(url, question), name="weightcast-look", daemon=True).start()

    def _run(self, url: str, question: _Question[Answer]) -> None:
        answer: Answer | WeightcastError | None = None
        while answer is None:
            try:
                answer = self._ask(url)
            except WeightcastError as error:
                # Silence is no answer: the question stays out.
                if not is_silence(error) or self._out.get(url) is not question:
                    answer = error
        with self._news:
            question.answer.append(answer)
            self._news.notify_all()


def is_silence(error: BaseException) -> bool:
    """True if somebody may be there, and says nothing."""
    return isinstance(error, TargetUnreachable) and isinstance(error.__cause__, DeadlineExceeded | None)
