"""Kinds of engines that faults are injected into, a row for each.

A row says how to start one, which of its requests is which step of a session, and how to find out from outside what it
serves.  Version ``v`` has the weights of the seed ``v``, so weights say by themselves whose version they are.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch

from tests.engines.lmdeploy_receiver_server import command as lmdeploy_command
from tests.engines.sglang_server import sglang_command
from tests.engines.vllm_server import vllm_command
from tests.faults.weights import LARGEST_BYTES, SIZES, Weights, llama, toy
from tests.helpers.commands import context
from tests.helpers.fork_server import PRELOAD
from tests.helpers.harness import Engine, free, wait_for
from tests.helpers.tiny import tiny_model, tiny_tokenizer
from weightcast.comm.ports import quiet_port
from weightcast.digest.definition import tensor_digest
from weightcast.lab.dialects import routes_of
from weightcast.receiver.executor import die_with_parent
from weightcast.rollout.launch import ServeConfig, serve

Transport = Literal[
    "ipc",
    "broadcast",
    "direct memory",
    "direct messages",
    "direct mixed",
    "rdma",
    "direct relay",
    "direct shards",
    "disk",
]
WAYS: Mapping[Transport, Mapping[str, Any]] = {
    "ipc": {"transport": "ipc"},
    "broadcast": {"transport": "broadcast"},
    "direct memory": {"transport": "direct", "direct_by": "memory"},
    "direct messages": {"transport": "direct", "direct_by": "messages"},
    "direct mixed": {"transport": "direct", "direct_by": "mixed"},
    "rdma": {"transport": "rdma"},
    "direct relay": {"transport": "direct", "direct_by": "relay"},
    "direct shards": {"transport": "direct", "direct_by": "shards", "keep_mapped": True},
    "disk": {"transport": "disk"},
}
# Longer deadlines than a kind's own.  NIXL's agents connect in a second, or two beside other work.
DEADLINES_S: Mapping[Transport, float] = {"rdma": 4.0}
START_S = 600.0
_making = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of engine.

    Attributes:
        name: As in the table.
        transports: What it can be updated by.
        start: A process of it; with so many engine ranks, and at first with the weights of version 0.
        start_bystander: The engine beside it that nothing is done to.
        step_of: Which step a request is: ``open``, ``join``, ``bucket``, ``close``, ``commit`` or empty, by path and
            body.
        standing: What one that is alive serves; it is told which versions there have been, the last ones first.
        weights: Of a version.
        bucket_bytes: So that the weights are several buckets.
        deadline_s: Of every wait in an update.
        engine: What targets are said to be; see ``Target``.
        stock: Knows nothing of us: no session that ends by itself, no digests, no second set of weights.
        wake: What the report asks somebody to do with one that was updated, and left asleep as it was found.
        costly: Takes so long to start that few cases may end it.
        ranks: Of a victim whose rank is struck.
        spares: How many ranks those have that are started before they are needed.
        can_tear: One of its ranks can be told to fail in the middle of its switch of weights.
    """

    name: str
    transports: tuple[Transport, ...]
    start: Callable[[int], Engine]
    start_bystander: Callable[[], Engine]
    step_of: Callable[[str, bytes], str]
    standing: Callable[[Engine, Sequence[int]], Standing]
    weights: Weights
    bucket_bytes: int
    deadline_s: float
    engine: str = "auto"
    stock: bool = False
    wake: Callable[[Engine], None] = lambda engine: None
    costly: bool = False
    ranks: int = 2
    spares: tuple[int, ...] = (1, 2)
    can_tear: bool = False


@dataclass(frozen=True, kw_only=True)
class Standing:
    """State of an engine, as seen from outside.

    Attributes:
        version: Weight version that it serves as a whole; None if it is out of use.
        wrong: Description of an error; empty if there is none.
    """

    version: int | None
    wrong: str = ""


# -- engines with our receiver


_NATIVE_STEPS = {"join": "join", "announce": "bucket", "close": "close", "commit": "commit"}


def _native_step(path: str, body: bytes) -> str:
    if path == "/weightcast/open":
        return "open"
    if path != "/weightcast/apply":
        return ""
    return _NATIVE_STEPS.get(json.loads(body)["type"], "")


