"""LMDeploy's whole server on a CPU (``lmdeploy_cpu``), with or without our receiver, and requests that keep it busy."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch

from tests.engines.environment import LISTS, ROOT, engine_python
from tests.engines.overlays import HTTP_CLIENT, HTTP_PARSER, RAY, RAY_SETTINGS, overlay, with_wheels
from tests.engines.sglang_load import Stream
from tests.helpers.clock import PATIENCE_S
from tests.helpers.engines import NO_KEEP_ALIVE, Engine
from weightcast.comm.ports import quiet_port

START_S = 600.0
CONTEXT = 4096
EOS = 1


class LmdeployStream(Stream):
    """One streamed, greedy answer of LMDeploy."""

    limit = 1 << 30

    def body(self) -> dict[str, Any]:
        """Returns the request."""
        return question(self.prompt, self.count) | {"stream": True}

    def cut_after(self, more: int) -> None:
        """Breaks the answer off once so many more tokens have come, or it is over."""
        self.limit = len(self.tokens) + more
        self._thread.join(PATIENCE_S)

    def _heard(self, said: dict[str, Any]) -> None:
        super()._heard(said)
        if len(self.tokens) >= self.limit:
            raise httpx.ReadError("the test has read enough")


def question(prompt: Sequence[int], count: int) -> dict[str, Any]:
    """The body of a greedy request that goes past the end-of-sequence token, which LMDeploy then never generates."""
    return {"input_ids": list(prompt), "max_tokens": count, "temperature": 0.0, "top_k": 1, "ignore_eos": True}


def fresh(engine: Engine, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Greedy answers, one after the other."""
    return [engine.post("/generate", **question(prompt, count))["output_ids"] for prompt in prompts]


@torch.no_grad()
def expected(model: Any, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """The same answers by transformers."""
    found: list[list[int]] = []
    for prompt in prompts:
        tokens: list[int] = []
        for _ in range(count):
            scores = model(torch.tensor([[*prompt, *tokens]])).logits[0, -1]
            scores[EOS] = float("-inf")
            tokens.append(int(scores.argmax()))
        found.append(tokens)
    return found


@torch.no_grad()
def choices(model: Any, prompt: Sequence[int], tokens: Sequence[int]) -> list[int]:
    """The token that a model prefers in each place of an answer, given the answer so far."""
    scores = model(torch.tensor([[*prompt, *tokens[:-1]]])).logits[0, len(prompt) - 1 :]
    scores[:, EOS] = float("-inf")
    return scores.argmax(-1).tolist()


def command(
    model: Path,
    options: Sequence[str],
    port: int,
    *,
    receiver: bool = True,
    metrics: bool = False,
    tp: int = 1,
    executor: str = "ray",
) -> tuple[list[str], dict[str, str]]:
    """Returns the command and the environment of a server."""
    python = engine_python("lmdeploy-0.18.0-cpu")
    module = "weightcast.plugins.lmdeploy" if receiver else "lmdeploy"
    words = [str(python), "-m", module, "serve", "api_server", str(model), "--backend=pytorch"]
    words += ["--server-name=127.0.0.1", f"--server-port={port}", f"--session-len={CONTEXT}", "--eager-mode"]
    words += ["--num-gpu-blocks=256", "--max-batch-size=8", "--max-prefill-token-num=256"]
    words += [] if metrics else ["--disable-metrics"]
    more = [overlay(python, "prometheus-client==0.26.0")] if metrics else []
    if tp > 1:
        words += [f"--tp={tp}", f"--distributed-executor-backend={executor}"]
    in_ray = tp > 1 and executor == "ray"
    more += [overlay(python, *RAY)] if in_ray else []
    environment = _environment(receiver, more) | ({"RAY_OVERRIDE_RESOURCES": '{"GPU": 2}'} if in_ray else {})
    return [*words, "--log-level=INFO", *options], environment


def _environment(receiver: bool, more: Sequence[Path]) -> dict[str, str]:
    others = ("WEIGHTCAST_", "LMDEPLOY_", "RAY_")
    python = engine_python("lmdeploy-0.18.0-cpu")
    ours = (ROOT / "src", overlay(python, HTTP_PARSER), overlay(python, *HTTP_CLIENT)) if receiver else ()
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(others)},
        "PYTHONPATH": os.pathsep.join(map(str, (*ours, LISTS / "lmdeploy_cpu", LISTS, *more))),
        "WEIGHTS_FROM_HOST": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        # LMDeploy and multiprocessing leave sockets and segments behind when they are killed.
        "TMPDIR": tempfile.mkdtemp(prefix="lmdeploy-"),
        **RAY_SETTINGS,
    }


