"""Stock adapters for SGLang and LMDeploy against the reference engine's dialects on GPUs, over CUDA IPC and NCCL.

The engine starts on checkpoint A.  After each update, what it keeps is compared with the checkpoint that was sent,
tensor by tensor.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.gpu.needs import needs
from tests.gpu.test_updates_gpu import ENVIRONMENT, digests, start_trainer, train
from weightcast.digest.definition import tensor_digest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

BUCKET_BYTES = 1 << 20  # the model has about ten of them
IPC = [
    pytest.param("ipc", ["cuda:0"], "cuda:0", 1, id="ipc, 1 GPU"),
    pytest.param("ipc", ["cuda:0", "cuda:1"], "cuda:0", 2, id="ipc, fsdp2 to tp2", marks=needs(2)),
]
NCCL = [
    pytest.param("broadcast", ["cuda:0"], "cuda:1", 1, id="nccl, 1+1", marks=needs(2)),
    # NCCL takes the two for different machines', so they may share the GPU.
    pytest.param("broadcast", ["cuda:0"], "cuda:0", 1, id="nccl, 1 GPU"),
]


# NCCL wants the same on both sides, and SGLang sets it for itself.
CUMEM = {"NCCL_CUMEM_ENABLE": "0"}


@pytest.fixture(autouse=True)
def as_sglang_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in CUMEM.items():
        monkeypatch.setenv(name, value)  # for the trainers


def make_model(folder: Path, *, seed: int) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=None,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    return make_model(folder / "a", seed=1), make_model(folder / "b", seed=2)


def sent(model: Path, *, negated: bool = False) -> dict[str, str]:
    """The digest of each tensor of a checkpoint, or of its negative."""
    tensors = load_file(model / "model.safetensors")
    return {name: tensor_digest(tensor.neg() if negated else tensor) for name, tensor in tensors.items()}


def start(dialect: str, model: Path, *, device: str, tp: int, host: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "tests.gpu.dialect_engine", dialect, str(model), "--port=0", "--staging=none"),
            *(f"--tp={tp}", f"--device={device}", "--dtype=bfloat16", "--max-len=256"),
        ],
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT | CUMEM | ({"NCCL_HOSTID": host} if host else {}),
    )


def url_of(process: subprocess.Popen[str]) -> str:
    """The URL of an engine, when it serves."""
    assert process.stderr is not None
    lines: list[str] = []
    for line in process.stderr:
        lines.append(line)
        if line.startswith("serving"):
            break
    assert "".join(lines[-1:]).startswith("serving"), "".join(lines)
    return next(word for word in lines[-1].split() if word.startswith("http://"))


@contextmanager
def serve(*dialects: str, model: Path, device: str, tp: int = 1, apart: bool = False) -> Iterator[list[str]]:
    """The reference engine in some dialects; with ``apart`` NCCL takes each for another machine's."""
    hosts = [dialect if apart else "" for dialect in dialects]
    processes = [
        start(dialect, model, device=device, tp=tp, host=host) for dialect, host in zip(dialects, hosts, strict=True)
    ]
    try:
        yield [url_of(process) for process in processes]
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(timeout=60)
            assert process.stderr is not None
            process.stderr.close()


@pytest.mark.parametrize(("transport", "trainer", "device", "tp"), [*IPC, *NCCL])
@pytest.mark.parametrize("dialect", ["sglang", "lmdeploy"])
def test_engine_keeps_exactly_what_was_sent(
    dialect: str, transport: str, trainer: list[str], device: str, tp: int, models: tuple[Path, Path]
) -> None:
    a, b = models
    apart = transport == "broadcast" and device in trainer
    options = {"engine": dialect, "transport": transport, "dtype": "bfloat16", "bucket_bytes": BUCKET_BYTES}
    options |= {"apart": int(apart)}
    with serve(dialect, model=a, device=device, tp=tp, apart=apart) as [url]:
        assert digests(url) == sent(a)
        # The second update sends the negative of the first, from other memory.
        for model, versions, negated in ((b, "1,2", True), (b, "3", False), (a, "4", False)):
            answer = train(trainer, [url], model=model, versions=versions, between="moved", **options)
            assert answer["ok"], answer
            rows = [row for report in answer["reports"] for row in report["targets"]]
            assert [(row["status"], row["transport"]) for row in rows] == [("serving", transport)] * len(rows)
            assert all(report["buckets"] >= 5 for report in answer["reports"])
            assert digests(url) == sent(model, negated=negated)


@pytest.mark.parametrize(("transport", "trainer", "device", "tp"), IPC)
@pytest.mark.parametrize("dialect", ["sglang", "lmdeploy"])
def test_killed_trainer_leaves_an_engine_that_the_next_one_makes_whole(
    dialect: str, transport: str, trainer: list[str], device: str, tp: int, models: tuple[Path, Path]
) -> None:
    a, b = models
    options = {"engine": dialect, "transport": transport, "dtype": "bfloat16", "bucket_bytes": BUCKET_BYTES}
    with serve(dialect, model=a, device=device, tp=tp) as [url]:
        doomed = start_trainer(trainer, [url], model=b, versions="1", die_after=3, **options)
        for process in doomed:
            process.communicate(timeout=240)
        assert doomed[0].returncode == -signal.SIGKILL
        kept = digests(url)
        assert kept not in (sent(a), sent(b)), "it should have been killed between two buckets"
        answer = train(trainer, [url], model=b, versions="2", **options)
        assert answer["ok"], answer
        assert digests(url) == sent(b)


@pytest.mark.parametrize("device", [pytest.param("cuda:1", marks=needs(2)), "cuda:0"])
def test_stock_engines_of_two_kinds_are_updated_by_nccl_in_cells_of_their_own(
    device: str, models: tuple[Path, Path]
) -> None:
    a, b = models
    options = {"transport": "broadcast", "dtype": "bfloat16", "bucket_bytes": BUCKET_BYTES, "cell_ranks": 1, "apart": 1}
    with serve("sglang", "lmdeploy", model=a, device=device, apart=True) as urls:
        assert [digests(url) for url in urls] == [sent(a)] * 2
        answer = train(["cuda:0"], urls, model=b, versions="1,2,3", between="moved", **options)
        assert answer["ok"], answer
        assert answer["cells"] == [[url] for url in urls]
        assert [digests(url) for url in urls] == [sent(b)] * 2
