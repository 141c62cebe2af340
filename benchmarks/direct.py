"""Measures ``direct``: trainer ranks to engines of several tensor-parallel ranks, beside our other transports.

    python benchmarks/direct.py --trainers 4 --engines 2 --tp 2 --model dense-256MiB --out cpu-direct.json
    python benchmarks/direct.py --device cuda --trainers 4 --engines 1 --tp 2 --model qwen3-8b --out gpu.json

On CPUs all bytes go over loopback or shared memory.  With ``--device cuda`` all processes share the first ``--gpus``
GPUs, rank by rank, and reach each other's memory over CUDA IPC.  Every engine proves every update by digests, which
must equal those that the trainer ranks took of their own shards; other results end the run.  The file is written anew
after each way, and ``--limit-s`` ends the run with what was measured until then.

With ``--masters`` trainer ranks keep float32.  On one GPU, ``direct, shards`` then has engine ranks cast it in their
copy; the other ways cast it before.

After each round of ``direct, rdma`` the engine ranks do that update's reads again, in turns with as many bytes through
NIXL alone (``remote_reads.py``).  On a machine with other work, ``--rounds`` measures all ways in turns, and the
processor time of all processes is steadier than the time until weights are usable.

The ways named ``owners`` first put each tensor below ``--owned-kib`` together on one trainer rank, in one exchange of
packed messages; that is part of the update's time, and also shown by itself.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import socket
import statistics
import struct
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import uvicorn
from fastapi import FastAPI
from remote_reads import Alone, RecordedReads
from torch import nn
from torch.distributed.tensor import DTensor

from weightcast import WeightUpdater
from weightcast.comm import nixl
from weightcast.comm.ipc import device_uuid, host_id
from weightcast.comm.ports import quiet_port
from weightcast.config import PauseMode
from weightcast.exporters.stages import StagesExporter
from weightcast.lab.bench.machine import facts
from weightcast.lab.bench.shapes import ModelShape, ResidentPlace, model_shape
from weightcast.lab.bench.synthetic import Pattern, key_of, nested
from weightcast.lab.connect import connect as connect_in_lab
from weightcast.receiver import WeightReceiver
from weightcast.receiver.engine_state import EngineFacts
from weightcast.receiver.executor import MpExecutor
from weightcast.receiver.peer_routes import peer_routes
from weightcast.receiver.server import weight_routes
from weightcast.receiver.session import SessionHandler
from weightcast.version import __version__
from weightcast.wire.answers import RankAck
from weightcast.wire.engine_info import RankInfo
from weightcast.wire.layout import TensorSpec
from weightcast.wire.messages import Message

WAYS: dict[str, dict[str, Any]] = {
    "broadcast": {"transport": "broadcast"},
    "ipc": {"transport": "ipc"},
    "direct, messages": {"transport": "direct", "direct_by": "messages"},
    "direct, memory": {"transport": "direct", "direct_by": "memory"},
    "direct, rdma": {"transport": "rdma"},
    "direct, shards": {"transport": "direct", "direct_by": "shards", "keep_mapped": True},
    "messages, owners": {"transport": "direct", "direct_by": "messages"},
    "memory, owners": {"transport": "direct", "direct_by": "memory"},
}
DEFAULT_WAYS = {
    "cpu": ["broadcast", "direct, messages", "ipc", "direct, memory"],
    "cuda": ["ipc", "direct, memory", "direct, shards"],
}
_TIME = struct.Struct("d")
_READS = "direct, rdma"  # the way after which reads are compared with NIXL's own
_READ_TURNS, _READ_PASSES = 5, 4


class Slices(nn.Module):
    """One engine rank's parameters: columns of ``o_proj`` and ``down_proj``, rows of other matrices, whole norms."""

    def __init__(self, shape: ModelShape, rank: int, size: int, device: torch.device) -> None:
        super().__init__()
        self._rank, self._size = rank, size
        self._places = {place.name: place for place in shape.places}
        self._rows: dict[str, int] = {}
        sizes: dict[str, tuple[int, ...]] = {}
        for place in shape.places:
            if place.index is not None:
                raise SystemExit(f"{shape.name} has stacked experts; choose a dense model")
            kept = self.cut(place, torch.empty(place.shape, device="meta")).shape
            before = sizes.get(place.resident, (0, *kept[1:]))
            self._rows[place.name] = before[0]
            sizes[place.resident] = (before[0] + kept[0], *kept[1:])
        self.kept = nn.ParameterDict()
        for name, kept_size in sizes.items():
            zeros = torch.zeros(kept_size, dtype=torch.bfloat16, device=device)
            self.kept[name.replace(".", "/")] = nn.Parameter(zeros, requires_grad=False)

    def cut(self, place: ResidentPlace, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's slice of a whole tensor."""
        if tensor.dim() == 1:
            return tensor
        dim = 1 if "o_proj" in place.name or "down_proj" in place.name else 0
        return tensor.tensor_split(self._size, dim)[self._rank]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copies this rank's slices of whole tensors."""
        for name, tensor in weights:
            place = self._places[name]
            kept = self.cut(place, tensor)
            first = self._rows[name]
            self.kept[place.resident.replace(".", "/")].data[first : first + kept.shape[0]].copy_(kept)


class Worker:
    """One engine rank; it writes the time of each switch to a file."""

    def __init__(
        self, rank: int, tp_size: int, rendezvous: str, *, model: str, device: str, gpus: int, times: str, first: int
    ) -> None:
        torch.set_num_threads(1)
        self._device = torch.device(device)
        if self._device.type == "cuda":
            self._device = torch.device("cuda", rank % gpus)
            torch.cuda.set_device(self._device)
        shape = model_shape(model)
        self._file = os.open(times, os.O_WRONLY)
        self._at = (first + rank) * _TIME.size
        slices = Slices(shape, rank, tp_size, self._device)
        self._reads: RecordedReads | None = None
        self._alone: Alone | None = None
        self.receiver = WeightReceiver(
            slices,
            load_weights=slices.load_weights,
            expected=specs_of(shape),
            tp_rank=rank,
            tp_size=tp_size,
            device=self._device,
            finishers=[self._switched],
        )

    def _switched(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        os.pwrite(self._file, _TIME.pack(time.monotonic()), self._at)

    def apply(self, message: Message) -> RankAck:
        """As ``Worker.apply`` of an engine."""
        return self.receiver.apply(message)

    def run(self, command: bytes) -> bytes:
        """Reads trainer ranks' memory as ``remote_reads.py`` says; all ranks do, and the answer is this one's."""
        told = json.loads(command)
        if self._reads is None:
            self._reads = RecordedReads(self.receiver._steps._shares.remote.reader)  # pyright: ignore[reportPrivateUsage]
        if told["what"] == "begin":
            if self._alone is not None:
                self._alone.close()
                self._alone = None
            self._reads.begin()
            return b""
        if told["what"] == "alone" and self._alone is None:
            self._alone = self._reads.alone()
        read = self._alone.read if told["what"] == "alone" and self._alone is not None else self._reads.repeat
        return json.dumps(sum(read() for _ in range(told["passes"]))).encode()

    def interrupt(self, reason: str) -> None:
        """As ``Worker.interrupt`` of an engine."""
        self.receiver.interrupt(reason)

    def close(self) -> None:
        """Frees everything."""
        self.receiver.close()


class NoRequests:
    """Hooks of an engine that generates nothing."""

    paused = False

    def pause(self, mode: PauseMode, timeout_s: float) -> None:
        """Has nothing to pause."""

    def stop_waiting(self) -> None:
        """Waits for nothing."""

    def resume(self) -> None:
        """Has nothing to resume."""

    def drop_caches(self) -> None:
        """Has none."""

    def set_version(self, version: int) -> None:
        """Needs no version."""


def device_of(rank: int, arguments: argparse.Namespace) -> torch.device:
    """The device of a trainer rank or engine rank."""
    return torch.device("cuda", rank % arguments.gpus) if arguments.device == "cuda" else torch.device("cpu")


def specs_of(shape: ModelShape) -> list[TensorSpec]:
    """Every tensor of the model."""
    return [TensorSpec(name=place.name, dtype="bfloat16", shape=place.shape) for place in shape.places]


def serve(number: int, arguments: argparse.Namespace, times: str, url: Any) -> None:
    """Runs one engine."""
    torch.set_num_threads(1)
    settings = {"model": arguments.model, "device": arguments.device, "gpus": arguments.gpus}
    executor = MpExecutor(Worker, arguments.tp, settings | {"times": times, "first": number * arguments.tp})
    places = [device_uuid(device_of(rank, arguments)) for rank in range(arguments.tp)]
    told = EngineFacts(
        engine=f"weightcast {__version__}",
        model=arguments.model,
        host_id=host_id(),
        ranks=tuple(RankInfo(rank=rank, pid=pid, device=places[rank]) for rank, pid in enumerate(executor.pids())),
        staging="device",
        transports=("ipc", "direct", "broadcast"),
        specs=tuple(specs_of(model_shape(arguments.model))),
        reads_remote=not nixl.missing(),
    )
    app = FastAPI()
    engine = SessionHandler(executor, NoRequests(), told)
    app.include_router(weight_routes(engine))
    app.include_router(peer_routes(lambda: engine))

    def reads(command: str) -> Any:
        return json.loads(executor.run(command.encode()) or b"null")

    app.get("/reads")(reads)
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.bind(("127.0.0.1", 0))
    url.send(f"http://127.0.0.1:{listening.getsockname()[1]}")
    uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False)).run(sockets=[listening])


