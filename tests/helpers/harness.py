"""Toy engines in processes of their own, and trainers for them.

Versions and weights go together: version ``v`` has the weights ``toy_weights(seed=v)``, an engine starts at version 0,
and no test uses a version twice.  So what an engine serves can be checked at any time, by any test.
"""

from __future__ import annotations

import functools
import http.client
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor

from tests.helpers import toy_engine
from tests.helpers.clock import AMPLE_S, PATIENCE_S
from tests.helpers.commands import context
from tests.helpers.forking import fork_ranks
from tests.helpers.stolen import Inexcusable
from tests.helpers.toy_engine import toy_weights
from weightcast import WeightUpdater
from weightcast.comm.ipc import SharedBuffer, shared_buffer_at
from weightcast.digest.definition import model_digest, tensor_digest
from weightcast.lab.connect import connect as connect_in_lab
from weightcast.receiver.executor import die_with_parent
from weightcast.report import UpdateReport
from weightcast.update.served_parts import MappedShares
from weightcast.wire.answers import Ack
from weightcast.wire.codec import decode_info
from weightcast.wire.engine_info import EngineInfo

SMALL_BUCKETS = 30_000  # 15 buckets for the toy model, its larger matrices cut into rows

_versions = itertools.count(1)
Started = TypeVar("Started")


def next_version() -> int:
    return next(_versions)


class Engine:
    """A toy engine.  Its processes are a process group of their own."""

    address = "127.0.0.1"

    def __init__(self, *args: str, port: int = 0) -> None:
        self.args = args
        self._launch(serve, ["--seed", "0", "--port", str(port), *args])

    def _launch(self, serve: Callable[..., None], *args: Any) -> None:
        """Start its process.

        Args:
            serve: Called there with the arguments and a connection that wants the port; leads a group of its own.
            args: Its first arguments.
        """
        self._ready, theirs = context.Pipe(duplex=False)
        self.process = context.Process(target=serve, args=(*args, theirs))
        self.process.start()
        theirs.close()
        self._port: int | None = None

    @property
    def port(self) -> int:
        """Known when it answers."""
        if self._port is None:
            assert self._ready.poll(PATIENCE_S), f"the engine {self.args} did not start"
            self._port = int(self._ready.recv())
        return self._port

    @property
    def url(self) -> str:
        return f"http://{self.address}:{self.port}"

    @property
    def dtype(self) -> str:
        return self.args[self.args.index("--dtype") + 1] if "--dtype" in self.args else "float32"

    def ask(self, method: str, path: str, body: bytes = b"", *, timeout_s: float = PATIENCE_S) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self.address, self.port, timeout=timeout_s)
        try:
            connection.request(method, path, body)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def info(self) -> EngineInfo:
        status, body = self.ask("GET", "/weightcast/info")
        assert status == 200, body
        return decode_info(body)

    def digests(self) -> dict[str, str]:
        """Digests of the engine's weights, read back through its loader."""
        status, body = self.ask("GET", "/weightcast/digests")
        assert status == 200, body
        ack = msgspec.json.decode(body, type=Ack)
        assert not ack.mismatched
        return ack.resident

    def pids(self) -> list[int]:
        """The server and its ranks."""
        return sorted({self.process.pid, *(rank.pid for rank in self.info().ranks)})

    def signal(self, number: int) -> None:
        """To all its processes."""
        os.killpg(self.process.pid, number)

    def close(self) -> None:
        """Kill it; safe to call twice."""
        if self.process.is_alive():
            self.port  # noqa: B018  it leads a process group of its own by then
            self.signal(signal.SIGKILL)
        self.process.join()
        self._ready.close()


def serve(argv: list[str], ready: Connection) -> None:
    die_with_parent()  # which ends with the tests, however these end
    os.setsid()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    fork_ranks()
    toy_engine.main(argv, ready.send)


def free(engine: Engine) -> EngineInfo:
    """Wait until nobody updates the engine."""
    return wait_for(lambda: (info := engine.info()).state != "updating" and info, f"{engine.url} to be free")


def serves_whole(engine: Engine) -> int:
    """The version that it says it serves; fails unless it has exactly its weights, in every bit."""
    info = free(engine)
    assert info.state == "serving", info.message
    assert info.version is not None
    kept = engine.digests()
    if kept != digests_of(info.version, engine.dtype) or info.digest not in (None, model_digest(kept)):
        raise Inexcusable(f"{engine.url} says version {info.version} and keeps other weights: {kept}")
    return info.version


def wait_for(condition: Callable[[], Any], what: str, *, timeout_s: float = PATIENCE_S) -> Any:
    """Waits until a condition is true and returns its value."""
    deadline = time.monotonic() + timeout_s
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}"
        time.sleep(0.02)


@functools.lru_cache(maxsize=64)
def digests_of(version: int, dtype: str = "float32", wire_dtype: str = "float32") -> dict[str, str]:
    """Returns the weights of an engine that keeps ``dtype`` after a version was sent in ``wire_dtype``."""
    return {
        name: tensor_digest(tensor.to(getattr(torch, wire_dtype)).to(getattr(torch, dtype)))
        for name, tensor in toy_weights(seed=version).items()
    }


