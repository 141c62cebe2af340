"""Real vLLM on GPUs: its own weight transfer (nccl, ipc), and our receiver in it (ipc, broadcast).

An engine that was updated from A to B answers, token for token, as the same engine does when it is started on B.  vLLM
comes from this Python, or from a folder::

    mkdir -p /tmp/site_vllm && cat vllm.tar.xz.part-* | tar -xJ -C /tmp/site_vllm
    WEIGHTCAST_VLLM_SITE=/tmp/site_vllm make gpu-test PYTHON=python3 TEST_ARGS="-k vllm --results DIR"

``WEIGHTCAST_VLLM_FLAGS`` replaces the flags that a build without FlashAttention needs.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.engines.environment import package_path
from tests.gpu.test_updates_gpu import free_port, needs, train
from tests.tiny import tiny_tokenizer

SITE = os.environ.get("WEIGHTCAST_VLLM_SITE", "")
FLAGS = os.environ.get("WEIGHTCAST_VLLM_FLAGS", "--attention-backend=TRITON_ATTN").split()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(not SITE and importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here"),
    pytest.mark.timeout(580),
]

PROMPTS = [[5, 6, 7, 8], [40, 30, 20, 10, 99], [200]]
TOKENS = 24
START_S = 400.0
BUCKET_BYTES = 256 << 20
SLACK_BYTES = 64 << 20
Record = Callable[[str, Any], None]
Models = dict[str, tuple[Path, Path]]


def make_model(folder: Path, *, family: str, seed: int) -> Path:
    """At least 1 GB in bfloat16, random."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    common: dict[str, Any] = {"vocab_size": 32000, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    common |= {"max_position_embeddings": 512, "initializer_range": 0.05, "num_key_value_heads": 8, "head_dim": 128}
    if family == "llama":
        sizes = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 16, "num_attention_heads": 16}
    else:
        sizes = {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 8}
        sizes |= {"moe_intermediate_size": 768, "num_experts": 16, "num_experts_per_tok": 2, "decoder_sparse_step": 1}
        common |= {"norm_topk_prob": True, "mlp_only_layers": []}
    config = AutoConfig.for_model(family, **common, **sizes)
    with torch.device("cuda:0"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tiny_tokenizer(folder)
    del model
    torch.cuda.empty_cache()
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    root = tmp_path_factory.mktemp("models")

    def two(family: str) -> tuple[Path, Path]:
        a, b = (make_model(root / f"{family}-{seed}", family=family, seed=seed) for seed in (1, 2))
        return a, b

    return {family: two(family) for family in ("llama", "qwen3_moe")}


@contextmanager
def serve(model: Path, logs: Path, *, backend: str, gpus: list[int], eager: bool) -> Iterator[str]:
    """vLLM on these GPUs, one rank on each; ``backend`` is of its weight transfer, ``weightcast`` is ours."""
    port = free_port()
    path = [package_path(logs / "metadata"), SITE, os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(part for part in path if part),
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)),
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if backend == "weightcast":
        environment["VLLM_PLUGINS"] = "weightcast"
    else:
        environment |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", f"--model={model}", f"--port={port}"]
    command += ["--host=127.0.0.1", "--served-model-name=m", "--max-model-len=256", "--max-num-seqs=8", *FLAGS]
    command += [f"--tensor-parallel-size={len(gpus)}", "--gpu-memory-utilization=0.3", "--no-enable-prefix-caching"]
    command += ["--weight-transfer-config", f'{{"backend": "{backend}"}}', *(["--enforce-eager"] if eager else [])]
    log = logs / f"vllm-{port}.log"
    with log.open("w") as output:
        server = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_S
        while True:
            assert server.poll() is None, f"vLLM did not start:\n{log.read_text()[-8000:]}"
            assert time.monotonic() < deadline, f"vLLM is not ready:\n{log.read_text()[-8000:]}"
            try:
                if httpx.get(f"{url}/health", timeout=10, trust_env=False).status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.5)
        yield url
    except BaseException:
        print(log.read_text()[-12000:])
        raise
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def answers(url: str) -> list[list[int]]:
    """Greedy, one prompt after the other, so that batches are the same every time."""
    found: list[list[int]] = []
    for prompt in PROMPTS:
        body = {"model": "m", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
        body |= {"ignore_eos": True, "return_token_ids": True}
        reply = httpx.post(f"{url}/v1/completions", json=body, timeout=120, trust_env=False)
        assert reply.status_code == 200, reply.text
        found.append(reply.json()["choices"][0]["token_ids"])
    return found


_started: dict[tuple[Path, int, bool], list[list[int]]] = {}


def started_on(model: Path, logs: Path, *, gpus: list[int], eager: bool) -> list[list[int]]:
    """What an engine answers that was started on these weights."""
    key = (model, len(gpus), eager)
    if key not in _started:
        with serve(model, logs, backend="ipc", gpus=gpus, eager=eager) as url:
            _started[key] = answers(url)
    return _started[key]


def used_bytes(gpus: list[int]) -> int:
    """In use on these GPUs, by anybody."""
    return sum(total - free for free, total in map(torch.cuda.mem_get_info, gpus))


ONE = [0]
CASES = [
    pytest.param("llama", "ipc", "ipc", ["cuda:0"], ONE, True, id="stock ipc, tp1, eager"),
    pytest.param("llama", "weightcast", "ipc", ["cuda:0"], ONE, False, id="plug-in ipc, tp1, graphs"),
    pytest.param("qwen3_moe", "weightcast", "ipc", ["cuda:0"], ONE, True, id="plug-in ipc, experts, eager"),
    pytest.param("qwen3_moe", "ipc", "ipc", ["cuda:0"], ONE, False, id="stock ipc, experts, graphs"),
    pytest.param("llama", "nccl", "broadcast", ["cuda:0"], [1], True, id="stock nccl, tp1, eager", marks=needs(2)),
    pytest.param("llama", "nccl", "broadcast", ["cuda:0"], [1], False, id="stock nccl, tp1, graphs", marks=needs(2)),
    pytest.param(
        "llama", "weightcast", "broadcast", ["cuda:0"], [1], True, id="plug-in nccl, tp1, eager", marks=needs(2)
    ),
    pytest.param(
        "llama", "ipc", "ipc", ["cuda:0", "cuda:1"], [0, 1], False, id="stock ipc, tp2, graphs", marks=needs(2)
    ),
    pytest.param(
        "llama", "weightcast", "ipc", ["cuda:0", "cuda:1"], [0, 1], True, id="plug-in ipc, tp2, eager", marks=needs(2)
    ),
    pytest.param("llama", "nccl", "broadcast", ["cuda:0"], [1, 2], True, id="stock nccl, tp2", marks=needs(3)),
    pytest.param(
        "qwen3_moe",
        "weightcast",
        "broadcast",
        ["cuda:0"],
        [1, 2],
        False,
        id="plug-in nccl, experts, tp2",
        marks=needs(3),
    ),
]


@pytest.mark.parametrize(("family", "backend", "via", "trainer", "gpus", "eager"), CASES)
def test_an_updated_engine_answers_as_one_started_on_the_weights(
    family: str,
    backend: str,
    via: str,
    trainer: list[str],
    gpus: list[int],
    eager: bool,
    models: Models,
    tmp_path: Path,
    record: Record,
) -> None:
    a, b = models[family]
    after = started_on(b, tmp_path, gpus=gpus, eager=eager)
    resident = backend == "weightcast"
    with serve(a, tmp_path, backend=backend, gpus=gpus, eager=eager) as url:
        before = answers(url)
        assert all(old != new for old, new in zip(before, after, strict=True))

        def update(model: Path, versions: list[int]) -> list[dict[str, Any]]:
            result = train(
                trainer,
                [url],
                transport=via,
                model=model,
                dtype="bfloat16",
                versions=",".join(map(str, versions)),
                bucket_bytes=BUCKET_BYTES,
                verify="resident",
                timeout=120.0,
            )
            assert result["ok"], result
            rows = [row for report in result["reports"] for row in report["targets"]]
            assert [row["status"] for row in rows] == ["serving"] * len(versions)
            assert {row["proof"] for row in rows} == {"resident" if resident else "none"}
            return result["reports"]

        reports = update(b, [1, 2, 3])
        assert answers(url) == after
        reports += update(a, [4])
        assert answers(url) == before
        first = used_bytes(gpus)
        reports += update(b, list(range(5, 25)))
        growth = used_bytes(gpus) - first
        assert answers(url) == after
        version = httpx.get(f"{url}/version", timeout=20, trust_env=False).json()["version"]
    record("vllm", version)
    record("bytes", reports[0]["bytes"])
    record("seconds", [round(report["seconds"], 4) for report in reports])
    record("phases", reports[-1]["phases"])
    record("peak_extra_bytes", reports[-1]["peak_extra_bytes"])
    record("growth_over_20_bytes", growth)
    assert growth <= SLACK_BYTES
