"""A real receiver around a model of a few matrices: sessions, staging, ranks and HTTP, but nothing to generate.

Run as ``python -m tests.helpers.toy_engine --tp 2``; prints ``ready PORT`` when it answers.  Tests use it where
the reference engine's language model would only cost time.  It starts at version 0 with the weights of ``--seed``.
"""

from __future__ import annotations

import argparse
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI
from torch import nn

from tests.helpers.forking import fork_ranks
from tests.helpers.hosts import INTERFACE, Host, become_another_user, enter
from tests.helpers.torn import tear
from weightcast.comm import nixl
from weightcast.comm.ipc import device_uuid, host_id
from weightcast.comm.remote_reads import Pull, RemoteReader
from weightcast.config import PauseMode
from weightcast.receiver import WeightReceiver, lost_ranks
from weightcast.receiver.engine_state import EngineFacts
from weightcast.receiver.executor import LocalExecutor, MpExecutor
from weightcast.receiver.peer_routes import peer_routes
from weightcast.receiver.server import weight_routes
from weightcast.receiver.session import SessionHandler
from weightcast.wire.answers import RankAck
from weightcast.wire.engine_info import RankInfo
from weightcast.wire.layout import TensorSpec
from weightcast.wire.messages import Message

OTHER_HOST = "22222222-1111-2222-3333-444444444444"


def toy_weights(*, seed: int, rows: int = 96, width: int = 64, layers: int = 3) -> dict[str, torch.Tensor]:
    """Weights as sent: column-parallel ``up``, row-parallel ``down``, replicated ``norm``, ``embed``."""
    generator = torch.Generator().manual_seed(seed)
    weights = {"embed.weight": torch.randn(rows, width, generator=generator)}
    for layer in range(layers):
        weights[f"layers.{layer}.up.weight"] = torch.randn(4 * width, width, generator=generator)
        weights[f"layers.{layer}.down.weight"] = torch.randn(width, 4 * width, generator=generator)
        weights[f"layers.{layer}.norm.weight"] = torch.randn(width, generator=generator)
    return weights


def toy_dtypes(names: Iterable[str], dtype: str, *, wide_norms: bool) -> dict[str, torch.dtype]:
    """The dtype that an engine keeps each weight in."""
    return {name: torch.float32 if wide_norms and ".norm." in name else getattr(torch, dtype) for name in names}


