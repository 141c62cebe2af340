"""Work on a GPU that is recorded once, as a CUDA graph, and launched again as a whole.

Many small launches cost the host far more than the GPU.  A recording reads and writes the memory that its tensors had,
so it holds only while they stay where they are; and it repeats what the work did once, so work that looks at values on
the host cannot be recorded.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import contextmanager

import torch

log = logging.getLogger(__name__)
_POLITE = "thread_local"  # other threads may allocate meanwhile


class RecordedLaunches:
    """Recorded work and the tensors that it reads and writes."""

    def __init__(self, graph: torch.cuda.CUDAGraph, tensors: Sequence[torch.Tensor], recorder: LaunchRecorder) -> None:
        self._graph = graph
        self._recorder = recorder
        self._tensors = tuple(tensors)
        self._places = self._places_now()

    def launch(self) -> bool:
        """Does the work; False, and nothing is done, if one of its tensors has moved.

        It runs on the current stream, or in a block of ``side_by_side`` on that of its recorder.
        """
        if self._places_now() != self._places:
            return False
        if self._recorder.aside:
            with torch.cuda.stream(self._recorder.stream):
                self._graph.replay()
        else:
            self._graph.replay()
        return True

    def _places_now(self) -> list[int]:
        return [tensor.data_ptr() for tensor in self._tensors]


class LaunchRecorder:
    """Records work on one device; what the recordings allocate while they run, they share.

    Attributes:
        stream: The recordings' own, since memory of a pool is for the stream that asked for it first.
        aside: True in a block of ``side_by_side``.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.aside = False
        with torch.cuda.device(device):
            self._pool = torch.cuda.graph_pool_handle()
            self.stream = torch.cuda.Stream()

    def record(self, work: Callable[[], object], tensors: Sequence[torch.Tensor]) -> RecordedLaunches | None:
        """Records work that has already been done at least once, so that its kernels are loaded.

        Recordings must not run side by side.

        Args:
            work: Reads and writes ``tensors``, on the current stream.  What else it allocates stays reserved, and the
                other recordings write into it.
            tensors: All on this device.

        Returns:
            None if the work waits for the GPU, which says that it looks at values, or if it cannot be captured.
        """
        with torch.cuda.device(self._device):
            try:
                with _no_waiting():
                    work()
            except RuntimeError as error:
                if "synchronizing" not in str(error):
                    raise
                return None
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.stream(self.stream):
                    graph.capture_begin(pool=self._pool, capture_error_mode=_POLITE)
                    try:
                        work()
                    finally:
                        graph.capture_end()
            except RuntimeError as error:
                log.warning("weightcast: not recorded, so launched one by one: %s", str(error).splitlines()[0])
                return None
        return RecordedLaunches(graph, tensors, self)


@contextmanager
def side_by_side(recorders: Collection[LaunchRecorder]) -> Generator[None]:
    """Launches recordings of several recorders side by side: small kernels of one leave most of a GPU idle.

    They begin after what the current stream did before the block, and it goes on when all of them are done.  No two of
    them may write the same memory, other than what their recorders gave them.
    """
    for recorder in recorders:
        recorder.stream.wait_stream(torch.cuda.current_stream(recorder.stream.device))
        recorder.aside = True
    try:
        yield
    finally:
        for recorder in recorders:
            recorder.aside = False
            torch.cuda.current_stream(recorder.stream.device).wait_stream(recorder.stream)


@contextmanager
def _no_waiting() -> Generator[None]:
    """Lets torch raise where the host would wait for the GPU."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")  # what it misses, no capture has
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
