"""Servers of real engines for measurements: on GPUs from a folder that holds the engine, or tiny ones on this CPU.

``start`` starts vLLM, SGLang or LMDeploy, with our receiver or as the engine ships, and waits for nothing.  Each server
is a process group of its own, which ``Server.close`` ends.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
from tests.engines.environment import QUICK, package_path
from tests.engines.sglang_server import sglang_command

from weightcast.comm.ports import quiet_port

ROOT = Path(__file__).resolve().parents[1]
PROMPTS = [[5, 6, 7, 8], [40, 30, 20, 10, 99], [200]]
TOKENS = 24
# Flags that the builds for machines without a network need: they have no FlashAttention 3 and no FlashInfer kernels.
FLAGS = {
    "vllm": "--attention-backend=TRITON_ATTN",
    "sglang": "--attention-backend=triton --sampling-backend=pytorch --grammar-backend=none",
    "lmdeploy": "",
}
# Words of a log that tell the sizes of caches and of staging, and the times of a start.
_SAID = {
    "vllm": r"rank \d+ stages updates on.*|Available KV cache memory.*|GPU KV cache size.*|CPU KV cache size.*",
    "sglang": r"(?:Load weight end|Memory pool end|Capture .*end|KV Cache is allocated|weightcast: rank).*",
    "lmdeploy": r"weightcast: rank.*",
}
# vLLM says when it compiles a kernel while it serves: a step then takes up to a second, and an update waits for it.
_COMPILED = "compilation during inference"
_running: list[Server] = []


class Server:
    """One server in a process group of its own.

    Attributes:
        ours: True if it has our receiver.
    """

    def __init__(
        self, kind: str, command: Sequence[str], environment: Mapping[str, str], log: Path, port: int, *, ours: bool
    ) -> None:
        self.kind, self.log, self.ours = kind, log, ours
        self.command = " ".join(command[1:])
        self.url = f"http://127.0.0.1:{port}"
        self.client = httpx.Client(timeout=180, trust_env=False)
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        _running.append(self)

    def wait_ready(self, limit_s: float) -> dict[str, Any]:
        """Waits for the first answer; returns what the server said of its start.

        Raises:
            RuntimeError: It ended, or was not ready in time; with the end of its log.
        """
        deadline = time.monotonic() + limit_s
        path = "/weightcast/status" if self.kind == "lmdeploy" else "/health"
        while True:
            if self.process.poll() is not None:
                raise RuntimeError(f"{self.kind} ended with {self.process.returncode}:\n{self.text()[-6000:]}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self.kind} was not ready after {limit_s:.0f} s:\n{self.text()[-6000:]}")
            try:
                if self.client.get(self.url + path).status_code == 200:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.3)
        found: dict[str, Any] = {"command": self.command}
        found["said"] = [line[:300] for line in re.findall(_SAID[self.kind], self.text())][:12]
        if self.ours:
            info = self.get("/weightcast/info")
            found |= {name: info[name] for name in ("engine", "state", "version", "staging", "staging_bytes", "ranks")}
        return found

    def get(self, path: str) -> Any:
        return self.client.get(self.url + path).raise_for_status().json()

    def post(self, path: str, body: Any = None) -> Any:
        """Posts and returns the answer.

        Raises:
            RuntimeError: The server refuses; with its words.
        """
        answer = self.client.post(self.url + path, json=body)
        if answer.status_code != 200:
            raise RuntimeError(f"{path}: {answer.status_code} {answer.text[:1000]}")
        return answer

    def answers(self, model: str = "m") -> list[list[int]]:
        """Greedy tokens, one prompt after the other, so that batches are the same every time."""
        return [self._answer(prompt, model) for prompt in PROMPTS]

    def _answer(self, prompt: list[int], model: str) -> list[int]:
        if self.kind == "vllm":
            body: dict[str, Any] = {"model": model, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
            body |= {"ignore_eos": True, "return_token_ids": True}
            return self.post("/v1/completions", body).json()["choices"][0]["token_ids"]
        if self.kind == "sglang":
            sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
            return self.post("/generate", {"input_ids": prompt, "sampling_params": sampling}).json()["output_ids"]
        body = {"input_ids": prompt, "max_tokens": TOKENS, "temperature": 0.0, "top_k": 1, "ignore_eos": True}
        return self.post("/generate", body).json()["output_ids"]

    def sleep(self, level: int) -> None:
        """Frees the weights and the cache.  SGLang has one level."""
        if self.kind == "sglang":
            self.post("/release_memory_occupation", {})
        else:
            self.post(f"/sleep?level={level}")

    def wake(self, tag: str) -> None:
        """Brings ``weights`` or ``kv_cache`` back."""
        if self.kind == "sglang":
            self.post("/resume_memory_occupation", {"tags": [tag]})
        else:
            self.post(f"{'/wake_up' if self.kind == 'vllm' else '/wakeup'}?tags={tag}")

    def text(self) -> str:
        """Its log."""
        return self.log.read_text(errors="replace")

    def compiled(self) -> int:
        """How many kernels vLLM has compiled while it served."""
        return self.text().count(_COMPILED)

    def close(self) -> None:
        """Ends it with all its processes.  Safe to call twice."""
        if self not in _running:
            return
        _running.remove(self)
        self.client.close()
        family = _family(self.process.pid)
        for number, patience_s in ((signal.SIGTERM, 15.0), (signal.SIGKILL, 10.0)):
            try:
                os.killpg(self.process.pid, number)
                self.process.wait(patience_s)
            except ProcessLookupError:
                break
            except subprocess.TimeoutExpired:
                continue
        for member in family:
            if member.is_running():
                member.kill()
        psutil.wait_procs(family, timeout=20)


def _family(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def start(
    args: argparse.Namespace,
    model: Path,
    name: str,
    *options: str,
    ours: bool,
    tp: int = 1,
    more: Mapping[str, str] | None = None,
) -> Server:
    """Starts a server of the kind ``args.engine``, which is not ready yet.

    Args:
        args: Of the command line: ``engine``, ``site``, ``python``, ``flags``, ``tiny``, ``folder``, ``sleep``,
            ``cache_gib``, ``cache_tokens`` and ``version``.
        model: Its checkpoint.
        name: Name of its log.
        options: More of the engine's.
        ours: With our receiver in it.
        tp: Tensor-parallel ranks.
        more: More of its environment.
    """
    port = quiet_port()
    make = {"vllm": _vllm, "sglang": _sglang, "lmdeploy": _lmdeploy}[args.engine]
    command, environment = make(args, model, port, options, ours=ours, tp=tp)
    log = args.folder / f"{name}.log"
    return Server(args.engine, command, environment | dict(more or {}), log, port, ours=ours)


def kill_all() -> None:
    """Ends every server that still runs."""
    for server in [*_running]:
        server.close()


def _environment(*path: str, **more: str) -> dict[str, str]:
    """The environment of a server that finds its modules in these folders first."""
    found = [*path, os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", **more} | {
        "PYTHONPATH": os.pathsep.join(filter(None, found))
    }


Made = tuple[list[str], dict[str, str]]


def _vllm(args: argparse.Namespace, model: Path, port: int, options: Sequence[str], *, ours: bool, tp: int) -> Made:
    package = package_path(args.folder / "metadata", *([QUICK] if args.tiny else []))
    environment = _environment(
        package,
        "" if args.tiny else args.site,
        VLLM_PLUGINS="weightcast" if ours else "",
        VLLM_SERVER_DEV_MODE="1",
        VLLM_CACHE_ROOT=str(args.folder / f"cache-{'ours' if ours else 'stock'}"),
        VLLM_NO_USAGE_STATS="1",
        VLLM_USE_FLASHINFER_SAMPLER="0",
        VLLM_ALLREDUCE_USE_SYMM_MEM="0",  # no NVLink multicast
    )
    if not ours:
        environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # its handles are pickles
    words = args.flags.split()
    if args.tiny:
        environment |= {"VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        words = ["--enforce-eager", "--dtype=float32", "--max-num-seqs=8"]
    else:
        words += [f"--kv-cache-memory-bytes={args.cache_gib << 30}", "--gpu-memory-utilization=0.05"]
    words += ["--enable-sleep-mode"] if args.sleep and ours and not args.tiny else []
    command = [args.python, "-m", "vllm.entrypoints.openai.api_server", f"--model={model}", f"--port={port}"]
    command += ["--host=127.0.0.1", "--served-model-name=m", f"--tensor-parallel-size={tp}", *words]
    command += ["--no-enable-prefix-caching"]
    backend = json.dumps({"backend": "weightcast" if ours else "ipc"})
    return [*command, "--weight-transfer-config", backend, *options], environment


def _sglang(args: argparse.Namespace, model: Path, port: int, options: Sequence[str], *, ours: bool, tp: int) -> Made:
    saver = ["--enable-memory-saver"] if args.sleep and ours else []
    if args.tiny:
        options = ("--context-length=4096", "--max-total-tokens=16384", "--skip-tokenizer-init", *saver, *options)
        command, environment = sglang_command(model, tp, options, port, receiver=ours, version=args.version)
        return command, environment | {"PYTHONUNBUFFERED": "1"}
    command = [args.python, "-m", "sglang.launch_server", f"--model-path={model}", "--host=127.0.0.1"]
    command += [f"--port={port}", "--skip-tokenizer-init", f"--max-total-tokens={args.cache_tokens}"]
    command += [f"--tp-size={tp}", *args.flags.split(), *saver, *options]
    environment = _environment(
        args.site,
        package_path(args.folder / "metadata") if ours else "",
        SGLANG_ENABLE_JIT_DEEPGEMM="0",
        SGLANG_IS_FLASHINFER_AVAILABLE="0",
    )
    if ours:
        environment["SGLANG_PLUGINS"] = "weightcast"
    return command, environment


def _lmdeploy(args: argparse.Namespace, model: Path, port: int, options: Sequence[str], *, ours: bool, tp: int) -> Made:
    assert ours, "LMDeploy's own sender is not measured"
    command = [args.python, "-m", "weightcast.plugins.lmdeploy", "serve", "api_server", str(model)]
    command += ["--backend", "pytorch", "--server-name", "127.0.0.1", "--server-port", str(port)]
    command += ["--max-batch-size", "32", "--log-level", "INFO", "--tp", str(tp)]
    path = [args.site, str(ROOT / "src")]
    environment = {"NCCL_CUMEM_ENABLE": "0"}
    if args.tiny:
        path.insert(0, str(ROOT / "tests" / "engines" / "lmdeploy_cpu"))
        environment |= {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
        command += ["--eager-mode", "--session-len", "512", "--num-gpu-blocks", "256"]
    else:
        command += ["--session-len", "2048", "--cache-max-entry-count", "0.2"]
    if args.tiny or importlib.util.find_spec("prometheus_client") is None:
        command += ["--disable-metrics"]
    return [*command, *args.flags.split(), *options], _environment(*path, **environment)
