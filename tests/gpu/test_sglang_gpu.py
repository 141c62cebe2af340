"""The real SGLang server on GPUs, unpatched: CUDA IPC on its own GPU, NCCL from another one, one rank and two.

Runs where ``sglang`` can be imported.  The model is random, of about 1 GB; what is right is what the same engine says
when it is started on the checkpoint that was pushed.
"""

from __future__ import annotations

import importlib.util
import json
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

from tests.gpu.test_updates_gpu import needs, start_trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="no SGLang here"),
    pytest.mark.timeout(900),
]

START_S = 300.0
PROMPTS = [[1, 400, 7, 22, 90], [5, 6, 7, 8, 9, 10, 11], [900, 12, 4]]
COUNT = 24
GROWTH_BYTES = 64 << 20  # of a GPU over 20 updates; one bucket that is not let go is more
Record = Callable[[str, Any], None]


def make_model(folder: Path, *, seed: int) -> None:
    """A random Llama of 0.5 billion parameters in bfloat16; the final norm's sign makes answers part at once."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=5504,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=8,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    torch.manual_seed(seed)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    if seed % 2:
        model.model.norm.weight.data.neg_()
    model.save_pretrained(folder)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    found = [tmp_path_factory.mktemp(f"checkpoint-{seed}") for seed in range(3)]
    for seed, folder in enumerate(found):
        make_model(folder, seed=seed)
        torch.cuda.empty_cache()
    return found


@dataclass
class Server:
    url: str
    gpus: tuple[int, ...]
    log: Path

    def answers(self) -> list[list[int]]:
        sampling = {"temperature": 0, "max_new_tokens": COUNT, "ignore_eos": True}
        body = {"input_ids": PROMPTS, "sampling_params": sampling}
        answer = httpx.post(f"{self.url}/generate", json=body, timeout=120, trust_env=False)
        assert answer.status_code == 200, answer.text
        return [one["output_ids"] for one in answer.json()]

    def checksum(self) -> str:
        answer = httpx.post(f"{self.url}/weights_checker", json={"action": "checksum"}, timeout=120, trust_env=False)
        return answer.json()["per_engine_checksum"] if answer.status_code == 200 else ""

    def used_bytes(self) -> int:
        return sum(total - free for free, total in map(torch.cuda.mem_get_info, self.gpus))


@contextmanager
def sglang(model: Path, gpus: tuple[int, ...], log: Path) -> Iterator[Server]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # All GPUs stay visible: the sender's are named by UUID, and a rank must be able to see them.
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "NCCL_CUMEM_ENABLE": "0",
        "SGLANG_ENABLE_JIT_DEEPGEMM": "0",
        "SGLANG_IS_FLASHINFER_AVAILABLE": "0",
    }
    command = [sys.executable, "-m", "sglang.launch_server", f"--model-path={model}", "--host=127.0.0.1"]
    command += [f"--port={port}", f"--tp-size={len(gpus)}", f"--base-gpu-id={gpus[0]}", "--skip-tokenizer-init"]
    command += ["--attention-backend=triton", "--sampling-backend=pytorch", "--grammar-backend=none"]
    command += ["--disable-cuda-graph", "--mem-fraction-static=0.3", "--context-length=2048"]
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
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def push(checkpoint: Path, server: Server, trainer: list[str], versions: str, transport: str) -> list[dict[str, Any]]:
    """A trainer's reports."""
    os.environ["NCCL_CUMEM_ENABLE"] = "0"
    found: list[dict[str, Any]] = []
    for process in start_trainer(
        trainer,
        [server.url],
        transport=transport,
        versions=versions,
        model=checkpoint,
        verify="behaviour",
        bucket_bytes=256 << 20,
        timeout=60,
    ):
        output, _ = process.communicate(timeout=400)
        found.append(json.loads(output.strip().splitlines()[-1]))
    assert all(answer["ok"] for answer in found), found
    return found[0]["reports"]


@pytest.mark.parametrize(
    ("transport", "trainer", "gpus"),
    [
        pytest.param("ipc", ["cuda:0"], (0,), id="ipc, the same GPU"),
        pytest.param("broadcast", ["cuda:1"], (0,), id="nccl from another GPU", marks=needs(2)),
        pytest.param("ipc", ["cuda:0", "cuda:1"], (0, 1), id="ipc, two ranks", marks=needs(2)),
        pytest.param("broadcast", ["cuda:2"], (0, 1), id="nccl to two ranks", marks=needs(3)),
        pytest.param("disk", ["cuda:0"], (0,), id="disk"),
    ],
)
def test_it_answers_as_if_started_on_what_was_pushed(
    checkpoints: list[Path], tmp_path: Path, record: Record, transport: str, trainer: list[str], gpus: tuple[int, ...]
) -> None:
    wanted: list[list[list[int]]] = []
    sums: list[str] = []
    for number, folder in enumerate(checkpoints):
        with sglang(folder, gpus, tmp_path / f"fresh-{number}.log") as server:
            wanted.append(server.answers())
            sums.append(server.checksum())
    assert wanted[0] != wanted[1] != wanted[2] != wanted[0]

    with sglang(checkpoints[0], gpus, tmp_path / "pushed.log") as server:
        assert server.answers() == wanted[0]
        seconds: list[float] = []
        for version, number in enumerate((1, 2, 0, 0), 1):
            [report] = push(checkpoints[number], server, trainer, str(version), transport)
            [row] = report["targets"]
            assert (row["status"], row["version_after"], row["ranks"]) == ("serving", version, len(gpus)), row
            assert row["proof"] == "behaviour", row
            assert server.answers() == wanted[number]
            assert server.checksum() == sums[number]
            seconds.append(report["seconds"])
        record("seconds", seconds)
        record("bytes", report["bytes"])
        record("phases", report["phases"])
        record("engine", row["engine"])

        push(checkpoints[1], server, trainer, "5,6", transport)  # what is made once is there
        before = server.used_bytes()
        push(checkpoints[1], server, trainer, ",".join(map(str, range(7, 27))), transport)
        growth = server.used_bytes() - before
        record("growth_bytes_over_20_updates", growth)
        assert growth < GROWTH_BYTES
        assert server.answers() == wanted[1]
