"""The programs of ``examples/``: what they print and leave behind, a run that goes on, and a reward that rises."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file

from tests.engines.environment import QUICK, engine_python
from tests.engines.lmdeploy_receiver_server import command as lmdeploy_command
from tests.engines.sglang_server import STANDINS
from tests.engines.test_vllm_cpu import SIZES
from tests.engines.vllm_server import vllm_command
from tests.helpers.tiny import tiny_model, tiny_tokenizer
from weightcast.digest.definition import model_digest, tensor_digest

EXAMPLES = Path(__file__).parents[2] / "examples"
# Settings of vLLM on a CPU, and where it finds our plug-in.
VLLM_SETTINGS = (
    "PYTHONPATH",
    "VLLM_TARGET_DEVICE",
    "VLLM_CPU_KVCACHE_SPACE",
    "VLLM_CPU_OMP_THREADS_BIND",
    "VLLM_NO_USAGE_STATS",
    "HF_HUB_OFFLINE",
    "TORCHINDUCTOR_VEC_ISA_OK",
)
NAMES = ["rl_colocated", "rl_disaggregated", "rl_disaggregated_async"]

pytestmark = [pytest.mark.example, pytest.mark.timeout(1500)]


# A server takes what a request leaves out from the model's generation settings; LMDeploy draws from 50 tokens.
WHOLE = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}


def run(name: str, out: Path, *arguments: object, timeout_s: float = 400, **more: str) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"} | more
    environment["RAY_memory_monitor_refresh_ms"] = "0"  # it would end our actors for the memory that others use
    done = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py", f"--out={out}", *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment,
        cwd=out,
        timeout=timeout_s,
    )
    logs = "".join(f"--- {log.name}\n{log.read_text()[-6000:]}" for log in out.glob("engine-*.log"))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    return done.stdout


def metrics(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_model(folder, max_position_embeddings=1024)
    tiny_tokenizer(folder)
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_a_run_can_be_stopped_and_goes_on(name, tiny, tmp_path):
    settings = (f"--model={tiny}", "--prompts=2", "--group=3", "--max-tokens=6", "--dtype=float32", "--save-every=2")
    run(name, tmp_path, *settings, "--steps=3")
    assert (tmp_path / "last").read_text() == "2"  # the third step was not saved
    said = run(name, tmp_path, *settings, "--steps=4", "--resume")
    rows = metrics(tmp_path)
    assert f"resumed after step 2; engines serve version 2, digest {rows[1]['digest']}" in said
    assert [row["step"] for row in rows] == [1, 2, 3, 3, 4]
    assert all(row["version"] == row["step"] for row in rows)
    for row in rows[3:]:
        assert f"{row['digest']} on 1/1 ranks" in said
    # Engine and trainer have the same weights, so they agree on what was said.
    assert max(row["logprob_gap"] for row in rows if not any(row.get("behind", [0]))) < 1e-3


def test_nothing_older_than_the_bound_is_trained_on(tiny, tmp_path):
    said = run(
        "rl_disaggregated_async",
        tmp_path,
        *(f"--model={tiny}", "--prompts=2", "--group=3", "--max-tokens=6", "--dtype=float32"),
        *("--steps=6", "--save-every=0", "--staleness=1", "--inflight=3"),
    )
    behind = [age for row in metrics(tmp_path) for age in row["behind"]]
    assert len(behind) == 12
    assert max(behind) == 1  # they did not wait for each other, and kept the bound
    assert re.search(r"groups trained on, by versions behind: \{0: \d+, 1: \d+\}, bound 1", said)


@pytest.mark.parametrize("name", NAMES)
def test_the_reward_rises(name, tmp_path):
    from weightcast.lab.demo.smollm2 import ensure_smollm2

    ensure_smollm2(lambda done, total: None)
    run(name, tmp_path, "--save-every=0", timeout_s=1400)
    rewards = [row["reward"] for row in metrics(tmp_path)]
    part = len(rewards) // 4
    assert sum(rewards[-part:]) > sum(rewards[:part]) + 0.1 * part


@pytest.fixture(scope="module")
def servable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose heads are large enough for vLLM's and SGLang's kernels."""
    folder = tmp_path_factory.mktemp("servable")
    tiny_model(folder, max_position_embeddings=1024, **SIZES)
    tiny_tokenizer(folder)
    return folder


# A random model cannot calculate: only with this reward the weights change in every step.
SHORT = (
    *("--prompts=2", "--group=6", "--max-tokens=8", "--steps=3", "--save-every=0", "--trainers=1", "--lr=1e-3"),
    "--reward=letters",
)


def check_three_updates(rows: list[dict[str, Any]]) -> None:
    assert [row["version"] for row in rows] == [1, 2, 3]
    assert len({row["digest"] for row in rows}) == 3
    assert max(row["logprob_gap"] for row in rows) < 1e-2  # the engine samples with the trainer's weights


