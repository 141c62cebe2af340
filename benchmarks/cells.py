"""Measures what cells cost the sender: one process group over a fleet, or cells of bounded size.

    python benchmarks/cells.py --engines 128 --cell-ranks 64 1024 --ways broadcast relay --out FILE

Engines are real receivers around a model of a few matrices, many in one process, and have one rank each.  All run on
this machine, so times are those of all of them on its cores, and only ratios mean anything.  Run it with low priority:
hundreds of engines take all of a small machine.  ``copies`` is what the kernel has sent on the trainer's TCP sockets,
without headers and requests, by the bytes of the model.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import resource
import socket
import struct
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / name) for name in ("src", ".")]

import torch  # noqa: E402

from weightcast.comm.ipc import host_id  # noqa: E402
from weightcast.digest.definition import tensor_digest  # noqa: E402
from weightcast.lab.bench.synthetic import nested  # noqa: E402
from weightcast.lab.connect import connect as connect_in_lab  # noqa: E402

_PER_PROCESS = 32  # a group over 256 ranks has a connection for each two of them
_ROWS = 24_000  # 6.5 MB with the layers
_BUCKET_BYTES = 512 << 10
_TIMEOUT_S = 300.0
_TCP_INFO_BYTES = 232
_BYTES_SENT = 200  # offset of tcpi_bytes_sent
_WAYS: Mapping[str, Mapping[str, Any]] = {
    "broadcast": {"transport": "broadcast"},
    "messages": {"transport": "direct", "direct_by": "messages"},
    "relay": {"transport": "direct", "direct_by": "relay"},
}


def serve(count: int, pipe: Connection) -> None:
    """Runs so many engines, and tells the processor time of this process when asked, until the pipe is closed."""
    import anyio.to_thread
    import uvicorn
    from fastapi import FastAPI
    from tests.helpers.toy_engine import Clockwork, ToyWorker, toy_weights

    from weightcast.receiver.engine_state import EngineFacts
    from weightcast.receiver.executor import LocalExecutor
    from weightcast.receiver.server import weight_routes
    from weightcast.receiver.session import SessionHandler
    from weightcast.wire.engine_info import RankInfo
    from weightcast.wire.layout import TensorSpec

    _allow_files()
    torch.set_num_threads(1)
    settings = {"seed": 0, "rows": _ROWS, "staging": "auto", "dtype": "float32"}
    specs = tuple(TensorSpec.of(name, tensor) for name, tensor in toy_weights(seed=0, rows=_ROWS).items())
    workers = [ToyWorker(0, 1, "", **settings) for _ in range(count)]

    def app_of(worker: ToyWorker) -> FastAPI:
        facts = EngineFacts(
            engine="toy 1",
            model="toy",
            host_id=host_id(),
            ranks=(RankInfo(rank=0, pid=os.getpid(), device="cpu"),),
            staging="device",
            transports=("direct", "broadcast"),
            specs=specs,
        )
        app = FastAPI()
        app.include_router(weight_routes(SessionHandler(LocalExecutor(worker), Clockwork(), facts)))
        return app

    async def run() -> None:
        anyio.to_thread.current_default_thread_limiter().total_tokens = 8 * count  # every engine waits for the others
        listeners = [socket.create_server(("127.0.0.1", 0), backlog=64) for _ in workers]
        for listener in listeners:
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        servers = [
            uvicorn.Server(uvicorn.Config(app_of(worker), log_level="warning", lifespan="off")) for worker in workers
        ]
        tasks = [
            asyncio.create_task(server.serve(sockets=[listener]))
            for server, listener in zip(servers, listeners, strict=True)
        ]
        pipe.send([listener.getsockname()[1] for listener in listeners])
        with suppress(EOFError):
            while True:
                await asyncio.to_thread(pipe.recv)
                pipe.send(time.process_time())
        for task in tasks:
            task.cancel()

    asyncio.run(run())


def digests(url: str) -> dict[str, str]:
    """Digests of the weights that an engine keeps now."""
    with urllib.request.urlopen(f"{url}/weightcast/digests", timeout=_TIMEOUT_S) as answer:
        return json.load(answer)["resident"]


def sent_bytes(requests: frozenset[int]) -> int:
    """Bytes that this process has sent on its open TCP sockets, but for those to these ports."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as one:
                tcp = one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM
                if not tcp or one.getpeername()[1] in requests:
                    continue
                info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        except OSError:  # it listens, or was closed meanwhile
            continue
        found += struct.unpack_from("Q", info, _BYTES_SENT)[0]
    return found


