"""SmolLM2-135M through the command line: served on three ranks, pushed to, verified, compared with transformers."""

from __future__ import annotations

import shutil
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.helpers.commands import context
from tests.helpers.engines import Engine, engines, push, status, verify
from weightcast.lab.demo.smollm2 import ensure_smollm2

# test_vllm_short.py pushes the same model to vLLM, and test_reference_engine.py tiny ones to three ranks.
pytestmark = pytest.mark.wide

COUNT = 8
PROMPTS = ["The capital of France is", "Once upon a time,", "In the beginning there was"]  # of equal length in tokens
Answers = list[list[int]]


def perturb(folder: Path, target: Path) -> set[str]:
    """Makes a copy with other weights in every matrix; returns the names of the changed tensors."""
    shutil.copytree(folder, target)
    torch.manual_seed(3)
    tensors = load_file(folder / "model.safetensors")
    changed = [name for name, tensor in tensors.items() if tensor.ndim == 2]
    for name in changed:
        tensors[name].mul_(torch.empty_like(tensors[name]).uniform_(0.8, 1.2))
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return set(changed)


def say(folder: str) -> Answers:
    """transformers' greedy answers in fp32: token ids for each prompt."""
    torch.set_num_threads(1)  # several threads would spin for each other on a busy machine
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    prompts = tokenizer(PROMPTS, return_tensors="pt")
    completions = model.generate(**prompts, max_new_tokens=COUNT, do_sample=False, eos_token_id=None)
    return completions[:, prompts["input_ids"].shape[1] :].tolist()


def ask(engine: Engine, version: int) -> Answers:
    """The engine's answers to the same prompts."""
    answer = engine.post(
        "/v1/completions", prompt=PROMPTS, max_tokens=COUNT, temperature=0, ignore_eos=True, return_token_ids=True
    )
    assert answer["weight_version"] == version
    return [choice["token_ids"] for choice in answer["choices"]]


def test_push_a_perturbed_smollm2_and_back(tmp_path: Path) -> None:
    a = ensure_smollm2(lambda done, total: None)
    b = tmp_path / "b"
    changed = perturb(a, b)
    # A process of its own frees its memory when it ends.
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        said_a, said_b = pool.map(say, [str(a), str(b)])
    assert all(old != new for old, new in zip(said_a, said_b, strict=True))
    with engines(a, tmp_path, {"tp": 3}) as [engine]:
        assert ask(engine, 0) == said_a

        report = push(b, [engine], 7)
        assert report["transport"] == "ipc"
        assert [(row["proof"], row["digests_matched"]) for row in report["targets"]] == [("resident", 3)]
        assert ask(engine, 7) == said_b
        assert [(row["version"], row["state"], row["tp"]) for row in status(engine)] == [(7, "serving", 3)]
        assert verify(b, engine) == (0, set())
        assert verify(a, engine) == (3, changed)

        report = push(a, [engine], 8, "--via", "broadcast", "--bucket-bytes", "64MiB")
        assert [(row["proof"], row["digests_matched"]) for row in report["targets"]] == [("resident", 3)]
        assert ask(engine, 8) == said_a