class ToyTrainer(nn.Module):
    """A module whose parameters have the names of the toy weights."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in weights.items():
            *path, last = name.split(".")
            module: nn.Module = self
            for step in path:
                if not hasattr(module, step):
                    module.add_module(step, nn.Module())
                module = getattr(module, step)
            module.register_parameter(last, nn.Parameter(tensor))

    def set_version(self, version: int) -> None:
        weights = toy_weights(seed=version)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(weights[name])


def set_shards(model: nn.Module, version: int) -> None:
    """Gives this rank's shards of a sharded toy trainer the values of a version."""
    whole = dict(trainer_of(version).named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor)
            mine = distribute_tensor(whole[name].data, parameter.device_mesh, parameter.placements)
            parameter.to_local().copy_(mine.to_local())


def share_memory(model: nn.Module, mesh: DeviceMesh, placements: Sequence[Placement]) -> SharedBuffer:
    """Shards a module into a buffer that other processes can map, as GPU memory is; returns the buffer."""
    whole = {name: distribute_tensor(tensor.data, mesh, placements) for name, tensor in model.named_parameters()}
    buffer = SharedBuffer(sum(tensor.to_local().nbytes for tensor in whole.values()), torch.device("cpu"))
    end = 0
    for name, tensor in whole.items():
        path, _, last = name.rpartition(".")
        local = tensor.to_local()
        view = buffer.data[end : end + local.nbytes].view(local.dtype).view(local.shape).copy_(local)
        end += local.nbytes
        moved = DTensor.from_local(view, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())
        setattr(model.get_submodule(path), last, nn.Parameter(moved))
    return buffer


def map_other_memory(wanted: Callable[[], bool], *, byte: int = 0) -> Callable[[], None]:
    """Engines map a copy of this rank's weights in which one bit is another, while ``wanted``; returns the undoing."""
    share, kept = MappedShares.share, list[SharedBuffer]()

    def share_other(self: MappedShares, lying: Any) -> Any:
        found = share(self, lying)
        if not wanted():
            return found
        real = shared_buffer_at(lying.views()[0][2].data_ptr())
        assert real is not None
        other = SharedBuffer(real.data.numel(), torch.device("cpu"))
        other.data.copy_(real.data)
        other.data[byte] ^= 1
        kept.append(other)
        return msgspec.structs.replace(found, memories=(other.handle(),))

    MappedShares.share = share_other  # type: ignore[method-assign]

    def undo() -> None:
        MappedShares.share = share  # type: ignore[method-assign]

    return undo


def trainer_of(version: int) -> ToyTrainer:
    return ToyTrainer(toy_weights(seed=version))


def connect(model: nn.Module, engines: Sequence[Engine], **options: Any) -> WeightUpdater:
    options = {"bucket_bytes": SMALL_BUCKETS, "timeout_s": AMPLE_S} | options
    return connect_in_lab(model, [engine.url for engine in engines], **options)


def push(engines: Sequence[Engine], version: int, **options: Any) -> UpdateReport:
    """A new trainer that updates once."""
    with connect(trainer_of(version), engines, **options) as updater:
        return updater.update(version=version)


def unnamed_s(report: UpdateReport) -> float:
    """Seconds of an update that belong to no phase; not below 0 where engines' own times are in ``verify`` too."""
    engines = ("load", "stall")
    return max(report.seconds - sum(took_s for name, took_s in report.phases.items() if name not in engines), 0.0)


def on_every_rank(report: UpdateReport) -> str:
    """The part of a report that every trainer rank has, as JSON; the head alone has the timeline."""
    return msgspec.structs.replace(report).to_json()  # a replaced one has no timeline


def process(function: Callable[..., Any], *args: Any) -> Any:
    """A started process that calls the function: a trainer that may be killed."""
    started = context.Process(target=_quietly, args=(function, *args), daemon=True)
    started.start()
    return started


def _quietly(function: Callable[..., Any], *args: Any) -> None:
    torch.set_num_threads(1)
    function(*args)


def num_fds(pid: int | str) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def num_threads(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


def listening(pid: int) -> set[str]:
    """Sockets of a process that listen, as the kernel's lines of them."""
    sockets = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            where = os.readlink(f"/proc/{pid}/fd/{fd}")
        except FileNotFoundError:
            continue
        if where.startswith("socket:["):
            sockets.add(where[8:-1])
    lines: list[str] = []
    for table in ("tcp", "tcp6"):
        lines += Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
    return {line for line in lines if line.split()[3] == "0A" and line.split()[9] in sockets}


def children() -> set[int]:
    """Returns the child processes of this process."""
    mine = set()
    for task in os.listdir("/proc/self/task"):
        mine |= {int(pid) for pid in Path(f"/proc/self/task/{task}/children").read_text().split()}
    return mine


class BeforeCommit(Generic[Started]):
    """A ``progress`` of an updater that does something once, between the last bucket and the commit.

    Requests that must run at the switch start here.  If they began earlier, they might have ended on a busy machine.

    Attributes:
        result: What it returned; None before.
    """

    def __init__(self, do: Callable[[], Started]) -> None:
        self.result: Started | None = None
        self._do: Callable[[], Started] | None = do

    def __call__(self, sent: int, total: int) -> None:
        if sent == total and self._do is not None:
            do, self._do = self._do, None
            self.result = do()


def later(delay_s: float, do: Callable[[], Any]) -> threading.Timer:
    timer = threading.Timer(delay_s, do)
    timer.daemon = True
    timer.start()
    return timer
