"""Trainers and engines as Ray actors on GPUs: colocated through CUDA IPC, disaggregated through NCCL, ranks as actors.

Ray may come from a folder: ``PYTHONPATH=site_ray make gpu-test TEST_ARGS="-k ray --results DIR"``.  The examples run
with a model of half a gibibyte that is made on the spot, or with the one in ``WEIGHTCAST_MODEL``, and ``rl_moe`` with
its own; with vLLM and LMDeploy too, where they are (``test_vllm_gpu.py``, ``test_lmdeploy_gpu.py``).
"""

from __future__ import annotations

import importlib.util
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

pytest.importorskip("ray", reason="Ray is not installed here")

import ray
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.engines.environment import package_path
from tests.gpu.needs import needs
from tests.gpu.test_lmdeploy_gpu import SITE as LMDEPLOY_SITE
from tests.gpu.test_vllm_gpu import FLAGS as VLLM_FLAGS
from tests.gpu.test_vllm_gpu import SITE as VLLM_SITE
from tests.helpers.tiny import tiny_config, tiny_tokenizer
from weightcast.ray import (
    Bundles,
    EngineKind,
    RayExecutor,
    RolloutEngines,
    TrainWorkers,
    colocated,
    disaggregated,
    reference_engine,
)
from weightcast.receiver.executor import Worker

ROOT = Path(__file__).parents[2]
UPDATES = 5
ENGINES = ("reference", "vllm", "lmdeploy")
PATH = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])


pytestmark = [pytest.mark.gpu, pytest.mark.timeout(500), needs(2)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", PATH)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(
            address="local", num_cpus=8, include_dashboard=False, object_store_memory=512 << 20, log_to_driver=False
        )
    try:
        yield
    finally:
        ray.shutdown()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    changes = {"hidden_size": 1536, "intermediate_size": 4224, "num_hidden_layers": 12, "head_dim": 128}
    # With the initial weights of its family: with larger ones two implementations differ by nats in bfloat16.
    config = tiny_config(max_position_embeddings=1024, dtype="bfloat16", **changes)
    torch.manual_seed(0)
    tiny_tokenizer(path)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to("cuda:0")
    teach_form(model, AutoTokenizer.from_pretrained(path), steps=60)
    model.to(torch.bfloat16).save_pretrained(path)
    del model
    torch.cuda.empty_cache()
    return path