class ToyModel(nn.Module):
    """Keeps its slices of the weights, as an engine rank does."""

    def __init__(
        self,
        weights: dict[str, torch.Tensor],
        *,
        tp_rank: int,
        tp_size: int,
        dtypes: Mapping[str, torch.dtype],
        computed: bool = False,
    ) -> None:
        super().__init__()
        self.computed = computed
        self.tp_rank, self.tp_size = tp_rank, tp_size
        self.specs = [TensorSpec.of(name, tensor, dtype=dtypes[name]) for name, tensor in weights.items()]
        self.kept = nn.ParameterDict()
        for name, tensor in weights.items():
            part = self.slice(name, tensor).to(dtypes[name], copy=True).contiguous()
            self.kept[name.replace(".", "/")] = nn.Parameter(part, requires_grad=False)

    def slice(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        for part, dim in ((".up.", 0), (".down.", 1)):
            if part in name:
                size = tensor.shape[dim] // self.tp_size
                return tensor.narrow(dim, self.tp_rank * size, size)
        return tensor

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        with torch.no_grad():
            for name, tensor in weights:
                if self.computed and ".norm." in name:
                    tensor = tensor * 1  # the same values, and no copy of the source any more
                self.kept[name.replace(".", "/")].copy_(self.slice(name, tensor))


class ToyWorker:
    """One rank."""

    def __init__(
        self,
        rank: int,
        tp_size: int,
        rendezvous: str,
        *,
        seed: int,
        rows: int,
        staging: str,
        dtype: str,
        wide_norms: bool = False,
        devices: tuple[str, ...] = ("cpu",),
        keep_storage: bool = False,
        computed: bool = False,
        places: tuple[Host, ...] = (),
        stranger: int | None = None,
        count_reads: str = "",
    ) -> None:
        if places:
            enter(places[rank])  # while this process has one thread
            os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
        if rank == stranger:
            become_another_user()
        torch.set_num_threads(1)
        device = torch.device(devices[rank % len(devices)])
        weights = toy_weights(seed=seed, rows=rows)
        dtypes = toy_dtypes(weights, dtype, wide_norms=wide_norms)
        model = ToyModel(weights, tp_rank=rank, tp_size=tp_size, dtypes=dtypes, computed=computed)
        self.receiver = WeightReceiver(
            model.to(device),
            load_weights=model.load_weights,
            expected=model.specs,
            tp_rank=rank,
            tp_size=tp_size,
            device=device,
            staging=staging,  # type: ignore[arg-type]
            keep_storage=keep_storage,
        )
        self.rank = rank
        if count_reads:
            count_remote_reads(Path(count_reads) / f"rank-{rank}")

    def apply(self, message: Message) -> RankAck:
        return self.receiver.apply(message)

    def run(self, command: bytes) -> bytes:
        """``tear RANK TIMES``: the next so many attempts of this rank to move weights fail half way."""
        what, rank, times = command.decode().split()
        assert what == "tear", command
        if int(rank) == self.rank:
            tear(self.receiver.loader.staging, after=2, times=int(times))
        return b""

    def interrupt(self, reason: str) -> None:
        self.receiver.interrupt(reason)

    def close(self) -> None:
        self.receiver.close()


def count_remote_reads(file: Path) -> None:
    """Writes to a file how many bytes this process has read through NIXL, from now on."""
    read, total = RemoteReader.read, 0

    def counting(self: RemoteReader, pulls: Sequence[Pull], size_bytes: int, **options: Any) -> torch.Tensor:
        nonlocal total
        found = read(self, pulls, size_bytes, **options)
        total += sum(runs.size_bytes * runs.number for pull in pulls for _, runs in pull.runs)
        file.write_text(str(total))
        return found

    RemoteReader.read = counting  # type: ignore[method-assign]


class Clockwork:
    """Hooks that only remember."""

    def __init__(self) -> None:
        self.paused = False

    def pause(self, mode: PauseMode, timeout_s: float) -> None:
        self.paused = True

    def stop_waiting(self) -> None:
        pass

    def resume(self) -> None:
        self.paused = False

    def drop_caches(self) -> None:
        pass

    def set_version(self, version: int) -> None:
        pass


def main(argv: Sequence[str] | None = None, announce: Callable[[int], None] | None = None) -> None:
    """Serve until told to end.

    Args:
        argv: Arguments, those of the command line by default.
        announce: Called with the port when the engine answers; it is printed by default.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rows", type=int, default=96)
    parser.add_argument("--staging", default="auto")
    parser.add_argument("--computed", action="store_true", help="the loader computes with norms")
    parser.add_argument("--keep-storage", action="store_true", help="a flip moves contents also on the device")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--wide-norms", action="store_true", help="norms are kept in float32")
    parser.add_argument("--devices", default="cpu", help="comma-separated, one for each rank")
    parser.add_argument("--local", action="store_true")
    parser.add_argument("--pid", type=int, help="process number that every rank says it has, as in a container")
    parser.add_argument("--places", type=Host.read, nargs="+", default=(), help="the host of each rank, as JSON")
    parser.add_argument("--host-id", help="id of the host that it says it runs on")
    parser.add_argument("--elsewhere", type=int, help="a rank that says it is on another host")
    parser.add_argument("--stranger", type=int, help="a rank that runs as another user")
    parser.add_argument("--count-reads", default="", help="folder for the number of bytes that each rank reads")
    parser.add_argument("--fork", action="store_true", help="ranks are forked and need not import torch again")
    parser.add_argument(
        "--grace-s", type=float, default=15.0, help="how much later than its deadline a rank may answer"
    )
    args = parser.parse_args(argv)
    lost_ranks.GRACE_S = args.grace_s
    if args.fork:
        fork_ranks()
    settings = {"seed": args.seed, "rows": args.rows, "staging": args.staging, "dtype": args.dtype}
    devices = tuple(args.devices.split(","))
    settings["devices"] = devices
    settings["keep_storage"] = args.keep_storage
    settings["computed"] = args.computed
    settings["wide_norms"] = args.wide_norms
    settings["places"] = tuple(args.places)
    settings["stranger"] = args.stranger
    settings["count_reads"] = args.count_reads
    executor = (
        LocalExecutor(ToyWorker(0, 1, "", **settings)) if args.local else MpExecutor(ToyWorker, args.tp, settings)
    )
    weights = toy_weights(seed=args.seed, rows=args.rows)
    dtypes = toy_dtypes(weights, args.dtype, wide_norms=args.wide_norms)
    here = args.host_id or host_id()
    hosts, names = [here] * args.tp, ["here"] * args.tp
    if args.places:
        hosts, names = [place.id for place in args.places], [place.name for place in args.places]
    if args.elsewhere is not None:
        hosts[args.elsewhere], names[args.elsewhere] = OTHER_HOST, "elsewhere"
    facts = EngineFacts(
        engine="toy 1",
        model="toy",
        host_id=here,
        ranks=tuple(
            RankInfo(
                rank=rank,
                pid=pid if args.pid is None else args.pid,
                device=device_uuid(torch.device(devices[rank % len(devices)])),
                host_id=hosts[rank] if len(set(hosts)) > 1 else "",
                host=names[rank] if len(set(hosts)) > 1 else "",
            )
            for rank, pid in enumerate(executor.pids())
        ),
        staging={"none": "none", "host": "host"}.get(args.staging, "device"),
        transports=("ipc", "direct", "broadcast"),
        reads_remote=not nixl.missing(),
        specs=tuple(TensorSpec.of(name, tensor, dtype=dtypes[name]) for name, tensor in weights.items()),
    )
    app = FastAPI()
    handler = SessionHandler(executor, Clockwork(), facts)
    app.include_router(weight_routes(handler))
    app.include_router(peer_routes(lambda: handler))

    @app.post("/fault/{rank}/{times}")
    def fault(rank: int, times: int) -> None:
        executor.run(f"tear {rank} {times}".encode())

    # With the protocol named, asyncio switches Nagle off; without it every answer waits 40 ms for an acknowledgement.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((args.host, args.port))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))

    def say() -> None:
        while not server.started:
            time.sleep(0.01)
        port = listener.getsockname()[1]
        if announce is not None:
            announce(port)
        else:
            print(f"ready {port}", flush=True)

    threading.Thread(target=say, daemon=True).start()
    server.run(sockets=[listener])
    executor.close()
    os._exit(0)


if __name__ == "__main__":
    main()
