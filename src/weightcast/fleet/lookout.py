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

from weightcast.errors import DeadlineExceeded, TargetError, TargetUnreachable, WeightcastError

Answer = TypeVar("Answer")


@dataclass(slots=True)
class _Question(Generic[Answer]):
    asked_at: float
    answer: list[Answer | WeightcastError]


class Lookout(Generic[Answer]):
    """Asks many at once, and one never twice at a time.  Every call may come from any thread.

    Args:
        ask: The question to one of them; blocks, and raises a ``WeightcastError`` if it cannot be answered.
    """

    def __init__(self, ask: Callable[[str], Answer]) -> None:
        self._ask = ask
        self._out: dict[str, _Question[Answer]] = {}
        self._news = threading.Condition()

    def look(
        self, patience_s: Mapping[str, float], *, anew: Collection[str] = (), since: float | None = None
    ) -> dict[str, Answer | WeightcastError]:
        """What each of them answers now.

        Args:
            patience_s: Whom to ask, and how long to wait for each, in seconds, counted from when the question was
                put, which may have been at an earlier look.
            anew: Of them, those for whom it counts from now, whenever the question was put.
            since: An answer to a question that was put then (by ``time.monotonic``) or later will do; None takes only
                one that is still to come.

        Returns:
            The answer, or what went wrong; ``TargetUnreachable`` for one who has not answered so far.  Looks at the
            same time share a question and its answer.
        """
        with self._news:
            now = time.monotonic()
            # Kept here: while this look waits, another may take the answer, and ``forget`` may drop the question.
            questions = {url: self._put(url, now, since=since) for url in patience_s}
            while True:
                waiting = {url: question for url, question in questions.items() if not question.answer}
                ends = [
                    (now if url in anew else question.asked_at) + patience_s[url] for url, question in waiting.items()
                ]
                left_s = max(ends, default=0.0) - time.monotonic()
                if left_s <= 0:
                    break
                self._news.wait(left_s)
            return {url: self._take(url, question) for url, question in questions.items()}

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
        """Whatever is still to come from there does not count at a later look."""
        with self._news:
            self._out.pop(url, None)

    def _take(self, url: str, question: _Question[Answer]) -> Answer | WeightcastError:
        if question.answer:
            if self._out.get(url) is question:
                del self._out[url]
            return question.answer[0]
        return TargetUnreachable(
            f"{url}: has not answered for {time.monotonic() - question.asked_at:.1f} s",
            url=url,
            hint="something listens there and says nothing: is the engine stopped, or swamped?",
        )

    def _put(self, url: str, asked_at: float, *, since: float | None = None) -> _Question[Answer]:
        question = self._out.get(url)
        if question is not None and (not question.answer or (since is not None and question.asked_at >= since)):
            return question
        # New, or answered some time ago, which says little about now.
        self._out[url] = question = _Question[Answer](asked_at, [])
        # A daemon: it blocks in Python's own sockets, and nobody must wait for it at the end.
        threading.Thread(target=self._run, args=(url, question), name="weightcast-look", daemon=True).start()
        return question

    def _run(self, url: str, question: _Question[Answer]) -> None:
        answer: Answer | WeightcastError | None = None
        while answer is None:
            try:
                answer = self._ask(url)
            except WeightcastError as error:
                # Silence is no answer: the question stays out.
                if not is_silence(error) or self._out.get(url) is not question:
                    answer = error
            except Exception as error:  # noqa: BLE001  without an answer it would never be asked again
                answer = TargetError(f"{url}: could not be asked: {type(error).__name__}: {error}", url=url)
                answer.__cause__ = error
        with self._news:
            question.answer.append(answer)
            self._news.notify_all()


def is_silence(error: BaseException) -> bool:
    """True if somebody may be there, and says nothing."""
    return isinstance(error, TargetUnreachable) and isinstance(error.__cause__, DeadlineExceeded | None)