class Trainer:
    """One trainer rank: the model's rows, and an updater for each way."""

    def __init__(self, rank: int, arguments: argparse.Namespace, urls: list[str]) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard

        self.rank, self._arguments, self._urls = rank, arguments, urls
        self._device = device_of(rank, arguments)
        self._pattern = Pattern(self._device)
        self._local: list[tuple[torch.Tensor, int]] = []
        self._updaters: dict[str, WeightUpdater] = {}
        mesh = init_device_mesh(arguments.device, (arguments.trainers,))
        parameters: dict[str, nn.Parameter] = {}
        self._owners = Owners(rank, arguments.trainers, self._device)
        for place in model_shape(arguments.model).places:
            step = -(-place.shape[0] // arguments.trainers)
            first = min(rank * step, place.shape[0])
            rows = min(step, place.shape[0] - first)
            dtype = torch.float32 if arguments.masters else torch.bfloat16
            local = torch.zeros((rows, *place.shape[1:]), dtype=dtype, device=self._device)
            self._local.append((local, first * math.prod(place.shape[1:])))
            stride = torch.empty(place.shape, device="meta").stride()
            whole = DTensor.from_local(
                local, mesh, [Shard(0)], run_check=False, shape=torch.Size(place.shape), stride=stride
            )
            parameters[place.name] = nn.Parameter(whole, requires_grad=False)
            self._owners.add(place, parameters[place.name], owned_bytes=arguments.owned_kib << 10)
        self._model = nested(parameters)

    def turn(self, way: str, version: int) -> dict[str, Any]:
        """New weights, and one update."""
        if way not in self._updaters:
            size = self._arguments.bucket_mib << 20
            model = self._owners.exporter() if way.endswith("owners") else self._model
            self._updaters[way] = connect_in_lab(model, self._urls, bucket_bytes=size, **WAYS[way])
        for number, (tensor, first) in enumerate(self._local):
            words = torch.empty_like(tensor, dtype=torch.bfloat16) if self._arguments.masters else tensor
            self._pattern.fill(words, key=key_of(version, number), first_word=first)
            if words is not tensor:
                tensor.copy_(words)
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
        before = loopback_bytes()
        started = time.monotonic()
        if way.endswith("owners"):
            self._owners.gather()
        gathered = time.monotonic()
        report = self._updaters[way].update(version=version)
        returned = time.monotonic()
        for row in report.targets:
            if row.proof != "resident" or row.version_after != version:
                raise SystemExit(f"{way}: {row.url} proves {row.proof} and serves version {row.version_after}")
        return {
            "started": started,
            "returned_s": returned - started,
            "owners_s": gathered - started,
            "loopback_bytes": loopback_bytes() - before,
            "peak_extra_bytes": report.peak_extra_bytes,
            "phases": report.phases,
        }

    def close(self) -> None:
        """Disconnects."""
        for updater in self._updaters.values():
            updater.close()


class Owners:
    """The small tensors, each put together on one trainer rank, and the shards of the others."""

    def __init__(self, rank: int, world_size: int, device: torch.device) -> None:
        self._rank, self._world_size, self._device = rank, world_size, device
        self._stage: dict[str, nn.Parameter] = {}
        self._whole: dict[str, nn.Parameter] = {}
        self._given: list[list[nn.Parameter]] = [[] for _ in range(world_size)]
        self._taken: list[list[torch.Tensor]] = [[] for _ in range(world_size)]
        self._count = 0

    def add(self, place: ResidentPlace, sharded: nn.Parameter, *, owned_bytes: int) -> None:
        """Takes a tensor in turn; one that is too large stays sharded."""
        meta = torch.empty(place.shape, dtype=torch.bfloat16, device="meta")
        self._whole[place.name] = nn.Parameter(meta, requires_grad=False)
        if meta.nbytes >= owned_bytes:
            self._stage[place.name] = sharded
            return
        owner, self._count = self._count % self._world_size, self._count + 1
        self._given[owner].append(sharded)
        if owner == self._rank:
            whole = torch.zeros(place.shape, dtype=torch.bfloat16, device=self._device)
            self._stage[place.name] = nn.Parameter(whole, requires_grad=False)
            step = -(-place.shape[0] // self._world_size)
            for number, taken in enumerate(self._taken):
                taken.append(whole[number * step : (number + 1) * step].view(-1))

    def exporter(self) -> StagesExporter:
        """The model with small tensors whole on their owners."""
        return StagesExporter(nested(self._stage), whole=nested(self._whole))

    def gather(self) -> None:
        """Sends each small tensor's rows to its owner, in one message for each pair of ranks."""
        sent: list[torch.Tensor] = []
        for given in self._given:
            # Shards may have moved since the last update, so they are looked up in each, as weightcast does.
            local = [cast(DTensor, one)._local_tensor.view(-1) for one in given]
            sent.append(torch.cat(local) if local else torch.empty(0, dtype=torch.bfloat16, device=self._device))
        received = [
            torch.empty(sum(map(torch.Tensor.numel, taken)), dtype=torch.bfloat16, device=self._device)
            for taken in self._taken
        ]
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        works = [dist.irecv(received[rank].view(torch.uint8), rank) for rank in others if received[rank].numel()]
        works += [dist.isend(sent[rank].view(torch.uint8), rank) for rank in others if sent[rank].numel()]
        for work in works:
            assert work is not None
            work.wait()
        received[self._rank] = sent[self._rank]
        for taken, data in zip(self._taken, received, strict=True):
            if taken:
                torch._foreach_copy_(taken, data.split([part.numel() for part in taken]))  # pyright: ignore[reportPrivateUsage]


def train(rank: int, arguments: argparse.Namespace, port: int, urls: list[str], pipe: Any) -> None:
    """Runs one trainer rank until it is told to end."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    device, backend = device_of(rank, arguments), "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = "nccl" if arguments.gpus >= arguments.trainers else "gloo"  # NCCL wants a GPU for each rank
    dist.init_process_group(backend, rank=rank, world_size=arguments.trainers)
    trainer = Trainer(rank, arguments, urls)
    while (told := pipe.recv()) is not None:
        pipe.send(trainer.turn(*told))
    trainer.close()
    pipe.send(None)


def loopback_bytes() -> int:
    """Bytes that this host has received over loopback so far; 0 where the kernel does not say."""
    for line in Path("/proc/net/dev").read_text().splitlines() if Path("/proc/net/dev").exists() else ():
        name, _, figures = line.partition(":")
        if name.strip() == "lo":
            return int(figures.split()[0])
    return 0


def processor_s(pids: Iterable[int]) -> tuple[float, float]:
    """Processor seconds of these processes and all that they started, in their own code and in the kernel."""
    parents: dict[int, int] = {}
    times: dict[int, tuple[float, float]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # the process has ended meanwhile
            continue
        pid, tick = int(path.parent.name), os.sysconf("SC_CLK_TCK")
        parents[pid] = int(fields[1])
        times[pid] = int(fields[11]) / tick, int(fields[12]) / tick
    wanted = set(pids)
    while more := {pid for pid, parent in parents.items() if parent in wanted} - wanted:
        wanted |= more
    return sum(times[pid][0] for pid in wanted & set(times)), sum(times[pid][1] for pid in wanted & set(times))


def plain_copy_s(arguments: argparse.Namespace) -> float:
    """Seconds of a plain copy of as many bytes as the model has, in chunks, by one process alone."""
    device = torch.device("cuda:0" if arguments.device == "cuda" else "cpu")
    size = model_shape(arguments.model).size_bytes
    chunk = min(size, 1 << 30 if device.type == "cuda" else 64 << 20)
    source, target = (torch.ones(chunk, dtype=torch.uint8, device=device) for _ in range(2))
    found: list[float] = []
    for _ in range(3):
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.monotonic()
        for start in range(0, size, chunk):
            target[: size - start].copy_(source[: size - start])
        if device.type == "cuda":
            torch.cuda.synchronize()
        found.append(time.monotonic() - began)
    return min(found)


def main() -> None:
    """Measures all ways in turn and prints a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--model", default="dense-512MiB")
    parser.add_argument("--trainers", type=int, default=4)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--gpus", type=int, default=1, help="number of GPUs that trainer ranks and engine ranks share")
    parser.add_argument("--bucket-mib", type=int, default=0, help="16 on CPUs and 512 on GPUs by default")
    parser.add_argument("--turns", type=int, default=5, help="updates of a way in a round, beside those that warm up")
    parser.add_argument("--warm", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1, help="rounds over all ways, on a machine with other work")
    parser.add_argument(
        "--way", action="append", choices=list(WAYS), help="may be repeated; those of the device if not"
    )
    parser.add_argument("--masters", action="store_true", help="trainer ranks keep float32, and engines bfloat16")
    parser.add_argument("--owned-kib", type=int, default=64, help="size below which an owner puts a tensor together")
    parser.add_argument("--limit-s", type=float, default=3600.0, help="time limit of the whole run, in seconds")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    arguments.bucket_mib = arguments.bucket_mib or (512 if arguments.device == "cuda" else 16)
    until = time.monotonic() + arguments.limit_s
    ways = arguments.way or DEFAULT_WAYS[arguments.device]
    if arguments.masters and any(way.endswith("owners") for way in ways):
        parser.error("owners put bfloat16 together: leave --masters out")
    limit_s = plain_copy_s(arguments)
    context = multiprocessing.get_context("spawn")
    ranks = arguments.engines * arguments.tp
    with tempfile.NamedTemporaryFile() as times:
        times.write(bytes(ranks * _TIME.size))
        times.flush()
        processes: list[Any] = []
        try:
            urls: list[str] = []
            for number in range(arguments.engines):
                mine, theirs = context.Pipe()
                processes.append(context.Process(target=serve, args=(number, arguments, times.name, theirs)))
                processes[-1].start()
                if not mine.poll(min(300.0, max(0.0, until - time.monotonic()))):
                    raise SystemExit(f"engine {number} did not start")
                urls.append(mine.recv())
            port, pipes = quiet_port(), []
            for rank in range(arguments.trainers):
                mine, theirs = context.Pipe()
                processes.append(context.Process(target=train, args=(rank, arguments, port, urls, theirs)))
                processes[-1].start()
                pipes.append(mine)
            pids = [process.pid for process in processes]
            measure(arguments, ways, pipes, urls, pids, times.name, ranks, limit_s=limit_s, until=until)
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                process.join(10.0)
                process.kill()


def measure(
    arguments: argparse.Namespace,
    ways: list[str],
    pipes: list[Any],
    urls: list[str],
    pids: list[int],
    times: str,
    ranks: int,
    *,
    limit_s: float,
    until: float,
) -> None:
    """Runs all turns of one way, then those of the next, and reports after each.

    Ways in turn would make each update a first one: an engine unmaps what the way before had mapped.
    """
    rows: dict[str, list[dict[str, Any]]] = {}
    reads: list[dict[str, float]] = []
    version = 0
    for way in ways * arguments.rounds:
        rows.setdefault(way, [])
        for turn in range(arguments.warm + arguments.turns):
            version += 1
            if way == _READS and turn == arguments.warm + arguments.turns - 1:
                tell_all(urls, "begin", 1)
            before = processor_s(pids)
            for pipe in pipes:
                pipe.send((way, version))
            answers = []
            for rank, pipe in enumerate(pipes):
                if not pipe.poll(min(300.0, max(0.0, until - time.monotonic()))):
                    raise SystemExit(f"{way}: trainer rank {rank} did not answer in time")
                answers.append(pipe.recv())
            switched = [_TIME.unpack_from(Path(times).read_bytes(), rank * _TIME.size)[0] for rank in range(ranks)]
            row = answers[0] | {"usable_s": max(switched) - min(answer["started"] for answer in answers)}
            own, kernel = (now - then for now, then in zip(processor_s(pids), before, strict=True))
            row |= {"processor_s": own + kernel, "kernel_s": kernel}
            if turn >= arguments.warm:
                rows[way].append(row)
            print(
                f"{way}: usable in {row['usable_s'] * 1e3:.1f} ms, returned {row['returned_s'] * 1e3:.1f}, "
                f"{row['processor_s']:.2f} s of processors",
                flush=True,
            )
        if way == _READS:
            reads += compare_reads(urls)
        report(arguments, rows, reads, limit_s)
    for pipe in pipes:
        pipe.send(None)
    for pipe in pipes:
        pipe.poll(30.0)


def tell_all(urls: list[str], what: str, passes: int) -> float:
    """Lets all engine ranks read at once; returns the seconds until the last has ended."""
    command = urllib.parse.quote(json.dumps({"what": what, "passes": passes}))

    def tell(url: str) -> None:
        with urllib.request.urlopen(f"{url}/reads?command={command}", timeout=300.0) as answer:
            answer.read()

    began = time.monotonic()
    with ThreadPoolExecutor(len(urls)) as pool:
        list(pool.map(tell, urls))
    return time.monotonic() - began


def compare_reads(urls: list[str]) -> list[dict[str, float]]:
    """Times the reads of the last update, and as many bytes through NIXL alone, in turns."""
    found: list[dict[str, float]] = []
    for turn in range(1 + _READ_TURNS):
        row = {f"{what}_s": tell_all(urls, what, _READ_PASSES) / _READ_PASSES for what in ("repeat", "alone")}
        found += [row] if turn else []
    return found


def report(
    arguments: argparse.Namespace, rows: dict[str, list[dict[str, Any]]], reads: list[dict[str, float]], limit_s: float
) -> None:
    """Prints the medians and writes the result."""
    size = model_shape(arguments.model).size_bytes
    first = next(iter(rows))
    base = statistics.median(row["usable_s"] for row in rows[first])
    table: list[dict[str, Any]] = []
    for way, found in rows.items():
        usable = statistics.median(row["usable_s"] for row in found)
        table.append(
            {
                "way": way,
                "usable_s": usable,
                "returned_s": statistics.median(row["returned_s"] for row in found),
                "owners_s": statistics.median(row["owners_s"] for row in found),
                "times_faster": base / usable,
                "loopback_bytes": int(statistics.median(row["loopback_bytes"] for row in found)),
                "peak_extra_bytes": max(row["peak_extra_bytes"] for row in found),
                "runs": found,
            }
        )
        print(
            f"{way:18} usable {usable * 1e3:9.1f} ms, {base / usable:5.2f} times {first}; "
            f"loopback {table[-1]['loopback_bytes'] / size:5.2f} models; "
            f"owners {table[-1]['owners_s'] * 1e3:.1f} ms of it"
        )
    print(f"a plain copy of the model's {size / 2**30:.2f} GiB by one process: {limit_s * 1e3:.1f} ms")
    if reads:
        ours, alone = (statistics.median(row[f"{what}_s"] for row in reads) for what in ("repeat", "alone"))
        print(
            f"reads of an update by rdma {ours * 1e3:.1f} ms, NIXL alone {alone * 1e3:.1f} ms for as many bytes: "
            f"{alone / ours:.2f} of its rate"
        )
    if arguments.out is not None:
        told = {key: str(value) if isinstance(value, Path) else value for key, value in vars(arguments).items()}
        result = {"what": "direct", "machine": facts(), "arguments": told, "model_bytes": size}
        result |= {"plain_copy_s": limit_s, "ways": table, "reads": reads}
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
