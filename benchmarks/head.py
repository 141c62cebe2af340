"""Measures what an update costs the head for each target, with stub engines on loopback.

    python benchmarks/head.py --targets 200 1000 --out FILE

The stubs answer at once with what a real engine would: they take no weights.  They are one process, so the processor
time that is reported is the trainer's alone.  The first update is left out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import resource
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / "src")]

import msgspec  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402

from weightcast import WeightUpdater  # noqa: E402
from weightcast.adapters.native.adapter import NativeAdapter  # noqa: E402
from weightcast.comm.ipc import host_id  # noqa: E402
from weightcast.comm.trainer_group import TrainerGroup  # noqa: E402
from weightcast.digest.sent import SentDigests  # noqa: E402
from weightcast.exporters.bucketize import bucketize  # noqa: E402
from weightcast.exporters.module import ModuleExporter  # noqa: E402
from weightcast.lab.bench.synthetic import nested  # noqa: E402
from weightcast.wire.answers import Ack  # noqa: E402
from weightcast.wire.codec import encode  # noqa: E402
from weightcast.wire.engine_info import EngineInfo, RankInfo  # noqa: E402
from weightcast.wire.layout import TensorSpec, plan_buckets  # noqa: E402
from weightcast.wire.messages import PROTOCOL  # noqa: E402

_BUCKET_BYTES = 64 << 20


class _Opening(msgspec.Struct):
    """The part of an Open that a stub reads.  All stubs share one process, so none decodes the plan."""

    version: int


class _Other(msgspec.Struct):
    """The parts of the other messages that a stub reads."""

    type: str
    bucket: int = -1
    digest: str = ""


_opens, _others = msgspec.json.Decoder(_Opening), msgspec.json.Decoder(_Other)


class Stub:
    """One engine that has everything as soon as it is told of it."""

    def __init__(self, number: int, specs: tuple[TensorSpec, ...], received: str, buckets: int) -> None:
        self._received, self._buckets = received, buckets
        self._version: int | None = None
        self._info = EngineInfo(
            protocol=PROTOCOL,
            engine="stub 1",
            model="m",
            state="serving",
            version=None,
            digest=None,
            tp_size=1,
            host_id=host_id(),
            ranks=(RankInfo(rank=0, pid=os.getpid(), device="cpu"),),
            staging="device",
            transports=("ipc",),
            specs=specs,
            instance=f"{number:032x}",
        )

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers the requests of one connection, in order."""
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
                line, _, fields = head.partition("\r\n")
                lengths = [field for field in fields.split("\r\n") if field.startswith("content-length:")]
                body = await reader.readexactly(int(lengths[0].split(":")[1])) if lengths else b""
                path = line.split(" ")[1]
                if path.startswith("/weightcast/open"):
                    frame = encode(self._opened(body))
                    frame = len(frame).to_bytes(4, "big") + frame
                    writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
                    writer.write(f"{len(frame):x}\r\n".encode() + frame + b"\r\n")
                    await reader.read()  # the lease, until the trainer closes it
                    return
                if path.startswith("/weightcast/info"):
                    _, _, known = path.partition("specs=")
                    answer = encode(msgspec.structs.replace(self._info, version=self._version), known_specs=known)
                else:
                    answer = encode(self._applied(body))
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(answer) + answer)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # the trainer has closed the connection, or the stubs end
        finally:
            writer.close()

    def _opened(self, body: bytes) -> Ack:
        self._next = _opens.decode(body).version
        return Ack(ok=True, version=self._version, ranks=1)

    def _applied(self, body: bytes) -> Ack:
        message = _others.decode(body)
        if message.type == "announce" and message.bucket == self._buckets - 1:
            return Ack(ok=True, ranks=1, closed=True, received_all=self._received, received_ranks=1)
        if message.type == "commit":
            self._version = self._next
            return Ack(ok=True, ranks=1, version=self._version, digest=message.digest, resident_ranks=1)
        return Ack(ok=True, ranks=1, version=self._version)


