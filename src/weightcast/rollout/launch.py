"""Starts and ends the reference engine: port, ranks, scheduler and server.

``serve(ServeConfig(...))`` blocks until SIGTERM or SIGINT and ends every process that it started.  The executor ends
the ranks' processes even if this one is killed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass, fields
from pathlib import Path
from types import FrameType
from typing import Literal, get_args

import msgspec
import torch
import uvicorn
from prometheus_client import CollectorRegistry
from starlette.concurrency import run_in_threadpool
from starlette.types import ASGIApp
from transformers import PretrainedConfig

from weightcast.comm import nixl
from weightcast.comm.tls import server_context
from weightcast.errors import ConfigError, WeightcastError
from weightcast.receiver.api_keys import warn_if_open
from weightcast.receiver.engine_state import EngineFacts
from weightcast.receiver.executor import Executor, LocalExecutor, MpExecutor
from weightcast.receiver.rank import StagingChoice
from weightcast.receiver.session import SessionHandler
from weightcast.rollout import commands
from weightcast.rollout.batch import Limits
from weightcast.rollout.checkpoint import check_config, config_dtype, parse_dtype, read_config
from weightcast.rollout.engine import RolloutEngine
from weightcast.rollout.scheduler import Scheduler
from weightcast.rollout.server import ExtraRoutes, build_app
from weightcast.rollout.text import TextTokenizer
from weightcast.rollout.worker import WorkerSettings, import_for_ranks, make_worker
from weightcast.runtime.gc_pause import spare_what_lives
from weightcast.version import __version__
from weightcast.watch.engine_metrics import EngineMetrics
from weightcast.watch.spans import EngineSpans

log = logging.getLogger("weightcast.rollout")

ExecutorName = Literal["auto", "local", "mp", "ray"]
MakeExecutor = Callable[[WorkerSettings, int], Executor]
_DRAIN_S = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Settings of one engine.

    Attributes:
        model_dir: A Hugging Face folder with config.json, safetensors and possibly a tokenizer.
        port: Port to listen on; 0 takes a free one, which the ready line names.
        device: ``"auto"``, ``"cpu"``, ``"cuda"`` or ``"cuda:N"``.
        dtype: ``"auto"`` for the checkpoint's own, or a torch name such as ``"bfloat16"``.
        executor: ``"local"`` (one rank, in this process), ``"mp"`` (a process per rank), ``"ray"`` (an actor per rank,
            which the caller of ``serve`` makes) or ``"auto"``.
        api_key: Key that every caller must send; None requires none.
        tls_cert: PEM file with the server's certificate chain; None serves plain HTTP.
        tls_key: PEM file with its private key, if that is not in ``tls_cert``.
        tls_client_ca: PEM file of the authorities that must have signed a caller's certificate; None requires none.
        max_batch: Largest number of requests that generate at once.
        max_len: Largest number of tokens of a request, prompt and answer; cut to the model's own limit.
        staging: Place where a new version waits for its commit.
        name: Name under which the model is served; None for the folder's.
        threads: CPU threads of each rank; 0 divides the cores among the ranks.
    """

    model_dir: str
    host: str = "127.0.0.1"
    port: int = 8000
    tp: int = 1
    device: str = "auto"
    dtype: str = "auto"
    executor: ExecutorName = "auto"
    api_key: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_client_ca: str | None = None
    max_batch: int = 32
    max_len: int = 2048
    staging: StagingChoice = "auto"
    name: str | None = None
    version: int = 0
    threads: int = 0

    def __post_init__(self) -> None:
        if self.tp < 1:
            raise ConfigError(f"tp={self.tp}: an engine needs at least one rank")
        if self.max_batch < 1:
            raise ConfigError(f"max_batch={self.max_batch}: an engine needs room for at least one request")
        if self.max_len < 2:
            raise ConfigError(f"max_len={self.max_len}: a prompt and an answer have at least two tokens")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port={self.port}: ports go from 0 (any free one) to 65535")
        if self.executor not in get_args(ExecutorName):
            raise ConfigError(f"executor={self.executor!r}: choose one of {', '.join(get_args(ExecutorName))}")
        if self.staging not in get_args(StagingChoice):
            raise ConfigError(f"staging={self.staging!r}: choose one of {', '.join(get_args(StagingChoice))}")
        if self.executor == "local" and self.tp > 1:
            raise ConfigError(f"the local executor has one rank, not {self.tp}", hint="use executor mp")
        if self.api_key is not None and not self.api_key:
            raise ConfigError("the API key is empty", hint="leave it out to serve without a key")
        if self.tls_cert is None and (self.tls_key or self.tls_client_ca):
            raise ConfigError("TLS needs this server's certificate", hint="pass tls_cert (--tls-cert) too")