def teach_form(model: Any, tokenizer: Any, *, steps: int) -> None:
    """Teach it to end as the examples' judge wants, with any number: without a reward nothing is learned."""
    job: Any = runpy.run_path(str(ROOT / "examples" / "grpo" / "task.py"), run_name="example")
    problems = job["read_problems"](ROOT / "examples" / "arithmetic.jsonl")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for step in range(steps):
        for problem in problems[8 * step % len(problems) :][:8]:
            prompt = problem.prompt(tokenizer)
            ending = f"{problem.answer} = {problem.answer}\n#### {problem.answer}"
            answer = [*tokenizer(ending, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
            ids = torch.tensor([prompt + answer], device=model.device)
            labels = torch.tensor([[-100] * len(prompt) + answer], device=model.device)
            (model(input_ids=ids, labels=labels).loss / 8).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


class Learner:
    """A sharded model that an "optimiser step" only shifts."""

    def __init__(self, device: torch.device, folder: str) -> None:
        from torch.distributed.fsdp import fully_shard
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        for layer in model.model.layers:
            fully_shard(layer)
        self.model = fully_shard(model.to(device))

    def step(self, by: float) -> str:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(by)
        return str(torch.cuda.get_device_properties(0).uuid)


def update_often(place: Any, kind: EngineKind, folder: Path, transport: str, *, turns: bool) -> dict[str, Any]:
    """Several updates; what they took.  Fails unless every engine serves and has proved every version."""
    trainer_bundles, engine_bundles = place
    with (
        TrainWorkers(
            Learner, trainer_bundles, {"folder": str(folder)}, update={"transport": transport, "timeout_s": 120.0}
        ) as trainers,
        RolloutEngines(kind, engine_bundles, start_timeout_s=400) as engines,
    ):
        reports, gpus = [], []
        for version in range(1, UPDATES + 1):
            if turns:
                engines.sleep()
            gpus = trainers.call("step", 1e-3)
            if turns:
                engines.wake()
            report = trainers.update(engines, version=version)
            assert report.ok
            assert report.transport == transport
            assert all(row.digests_matched == row.ranks for row in report.targets)
            reports.append(json.loads(report.to_json()))
        infos = [httpx.get(f"{url}/weightcast/info", trust_env=False).json() for url in engines.urls]
    assert len({report["digest"] for report in reports}) == UPDATES
    theirs = {rank["device"] for info in infos for rank in info["ranks"]}
    return {"trainers": sorted(gpus), "engines": sorted(theirs), "reports": reports}


def test_colocated(cluster, folder, record):
    kind = reference_engine(str(folder), "--device", "cuda", "--dtype", "bfloat16")
    found = update_often(colocated(2, 2, resource="GPU"), kind, folder, "ipc", turns=True)
    assert found["trainers"] == found["engines"]  # each engine on the GPU of a trainer
    record("colocated", found)


def test_colocated_with_one_engine_over_both_gpus(cluster, folder, record):
    kind = reference_engine(str(folder), "--device", "cuda", "--dtype", "bfloat16")
    found = update_often(colocated(2, 1, tp=2, resource="GPU"), kind, folder, "ipc", turns=True)
    assert found["trainers"] == found["engines"]
    record("colocated tp 2", found)


def test_disaggregated(cluster, folder, record):
    kind = reference_engine(str(folder), "--device", "cuda", "--dtype", "bfloat16")
    found = update_often(disaggregated(1, 1, resource="GPU"), kind, folder, "broadcast", turns=False)
    assert not set(found["trainers"]) & set(found["engines"])
    record("disaggregated", found)


@needs(4)
def test_disaggregated_on_four(cluster, folder, record):
    kind = reference_engine(str(folder), "--device", "cuda", "--dtype", "bfloat16")
    found = update_often(disaggregated(2, 1, tp=2, resource="GPU"), kind, folder, "broadcast", turns=False)
    assert len(set(found["trainers"] + found["engines"])) == 4
    record("disaggregated on four", found)


class Where:
    """A rank that says which GPU it sees."""

    def __init__(self, rank: int, tp_size: int, rendezvous: str) -> None:
        self.device = torch.cuda.get_device_properties(0).uuid
        self.count = torch.cuda.device_count()

    def run(self, command: bytes) -> bytes:
        return f"{self.device} {self.count}".encode()

    def apply(self, message: Any) -> Any:
        raise LookupError

    def interrupt(self, reason: str) -> None:
        pass

    def close(self) -> None:
        pass


def make_where(rank: int, tp_size: int, rendezvous: str) -> Worker:
    return Where(rank, tp_size, rendezvous)


def test_ranks_keep_the_callers_order_of_gpus(cluster):
    bundles = Bundles.create(2, resource="GPU")
    seen = []
    try:
        for order in ([0, 1], [1, 0]):
            chosen = Bundles.of(bundles.group, 2, indices=order, resource="GPU")
            executor = RayExecutor(make_where, 2, bundles=chosen)
            gpus = [place.gpus for place in executor.places]
            device, count = executor.run(b"").decode().split()
            executor.close()
            assert count == "1"
            seen.append((device, gpus))
    finally:
        bundles.close()
    assert seen[0][0] != seen[1][0]
    assert seen[0][1] == seen[1][1][::-1]


ON_TWO = [
    ("rl_colocated", "--gpus=2", "--trainers=2", "--engines=2"),
    ("rl_disaggregated", "--gpus=2", "--trainers=1", "--engines=1"),
    ("rl_disaggregated_async", "--gpus=2", "--trainers=1", "--engines=1", "--staleness=1"),
    ("rl_moe", "--gpus=2", "--trainers=1", "--engines=1"),
]
ON_FOUR = [
    ("rl_colocated", "--gpus=4", "--trainers=4", "--engines=4"),
    ("rl_disaggregated", "--gpus=4", "--trainers=2", "--engines=1", "--tp=2"),
    ("rl_disaggregated_async", "--gpus=4", "--trainers=2", "--engines=2", "--staleness=1"),
]
EXAMPLES = [
    *(pytest.param(example, engine, id=f"{example[0]}-{engine}") for example in ON_TWO for engine in ENGINES),
    *(pytest.param(example, "vllm", id=f"{example[0]}-vllm-four", marks=needs(4)) for example in ON_FOUR),
]


@pytest.mark.parametrize(("example", "engine"), EXAMPLES)
def test_examples(example, engine, folder, tmp_path, record):
    name, *arguments = example
    environment = os.environ | {"PYTHONPATH": PATH, "RAY_USAGE_STATS_ENABLED": "0", "HF_HUB_OFFLINE": "1"}
    if engine == "vllm":
        if not VLLM_SITE and importlib.util.find_spec("vllm") is None:
            pytest.skip("vLLM is not installed here, and WEIGHTCAST_VLLM_SITE names no folder that has it")
        environment["PATH"] = f"{vllm_program(tmp_path)}{os.pathsep}{environment['PATH']}"
        flags = f"--gpu-memory-utilization=0.1 --kv-cache-memory-bytes={1 << 30} --max-model-len=1024 --enforce-eager"
        arguments += ["--engine=vllm", f"--engine-args={flags} {' '.join(VLLM_FLAGS)}"]
    if engine == "lmdeploy":
        if not LMDEPLOY_SITE and importlib.util.find_spec("lmdeploy") is None:
            pytest.skip("LMDeploy is not installed here, and WEIGHTCAST_LMDEPLOY_SITE names no folder that has it")
        path = os.pathsep.join(part for part in (LMDEPLOY_SITE, PATH) if part)
        program = f"env PYTHONPATH={path} {sys.executable} -m weightcast.plugins.lmdeploy"
        flags = "--cache-max-entry-count=0.1 --session-len=1024"
        arguments += ["--engine=lmdeploy", f"--engine-program={program}", f"--engine-args={flags}"]
    if name != "rl_moe":  # it makes its model
        arguments += [f"--model={os.environ.get('WEIGHTCAST_MODEL', folder)}"]
    done = subprocess.run(
        [
            *(sys.executable, str(ROOT / "examples" / f"{name}.py"), *arguments),
            *(f"--steps={UPDATES}", "--save-every=0", f"--out={tmp_path}"),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=environment,
        timeout=450,
    )
    if done.returncode != 0:
        for log in tmp_path.glob("engine-*.log"):  # the first error is the one that matters
            lines = log.read_text().splitlines()
            first = next((number for number, line in enumerate(lines) if " ERROR " in line), len(lines))
            print(f"--- {log.name}", *lines[max(first - 5, 0) : first + 60], sep="\n")
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["version"] for row in rows] == list(range(1, UPDATES + 1))
    assert len({row["digest"] for row in rows}) == UPDATES  # each is of other weights
    record(f"{name}, {engine}, {example[1]}", {"output": done.stdout, "rows": rows})


def vllm_program(folder: Path) -> Path:
    """A folder with a program ``vllm``, as an environment of its own has."""
    program = folder / "bin" / "vllm"
    program.parent.mkdir()
    path = os.pathsep.join(part for part in (package_path(folder / "metadata"), VLLM_SITE) if part)
    run = f'exec {sys.executable} -m vllm.entrypoints.cli.main "$@"'
    program.write_text(f"#!/bin/sh\nPYTHONPATH={path} VLLM_USE_FLASHINFER_SAMPLER=0 {run}\n")
    program.chmod(0o755)
    return program.parent
