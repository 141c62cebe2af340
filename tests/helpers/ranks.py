"""A few real processes that are the ranks of a training job, kept for many tests."""

from __future__ import annotations

import os
import tempfile
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from tests.helpers.clock import PATIENCE_S
from tests.helpers.commands import context
from weightcast.comm.ports import quiet_port


class Ranks:
    """``world_size`` processes joined by gloo or what is asked for.  ``run`` calls a function in all of them."""

    def __init__(
        self,
        world_size: int,
        backend: str = "gloo",
        place: Callable[[int], None] | None = None,
        *,
        address: str = "127.0.0.1",
    ) -> None:
        """Starts the processes.

        Args:
            place: Called in each with its rank before anything else.
            address: Address of rank 0, which the others reach.
        """
        self.world_size = world_size
        self.broken = False  # of no use to another test
        port = quiet_port()
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            args = (rank, world_size, address, port, backend, theirs, place)
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        for pipe in self.pipes:
            pipe.send((function, args))

    def answer(self, rank: int, timeout_s: float = PATIENCE_S) -> Any:
        """The result of the function on one rank.  An exception there is an AssertionError here."""
        ok, value = self._receive(rank, timeout_s)
        assert ok, f"rank {rank}:\n{value}"
        return value

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """The results of the function on every rank, in order."""
        self.start(function, *args)
        # All of them before any complaint: an answer left behind would be taken for that of the next call.
        deadline = time.monotonic() + PATIENCE_S
        answers = [self._receive(rank, max(deadline - time.monotonic(), 0.1)) for rank in range(self.world_size)]
        failed = [f"rank {rank}:\n{value}" for rank, (ok, value) in enumerate(answers) if not ok]
        assert not failed, "\n".join(failed)
        return [value for _, value in answers]

    def _receive(self, rank: int, timeout_s: float) -> tuple[bool, Any]:
        if not self.pipes[rank].poll(timeout_s):
            self.broken = True
            return False, "no answer"
        try:
            return self.pipes[rank].recv()
        except EOFError:
            self.broken = True
            return False, "it died"

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(1.0)
            if process.is_alive():
                process.kill()
                process.join()


@contextmanager
def trainer_jobs() -> Generator[Callable[[int], Ranks]]:
    """Trainer jobs by their number of ranks, started when first asked for; one that is of no use is replaced."""
    started: dict[int, Ranks] = {}

    def job(world_size: int) -> Ranks:
        if world_size in started and started[world_size].broken:
            started.pop(world_size).close()
        if world_size not in started:
            started[world_size] = Ranks(world_size)
        return started[world_size]

    try:
        yield job
    finally:
        for ranks in started.values():
            ranks.close()


def _serve(
    rank: int,
    world_size: int,
    address: str,
    port: int,
    backend: str,
    pipe: Connection,
    place: Callable[[int], None] | None,
) -> None:
    if place is not None:
        place(rank)
    os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    os.chdir(tempfile.gettempdir())
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(backend, rank=rank, world_size=world_size)
    while True:
        try:
            function, args = pipe.recv()
        except (EOFError, ConnectionError):
            os._exit(0)
        try:
            pipe.send((True, function(*args)))
        except BaseException:  # noqa: BLE001  # whatever it was, the test has to see it
            pipe.send((False, traceback.format_exc()))


def allocate_slots(device: torch.device, bucket_bytes: int, *, count: int = 2) -> list[torch.Tensor]:
    """Buffers for ``bucketize``: flat uint8 on a device."""
    return [torch.empty(bucket_bytes, dtype=torch.uint8, device=device) for _ in range(count)]
