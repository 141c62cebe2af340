"""Probes targets in the background, so that a silent target does not delay the others.

A probe runs until its target answers, from one look to the next.  A silent target therefore costs one short wait, and
the next look sees its answer as soon as it is back.  A host that is switched off fails to connect only after seconds;
its probe is repeated in the background, and a look returns the last error at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from weightcast.comm import event_loop
from weightcast.errors import TargetError, TargetUnreachable, WeightcastError
from weightcast.transports.link import is_silence

Answer = TypeVar("Answer")
_QUICK_ERROR_S = 0.5  # an error that takes longer is repeated in the background


@dataclass(slots=True)
class _Probe(Generic[Answer]):
    """``answer`` has at most one element; ``repeated`` is true while a failing probe is still repeated."""

    asked_at: float
    answer: list[Answer | WeightcastError]
    repeated: bool = False
    answered: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None  # the event loop keeps only a weak reference


class BackgroundProbe(Generic[Answer]):
    """Probes many targets at once on the event loop, each once at a time.  Any thread may call any method.

    ``ask`` probes one URL, and raises a ``WeightcastError`` if the probe fails.
    """

    def __init__(self, ask: Callable[[str], Awaitable[Answer]]) -> None:
        self._ask = ask
        self._open: dict[str, _Probe[Answer]] = {}  # changed on the event loop only, except for ``forget``

    async def look_on_loop(
        self, patience_s: Mapping[str, float], *, anew: Collection[str] = (), since: float | None = None
    ) -> dict[str, Answer | WeightcastError]:
        """Probes targets and waits for their answers, on the event loop.

        Args:
            patience_s: Deadline in seconds by URL, counted from the start of the probe, which an earlier call may
                have started.
            anew: URLs whose deadline counts from now.
            since: Also accepts an answer to a probe that started at this ``time.monotonic()`` or later; None accepts
                only answers that arrive from now on.

        Returns:
            The answer or the error by URL; ``TargetUnreachable`` for a target that has not answered yet.  Concurrent
            calls share a probe and its answer.
        """
        now = time.monotonic()
        # While this call waits, another may take the answer, and `forget` may drop the probe.
        probes = {url: self._start(url, now, since=since) for url in patience_s}
        ends = {url: (now if url in anew else probe.asked_at) + patience_s[url] for url, probe in probes.items()}
        # The latest end first: most targets have answered by the time that the slowest one has.
        for url in sorted(probes, key=ends.__getitem__, reverse=True):
            left_s = ends[url] - time.monotonic()
            if left_s <= 0:
                break
            probe = probes[url]
            if not probe.answer:
                with suppress(TimeoutError):
                    async with asyncio.timeout(left_s):
                        await probe.answered.wait()
        return {url: self._take(url, probe) for url, probe in probes.items()}

    def ask_ahead(self, urls: Iterable[str], *, waited_s: float) -> None:
        """Starts probes for a later ``look``, which count as waited for ``waited_s`` seconds already."""
        asked_at = time.monotonic() - waited_s
        chosen = tuple(urls)

        async def start() -> None:
            for url in chosen:
                self._start(url, asked_at)

        if chosen:
            event_loop.submit([start()])

    def forget(self, url: str) -> None:
        """Drops the running probe of a URL; a later ``look`` ignores its answer."""
        self._open.pop(url, None)

    def _take(self, url: str, probe: _Probe[Answer]) -> Answer | WeightcastError:
        if probe.answer:
            if self._open.get(url) is probe and not probe.repeated:
                self.forget(url)
            return probe.answer[0]
        return TargetUnreachable(
            f"{url}: the engine has not answered for {time.monotonic() - probe.asked_at:.1f} s",
            url=url,
            hint="its port accepts connections; check whether the engine is stopped or overloaded",
        )

    def _start(self, url: str, asked_at: float, *, since: float | None = None) -> _Probe[Answer]:
        probe = self._open.get(url)
        if probe is not None and (
            not probe.answer or probe.repeated or (since is not None and probe.asked_at >= since)
        ):
            return probe
        # A new probe, also where the last answer is old.
        self._open[url] = probe = _Probe[Answer](asked_at, [])
        probe.task = asyncio.get_running_loop().create_task(self._run(url, probe))
        return probe

    async def _run(self, url: str, probe: _Probe[Answer]) -> None:
        answer: Answer | WeightcastError | None = None
        began = time.monotonic()
        while answer is None:
            began = time.monotonic()
            try:
                answer = await self._ask(url)
            except WeightcastError as error:
                if self._open.get(url) is not probe:
                    answer = error
                elif is_silence(error):
                    await asyncio.sleep(0)
                    continue  # the target is silent: probe again
                elif isinstance(error, TargetUnreachable) and time.monotonic() - began > _QUICK_ERROR_S:
                    self._record(probe, error, asked_at=began, repeated=True)
                    await asyncio.sleep(0)
                else:
                    answer = error
            except Exception as error:  # noqa: BLE001  without an answer the URL would never be probed again
                answer = TargetError(f"{url}: the probe failed: {type(error).__name__}: {error}", url=url)
                answer.__cause__ = error
        self._record(probe, answer, asked_at=began if probe.repeated else probe.asked_at)

    def _record(
        self,
        probe: _Probe[Answer],
        answer: Answer | WeightcastError,
        *,
        asked_at: float,
        repeated: bool = False,
    ) -> None:
        probe.asked_at, probe.repeated = asked_at, repeated
        probe.answer[:] = [answer]
        probe.answered.set()