@contextmanager
def lmdeploy(
    model: Path,
    log: Path,
    *options: str,
    key: str = "",
    receiver: bool = True,
    metrics: bool = False,
    tp: int = 1,
    executor: str = "ray",
    extra: Mapping[str, str] | None = None,
    wheels: Sequence[str] = (),
) -> Iterator[Engine]:
    """A server, ended on the way out.

    Args:
        model: Folder of the model.
        log: File for its output.
        options: More options of LMDeploy.
        key: API key for our own questions.
        receiver: False for the server as it ships.
        metrics: True for a server with ``/metrics``.
        tp: Number of ranks.
        executor: LMDeploy's executor of several ranks: ``ray`` or ``mp``.
        extra: More of its environment.
        wheels: Packages instead of those of its own environment.
    """
    port = quiet_port()
    words, environment = command(model, options, port, receiver=receiver, metrics=metrics, tp=tp, executor=executor)
    environment = with_wheels(environment, Path(words[0]), wheels)
    environment |= extra or {}
    with log.open("w") as output:
        process = subprocess.Popen(words, env=environment, stdout=output, stderr=output, start_new_session=True)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    client = httpx.Client(timeout=300.0, trust_env=False, headers=headers, limits=NO_KEEP_ALIVE)
    engine = Engine(process=process, url=f"http://127.0.0.1:{port}", folder=model, tp=tp, client=client)
    try:
        _wait(engine, log)
        yield engine
    finally:
        client.close()
        end(process)


@contextmanager
def lmdeploy_in_ray(model: Path, log: Path, bundles: Sequence[int]) -> Iterator[tuple[Engine, list[str]]]:
    """A server of two ranks in a placement group of ours (``lmdeploy_in_ray.py``), ended on the way out.

    Args:
        model: Folder of the model.
        log: File for its output.
        bundles: Numbers of the bundles, of rank 0 first.

    Yields:
        The server, and the socket of the node of each bundle.
    """
    port = quiet_port()
    process = start_in_ray(model, log, port, bundles)
    client = httpx.Client(timeout=300.0, trust_env=False, limits=NO_KEEP_ALIVE)
    engine = Engine(process=process, url=f"http://127.0.0.1:{port}", folder=model, tp=2, client=client)
    try:
        _wait(engine, log)
        [nodes] = [line.split(" ", 1)[1] for line in log.read_text().splitlines() if line.startswith("nodes ")]
        yield engine, json.loads(nodes)
    finally:
        client.close()
        end(process)


def start_in_ray(
    model: Path, log: Path, port: int, bundles: Sequence[int], addresses: Sequence[str] = ()
) -> subprocess.Popen[bytes]:
    """Starts it, with addresses of their own for the nodes if there are any."""
    python = engine_python("lmdeploy-0.18.0-cpu")
    words = [str(python), str(LISTS / "lmdeploy_in_ray.py"), str(model), str(port), ",".join(map(str, bundles))]
    environment = _environment(True, [overlay(python, *RAY)])
    with log.open("w") as output:
        return subprocess.Popen(
            [*words, *addresses], env=environment, stdout=output, stderr=output, start_new_session=True
        )


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends a server and what it has started."""
    started = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(15)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue
    for child in started:  # Ray's processes are in groups of their own
        with suppress(psutil.NoSuchProcess):
            child.kill()


def _wait(engine: Engine, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert engine.process.poll() is None, f"LMDeploy did not start:\n{log.read_text()[-6000:]}"
        try:
            if engine.client.get(f"{engine.url}/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.3)
    raise AssertionError(f"LMDeploy was not ready within {START_S:g} s:\n{log.read_text()[-6000:]}")
