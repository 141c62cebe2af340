"""The process of one trainer or engine of a rig: carries out what the rig asks for."""

from __future__ import annotations

import gc
import importlib
import os
import time
import traceback
from contextlib import nullcontext, suppress
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from weightcast.lab.bench.decoding import Decoding
from weightcast.lab.bench.methods import EngineSide, Half, Layout, Method, Side, TrainerSide
from weightcast.lab.bench.peak import Peak, held_bytes
from weightcast.lab.bench.raw import Pipe, stamp, synchronize
from weightcast.lab.bench.shapes import ModelShape, model_shape
from weightcast.lab.bench.stacks import StackSampler
from weightcast.lab.bench.synthetic import Pattern, SyntheticEngine, key_of, nested
from weightcast.runtime.gc_pause import spare_what_lives


def serve_rig(
    role: str, rank: int, layout: Layout, store_port: int, driver: Connection, ends: list[Connection]
) -> None:
    """Answers the rig's commands until it ends or dies; the whole life of a process."""
    device = layout.device_of(role, rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(layout.threads)
    try:
        worker = _RigWorker(role, rank, layout, device, store_port, ends)
        spare_what_lives()  # servers do the same
        while True:
            command, *arguments = driver.recv()
            answer = getattr(worker, f"do_{command}")(driver, *arguments)
            driver.send((True, answer))
            if command == "end":
                break
    except (EOFError, BrokenPipeError):
        pass  # the driver has died
    except BaseException as error:  # noqa: BLE001  whatever it was, the driver says it; nobody reads this process
        last = traceback.extract_tb(error.__traceback__)[-1]
        with suppress(OSError):
            driver.send((False, f"{type(error).__name__}: {error} ({os.path.basename(last.filename)}:{last.lineno})"))
    # Groups of failed methods may hold threads inside torch, which would keep this process alive.
    os._exit(0)


class _RigWorker:
    def __init__(
        self, role: str, rank: int, layout: Layout, device: torch.device, store_port: int, ends: list[Connection]
    ) -> None:
        shape = model_shape(layout.model)
        self._pattern = Pattern(device)
        self._halves: dict[str, Half] = {}
        self._before: dict[str, int] = {}
        self._busy_s = 0.0
        common: dict[str, Any] = dict(
            layout=layout,
            rank=rank,
            device=device,
            shape=shape,
            pipes=[Pipe(end) for end in ends],
            store_port=store_port,
        )
        if role == "engine":
            engine = SyntheticEngine(shape, device)
            decoding = Decoding(engine, enabled=layout.generate)
            self._side: Side = EngineSide(**common, engine=engine, decoding=decoding)
        else:
            self._local: list[tuple[torch.Tensor, int]] = []
            _start_trainers(rank, layout, store_port)
            self._side = TrainerSide(**common, model=self._make_model(shape, layout, rank, device))

    def do_hello(self, driver: Connection) -> None:
        synchronize(self._side.device)

    def do_note(self, driver: Connection, name: str) -> None:
        self._before[name] = held_bytes(self._side.device)  # no process has begun to prepare yet

    def do_prepare(self, driver: Connection, method: Method, serial: int, profile: bool) -> dict[str, Any]:
        self._side.serial = serial
        path = method.engine if isinstance(self._side, EngineSide) else method.trainer
        module, _, name = path.partition(":")
        sampler = StackSampler()
        with sampler if profile else nullcontext():
            half: Half = getattr(importlib.import_module(module), name)(self._side, **method.options)
            half.prepare()
            synchronize(self._side.device)
        self._halves[method.name] = half
        role = "engine" if isinstance(self._side, EngineSide) else "trainer"
        return {role: sampler.table()} if profile else {}

    def do_held(self, driver: Connection, name: str) -> int:
        return max(0, held_bytes(self._side.device) - self._before[name])

    def do_drop(self, driver: Connection, name: str) -> None:
        half = self._halves.pop(name, None)
        if half is not None:
            half.close()
        del half
        gc.collect()  # a server and its receiver form a reference cycle that holds gigabytes
        if self._side.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def do_fill(self, driver: Connection, version: int) -> None:
        side = self._side
        if isinstance(side, EngineSide):
            side.engine.poison(self._pattern, version)
        else:
            self._pattern.fill_all(
                (tensor, key_of(version, number), first_word) for number, (tensor, first_word) in enumerate(self._local)
            )
        synchronize(side.device)

    def do_check(self, driver: Connection, version: int) -> list[str]:
        assert isinstance(self._side, EngineSide)
        return self._side.engine.wrong(self._pattern, version)

    def do_update(
        self, driver: Connection, name: str, version: int, pauses: bool, watch: bool, profile: bool
    ) -> dict[str, Any]:
        side, half = self._side, self._halves[name]
        watched: dict[str, int] = {}
        peak = Peak(side.device) if watch else None
        engine = side if isinstance(side, EngineSide) else None
        before = dict(side.counts)
        pipes = [(pipe.messages, pipe.sent_bytes) for pipe in side.pipes]
        if peak is not None:
            peak.start()
        if engine is not None:
            engine.decoding.start()
            if pauses:
                engine.decoding.pause()
            driver.send((True, None))
        started, self._busy_s = time.monotonic(), time.process_time()
        sampler = StackSampler()
        with sampler if profile else nullcontext():
            extra = half.update(version) or {}
            ended = stamp(side.device)
        stall_s = 0.0
        if engine is not None:
            if pauses:
                engine.decoding.resume()
            stall_s = engine.decoding.stop()
        if peak is not None:
            watched |= peak.stop()
            watched |= {key: value - before.get(key, 0) for key, value in side.counts.items()}
            for pipe, (messages, sent) in zip(side.pipes, pipes, strict=True):
                watched["messages"] = watched.get("messages", 0) + pipe.messages - messages
                watched["metadata_bytes"] = watched.get("metadata_bytes", 0) + pipe.sent_bytes - sent
        return {
            "started": started,
            "ended": ended,
            "usable_at": extra.pop("usable_at", ended),
            "stall_s": stall_s,
            "extra": extra,
            "watched": watched,
            "stacks": sampler.table() if profile else {},
        }

    def do_spent(self, driver: Connection) -> float:
        """Processor time of all threads since the update began, which shows its cost even on a busy machine."""
        return time.process_time() - self._busy_s

    def do_end(self, driver: Connection) -> None:
        for half in self._halves.values():
            half.close()
        self._halves.clear()

    def _make_model(self, shape: ModelShape, layout: Layout, rank: int, device: torch.device) -> nn.Module:
        """Makes a model with the checkpoint's names, sharded by rows over the trainers as FSDP2 does."""
        parameters: dict[str, nn.Parameter] = {}
        mesh = None
        if layout.trainers > 1:
            from torch.distributed.device_mesh import init_device_mesh

            mesh = init_device_mesh(layout.device, (layout.trainers,))
        for place in shape.places:
            rows = place.shape[0]
            first, count = 0, rows
            if mesh is not None:
                step = -(-rows // layout.trainers)
                first = min(rank * step, rows)
                count = min(step, rows - first)
            local = torch.zeros((count, *place.shape[1:]), dtype=torch.bfloat16, device=device)
            row_words = local[0].numel() if count else 0
            self._local.append((local, first * row_words))
            value: torch.Tensor = local
            if mesh is not None:
                from torch.distributed.tensor import DTensor, Shard

                stride = torch.empty(place.shape, device="meta").stride()
                value = DTensor.from_local(
                    local, mesh, [Shard(0)], run_check=False, shape=torch.Size(place.shape), stride=stride
                )
            parameters[place.name] = nn.Parameter(value, requires_grad=False)
        return nested(parameters)


def _start_trainers(rank: int, layout: Layout, store_port: int) -> None:
    """Makes the default group of the trainer ranks, as every training job does."""
    store = dist.TCPStore("127.0.0.1", store_port, is_master=False, wait_for_workers=False)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if layout.device == "cuda" else "gloo",
        store=dist.PrefixStore("trainers", store),
        rank=rank,
        world_size=layout.trainers,
        device_id=layout.device_of("trainer", rank) if layout.device == "cuda" else None,
    )