def _native_standing(weights: Weights, engine: Engine, versions: Sequence[int]) -> Standing:
    info = free(engine)
    if info.state == "quarantined":
        return Standing(version=None, wrong="" if info.paused else "quarantined, and not paused")
    assert info.version is not None
    whole = engine.digests() == _digests(weights, info.version)
    return Standing(version=info.version, wrong="" if whole else f"its weights are not those of {info.version}")


@functools.lru_cache(maxsize=64)
def _digests(weights: Weights, version: int) -> dict[str, str]:
    return {name: tensor_digest(tensor) for name, tensor in weights(version).items()}


def _start_toy(ranks: int) -> Engine:
    return Engine("--local") if ranks == 1 else Engine("--tp", str(ranks), "--grace-s", "1")


def _start_spread(ranks: int) -> Engine:
    """One rank reads the trainer's memory, and the other gets messages."""
    return Engine("--tp", "2", "--grace-s", "1", "--elsewhere", "1")


# -- language models


def _folder(**changes: Any) -> Path:
    """Makes a checkpoint of version 0, which is deleted when this process ends; ``changes`` of its configuration."""
    with _making:  # engines start side by side
        return _made_folder(**changes)


@functools.cache
def _made_folder(**changes: Any) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="weightcast-faults-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    model = tiny_model(folder, **SIZES, **changes)
    model.load_state_dict(llama(0))
    model.save_pretrained(folder)
    tiny_tokenizer(folder)
    return folder


class _Reference(Engine):
    """The reference engine, alone or in a dialect."""

    def __init__(self, ranks: int, dialect: str) -> None:
        self.args = (dialect,)
        self._launch(_serve_reference, str(_folder()), ranks, dialect)


def _serve_reference(folder: str, ranks: int, dialect: str, ready: Connection) -> None:
    die_with_parent()
    os.setsid()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    settings = ServeConfig(
        model_dir=folder,
        port=0,
        tp=ranks,
        device="cpu",
        dtype="float32",
        threads=1,
        max_len=64,
        max_batch=4,
        staging="auto" if dialect == "none" else "none",
    )
    serve(
        settings,
        on_ready=lambda url: ready.send(int(url.rsplit(":", 1)[1])),
        extra_routes=routes_of(dialect),
    )


def _start_reference(dialect: str, ranks: int = 1) -> Engine:
    return _Reference(ranks, dialect)


# -- stock dialects


def _sglang_step(path: str, body: bytes) -> str:
    """Returns the update step that a request belongs to; of several requests of a step only one counts."""
    return {
        "/pause_generation": "open",
        "/init_weights_update_group": "join",
        "/update_weights_from_distributed": "bucket",
        "/update_weights_from_tensor": "bucket",
        "/update_weights_from_disk": "bucket",
        "/end_weight_update": "close",
        "/continue_generation": "commit",
    }.get(path, "")


def _lmdeploy_step(path: str, body: bytes) -> str:
    route, _, query = path.partition("?")
    match route:
        case "/sleep":
            return "open"
        case "/init_weights_update_group":
            return "join"
        case "/update_weights" | "/update_weights_from_distributed":
            return "close" if json.loads(body)["finished"] else "bucket"
        case "/wakeup":
            return "commit" if "kv_cache" in query else ""
        case _:
            return ""


def _sglang_paused(engine: Engine) -> bool:
    return engine.ask("GET", "/ready")[0] == 503


def _lmdeploy_paused(engine: Engine) -> bool:
    return bool(json.loads(engine.ask("GET", "/is_sleeping")[1])["is_sleeping"])


def _lmdeploy_wake(engine: Engine) -> None:
    if _lmdeploy_paused(engine):
        assert engine.ask("POST", "/wakeup?tags=kv_cache")[0] == 200


def _stock_standing(paused: Callable[[Engine], bool], engine: Engine, versions: Sequence[int]) -> Standing:
    """Finds the version by comparing every bit of the weights, since the engine's own version cannot be trusted."""

    def settled() -> Standing | None:
        if paused(engine):
            return Standing(version=None)
        kept = engine.digests()
        return next((Standing(version=v) for v in versions if kept == _digests(llama, v)), None)

    try:
        return wait_for(settled, "one whole version", timeout_s=5.0)
    except AssertionError:
        return Standing(version=None, wrong="not paused, and its weights are those of no version")