def test_disaggregated_with_vllm(servable, tmp_path):
    python, *_ = vllm_command(servable, tmp_path, 0)[0]
    _, environment = vllm_command(servable, tmp_path, 0)
    program = ["env", *(f"{name}={environment[name]}" for name in VLLM_SETTINGS), python]
    run(
        "rl_disaggregated",
        tmp_path,
        *(
            f"--model={servable}",
            "--engine=vllm",
            *SHORT,
            "--verify=resident",
            "--via=broadcast",
            "--start-timeout=1200",
        ),
        # `vllm serve` asks for the metadata of a package "vllm", and this one is called vllm-cpu.
        f"--engine-program={shlex.join([*program, '-m', 'vllm.entrypoints.openai.api_server', '--model'])}",
        "--engine-args=--max-model-len=1024 --enforce-eager --max-num-seqs=8",
        timeout_s=1400,
    )
    rows = metrics(tmp_path)
    check_three_updates(rows)
    assert all(row["proof"] == ["resident"] for row in rows)


def test_disaggregated_with_sglang(servable, tmp_path):
    settings = {
        "PYTHONPATH": f"{STANDINS}{os.pathsep}{QUICK}",
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": "0",
        "TORCHINDUCTOR_VEC_ISA_OK": "1",
        "HF_HUB_OFFLINE": "1",
    }
    program = ["env", *(f"{name}={value}" for name, value in settings.items())]
    program += [str(engine_python("sglang-0.5.23-cpu")), "-m", "sglang.launch_server"]
    flags = "--device=cpu --attention-backend=torch_native --context-length=1024 --max-total-tokens=8192 "
    flags += "--max-running-requests=8 --mem-fraction-static=0.3 --disable-cuda-graph --sleep-on-idle "
    flags += "--disable-overlap-schedule --skip-server-warmup"
    run(
        "rl_disaggregated",
        tmp_path,
        *(f"--model={servable}", "--engine=sglang", *SHORT, "--verify=behaviour", "--via=broadcast"),
        *(f"--engine-program={shlex.join(program)}", f"--engine-args={flags}", "--start-timeout=1200"),
        timeout_s=1400,
    )
    check_three_updates(metrics(tmp_path))


def run_with_lmdeploy(out: Path, *options: str, receiver: bool) -> list[dict[str, Any]]:
    """Three steps with LMDeploy on this CPU; returns the records of the steps."""
    folder = out / "model"
    tiny_model(folder, max_position_embeddings=1024, **SIZES)
    tiny_tokenizer(folder)
    (python, *_), environment = lmdeploy_command(folder, (), 0, receiver=receiver)
    settings = ("PYTHONPATH", "WEIGHTS_FROM_HOST", "HF_HUB_OFFLINE", "TORCHDYNAMO_DISABLE", "TMPDIR")
    program = ["env", *(f"{name}={environment[name]}" for name in settings), python, "-m"]
    program += ["weightcast.plugins.lmdeploy" if receiver else "lmdeploy"]
    flags = "--session-len=1024 --eager-mode --num-gpu-blocks=256 --max-batch-size=8 --max-prefill-token-num=256 "
    flags += "--disable-metrics"
    run(
        "rl_disaggregated",
        out,
        *(f"--model={folder}", "--engine=lmdeploy", *SHORT, *options),
        *(f"--engine-program={shlex.join(program)}", f"--engine-args={flags}", "--start-timeout=1200"),
        timeout_s=1400,
    )
    rows = metrics(out)
    check_three_updates(rows)
    return rows


def test_disaggregated_with_lmdeploy_and_our_receiver(tmp_path):
    rows = run_with_lmdeploy(tmp_path, "--verify=resident", "--via=broadcast", receiver=True)
    assert all(row["proof"] == ["resident"] for row in rows)


def test_disaggregated_with_lmdeploy_by_its_own_routes(tmp_path):
    rows = run_with_lmdeploy(tmp_path, "--verify=behaviour", "--via=checkpoint-engine", receiver=False)
    assert all(row["proof"] == ["behaviour"] for row in rows)