class Fleet:
    """Engines in a few processes."""

    def __init__(self, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipes: list[Connection] = []
        self._processes: list[Any] = []
        for first in range(0, count, _PER_PROCESS):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(min(_PER_PROCESS, count - first), theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self._processes.append(process)
        self.ports = [port for pipe in self.pipes for port in pipe.recv()]

    def cpu_s(self) -> float:
        """Processor time of all engines so far, in seconds."""
        for pipe in self.pipes:
            pipe.send(None)
        return sum(pipe.recv() for pipe in self.pipes)

    def close(self) -> None:
        """Ends the processes."""
        for pipe in self.pipes:
            pipe.close()
        for process in self._processes:
            process.join(5.0)
            process.kill()


def measure(fleet: Fleet, way: str, cell_ranks: int, updates: int) -> dict[str, Any]:
    """Updates a fleet some times with new weights; the first update also makes the groups."""
    from tests.helpers.toy_engine import toy_weights

    parameters = {name: torch.nn.Parameter(tensor, False) for name, tensor in toy_weights(seed=1, rows=_ROWS).items()}
    model = nested(parameters)
    size_bytes = sum(parameter.nbytes for parameter in parameters.values())
    urls = [f"http://127.0.0.1:{port}" for port in fleet.ports]
    requests = frozenset(fleet.ports)
    rows: list[dict[str, float]] = []
    with connect_in_lab(
        model,
        urls,
        bucket_bytes=_BUCKET_BYTES,
        timeout_s=_TIMEOUT_S,
        advanced={"cell_ranks": cell_ranks},
        allow_older=True,
        **_WAYS[way],
    ) as updater:
        for version in range(1, updates + 2):
            with torch.no_grad():
                for parameter in parameters.values():
                    parameter.add_(1.0)
            before, cpu, engines, began = (
                sent_bytes(requests),
                time.process_time(),
                fleet.cpu_s(),
                time.monotonic(),
            )
            report = updater.update(version=version)
            row: dict[str, float] = {"wall_s": time.monotonic() - began, "cpu_s": time.process_time() - cpu}
            row["engines_cpu_s"] = fleet.cpu_s() - engines
            row["copies"] = (sent_bytes(requests) - before) / size_bytes
            assert report.ok
            assert all(one.proof == "resident" for one in report.targets)
            rows.append(row)
            _say(f"{len(urls)} engines, {way}, {len(updater.cells)} cells, update {version}: {row}")
        cells = [len(cell) for cell in updater.cells]
        expected = {name: tensor_digest(parameter.detach()) for name, parameter in parameters.items()}
        assert all(digests(url) == expected for url in urls)
    return {
        "engines": len(urls),
        "way": way,
        "cells": cells,
        "model_bytes": size_bytes,
        "buckets": report.buckets,
        "first": rows[0],
        "median": sorted(rows[1:], key=lambda row: row["wall_s"])[len(rows[1:]) // 2],
        "later": rows[1:],
    }


def _allow_files() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _say(text: str) -> None:
    print(text, flush=True)


def run(engines: Sequence[int], ways: Sequence[str], cell_ranks: Sequence[int], updates: int) -> list[dict[str, Any]]:
    """Measures each case."""
    found: list[dict[str, Any]] = []
    for count in engines:
        fleet = Fleet(count)
        try:
            found += [measure(fleet, way, most, updates) for way in ways for most in cell_ranks]
        finally:
            fleet.close()
    return found


def main() -> None:
    """Reads the options and measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, nargs="+", default=[128])
    parser.add_argument("--cell-ranks", type=int, nargs="+", default=[64, 1024])
    parser.add_argument("--ways", nargs="+", choices=list(_WAYS), default=["broadcast", "relay"])
    parser.add_argument("--updates", type=int, default=5, help="beside the first one")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    _allow_files()
    torch.set_num_threads(1)
    found = run(arguments.engines, arguments.ways, arguments.cell_ranks, arguments.updates)
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
