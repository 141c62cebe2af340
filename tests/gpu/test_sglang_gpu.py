"""The real SGLang server on GPUs, unpatched: CUDA IPC on its own GPU, NCCL from another one, folders, one rank and two.

Runs where ``sglang`` can be imported, or with the folder that holds it in ``WEIGHTCAST_SGLANG_SITE``.
"""

from __future__ import annotations

import importlib.util
import os
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch

from tests.gpu.servers import PROMPTS, TOKENS, Record, Server, check_updates, models, started
from tests.gpu.test_updates_gpu import needs

SITE = os.environ.get("WEIGHTCAST_SGLANG_SITE", "")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(not SITE and importlib.util.find_spec("sglang") is None, reason="no SGLang here"),
    pytest.mark.timeout(580),
]


class Sglang:
    def answers(self, server: Server) -> list[list[int]]:
        sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
        bodies = [{"input_ids": prompt, "sampling_params": sampling} for prompt in PROMPTS]
        return [server.post("/generate", body)["output_ids"] for body in bodies]

    def checksum(self, server: Server) -> str:
        return server.post("/weights_checker", {"action": "checksum"})["per_engine_checksum"]


def sglang(model: Path, gpus: tuple[int, ...], log: Path) -> AbstractContextManager[Server]:
    def command(port: int) -> list[str]:
        words = ["-m", "sglang.launch_server", f"--model-path={model}", "--host=127.0.0.1", f"--port={port}"]
        words += [f"--tp-size={len(gpus)}", f"--base-gpu-id={gpus[0]}", "--skip-tokenizer-init"]
        words += ["--attention-backend=triton", "--sampling-backend=pytorch", "--grammar-backend=none"]
        words += ["--disable-cuda-graph", "--mem-fraction-static=0.5", "--context-length=2048"]
        # A prefix that another request has left in the cache is computed in other batches: near ties may part.
        return [*words, "--max-total-tokens=16384", "--max-running-requests=8", "--disable-radix-cache"]

    # All GPUs stay visible: the sender's are named by UUID, and a rank must be able to see them.
    environment = {
        "HF_HUB_OFFLINE": "1",
        "NCCL_CUMEM_ENABLE": "0",
        "PYTHONPATH": os.pathsep.join(part for part in (SITE, os.environ.get("PYTHONPATH", "")) if part),
        "SGLANG_ENABLE_JIT_DEEPGEMM": "0",
        "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",  # others may be on these GPUs
        "SGLANG_IS_FLASHINFER_AVAILABLE": "0",
    }
    return started(command, gpus=gpus, log=log, environment=environment)


@pytest.mark.parametrize(
    ("transport", "trainer", "gpus"),
    [
        pytest.param("ipc", ["cuda:0"], (0,), id="sglang ipc, the same GPU"),
        pytest.param("broadcast", ["cuda:1"], (0,), id="sglang nccl from another GPU", marks=needs(2)),
        pytest.param("ipc", ["cuda:0", "cuda:1"], (0, 1), id="sglang ipc, two ranks", marks=needs(2)),
        pytest.param("broadcast", ["cuda:2"], (0, 1), id="sglang nccl to two ranks", marks=needs(3)),
        pytest.param("disk", ["cuda:0"], (0,), id="sglang disk"),
        pytest.param("checkpoint-engine", ["cuda:0"], (0,), id="sglang checkpoint-engine"),
    ],
)
def test_an_updated_engine_answers_as_one_started_on_the_weights(
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    record: Record,
    transport: str,
    trainer: list[str],
    gpus: tuple[int, ...],
) -> None:
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "0")  # as the server sets it for itself
    a, b = models(tmp_path_factory, "llama")
    with sglang(a, gpus, tmp_path / "updated.log") as server, sglang(b, gpus, tmp_path / "other.log") as other:
        check_updates(
            Sglang(), server, other, (a, b), via=transport, trainer=trainer, verify="behaviour", record=record
        )