@pytest.mark.parametrize(("temperature", "count"), [(1.0, 3), (0.0, 1)])
def test_lmdeploy_is_asked_for_the_whole_distribution(monkeypatch, temperature, count):
    monkeypatch.syspath_prepend(EXAMPLES)
    from grpo.rollouts import generate_of

    asked: list[dict[str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(json.loads(request.content))
        meta = {"output_token_logprobs": [[-1.5, 7]], "finish_reason": {"type": "length"}}
        return httpx.Response(200, json={"text": "x", "meta_info": meta})

    args = argparse.Namespace(engine="lmdeploy", max_tokens=4)
    with httpx.Client(transport=httpx.MockTransport(answer)) as client:
        found = generate_of(client, args, "http://e", [5, 6], count=count, temperature=temperature, seed=0)
    assert [(each.tokens, each.logprobs, each.finished) for each in found] == [([7], [-1.5], False)] * count
    body = {"input_ids": [5, 6], "temperature": temperature, "max_tokens": 4, "return_logprob": True}
    assert asked == count * [body | WHOLE | {"include_stop_str_in_output": True}]


def test_an_answer_that_was_aborted_before_its_first_token_is_empty(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    from grpo.rollouts import generate_of

    def answer(_: httpx.Request) -> httpx.Response:
        meta = {"output_token_logprobs": None, "finish_reason": {"type": "abort"}}
        return httpx.Response(200, json={"text": "", "meta_info": meta})

    args = argparse.Namespace(engine="lmdeploy", max_tokens=4)
    with httpx.Client(transport=httpx.MockTransport(answer)) as client:
        [found] = generate_of(client, args, "http://e", [5, 6], count=1, temperature=1.0, seed=0)
    assert (found.tokens, found.logprobs, found.finished) == ([], [], False)


@pytest.mark.parametrize("engine", ["reference", "vllm"])
def test_completions_are_asked_for_from_the_whole_distribution(monkeypatch, engine):
    monkeypatch.syspath_prepend(EXAMPLES)
    from grpo.rollouts import completions_of

    asked: list[dict[str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        asked.append(json.loads(request.content))
        choice = {"token_ids": [7], "logprobs": {"token_logprobs": [-1.5]}, "text": "x", "finish_reason": "length"}
        return httpx.Response(200, json={"choices": [choice] * 2})

    args = argparse.Namespace(engine=engine, max_tokens=4)
    with httpx.Client(transport=httpx.MockTransport(answer)) as client:
        completions_of(client, args, "http://e", [5, 6], count=2, temperature=1.0, seed=3)
    [body] = asked
    penalised = {"repetition_penalty"} if engine == "reference" else set()  # it has no penalties, and refuses them
    assert {name: body[name] for name in WHOLE if name in body} == {
        name: value for name, value in WHOLE.items() if name not in penalised
    }


def test_every_option_of_a_run(tiny, tmp_path):
    (tmp_path / "mine.py").write_text(
        "def track(step, record):\n    print(f'tracked {step} {sorted(record)}', flush=True)\n"
    )
    said = run(
        "rl_disaggregated",
        tmp_path,
        *(f"--model={tiny}", *SHORT, "--save-every=1", "--keep-last=2", "--eval-every=2", "--eval-problems=3"),
        *("--kl=0.1", "--clip=0.1", "--clip-high=0.3", "--bucket-bytes=64KiB", "--verify=behaviour", "--pause=retract"),
        *("--tracker=mine:track", f"--export={tmp_path / 'exported'}", "--via=ipc"),
        PYTHONPATH=os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]),
    )
    rows = metrics(tmp_path)
    assert [path.name for path in sorted(tmp_path.glob("step-*"))] == ["step-2", "step-3"]
    assert ["eval_reward" in row for row in rows] == [False, True, False]
    assert rows[0]["kl"] == pytest.approx(0.0, abs=1e-6)  # the first model is the anchor
    assert all(row["proof"] == ["behaviour"] for row in rows)
    assert "tracked 1 [" in said
    assert "tracked 3 [" in said
    exported = {
        name: tensor_digest(tensor) for name, tensor in load_file(tmp_path / "exported/model.safetensors").items()
    }
    assert model_digest(exported) == rows[-1]["digest"]  # what is exported is what the engine served at the end


def test_experts(tmp_path):
    run("rl_moe", tmp_path, *SHORT, "--bucket-bytes=64KiB")
    rows = metrics(tmp_path)
    check_three_updates(rows)
    assert all(row["proof"] == ["resident"] for row in rows)


def test_vision_learns_and_is_on_policy(tmp_path):
    said = run("rl_vision", tmp_path, "--export=exported")
    rows = metrics(tmp_path)
    assert [row["version"] for row in rows] == list(range(1, 61))
    assert max(row["logprob_gap"] for row in rows) < 1e-3
    assert all(row["proof"] == "resident" for row in rows)
    assert sum(row["reward"] for row in rows[:10]) / 10 < 0.4
    assert sum(row["reward"] for row in rows[-10:]) / 10 > 0.5  # at most 0.4 for a model that does not see
    assert "parts of the model that training has changed: language_model, lm_head, visual" in said
    assert (tmp_path / "exported" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("rl_disaggregated", ["--model=/nowhere"], "is no Hugging Face folder"),
        ("rl_disaggregated", ["--engine=lmdeploy"], "LMDeploy does not serve on a CPU"),
        ("rl_disaggregated", ["--via=pigeon"], "invalid choice: 'pigeon'"),
        ("rl_colocated", ["--engine=vllm"], "vLLM cannot sleep on a CPU"),
    ],
)
def test_arguments_that_cannot_work_are_refused(name, arguments, words, tiny):
    done = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py", f"--model={tiny}", *arguments],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert words in done.stderr