def serve(
    config: ServeConfig,
    *,
    on_ready: Callable[[str], None] | None = None,
    make_executor: MakeExecutor | None = None,
    extra_routes: ExtraRoutes | None = None,
) -> int:
    """Serves until SIGTERM or SIGINT, then ends everything that it started.

    Prints one line on stderr when ready: ``serving NAME on http://HOST:PORT ...``.

    Args:
        on_ready: Function that gets the URL once the server accepts requests.
        make_executor: Function that starts a number of ranks, for executor ``"ray"``; see ``weightcast.ray.executor``.
        extra_routes: The same as for ``build_app``.

    Returns:
        The exit code of the process: 0 after a signal, 1 if serving ended by itself.

    Raises:
        ConfigError: The port, the model or an option cannot be used; nothing was loaded.
        EngineFailure: A rank could not start.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_stop_on_signals())
        try:
            trust = _trust(config)
            listener = stack.enter_context(_listen(config.host, config.port))
            model_config, ranks = _settings(config)
            engine = _start(config, model_config, ranks, make_executor, stack)
            host = f"[{config.host}]" if ":" in config.host else config.host
            url = f"{'http' if trust is None else 'https'}://{host}:{listener.getsockname()[1]}"
            ready = (
                f"serving {engine.model} on {url} "
                f"(tp {config.tp}, {ranks.device}, {ranks.dtype}, context {ranks.max_len}, "
                f"version {config.version})\n"
            )

            def announce() -> None:
                spare_what_lives()
                _say(ready)
                if config.tls_client_ca is None:
                    keys = [] if config.api_key is None else [config.api_key]
                    warn_if_open(keys, host=config.host, port=listener.getsockname()[1], option="--api-key")
                if on_ready is not None:
                    on_ready(url)

            app = build_app(engine, api_key=config.api_key, extra_routes=extra_routes)
            server = _Server(http_settings(app, trust), ready=announce, stopping=engine.scheduler.close)
            server.run(sockets=[listener])
            # uvicorn returns without a signal only if it could not start.
            return 0 if server.started else 1
        except _Stop:
            return 0


def _start(
    config: ServeConfig,
    model_config: PretrainedConfig,
    settings: WorkerSettings,
    make_executor: MakeExecutor | None,
    stack: contextlib.ExitStack,
) -> RolloutEngine:
    """Starts ranks, scheduler and receiver; `stack` closes them in reverse order."""
    text = TextTokenizer.load(Path(config.model_dir), max_len=settings.max_len)
    if config.executor == "ray":
        if make_executor is None:
            raise ConfigError("executor ray needs make_executor", hint="use `weightcast serve --executor ray`")
        executor = make_executor(settings, config.tp)
    elif config.executor == "mp" or config.tp > 1:
        on_cpu = settings.device == "cpu"
        if on_cpu:
            import_for_ranks(model_config, Path(config.model_dir))
        executor: Executor = MpExecutor(make_worker, config.tp, {"settings": settings}, fork=on_cpu)
    else:
        executor = LocalExecutor(make_worker(0, 1, "", settings=settings))
    stack.callback(executor.close)
    described = commands.decode_answer(executor.run(commands.encode(commands.Describe())), commands.Description)
    scheduler = Scheduler(
        executor,
        limits=Limits(max_batch=config.max_batch, max_len=settings.max_len),
        eos_token_ids=_eos(Path(config.model_dir), model_config),
        vocab_size=int(model_config.vocab_size),
        version=config.version,
    )
    stack.callback(scheduler.close)
    name = config.name or Path(config.model_dir).resolve().name
    hosts = {rank.host_id for rank in described.ranks}
    several = len(hosts) > 1
    facts = EngineFacts(
        engine=f"weightcast {__version__}",
        model=name,
        # No trainer can share memory with all ranks if they are on several hosts.
        host_id="" if several else hosts.pop(),
        ranks=tuple(
            msgspec.structs.replace(rank, pid=pid, host_id=rank.host_id if several else "")
            for rank, pid in zip(described.ranks, executor.pids(), strict=True)
        ),
        staging=described.staging,
        staging_bytes=described.staging_bytes,
        transports=("ipc", "direct", "broadcast"),
        reads_remote=not nixl.missing(),
        specs=tuple(described.specs),
    )
    registry = CollectorRegistry()
    metrics = EngineMetrics(registry, model_name=name, version=config.version)
    receiver = SessionHandler(executor, scheduler, facts, version=config.version, watchers=(EngineSpans(), metrics))
    stack.callback(receiver.close)
    return RolloutEngine(scheduler=scheduler, text=text, model=name, receiver=receiver, registry=registry)


def _settings(config: ServeConfig) -> tuple[PretrainedConfig, WorkerSettings]:
    """The ranks' settings, after every check that needs no weights."""
    model_config = read_config(Path(config.model_dir))
    longest = int(model_config.max_position_embeddings)
    if config.max_len > longest:
        log.info("context cut from %d tokens to the model's %d", config.max_len, longest)
    max_len = min(config.max_len, longest)
    check_config(model_config, tp_size=config.tp, max_len=max_len)
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    # Ray actors may live on other hosts, so they check for a GPU themselves.
    if device.startswith("cuda") and not torch.cuda.is_available() and config.executor != "ray":
        raise ConfigError(f"device {device}: torch sees no GPU here", hint="use --device cpu")
    dtype = str(config_dtype(model_config)).removeprefix("torch.") if config.dtype == "auto" else config.dtype
    parse_dtype(dtype)
    settings = WorkerSettings(
        model_dir=config.model_dir,
        dtype=dtype,
        device=device,
        max_batch=config.max_batch,
        max_len=max_len,
        staging=config.staging,
        threads=config.threads,
        own_gpu=config.executor == "ray",
    )
    return model_config, settings