def serve(count: int, specs: tuple[TensorSpec, ...], received: str, buckets: int, ready: Connection) -> None:
    """Runs the stubs until the other end of the pipe is closed."""
    _allow_files()

    async def run() -> None:
        stubs = [Stub(number, specs, received, buckets) for number in range(count)]
        servers = [await asyncio.start_server(stub.serve, "127.0.0.1", 0) for stub in stubs]
        ready.send([server.sockets[0].getsockname()[1] for server in servers])
        await asyncio.to_thread(ready.poll, None)

    asyncio.run(run())


def digest_of(model: nn.Module) -> tuple[str, int]:
    """Returns the one digest of everything that an engine receives, and the number of buckets."""
    exporter, group = ModuleExporter(model), TrainerGroup(device=torch.device("cpu"), timeout_s=60.0)
    layouts = plan_buckets(exporter.specs(), bucket_bytes=_BUCKET_BYTES, packing=NativeAdapter.packing)
    memory = torch.empty(max(layout.size_bytes for layout in layouts), dtype=torch.uint8)
    digests = SentDigests()
    for bucket in bucketize(exporter, layouts, group, [memory]):
        assert bucket is not None
        digests.add(bucket)
    return digests.finish().of_all, len(layouts)


def measure(count: int, tensors: int, updates: int, connections: int | None = None) -> dict[str, Any]:
    """Runs updates of so many stubs."""
    torch.manual_seed(0)
    parameters = {f"layers.{n // 64}.w{n % 64}": nn.Parameter(torch.randn(2, 8), False) for n in range(tensors)}
    model = nested(parameters)
    received, buckets = digest_of(model)
    specs = tuple(TensorSpec.of(name, tensor) for name, tensor in parameters.items())
    context = multiprocessing.get_context("spawn")
    ready, theirs = context.Pipe()
    process = context.Process(target=serve, args=(count, specs, received, buckets, theirs), daemon=True)
    process.start()
    theirs.close()
    urls = [f"http://127.0.0.1:{port}" for port in ready.recv()]
    rows: list[dict[str, float]] = []
    try:
        busy, began = time.process_time(), time.monotonic()
        updater = WeightUpdater.connect(
            model, urls, transport="ipc", bucket_bytes=_BUCKET_BYTES, timeout_s=300.0, max_connections=connections
        )
        connect = {"cpu_s": time.process_time() - busy, "wall_s": time.monotonic() - began}
        with updater:
            for version in range(1, updates + 2):
                busy, began = time.process_time(), time.monotonic()
                most = _Threads()
                with most:
                    report = updater.update(version=version)
                assert report.ok
                assert all(row.proof == "resident" for row in report.targets)
                cpu_s = time.process_time() - busy
                row = {"cpu_s": cpu_s, "wall_s": time.monotonic() - began, "threads": most.most}
                rows.append(row | {"cpu_ms_per_target": cpu_s / count * 1e3})
                _say(f"{count} targets, update {version}: {row}")
    finally:
        ready.close()
        process.join(10.0)
        process.kill()
    later = sorted(rows[1:], key=lambda row: row["cpu_s"])
    return {
        "targets": count,
        "tensors": tensors,
        "connect": connect,
        "first": rows[0],
        "median": later[len(later) // 2],
    }


class _Threads:
    """Counts the threads of this process ten times a second."""

    def __init__(self) -> None:
        self.most = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._count)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _count(self) -> None:
        while True:
            self.most = max(self.most, threading.active_count())
            if self._ended.wait(0.1):
                return


def _allow_files() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _say(text: str) -> None:
    print(text, flush=True)


def main() -> None:
    """Reads the options and measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", type=int, nargs="+", default=[200, 1000])
    parser.add_argument("--tensors", type=int, default=18769, help="as many as Qwen3-30B-A3B has")
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--connections", type=int, help="the trainer's limit of connections; its default without")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    _allow_files()
    found = [measure(count, arguments.tensors, arguments.updates, arguments.connections) for count in arguments.targets]
    _say(json.dumps(found, indent=1))
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
