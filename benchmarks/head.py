"""Measures what an update costs the head for each target, with stub engines on loopback.

    python benchmarks/head.py --targets 200 1000 --out FILE

The stubs answer at once with what a real engine would: they take no weights.  They are one process, and its processor
time is reported beside the trainer's.  The sum is what an update takes at most on cores that do nothing else, also on
one.  The median leaves the first update out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import re
import resource
import sys
import threading
import time
from contextlib import suppress
from functools import cache, partial
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
from weightcast.protocols import TO_HEAD  # noqa: E402
from weightcast.wire.answers import Ack  # noqa: E402
from weightcast.wire.codec import encode  # noqa: E402
from weightcast.wire.engine_info import EngineInfo, RankInfo  # noqa: E402
from weightcast.wire.layout import TensorSpec, plan_buckets  # noqa: E402
from weightcast.wire.messages import PROTOCOL  # noqa: E402

_BUCKET_BYTES = 64 << 20
_INSTANCE = "f" * 32
_LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)
_SESSION = re.compile(rb'"session":"[^"]*",?')


class _Opening(msgspec.Struct):
    """The part of an Open that a stub reads.  All stubs share one process, so none decodes the plan."""

    version: int


class _Other(msgspec.Struct):
    """The parts of the other messages that a stub reads."""

    type: str
    bucket: int = -1
    digest: str = ""


_opens, _others = msgspec.json.Decoder(_Opening), msgspec.json.Decoder(_Other)


class Answers:
    """The answers of all stubs, each encoded once."""

    def __init__(self, specs: tuple[TensorSpec, ...], received: str, buckets: int) -> None:
        self._received, self._last = received, buckets - 1
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
            instance=_INSTANCE,
        )

    @cache  # noqa: B019  there is one of these
    def info(self, version: int | None, known: str) -> bytes:
        """The answer to a probe, with ``_INSTANCE`` in place of the engine's own."""
        return _whole(encode(msgspec.structs.replace(self._info, version=version), known=(known,)))

    @cache  # noqa: B019
    def opened(self, version: int | None) -> bytes:
        """The head of the stream that follows an Open, and its first frame."""
        frame = encode(Ack(ok=True, version=version, ranks=1))
        frame = len(frame).to_bytes(4, "big") + frame
        return b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n" % (len(frame), frame)

    @cache  # noqa: B019
    def applied(self, body: bytes, version: int | None) -> tuple[bytes, bool]:
        """The answer to another message, and whether that message is a Commit.  ``body`` has no session."""
        message = _others.decode(body)
        ack = Ack(ok=True, ranks=1, version=version)
        if message.type == "announce" and message.bucket == self._last:
            ack = Ack(ok=True, ranks=1, closed=True, digest=self._received)
        if message.type == "commit":
            ack = Ack(ok=True, ranks=1, version=version, digest=message.digest, resident_ranks=1)
        return _whole(encode(ack)), message.type == "commit"