def _eos(folder: Path, model_config: PretrainedConfig) -> frozenset[int]:
    """End-of-sequence tokens: those of the generation settings, else the model's own."""
    found: int | list[int] | None = None
    if (folder / "generation_config.json").is_file():
        try:
            found = json.loads((folder / "generation_config.json").read_text()).get("eos_token_id")
        except (OSError, ValueError, AttributeError) as error:
            raise ConfigError(f"{folder / 'generation_config.json'}: {error}") from error
    if found is None:
        found = model_config.eos_token_id
    if found is None:
        return frozenset()
    return frozenset([found] if isinstance(found, int) else found)


def _trust(config: ServeConfig) -> ssl.SSLContext | None:
    if config.tls_cert is None:
        return None
    return server_context(cert_file=config.tls_cert, key_file=config.tls_key, client_ca_file=config.tls_client_ca)


def _listen(host: str, port: int) -> socket.socket:
    """Binds the socket without listening, so that connections are refused until the model is loaded."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio switches Nagle off only if the protocol is given; with Nagle, answers wait for acknowledgements.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror or error}",
            hint="choose another port, or 0 for any free one",
        ) from error
    os.register_at_fork(after_in_child=listener.close)  # a rank must not keep the port
    return listener


class _Stop(BaseException):
    """A signal asked this process to end."""


@contextlib.contextmanager
def _stop_on_signals() -> Generator[None]:
    """Turns SIGTERM and SIGINT into an exception, so that everything is closed on the way out.

    uvicorn takes the signals while it serves and raises them again when it has drained.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    numbers = (signal.SIGTERM, signal.SIGINT)

    def stop(number: int, frame: FrameType | None) -> None:
        # Closing has deadlines of its own, and a second signal must not cut it short.
        for wanted in numbers:
            signal.signal(wanted, signal.SIG_IGN)
        raise _Stop

    previous = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def http_settings(app: ASGIApp, trust: ssl.SSLContext | None = None) -> uvicorn.Config:
    """Settings of the HTTP server; ``trust`` is its TLS context, or None for plain HTTP."""
    # h11 refuses heads over 64 KiB.  httptools keeps heads of any length, so a client without a key could fill memory.
    settings = uvicorn.Config(app, http="h11", log_level="warning", lifespan="off", timeout_graceful_shutdown=_DRAIN_S)
    settings.load()
    settings.ssl = trust
    return settings


class _Server(uvicorn.Server):
    """uvicorn with two callbacks: when it is ready, and before it waits for open connections to end."""

    def __init__(self, config: uvicorn.Config, *, ready: Callable[[], None], stopping: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready
        self._stopping = stopping

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await run_in_threadpool(self._stopping)
        await super().shutdown(sockets)


def _say(line: str) -> None:
    sys.stderr.write(line)
    sys.stderr.flush()


def main() -> int:
    """Runs ``python -m weightcast.rollout MODEL_DIR [--port 0 ...]``; the options are the fields of `ServeConfig`."""
    parser = argparse.ArgumentParser(prog="python -m weightcast.rollout")
    parser.add_argument("model_dir")
    for field in fields(ServeConfig):
        if field.name != "model_dir":
            kind = int if isinstance(field.default, int) else str
            parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, default=field.default)
    try:
        return serve(ServeConfig(**vars(parser.parse_args())))
    except WeightcastError as error:
        _say(f"error: {error}\n" + (f"hint: {error.hint}\n" if error.hint else ""))
        return 1
