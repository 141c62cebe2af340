"""The real LMDeploy server on GPUs, unpatched: CUDA IPC, NCCL from another GPU, checkpoint-engine's wire.

Runs where ``lmdeploy`` and ``ray`` can be imported, or with the folder that holds both in ``WEIGHTCAST_LMDEPLOY_SITE``.
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

SITE = os.environ.get("WEIGHTCAST_LMDEPLOY_SITE", "")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(not SITE and importlib.util.find_spec("lmdeploy") is None, reason="no LMDeploy here"),
    pytest.mark.timeout(580),
]


class Lmdeploy:
    def answers(self, server: Server) -> list[list[int]]:
        sampling = {"max_tokens": TOKENS, "temperature": 0.0, "top_k": 1, "ignore_eos": True}
        return [server.post("/generate", {"input_ids": prompt} | sampling)["output_ids"] for prompt in PROMPTS]

    def checksum(self, server: Server) -> str:
        return ""


def lmdeploy(
    model: Path, gpus: tuple[int, ...], log: Path, *, executor: str, graphs: bool
) -> AbstractContextManager[Server]:
    def command(port: int) -> list[str]:
        words = ["-m", "lmdeploy", "serve", "api_server", str(model), "--backend", "pytorch"]
        words += ["--server-name", "127.0.0.1", "--server-port", str(port), "--session-len", "2048"]
        words += ["--tp", str(len(gpus)), "--cache-max-entry-count", "0.03", "--logprobs-mode", "raw_logprobs"]
        return [*words, "--distributed-executor-backend", executor, *([] if graphs else ["--eager-mode"])]

    # Each has a Ray cluster of its own, which it would look for in the folder of temporary files otherwise.
    ray_folder = Path("/tmp") / f"ray-{os.getpid()}-{log.stem}"
    environment = {
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)),
        "HF_HUB_OFFLINE": "1",
        "LMDEPLOY_EXECUTOR_BACKEND": executor,
        "NCCL_CUMEM_ENABLE": "0",
        "PYTHONPATH": os.pathsep.join(part for part in (SITE, os.environ.get("PYTHONPATH", "")) if part),
        "RAY_AUTH_MODE": "disabled",
        "RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES": "1000000000",
        "RAY_TMPDIR": str(ray_folder),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    return started(command, gpus=gpus, log=log, environment=environment)


@pytest.mark.parametrize(
    ("transport", "executor", "trainer", "gpus", "graphs"),
    [
        pytest.param("ipc", "ray", ["cuda:0"], (0,), False, id="lmdeploy ipc, the same GPU"),
        pytest.param("ipc", "ray", ["cuda:0"], (0,), True, id="lmdeploy ipc, the same GPU, captured graphs"),
        pytest.param("checkpoint-engine", "uni", ["cuda:0"], (0,), False, id="lmdeploy checkpoint-engine, one process"),
        pytest.param("broadcast", "ray", ["cuda:1"], (0,), True, id="lmdeploy nccl from another GPU", marks=needs(2)),
        pytest.param("ipc", "ray", ["cuda:0", "cuda:1"], (0, 1), False, id="lmdeploy ipc, two ranks", marks=needs(2)),
        pytest.param("broadcast", "ray", ["cuda:2"], (0, 1), False, id="lmdeploy nccl to two ranks", marks=needs(3)),
    ],
)
def test_an_updated_engine_answers_as_one_started_on_the_weights(
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    record: Record,
    transport: str,
    executor: str,
    trainer: list[str],
    gpus: tuple[int, ...],
    graphs: bool,
) -> None:
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "0")
    a, b = models(tmp_path_factory, "llama")
    with (
        lmdeploy(a, gpus, tmp_path / "updated.log", executor=executor, graphs=graphs) as server,
        lmdeploy(b, gpus, tmp_path / "other.log", executor=executor, graphs=graphs) as other,
    ):
        check_updates(
            Lmdeploy(), server, other, (a, b), via=transport, trainer=trainer, verify="behaviour", record=record
        )
