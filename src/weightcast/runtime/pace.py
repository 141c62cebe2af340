"""Work on a GPU in slices, between which an engine's steps get their turn.

A step of a large model reads as much memory as a copy of its weights, and its kernels want whole multiprocessors.  So a
step that comes while a launch runs begins when the launch ends.  On an H100, 16 GB held a step of 7 ms up for 13 to
18 ms.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from weightcast.runtime.steps import StepCounter

_pace: ContextVar[Pace | None] = ContextVar("_pace", default=None)


class Pace:
    """So much work between two steps, however many launches it comes in, and of whatever kinds."""

    def __init__(self, steps: StepCounter, *, share: float = 1.0) -> None:
        """``share`` is how much of each slice comes between two steps."""
        self._steps = steps
        self._share = share
        self._used = 0.0  # the share of what may come before this step begins
        self._before_step = 0

    def slices(self, count: int, size: int) -> Iterator[slice]:
        """As the function below; ``size`` parts come after the beginning of a step."""
        steps = self._steps
        size = max(1, round(self._share * size))
        first = 0
        while first < count:
            if not steps.generates():
                yield slice(first, count)
                return
            if not self._left(size) and steps.begun < self._before_step:
                torch.cuda.current_stream().synchronize()
                while steps.begun < self._before_step and steps.let_one_begin():
                    pass
                self._before_step = 0
            if steps.begun >= self._before_step:
                self._used, self._before_step = 0.0, steps.begun + 1
            last = min(count, first + self._left(size))
            yield slice(first, last)
            self._used += (last - first) / size
            first = last

    def restart(self) -> None:
        """Notes that the engine stands still: nothing comes until it has begun two steps, if it generates.

        The first of them finds the GPU and the interpreter free; a launch here would delay it.
        """
        self._used, self._before_step = 1.0, self._steps.begun + 2

    def _left(self, size: int) -> int:
        return max(0, round((1.0 - self._used) * size))


@contextmanager
def paced(pace: Pace) -> Generator[None]:
    """Makes this thread's launches come in slices, with waits of ``pace`` between them."""
    token = _pace.set(pace)
    try:
        yield
    finally:
        _pace.reset(token)


def slices(count: int, size: int) -> Iterator[slice]:
    """Divides ``count`` parts into slices, of ``size`` at most between two steps.

    All comes at once where nothing is paced, and while the engine does not generate.  A part is what a caller takes for
    one, such as a tile or a byte; callers of all kinds share what may come between two steps.

    Before it lets a step begin, it waits for the current stream of the current device.
    """
    pace = _pace.get()
    if pace is None:
        yield slice(0, count)
    else:
        yield from pace.slices(count, size)
