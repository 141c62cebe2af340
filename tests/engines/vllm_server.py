"""A vLLM server of its own process, with our plug-in in it."""

from __future__ import annotations

import atexit
import functools
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.engines.environment import engine_python
from tests.engines.forked import start
from tests.engines.overlays import receiver_path, with_wheels
from tests.helpers.engines import NO_KEEP_ALIVE, Engine
from weightcast.comm.ports import quiet_port

START_S = 600.0
IMPORTED = (
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.qwen3_moe",
)


@contextmanager
def vllm(
    model: Path,
    logs: Path,
    *options: str,
    tp: int = 1,
    key: str | None = None,
    stock: bool = False,
    serve: bool = False,
    extra: Mapping[str, str | None] | None = None,
    wheels: Sequence[str] = (),
) -> Iterator[Engine]:
    """Serve a folder with vLLM on the CPU, in fp32; ended on the way out.

    Args:
        model: The folder.
        logs: Where its log goes.
        options: More of vLLM's own.
        tp: How many ranks.
        key: Its API key.
        stock: Without our receiver, with its own routes for updates.
        serve: Started as ``vllm serve`` does it, which can start several API servers.
        extra: More of its environment; None takes a variable away.
        wheels: Packages beside it that its own environment does not have.
    """
    port = quiet_port()
    command, environment = vllm_command(model, logs, port, *options, tp=tp, key=key, stock=stock)
    environment = with_wheels(environment, Path(command[0]), wheels)
    python, *argv = as_command(command) if serve else command
    environment = {name: value for name, value in (environment | (extra or {})).items() if value is not None}
    log = logs / "vllm.log"
    with log.open("w") as output:
        process = start(Path(python), argv, modules=IMPORTED, env=environment, output=output)
    client = httpx.Client(timeout=300.0, trust_env=False, limits=NO_KEEP_ALIVE)
    engine = Engine(process=process, url=f"http://127.0.0.1:{port}", folder=model, tp=tp, client=client)
    try:
        _wait(engine, log)
        yield engine
    finally:
        engine.stop(within_s=60)


def vllm_command(
    model: Path, logs: Path, port: int, *options: str, tp: int = 1, key: str | None = None, stock: bool = False
) -> tuple[list[str], dict[str, str]]:
    """Returns the command and the environment of such a server; the arguments are those of ``vllm``."""
    python = engine_python("vllm-0.32.0-cpu")
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("WEIGHTCAST_", "VLLM_"))},
        "PYTHONPATH": receiver_path(python, Path(_folder())),
        **({"VLLM_SERVER_DEV_MODE": "1"} if stock else {}),
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_VEC_ISA_OK": "1",  # nothing is compiled here: no tries with a compiler
    }
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", f"--model={model}", "--host=127.0.0.1"]
    command += [
        f"--port={port}",
        "--served-model-name=tiny",
        "--dtype=float32",
        "--max-model-len=256",
        "--enforce-eager",
    ]
    command += ["--max-num-seqs=8", f"--tensor-parallel-size={tp}"]
    command += [*([] if stock else ["--weight-transfer-config", '{"backend": "weightcast"}']), *options]
    command += [f"--api-key={key}"] if key else []
    return command, environment


def as_command(command: list[str]) -> list[str]:
    """Turns the command of a server into that of ``vllm serve``."""
    python, _, _, *options = command
    (Path(_folder()) / "vllm-0.32.0+cpu.dist-info").mkdir(exist_ok=True)  # the command asks for its own version
    metadata = Path(_folder()) / "vllm-0.32.0+cpu.dist-info" / "METADATA"
    metadata.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    return [python, "-m", "vllm.entrypoints.cli.main", "serve", *options]


@functools.cache
def _folder() -> str:
    folder = tempfile.TemporaryDirectory(prefix="weightcast-metadata-")
    atexit.register(folder.cleanup)
    return folder.name


def greedy_tokens(engine: Engine, prompts: list[list[int]], count: int, **headers: str) -> list[list[int]]:
    """Generates tokens with vLLM, greedily and past end-of-sequence tokens."""
    body: dict[str, Any] = {"model": "tiny", "prompt": prompts, "max_tokens": count, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True}
    answer = engine.client.post(f"{engine.url}/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return [choice["token_ids"] for choice in sorted(answer.json()["choices"], key=lambda choice: choice["index"])]


def _wait(engine: Engine, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert engine.process.poll() is None, f"vLLM did not start:\n{log.read_text()[-6000:]}"
        try:
            if engine.client.get(f"{engine.url}/health").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.5)
    raise AssertionError(f"vLLM was not ready within {START_S:g} s:\n{log.read_text()[-6000:]}")
