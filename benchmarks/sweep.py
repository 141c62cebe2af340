"""Limits by size: the bandwidth of each way of moving bytes between these processes, from 1 MiB to 1 GiB.

Trainer 0 and engine 0 stand for a pair; broadcast and the fan of all trainers to all engines take everybody.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from weightcast.lab.bench.machine import facts
from weightcast.lab.bench.methods import EngineSide, Layout, Method, TrainerSide
from weightcast.lab.bench.raw import RawGroup, synchronize
from weightcast.lab.bench.rig import Rig

_MIB = 1 << 20
SIZES_GPU = (1, 16, 64, 256, 1024)
SIZES_CPU = (1, 16, 64)
_REPEATS = 7


def run_limits(layout: Layout, *, say: Callable[[str], None]) -> dict[str, Any]:
    """All of them, in one set of processes."""
    method = Method(name="limits", trainer="sweep:Trainer", engine="sweep:Engine", writes=False, pauses=False)
    with Rig(layout) as rig:
        say("limits by size")
        rig.prepare(method, timeout_s=120.0)
        turn, _ = rig.turn(method, timeout_s=300.0)
        rig.drop(method)
    return {"what": "limits", "ok": True, "machine": facts(), "case": asdict(layout), "gb_per_s": turn.extra}


class _Half:
    def __init__(self, side: Any) -> None:
        self.side: Any = side
        layout: Layout = side.layout
        self.apart = layout.placement == "disaggregated"
        self.device: torch.device = side.device
        self.sizes = SIZES_GPU if self.device.type == "cuda" else SIZES_CPU
        self.world: RawGroup | None = None
        self.trainers: RawGroup | None = None
        self.found: dict[str, float] = {}

    def prepare(self) -> None:
        """Allocates the buffers and joins the group of all processes."""
        largest = max(self.sizes) * _MIB
        self.a = torch.ones(largest, dtype=torch.uint8, device=self.device)
        self.b = torch.zeros(largest, dtype=torch.uint8, device=self.device)
        layout: Layout = self.side.layout
        if self.apart:
            first = 0 if isinstance(self.side, TrainerSide) else layout.trainers
            self.world = self.side.group("sweep", rank=first + self.side.rank, size=layout.trainers + layout.engines)
            self.world.broadcast(self.a[:1])
            synchronize(self.device)

    def close(self) -> None:
        """Part."""
        if self.world is not None:
            self.world.close()

    def time(self, name: str, size_bytes: int, run: Callable[[], object]) -> None:
        """Records the bandwidth of the median run; the first run does not count."""
        seconds: list[float] = []
        for number in range(_REPEATS + 1):
            synchronize(self.device)
            begin = time.perf_counter()
            run()
            synchronize(self.device)
            if number:
                seconds.append(time.perf_counter() - begin)
        self.found[name] = size_bytes / statistics.median(seconds) / 1e9

    def together(self) -> None:
        """Measures the collectives, which need all processes."""
        layout: Layout = self.side.layout
        world = self.world
        if world is None:
            return
        for size in self.sizes:
            count = size * _MIB
            self.time(f"broadcast {size} MiB", count, lambda count=count: world.broadcast(self.a[:count]))
        count = max(self.sizes) * _MIB
        share = count // world.size
        self.time(
            f"all-gather {max(self.sizes)} MiB",
            share * world.size,
            lambda: world.all_gather(self.b[: share * world.size], self.a[:share]),
        )
        pairs = min(layout.trainers, layout.engines)

        def pair() -> None:
            rank = world.rank
            if rank < pairs:
                world.send(self.a[:count], layout.trainers + rank)
            elif layout.trainers <= rank < layout.trainers + pairs:
                world.receive(self.b[:count], rank - layout.trainers)

        self.time(f"pairs send and receive {max(self.sizes)} MiB", count, pair)


class Trainer(_Half):
    """Measures local copies on trainer 0, then the collectives."""

    def update(self, version: int) -> dict[str, float]:
        """All of it."""
        side: TrainerSide = self.side
        if side.rank == 0:
            self._alone(side)
        if side.layout.trainers > 1:
            torch.distributed.barrier()
        for engine, pipe in enumerate(side.pipes):
            if side.rank == 0:
                pipe.send("go")
                if engine == 0 and not self.apart:
                    pipe.receive()
        self.together()
        return self.found

    def _alone(self, side: TrainerSide) -> None:
        count = max(self.sizes) * _MIB
        self.time("copy within the device", count, lambda: self.b.copy_(self.a))
        if self.device.type == "cuda":
            host = torch.empty(count, dtype=torch.uint8, pin_memory=True)
            self.time("host to device, pinned", count, lambda: self.b.copy_(host, non_blocking=True))
            self.time("device to host, pinned", count, lambda: host.copy_(self.a, non_blocking=True))
            pageable = torch.empty(count // 4, dtype=torch.uint8)
            self.time("host to device, pageable", count // 4, lambda: self.b[: count // 4].copy_(pageable))
            del host, pageable
        # What the engine opens: 16 handles to buffers of their own.
        lent = [torch.ones(4 * _MIB, dtype=torch.uint8, device=self.device) for _ in range(16)]
        if self.device.type == "cpu":
            lent = [tensor.share_memory_() for tensor in lent]
        big = self.a if self.device.type == "cuda" else self.a.clone().share_memory_()
        synchronize(self.device)
        side.pipes[0].send(big)
        for tensor in lent:
            side.pipes[0].send(tensor)
        side.pipes[0].receive()


class Engine(_Half):
    """Opens trainer 0's buffers and copies from them, then measures the collectives."""

    def update(self, version: int) -> dict[str, float]:
        """All of it."""
        side: EngineSide = self.side
        pipe = side.pipes[0]
        if side.rank == 0:
            big = pipe.receive()
            opened: list[float] = []
            kept: list[torch.Tensor] = []
            for _ in range(16):
                begin = time.perf_counter()
                kept.append(pipe.receive())
                opened.append(time.perf_counter() - begin)
            self.found["milliseconds to open a handle"] = statistics.median(opened) * 1e3
            kept.clear()
            name = (
                "copy from the trainer's device" if self.apart and self.device.type == "cuda" else "copy from a mapping"
            )
            self.time(name, big.numel(), lambda: self.b[: big.numel()].copy_(big, non_blocking=True))
            del big
            pipe.send(None)
        pipe.receive()
        if side.rank == 0 and not self.apart:
            pipe.send(None)
        self.together()
        return self.found
