"""The reference engine on GPUs, updated by a trainer process over CUDA IPC and NCCL, compared with transformers.

Engines start on checkpoint A, the trainer holds B.  Greedy answers in fp32 equal those of transformers on A
before and on B after, token for token; the bf16 model of 1.8 GB is for times and memory.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.gpu.test_updates_gpu import ENVIRONMENT, info, needs, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

PROMPTS = [[5, 6, 7, 8], [40, 30, 20, 10, 99], [200]]
TOKENS = 24
Record = Callable[[str, Any], None]


def make_model(folder: Path, *, seed: int, large: bool) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=32000 if large else 2048,
        hidden_size=2048 if large else 512,
        intermediate_size=5632 if large else 1408,
        num_hidden_layers=16 if large else 4,
        num_attention_heads=16 if large else 8,
        num_key_value_heads=8 if large else 4,
        max_position_embeddings=512,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
        initializer_range=0.05,
    )
    with torch.device("cuda:0"):
        model = LlamaForCausalLM(config).to(torch.bfloat16 if large else torch.float32)
    model.save_pretrained(folder)
    del model
    torch.cuda.empty_cache()
    return folder


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("small")
    return make_model(folder / "a", seed=1, large=False), make_model(folder / "b", seed=2, large=False)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("large")
    return make_model(folder / "a", seed=1, large=True), make_model(folder / "b", seed=2, large=True)


@contextmanager
def serve(model: Path, *, tp: int = 1, device: str = "cuda:0", dtype: str = "float32") -> Iterator[str]:
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "weightcast.rollout", str(model), "--port=0"),
            *(f"--tp={tp}", f"--device={device}", f"--dtype={dtype}", "--max-len=256"),
        ],
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    try:
        assert process.stderr is not None
        lines: list[str] = []
        for line in process.stderr:
            lines.append(line)
            if line.startswith("serving"):
                break
        assert "".join(lines[-1:]).startswith("serving"), "".join(lines)
        yield next(word for word in lines[-1].split() if word.startswith("http://"))
    finally:
        process.terminate()
        process.wait(timeout=60)
        assert process.stderr is not None
        process.stderr.close()


def answers(url: str) -> list[list[int]]:
    body = {"prompt": PROMPTS, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    reply = httpx.post(f"{url}/v1/completions", json=body, timeout=120, trust_env=False)
    assert reply.status_code == 200, reply.text
    return [choice["token_ids"] for choice in reply.json()["choices"]]


def expected(model: Path) -> list[list[int]]:
    from transformers import AutoModelForCausalLM

    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to("cuda:0").eval()
    found: list[list[int]] = []
    with torch.no_grad():
        for prompt in PROMPTS:
            ids = torch.tensor([prompt], device="cuda:0")
            out = net.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=TOKENS,
                min_new_tokens=TOKENS,
                do_sample=False,
                eos_token_id=None,
            )
            found.append(out[0, len(prompt) :].tolist())
    del net
    torch.cuda.empty_cache()
    return found


TOPOLOGIES = [
    pytest.param("ipc", ["cuda:0"], [("cuda:0", 1)], id="ipc, 1 GPU, tp1"),
    pytest.param("ipc", ["cuda:0", "cuda:1"], [("cuda:0", 2)], id="ipc, 2 GPUs, fsdp2 to tp2", marks=needs(2)),
    pytest.param("ipc", ["cuda:0"], [("cuda:0", 1), ("cuda:0", 2)], id="ipc, tp1 and tp2", marks=needs(2)),
    pytest.param("broadcast", ["cuda:0"], [("cuda:1", 1)], id="nccl, 1+1, tp1", marks=needs(2)),
    pytest.param("broadcast", ["cuda:0", "cuda:1"], [("cuda:2", 2)], id="nccl, 2+2, fsdp2 to tp2", marks=needs(4)),
    pytest.param("broadcast", ["cuda:0"], [("cuda:1", 1), ("cuda:2", 2)], id="nccl, 1+3, tp1 and tp2", marks=needs(4)),
]


@pytest.mark.parametrize(("transport", "trainer", "engines"), TOPOLOGIES)
def test_engines_answer_as_transformers_does_on_the_pushed_weights(
    transport: str,
    trainer: list[str],
    engines: list[tuple[str, int]],
    small: tuple[Path, Path],
    record: Record,
) -> None:
    a, b = small
    before, after = expected(a), expected(b)
    assert all(old != new for old, new in zip(before, after, strict=True))
    with ExitStack() as stack:
        urls = [stack.enter_context(serve(a, tp=tp, device=device)) for device, tp in engines]
        for url in urls:
            assert answers(url) == before
        result = train(
            trainer,
            urls,
            transport=transport,
            model=b,
            dtype="float32",
            versions="7,8",
            bucket_bytes=8 << 20,
            verify="behaviour",
        )
        assert result["ok"], result
        for url in urls:
            assert answers(url) == after
            assert info(url)["version"] == 8
        rows = [row for report in result["reports"] for row in report["targets"]]
        assert all(row["proof"] == "behaviour" for row in rows), rows
        assert all(row["digests_matched"] == row["ranks"] for row in rows)
        record("reports", result["reports"])


@pytest.mark.parametrize(("transport", "trainer", "engines"), TOPOLOGIES)
def test_memory_stays_under_two_buckets(
    transport: str,
    trainer: list[str],
    engines: list[tuple[str, int]],
    large: tuple[Path, Path],
    record: Record,
) -> None:
    a, b = large
    bucket_bytes = 180 << 20  # the model has ten of them
    with ExitStack() as stack:
        urls = [stack.enter_context(serve(a, tp=tp, device=device, dtype="bfloat16")) for device, tp in engines]
        result = train(
            trainer, urls, transport=transport, model=b, dtype="bfloat16", versions="1,2,3", bucket_bytes=bucket_bytes
        )
    assert result["ok"], result
    limit = 2 * bucket_bytes + (64 << 20)
    for report in result["reports"]:
        assert report["buckets"] >= 10
        assert report["peak_extra_bytes"] <= limit
        assert all(row["peak_extra_bytes"] <= limit for row in report["targets"])
    record("bucket_bytes", bucket_bytes)
    record("reports", result["reports"])
