"""SGLang servers for measurements: on a GPU from a folder that holds SGLang, or a tiny one on this CPU."""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from tests.engines.environment import package_path
from tests.engines.sglang_server import sglang_command

from weightcast.comm.ports import quiet_port

# The folder for machines without a network has no FlashAttention 3 and no FlashInfer kernels.
BUILD_FLAGS = "--attention-backend=triton --sampling-backend=pytorch --grammar-backend=none"
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",
    "SGLANG_ENABLE_JIT_DEEPGEMM": "0",
    "SGLANG_IS_FLASHINFER_AVAILABLE": "0",
    "ENGINE_STARTS": "python",  # no forks: a process that has used CUDA cannot be forked
}
_running: list[Server] = []


class Late(BaseException):
    """The time is over.  No case may take it for a failure of its own."""


class Server:
    """One SGLang of its own process group.

    Attributes:
        first_answers: Set by the caller: what it answered on the weights that it was started with.
        receiver: True if it has our receiver.
    """

    def __init__(self, command: Sequence[str], environment: dict[str, str], folder: Path, log: Path, port: int) -> None:
        self.command = list(command[1:])
        self.folder, self.log = folder, log
        self.url = f"http://127.0.0.1:{port}"
        self.first_answers: list[list[int]] = []
        self.receiver = "SGLANG_PLUGINS" in environment
        self._python, self._environment = command[0], environment
        self._started = time.monotonic()
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        _running.append(self)

    def wait_ready(self, deadline: float) -> dict[str, Any]:
        """Waits for the first answer; returns what the server said of its start.

        Raises:
            RuntimeError: It ended, or was not ready in time; with the end of its log.
        """
        while True:
            if self.process.poll() is not None or time.monotonic() > deadline:
                how = f"it ended with {self.process.returncode}" if self.process.returncode else "it was not ready"
                raise RuntimeError(f"SGLang did not start, {how}:\n{self.text()[-9000:]}")
            try:
                # /health answers once a warm-up request has compiled the kernels that all later ones need.
                if httpx.get(self.url + "/health", timeout=60, trust_env=False).status_code == 200:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.3)
        told = self.get("/server_info")
        lines = r"(?:Load weight end|Memory pool end|Capture .*end|KV Cache is allocated|weightcast: rank).*"
        return {
            "seconds": round(time.monotonic() - self._started, 1),
            "version": told["version"],
            "settings": {
                name: told.get(name)
                for name in ("mem_fraction_static", "max_total_num_tokens", "disable_cuda_graph", "attention_backend")
            },
            "said": [line[:300] for line in re.findall(lines, self.text())][:12],
        }

    def text(self) -> str:
        """Its log."""
        return self.log.read_text(errors="replace")

    def get(self, path: str) -> Any:
        answer = httpx.get(self.url + path, timeout=60, trust_env=False)
        answer.raise_for_status()
        return answer.json()

    def post(self, path: str, **body: object) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=120, trust_env=False)

    def answers(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        """Greedy tokens, one prompt after the other, so that batches are the same every time."""
        sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
        found: list[list[int]] = []
        for prompt in prompts:
            answer = self.post("/generate", input_ids=list(prompt), sampling_params=sampling)
            if answer.status_code != 200:
                raise RuntimeError(f"/generate: {answer.status_code} {answer.text[:1000]}")
            found.append(answer.json()["output_ids"])
        return found

    def flush(self) -> None:
        """Empties its prefix cache.

        Raises:
            RuntimeError: It does not.
        """
        answer = self.post("/flush_cache")
        if answer.status_code != 200:
            raise RuntimeError(f"/flush_cache: {answer.status_code} {answer.text[:1000]}")

    def run_python(self, *arguments: str) -> str:
        """The output of a Python program that sees what this server sees.

        Raises:
            RuntimeError: It failed; with its last words.
        """
        with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as words:
            # No pipes: helpers of torch that outlive the program keep them open.
            done = subprocess.run(
                [self._python, *arguments],
                env=self._environment,
                stdout=output,
                stderr=words,
                timeout=200,
                check=False,
            )
            for file in (output, words):
                file.seek(0)
            if done.returncode:
                raise RuntimeError(f"{arguments[0]}: {words.read()[-3000:]}")
            return output.read()

    def close(self) -> None:
        """Ends it with all its processes."""
        if self in _running:
            _running.remove(self)
        for number, patience_s in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 10.0)):
            try:
                os.killpg(self.process.pid, number)
                self.process.wait(patience_s)
            except ProcessLookupError:
                return
            except subprocess.TimeoutExpired:
                continue


def start(
    args: argparse.Namespace, model: Path, folder: Path, *options: str, receiver: bool, tp: int = 1, name: str = ""
) -> Server:
    """Starts a server, which is not ready yet.

    Args:
        args: Of the command line: ``tiny``, ``python``, ``site``, ``version``, ``flags``, ``sleep``, ``cache_tokens``.
        model: Its checkpoint.
        folder: For its log.
        options: More of SGLang's.
        receiver: With our receiver in it.
        tp: Tensor-parallel ranks.
        name: Name of its log, if there are several of a kind.
    """
    port = quiet_port()
    saver = ["--enable-memory-saver"] if args.sleep and receiver else []
    log = folder / f"{name or ('receiver' if receiver else 'stock')}.log"
    if args.tiny:
        options = ("--context-length=4096", "--max-total-tokens=16384", "--skip-tokenizer-init", *saver, *options)
        command, environment = sglang_command(model, tp, options, port, receiver=receiver, version=args.version)
        return Server(command, environment | {"PYTHONUNBUFFERED": "1"}, model, log, port)
    command = [args.python, "-m", "sglang.launch_server", f"--model-path={model}", "--host=127.0.0.1"]
    command += [f"--port={port}", "--skip-tokenizer-init", f"--max-total-tokens={args.cache_tokens}"]
    command += [f"--tp-size={tp}", *args.flags.split(), *saver, *options]
    environment = {**os.environ, **_ENVIRONMENT}
    path = [args.site, *([package_path(folder / "metadata")] if receiver else []), os.environ.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    if receiver:
        environment["SGLANG_PLUGINS"] = "weightcast"
    return Server(command, environment, model, log, port)


def log_tails() -> dict[str, str]:
    """The end of the log of every server that still runs."""
    return {server.log.name: server.text()[-6000:] for server in _running}


def kill_all() -> None:
    """Ends every server that still runs."""
    for server in [*_running]:
        server.close()
