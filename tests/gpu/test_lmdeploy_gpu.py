"""The real LMDeploy server on GPUs, unpatched: CUDA IPC, NCCL from another GPU, checkpoint-engine's wire.

Runs where ``lmdeploy`` and ``ray`` can be imported.  The model is random, of about 1 GB; what is right is what the same
engine says when it is started on the checkpoint that was pushed.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.gpu.test_sglang_gpu import COUNT, GROWTH_BYTES, PROMPTS, make_model, push
from tests.gpu.test_updates_gpu import needs
from tests.tiny import tiny_tokenizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("lmdeploy") is None, reason="no LMDeploy here"),
    pytest.mark.timeout(1200),
]

START_S = 300.0
Record = Callable[[str, Any], None]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    found = [tmp_path_factory.mktemp(f"lmdeploy-{seed}") for seed in range(3)]
    for seed, folder in enumerate(found):
        make_model(folder, seed=seed)
        tiny_tokenizer(folder)  # its server does not start without one; prompts are token ids all the same
        torch.cuda.empty_cache()
    return found


@dataclass
class Server:
    url: str
    gpus: tuple[int, ...]
    log: Path

    def answers(self) -> list[list[int]]:
        found: list[list[int]] = []
        for prompt in PROMPTS:
            body = {"input_ids": prompt, "max_tokens": COUNT, "temperature": 0.0, "top_k": 1, "ignore_eos": True}
            answer = httpx.post(f"{self.url}/generate", json=body, timeout=120, trust_env=False)
            assert answer.status_code == 200, answer.text
            found.append(answer.json()["output_ids"])
        return found

    def used_bytes(self) -> int:
        return sum(total - free for free, total in map(torch.cuda.mem_get_info, self.gpus))


@contextmanager
def lmdeploy(model: Path, gpus: tuple[int, ...], log: Path, *, executor: str, graphs: bool) -> Iterator[Server]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)),
        "HF_HUB_OFFLINE": "1",
        "LMDEPLOY_EXECUTOR_BACKEND": executor,
        "NCCL_CUMEM_ENABLE": "0",
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES": "1000000000",
    }
    command = [sys.executable, "-m", "lmdeploy", "serve", "api_server", str(model), "--backend", "pytorch"]
    command += [
        "--server-name",
        "127.0.0.1",
        "--server-port",
        str(port),
        "--session-len",
        "2048",
        "--tp",
        str(len(gpus)),
    ]
    command += ["--cache-max-entry-count", "0.1", "--logprobs-mode", "raw_logprobs"]
    command += ["--distributed-executor-backend", executor]
    command += [] if graphs else ["--eager-mode"]
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    server = Server(url=f"http://127.0.0.1:{port}", gpus=gpus, log=log)
    try:
        deadline = time.monotonic() + START_S
        while True:
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            try:
                if httpx.get(f"{server.url}/health", timeout=5, trust_env=False).status_code == 200:
                    break
            except httpx.TransportError:
                pass
            time.sleep(1)
        yield server
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.mark.parametrize(
    ("transport", "executor", "trainer", "gpus", "graphs"),
    [
        pytest.param("ipc", "ray", ["cuda:0"], (0,), False, id="ipc, the same GPU"),
        pytest.param("ipc", "ray", ["cuda:0"], (0,), True, id="ipc, the same GPU, captured graphs"),
        pytest.param("checkpoint-engine", "uni", ["cuda:0"], (0,), False, id="checkpoint-engine, one process"),
        pytest.param("broadcast", "ray", ["cuda:1"], (0,), True, id="nccl from another GPU", marks=needs(2)),
        pytest.param("ipc", "ray", ["cuda:0", "cuda:1"], (0, 1), False, id="ipc, two ranks", marks=needs(2)),
        pytest.param("broadcast", "ray", ["cuda:2"], (0, 1), False, id="nccl to two ranks", marks=needs(3)),
    ],
)
def test_it_answers_as_if_started_on_what_was_pushed(
    checkpoints: list[Path],
    tmp_path: Path,
    record: Record,
    transport: str,
    executor: str,
    trainer: list[str],
    gpus: tuple[int, ...],
    graphs: bool,
) -> None:
    wanted: list[list[list[int]]] = []
    for number, folder in enumerate(checkpoints):
        with lmdeploy(folder, gpus, tmp_path / f"fresh-{number}.log", executor=executor, graphs=graphs) as server:
            wanted.append(server.answers())
    assert wanted[0] != wanted[1] != wanted[2] != wanted[0]

    with lmdeploy(checkpoints[0], gpus, tmp_path / "pushed.log", executor=executor, graphs=graphs) as server:
        assert server.answers() == wanted[0]
        seconds: list[float] = []
        digests: dict[int, str] = {}
        for version, number in enumerate((1, 2, 0, 0), 1):
            [report] = push(checkpoints[number], server, trainer, str(version), transport)  # type: ignore[arg-type]
            [row] = report["targets"]
            assert (row["status"], row["version_after"], row["ranks"]) == ("serving", version, len(gpus)), row
            assert row["proof"] == "behaviour", row
            assert server.answers() == wanted[number]
            assert digests.setdefault(number, report["digest"]) == report["digest"]
            seconds.append(report["seconds"])
        assert len(set(digests.values())) == 3
        record("seconds", seconds)
        record("bytes", report["bytes"])
        record("phases", report["phases"])
        record("stall_s", row["stall_s"])
        record("engine", row["engine"])
        record("command", [transport, executor, trainer, list(gpus), "graphs" if graphs else "eager"])

        push(checkpoints[1], server, trainer, "5,6", transport)  # type: ignore[arg-type]  # what is made once is there
        before = server.used_bytes()
        push(checkpoints[1], server, trainer, ",".join(map(str, range(7, 27))), transport)  # type: ignore[arg-type]
        growth = server.used_bytes() - before
        record("growth_bytes_over_20_updates", growth)
        assert growth < GROWTH_BYTES
        assert server.answers() == wanted[1]