def _whole(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


class Stub:
    """One engine that has everything as soon as it is told of it."""

    def __init__(self, number: int, answers: Answers) -> None:
        self.instance = f"{number:032x}".encode()
        self.answers = answers
        self.version: int | None = None
        self.next = 0


class Served(asyncio.Protocol):
    """One connection to a stub."""

    def __init__(self, stub: Stub) -> None:
        self._stub = stub
        self._parts: list[bytes] = []
        self._missing = 0  # bytes of the body that have not come yet

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Takes the connection."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Answers a request as soon as it is whole; requests of one connection come one after the other."""
        if self._missing:
            self._missing -= len(data)
        else:
            head_bytes = data.index(b"\r\n\r\n") + 4  # the trainer sends a head at once
            length = _LENGTH.search(data, 0, head_bytes)
            self._missing = head_bytes + (int(length[1]) if length else 0) - len(data)
        self._parts.append(data)
        if self._missing == 0:
            request, self._parts = b"".join(self._parts), []
            self._transport.write(self._answer(request))

    def _answer(self, request: bytes) -> bytes:
        stub = self._stub
        head, _, body = request.partition(b"\r\n\r\n")
        if request.startswith(b"POST /weightcast/apply "):
            answer, commits = stub.answers.applied(_SESSION.sub(b"", body), stub.next)
            if commits:
                stub.version = stub.next
            return answer
        if request.startswith(b"POST /weightcast/open "):
            stub.next = _opens.decode(body).version
            return stub.answers.opened(stub.version)  # the lease stays open until the trainer closes it
        _, _, known = head.partition(b" HTTP/")[0].partition(b"specs=")
        return stub.answers.info(stub.version, known.decode()).replace(_INSTANCE.encode(), stub.instance, 1)


def serve(count: int, specs: tuple[TensorSpec, ...], received: str, buckets: int, pipe: Connection) -> None:
    """Runs the stubs, and tells the processor time of this process when asked, until the other end is closed."""
    _allow_files()

    async def run() -> None:
        loop, answers = asyncio.get_running_loop(), Answers(specs, received, buckets)
        stubs = [Stub(number, answers) for number in range(count)]
        servers = [await loop.create_server(partial(Served, stub), "127.0.0.1", 0, backlog=16) for stub in stubs]
        pipe.send([server.sockets[0].getsockname()[1] for server in servers])
        with suppress(EOFError):
            while True:
                await asyncio.to_thread(pipe.recv)
                pipe.send(time.process_time())

    asyncio.run(run())


def digest_of(model: nn.Module) -> tuple[str, int]:
    """Returns the digest of what an engine receives, and the number of buckets."""
    exporter, group = ModuleExporter(model), TrainerGroup(device=torch.device("cpu"), timeout_s=60.0)
    layouts = plan_buckets(exporter.specs(), bucket_bytes=_BUCKET_BYTES, packing=NativeAdapter.packing)
    memory = torch.empty(max(layout.size_bytes for layout in layouts), dtype=torch.uint8)
    digests = SentDigests()
    exporter.prepare(group)
    for bucket in bucketize(exporter.plan(layouts, group, TO_HEAD), [memory]):
        assert bucket is not None
        digests.add(bucket)
    return digests.finish().digest, len(layouts)


def measure(count: int, tensors: int, updates: int) -> dict[str, Any]:
    """Runs updates of so many stubs."""
    torch.manual_seed(0)
    parameters = {f"layers.{n // 64}.w{n % 64}": nn.Parameter(torch.randn(2, 8), False) for n in range(tensors)}
    model = nested(parameters)
    received, buckets = digest_of(model)
    specs = tuple(TensorSpec.of(name, tensor) for name, tensor in parameters.items())
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=serve, args=(count, specs, received, buckets, theirs), daemon=True)
    process.start()
    theirs.close()
    urls = [f"http://127.0.0.1:{port}" for port in pipe.recv()]
    rows: list[dict[str, float]] = []
    try:
        with _Costs(pipe) as connect:
            updater = WeightUpdater.connect(model, urls, transport="ipc", bucket_bytes=_BUCKET_BYTES, timeout_s=300.0)
        with updater:
            for version in range(1, updates + 2):
                with _Costs(pipe) as row:
                    report = updater.update(version=version)
                assert report.ok
                assert all(row.proof == "resident" for row in report.targets)
                row["cpu_ms_per_target"] = row["cpu_s"] / count * 1e3
                rows.append(row)
                _say(f"{count} targets, update {version}: {row}")
    finally:
        pipe.close()
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


class _Costs:
    """Fills a row: processor time of this process and of the stubs', time, and this process's threads and memory.

    Threads are counted ten times a second, and the most of them are in the row.  ``peak_mib`` is the largest resident
    memory until the end of the row.
    """

    def __init__(self, stubs: Connection) -> None:
        self._stubs = stubs
        self._row: dict[str, float] = {"threads": 0}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._count)

    def __enter__(self) -> dict[str, float]:
        self._thread.start()
        self._before = self._now()
        return self._row

    def __exit__(self, *_: object) -> None:
        after = self._now()
        self._row |= {name: round(after[name] - self._before[name], 6) for name in after}
        self._row["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        self._ended.set()
        self._thread.join()

    def _now(self) -> dict[str, float]:
        self._stubs.send(None)
        return {"stubs_cpu_s": self._stubs.recv(), "cpu_s": time.process_time(), "wall_s": time.monotonic()}

    def _count(self) -> None:
        while not self._ended.wait(0.1):
            self._row["threads"] = max(self._row["threads"], threading.active_count())


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
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    _allow_files()
    found = [measure(count, arguments.tensors, arguments.updates) for count in arguments.targets]
    _say(json.dumps(found, indent=1))
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
