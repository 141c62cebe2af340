"""An SGLang server of its own process, as its project ships it: on its path are two stand-ins and `quick` of ours."""

from __future__ import annotations

import atexit
import functools
import math
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engines.environment import QUICK, engine_python
from tests.engines.forked import start
from tests.engines.overlays import overlay, receiver_path, with_wheels
from tests.helpers.engines import NO_KEEP_ALIVE, Engine, stop_all
from weightcast.comm.ports import quiet_port

START_S = 600.0
IMPORTED = (
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.models.registry",
)
STANDINS = Path(__file__).parent / "standins"
# Wheels that shadow the environment's own, by version.
OVERLAYS: dict[str, tuple[str, ...]] = {
    "0.5.17": ("sglang==0.5.17", "transformers==5.12.1", "tokenizers==0.22.2", "huggingface-hub==1.33.0"),
}
# `make test` plays the newest version, `make engine-test` all.
PLAYED = ("0.5.23", *(pytest.param(version, marks=pytest.mark.engine_full) for version in OVERLAYS))


@contextmanager
def sglang(
    logs: Path,
    *settings: tuple[Path, int, Sequence[str]],
    receiver: bool = False,
    version: str = "0.5.23",
    extra: Mapping[str, str] | None = None,
    wheels: Sequence[str] = (),
) -> Iterator[list[Engine]]:
    """Several servers on the CPU in fp32, started side by side; ended on the way out.

    Args:
        logs: Where their logs go.
        settings: For each a model's folder, tensor-parallel ranks, and options.
        receiver: With our receiver in it.
        version: Version of SGLang.
        extra: More of its environment.
        wheels: Packages beside it that its own environment does not have.
    """
    with ExitStack() as stack:
        found: list[Engine] = []
        files = [logs / f"sglang-{number}.log" for number in range(len(settings))]
        stack.callback(stop_all, found, within_s=10)
        for log, (model, tp, options) in zip(files, settings, strict=True):
            found.append(_start(model, tp, options, log, extra or {}, wheels, receiver=receiver, version=version))
        for engine, log in zip(found, files, strict=True):
            _wait(engine, log)
        yield found


def greedy_tokens(engine: Engine, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Generates tokens, greedily and past end-of-sequence tokens."""
    return [answer["output_ids"] for answer in generate(engine, prompts, count)]


def generate(engine: Engine, prompts: Sequence[Sequence[int]], count: int) -> list[dict[str, Any]]:
    sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
    body = {"input_ids": [list(prompt) for prompt in prompts], "sampling_params": sampling}
    answer = engine.client.post(f"{engine.url}/generate", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def checksum(engine: Engine) -> str:
    """Its own, over all ranks."""
    return engine.post("/weights_checker", action="checksum")["per_engine_checksum"]


def sglang_command(
    model: Path, tp: int, options: Sequence[str], port: int, *, receiver: bool = False, version: str = "0.5.23"
) -> tuple[list[str], dict[str, str]]:
    """Returns the command and the environment of a server; the arguments are those of ``sglang``."""
    python = engine_python("sglang-0.5.23-cpu")
    beside = [int(option.partition("=")[2]) for option in options if option.startswith(("--pp-size=", "--dp-size="))]
    ranks = tp if version in OVERLAYS else math.prod((tp, *beside))  # the older version counts those of one engine
    path = [str(overlay(python, *OVERLAYS[version]))] if version in OVERLAYS else []
    path += [str(STANDINS), _package(python) if receiver else str(QUICK)]
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("WEIGHTCAST_", "SGLANG_"))},
        "PYTHONPATH": os.pathsep.join(path),
        **({"SGLANG_PLUGINS": "weightcast"} if receiver else {}),
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_NCCL_SO_PATH": os.devnull,  # a torch for CUDA brings NCCL, which SGLang would use on a CPU too
        # Without it every rank binds itself to cores of a NUMA node of its own.
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(rank % (os.cpu_count() or 1)) for rank in range(ranks)),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_VEC_ISA_OK": "1",  # nothing is compiled here: no tries with a compiler
    }
    command = [str(python), "-m", "sglang.launch_server", f"--model-path={model}", "--device=cpu", "--host=127.0.0.1"]
    command += [f"--port={port}", f"--tp-size={tp}", "--dtype=float32", "--attention-backend=torch_native"]
    command += ["--served-model-name=tiny", "--context-length=256", "--max-total-tokens=2048"]
    command += ["--max-running-requests=8", "--mem-fraction-static=0.3", "--disable-cuda-graph"]
    # Idle schedulers would keep every core busy otherwise.
    command += ["--sleep-on-idle", "--skip-server-warmup", *options]
    command += [] if receiver else ["--disable-overlap-schedule"]
    return command, environment


def _start(
    model: Path,
    tp: int,
    options: Sequence[str],
    log: Path,
    extra: Mapping[str, str],
    wheels: Sequence[str],
    *,
    receiver: bool = False,
    version: str = "0.5.23",
) -> Engine:
    port = quiet_port()
    (python, *argv), environment = sglang_command(model, tp, options, port, receiver=receiver, version=version)
    environment = with_wheels(environment, Path(python), wheels) | dict(extra)
    with log.open("w") as output:
        process = start(Path(python), argv, modules=IMPORTED, env=environment, output=output)
    client = httpx.Client(timeout=300.0, trust_env=False, limits=NO_KEEP_ALIVE)
    return Engine(process=process, url=f"http://127.0.0.1:{port}", folder=model, tp=tp, client=client)


@functools.cache
def _package(python: Path) -> str:
    folder = tempfile.TemporaryDirectory(prefix="weightcast-metadata-")
    atexit.register(folder.cleanup)
    return receiver_path(python, Path(folder.name))


def _wait(engine: Engine, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert engine.process.poll() is None, f"SGLang did not start:\n{log.read_text()[-6000:]}"
        try:
            # The second answer is that of a server which wants a key.
            if engine.client.get(f"{engine.url}/model_info").status_code in (200, 401):
                return
        except httpx.TransportError:
            time.sleep(0.5)
    raise AssertionError(f"SGLang was not ready within {START_S:g} s:\n{log.read_text()[-6000:]}")