def _stock(
    name: str,
    step_of: Callable[[str, bytes], str],
    paused: Callable[[Engine], bool],
    transports: tuple[Transport, ...] = ("ipc", "broadcast"),
    **more: Any,
) -> Kind:
    return Kind(
        name=name,
        transports=transports,
        start=functools.partial(_start_reference, name),
        start_bystander=functools.partial(_start_reference, name),
        step_of=step_of,
        standing=functools.partial(_stock_standing, paused),
        weights=llama,
        bucket_bytes=LARGEST_BYTES,
        deadline_s=2.0,
        engine=name,
        stock=True,
        spares=(1,),
        **more,
    )


# -- vLLM, SGLang and LMDeploy with our receiver


class _Plugged(Engine):
    """A real engine on the CPU with our plug-in: a server, and a process of its own for its one rank."""

    def __init__(self, name: str, command_of: Callable[[Path, int], tuple[list[str], dict[str, str]]]) -> None:
        self.args = (name,)
        logs, port = Path(tempfile.mkdtemp(dir=_folder())), quiet_port()
        self.log = logs / f"{name}.log"
        command, environment = command_of(logs, port)
        self._launch(_become, command, environment, str(self.log), port)

    def ready(self) -> _Plugged:
        """Waits until the server answers."""

        def answers() -> bool:
            assert self.process.is_alive(), f"{self.args[0]} did not start:\n{self.log.read_text()[-6000:]}"
            with suppress(OSError):
                return self.ask("GET", "/weightcast/info")[0] == 200
            time.sleep(0.3)
            return False

        wait_for(answers, self.args[0], timeout_s=START_S)
        return self

    def close(self) -> None:
        """Kills what is left of the server's process group."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.join()
        self._ready.close()


def _become(command: Sequence[str], environment: dict[str, str], log: str, port: int, ready: Connection) -> None:
    die_with_parent()
    os.setsid()
    ready.send(port)
    output = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.execve(command[0], command, environment)


def _start_vllm(ranks: int) -> Engine:
    return _Plugged("vllm", lambda logs, port: vllm_command(_folder(), logs, port)).ready()


def _start_sglang(ranks: int) -> Engine:
    return _Plugged("sglang", lambda logs, port: sglang_command(_folder(), 1, (), port, receiver=True)).ready()


def _start_lmdeploy(ranks: int) -> Engine:
    # LMDeploy keeps the row of a padding token at zero, which no version's weights have.
    folder = _folder(pad_token_id=None)
    return _Plugged("lmdeploy", lambda logs, port: lmdeploy_command(folder, (), port)).ready()


def _plugged(name: str, start: Callable[[int], Engine]) -> Kind:
    return Kind(
        name=name,
        transports=("ipc", "broadcast"),
        start=start,
        start_bystander=functools.partial(_start_reference, "none"),
        step_of=_native_step,
        standing=functools.partial(_native_standing, llama),
        weights=llama,
        bucket_bytes=LARGEST_BYTES,
        deadline_s=3.0,
        costly=True,
        ranks=1,
        spares=(),
    )


KINDS: Mapping[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind(
            name="native",
            transports=tuple(way for way in WAYS if way not in ("direct mixed", "disk")),
            start=_start_toy,
            start_bystander=functools.partial(_start_toy, 1),
            step_of=_native_step,
            standing=functools.partial(_native_standing, toy),
            weights=toy,
            bucket_bytes=30_000,  # 15 buckets, the larger matrices cut into rows
            deadline_s=2.0,
            can_tear=True,
        ),
        Kind(
            name="two hosts",
            transports=("direct mixed",),
            start=_start_spread,
            start_bystander=functools.partial(_start_toy, 1),
            step_of=_native_step,
            standing=functools.partial(_native_standing, toy),
            weights=toy,
            bucket_bytes=30_000,
            deadline_s=2.0,
            can_tear=True,
        ),
        _stock("sglang", _sglang_step, _sglang_paused, transports=("ipc", "broadcast", "disk")),
        _stock("lmdeploy", _lmdeploy_step, _lmdeploy_paused, wake=_lmdeploy_wake),
        _plugged("vllm", _start_vllm),
        _plugged("sglang-plugin", _start_sglang),
        _plugged("lmdeploy-plugin", _start_lmdeploy),
    )
}


def preload() -> None:
    """Imports the engines' modules once, in the process that all engines are forked from."""
    context.set_forkserver_preload([*PRELOAD, "tests.faults.kinds"])
