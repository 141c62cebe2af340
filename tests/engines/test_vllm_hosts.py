"""Real vLLM on this CPU with the two ranks of one engine on two hosts, and the trainer on a third."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers import AutoModelForCausalLM

from tests.engines import training
from tests.engines.test_colocated_hosts import job_on
from tests.engines.test_vllm_cpu import COUNT, PROMPTS, SIZES
from tests.engines.test_vllm_lora import OPTIONS as ADAPTERS
from tests.engines.test_vllm_lora import adapted, expected, says, send
from tests.engines.test_vllm_short import said_by
from tests.engines.vllm_hosts import SECRET, START_S, engine_of, nodes
from tests.engines.vllm_server import greedy_tokens
from tests.helpers.engines import ENVIRONMENT, Engine, verify
from tests.helpers.hosts import Host, appear_on, cannot, hosts
from tests.helpers.ranks import Ranks
from tests.helpers.tiny import greedy, tiny_model, tiny_tokenizer
from weightcast import Target, WeightUpdater
from weightcast.errors import ConfigError, UpdateFailed
from weightcast.lab.connect import connect as connect_in_lab

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(cannot()), reason=cannot()),
    # PEFT uses deprecated parts of transformers.
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),
]


@pytest.fixture
def two(tmp_path: Path) -> Iterator[list[Host]]:
    with hosts(("alpha", "beta"), tmp_path) as found:
        yield found


def weights(root: Path) -> tuple[dict[str, Any], dict[str, list[list[int]]]]:
    """Two checkpoints' models, and the tokens that transformers generates with each."""
    models: dict[str, Any] = {}
    said: dict[str, list[list[int]]] = {}
    for seed, name in enumerate("AB"):
        models[name] = tiny_model(root / name, seed=seed, **SIZES)
        tiny_tokenizer(root / name)
        said[name] = [greedy(models[name], prompt, COUNT) for prompt in PROMPTS]
    assert said["A"] != said["B"]
    return models, said


def connect(model: Any, engine: Engine, **options: Any) -> WeightUpdater:
    """An updater in this process."""
    return connect_to(model, engine.url, **options)


def connect_to(model: Any, url: str, **options: Any) -> WeightUpdater:
    """As ``connect``, from any process."""
    return connect_in_lab(model, [Target(url)], bucket_bytes=1 << 14, timeout_s=60.0, **options)


@pytest.mark.engine
def test_ranks_on_two_hosts_switch_together_and_a_lost_one_is_named(tmp_path: Path, two: list[Host]) -> None:
    models, said = weights(tmp_path)
    first = tmp_path / "A"
    with nodes(first, tmp_path, two, *ADAPTERS) as (alpha, beta), engine_of((alpha, beta), first) as engine:
        assert greedy_tokens(engine, PROMPTS, COUNT) == said["A"]
        info = engine.info()
        assert (info["host_id"], info["tp_size"]) == ("", 2)
        assert "rank 0 on alpha, rank 1 on beta" in info["message"]
        ways = ("B", "auto", "direct"), ("A", "broadcast", "broadcast"), ("B", "direct", "direct")
        for version, (name, asked, taken) in enumerate(ways, 1):
            with connect(models[name], engine, transport=asked) as updater:
                (target,) = updater.update(version=version).targets
            assert (target.transport, target.proof, target.digests_matched) == (taken, "resident", 2)
            assert target.version_after == version
            assert greedy_tokens(engine, PROMPTS, COUNT) == said[name]
        with pytest.raises(ConfigError, match=r"runs on several hosts \(rank 0 on host alpha, rank 1 on host beta\)"):
            connect(models["A"], engine, transport="ipc")
        model = adapted(models["B"], seed=4)
        row = send(engine, model, "alice")
        assert (row.proof, row.version_after) == ("resident", 1)
        assert says(engine, "alice") == expected(model)
        assert greedy_tokens(engine, PROMPTS, COUNT) == said["B"]
        # The rank on the other host dies between two buckets.
        worker = psutil.Process(info["ranks"][1]["pid"])
        assert os.getsid(worker.pid) == beta.process.pid

        def kill(done: int, total: int) -> None:
            if 0 < done < total and worker.is_running():
                worker.kill()

        with connect(models["A"], engine, progress=kill) as updater:
            begin = time.monotonic()
            with pytest.raises(UpdateFailed, match=r"rank 1 \(pid \d+ on host beta\) is gone") as caught:
                updater.update(version=4)
            assert time.monotonic() - begin < 60
            (row,) = caught.value.report.targets
            assert row.version_after != 4
            assert (row.status, row.proof) != ("serving", "resident")
        # vLLM cannot go on without that rank, and no host of it does.
        for node in (alpha, beta):
            node.process.wait(60)
        assert "ends now, restart it on all its hosts" in alpha.words()


def settle_on(places: list[Host], rank: int) -> None:
    """Each trainer rank is on a host, and in this process's network."""
    appear_on(places[rank])


def from_both(url: str, checkpoint: str, version: int) -> tuple[str, str, str, int]:
    """An update by one of several trainer ranks that have whole models."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    with connect_to(model, url) as updater:
        (row,) = updater.update(version=version).targets
    return updater.transport, row.transport, row.proof, row.digests_matched


def without(url: str, checkpoint: str, version: int, pid: int) -> str:
    """An update in the middle of which a rank of the engine is killed; returns the error."""
    rank = psutil.Process(pid)

    def kill(done: int, total: int) -> None:
        if 0 < done < total and rank.is_running():
            rank.kill()

    with connect_to(checkpoint, url, progress=kill) as updater:  # nobody holds shards of a checkpoint
        assert updater.transport == "ipc+broadcast"
        try:
            updater.update(version=version)
        except UpdateFailed as error:
            return str(error)
    return "updated"


def on(host: Host, *arguments: object) -> subprocess.CompletedProcess[str]:
    """The command line, in a process on a host."""
    command = host.command(["-m", "weightcast", *map(str, arguments)])
    return subprocess.run([sys.executable, *command], env=ENVIRONMENT, capture_output=True, text=True, timeout=300)


@pytest.mark.engine_full
def test_each_rank_reads_the_memory_of_its_own_host_if_a_trainer_is_there(tmp_path: Path, two: list[Host]) -> None:
    _, said = weights(tmp_path)
    first = tmp_path / "A"
    with nodes(first, tmp_path, two) as (alpha, beta), engine_of((alpha, beta), first) as engine:
        for version, (name, host) in enumerate((("B", two[0]), ("A", two[1]), ("B", two[0])), 1):
            sizes = ("--bucket-bytes", "16KiB", "--json")
            done = on(host, "push", tmp_path / name, "--to", engine.url, "--version", version, *sizes)
            assert done.returncode == 0, done.stderr
            (row,) = json.loads(done.stdout)["targets"]
            assert (row["transport"], row["proof"], row["digests_matched"]) == ("ipc+broadcast", "resident", 2)
            assert greedy_tokens(engine, PROMPTS, COUNT) == said[name]
        told = on(two[0], "doctor", engine.url)
        assert "rank 0 on host alpha by memory, rank 1 on host beta by broadcast" in told.stdout, told
        trainers = Ranks(2, place=functools.partial(settle_on, two))
        try:
            reports = trainers.run(from_both, engine.url, str(tmp_path / "A"), 4)
        finally:
            trainers.close()
        assert reports == [("ipc", "ipc", "resident", 2)] * 2
        assert greedy_tokens(engine, PROMPTS, COUNT) == said["A"]
        pid = engine.info()["ranks"][1]["pid"]
        trainers = Ranks(1, place=functools.partial(settle_on, two))
        try:
            [words] = trainers.run(without, engine.url, str(tmp_path / "B"), 5, pid)
        finally:
            trainers.close()
        assert f"rank 1 (pid {pid} on host beta) is gone" in words


@pytest.mark.engine_full
def test_stages_on_two_hosts_prove_their_layers_and_a_lost_one_is_named(tmp_path: Path, two: list[Host]) -> None:
    """Nothing is generated: vLLM 0.32 fails at that with stages on a CPU, by itself."""
    models: dict[str, Any] = {}
    for seed, name in enumerate("AB"):
        models[name] = tiny_model(tmp_path / name, seed=seed, num_hidden_layers=4, **SIZES)
        tiny_tokenizer(tmp_path / name)
    first, stages = tmp_path / "A", ("--tensor-parallel-size=1", "--pipeline-parallel-size=2")
    with nodes(first, tmp_path, two, *stages) as (alpha, beta), engine_of((alpha, beta), first) as engine:
        info = engine.info()
        assert "rank 0 on alpha, rank 1 on beta" in info["message"]
        ways = ("B", "auto", "direct"), ("A", "broadcast", "broadcast"), ("B", "direct", "direct")
        for version, (name, asked, taken) in enumerate(ways, 1):
            with connect(models[name], engine, transport=asked) as updater:
                (target,) = updater.update(version=version).targets
            assert (target.transport, target.proof, target.digests_matched) == (taken, "resident", 2)
            assert verify(tmp_path / name, engine) == (0, set())
        code, differing = verify(first, engine)
        assert code == 3
        assert {f"model.layers.{layer}.mlp.up_proj.weight" for layer in (0, 3)} <= differing
        stage = psutil.Process(info["ranks"][1]["pid"])

        def kill(done: int, total: int) -> None:
            if 0 < done < total and stage.is_running():
                stage.kill()

        with (
            connect(models["A"], engine, progress=kill) as updater,
            pytest.raises(UpdateFailed, match=r"rank 1 \(pid \d+ on host beta\) is gone"),
        ):
            updater.update(version=4)


@pytest.mark.engine_full
@pytest.mark.parametrize(
    ("settings", "alpha_says", "beta_says"),
    [
        (
            ({"WEIGHTCAST_ENGINE_SECRET": SECRET}, {}),
            r"ranks without an engine secret are: 1 \(this is rank 0 on host alpha\)",
            r"ranks without an engine secret are: 1 \(this is rank 1 on host beta\)",
        ),
        (
            ({"WEIGHTCAST_ENGINE_SECRET": SECRET}, {"WEIGHTCAST_ENGINE_SECRET": SECRET[::-1]}),
            r"rank 1 on host beta and the API server on host alpha: .*the two ends have different secrets",
            r"rank 1 on host beta and the API server on host alpha: .*the two ends have different secrets",
        ),
    ],
    ids=["missing", "different"],
)
def test_engine_without_one_secret_does_not_start(
    tmp_path: Path, two: list[Host], settings: tuple[dict[str, str], ...], alpha_says: str, beta_says: str
) -> None:
    tiny_model(tmp_path / "A", **SIZES)
    tiny_tokenizer(tmp_path / "A")
    with nodes(tmp_path / "A", tmp_path, two, settings=settings) as (alpha, beta):
        assert alpha.process.wait(START_S) != 0
        assert re.search(alpha_says, alpha.words())
        assert re.search(beta_says, beta.words())
        assert "WEIGHTCAST_ENGINE_SECRET" in alpha.words()
        assert "WEIGHTCAST_ENGINE_SECRET" in beta.words()
        beta.process.wait(60)


@pytest.mark.engine_full
def test_killed_api_server_leaves_no_rank_behind_on_the_other_host(tmp_path: Path, two: list[Host]) -> None:
    tiny_model(tmp_path / "A", **SIZES)
    tiny_tokenizer(tmp_path / "A")
    with (
        nodes(tmp_path / "A", tmp_path, two) as (alpha, beta),
        engine_of((alpha, beta), tmp_path / "A") as engine,
    ):
        rank = psutil.Process(engine.info()["ranks"][1]["pid"])
        for process in engine.family():
            process.kill()
        beta.process.wait(60)
        rank.wait(60)
        assert "rank 1 has lost the API server on another host" in beta.words()


# Two trainer ranks are beside each rank of the engine: the way, the engine rank, the trainer ranks.
BOTH_WAYS = {("buffer", 0, 0, 1), ("group", 0, 2, 3), ("buffer", 1, 2, 3), ("group", 1, 0, 1)}


def update_that_fails(version: int, strike: Callable[[], object]) -> str:
    """The error of an update in which the engine loses a rank."""
    with pytest.raises(UpdateFailed) as caught:
        training.update(version, strike)
    return str(caught.value)


@pytest.mark.engine_full
def test_direct_reads_memory_on_a_ranks_own_host_and_gets_messages_from_the_other(
    tmp_path: Path, two: list[Host]
) -> None:
    weights(tmp_path)
    first, second, third = (tmp_path / name for name in ("A", "trained", "trained more"))
    alpha, beta = two
    with nodes(first, tmp_path, two) as found, engine_of(found, first) as engine:
        expected = [said_by(first)]
        assert greedy_tokens(engine, PROMPTS, COUNT) == expected[0]
        with job_on(alpha, alpha, beta, beta) as job:
            job.run(training.begin, str(first), (4,))
            job.run(training.connect, [engine.url], {"bucket_bytes": 1 << 14})
            for version, folder in enumerate((second, third), 1):
                job.run(training.train, str(folder))
                before = [host.sent_bytes() for host in two]
                answers = job.run(training.update, version)
                sent = [host.sent_bytes() - old for host, old in zip(two, before, strict=True)]
                print(f"sent by each host: {sent} bytes; in messages to engine ranks: {[own for _, own in answers]}")
                (row,) = json.loads(answers[0][0])["targets"]
                assert (row["transport"], row["proof"], row["version_after"]) == ("direct", "resident", version)
                assert {(leg["by"], *leg["ranks"], *leg["trainers"]) for leg in row["legs"]} == BOTH_WAYS
                # Each rank keeps the rows of the embedding that its own host has, and no row of it is sent.
                size = (folder / "model.safetensors").stat().st_size
                assert all(0 < number < size / 16 for _, number in answers)
                assert max(sent) < size / 2
                assert greedy_tokens(engine, PROMPTS, COUNT) == said_by(folder)
                expected.append(said_by(folder))
            assert len({json.dumps(said) for said in expected}) == len(expected)
            worker = psutil.Process(engine.info()["ranks"][1]["pid"])
            job.run(training.train, str(tmp_path / "never served"))
            for words in job.run(update_that_fails, 3, functools.partial(os.kill, worker.pid, signal.SIGKILL)):
                assert f"rank 1 (pid {worker.pid} on host beta) is gone" in words


@pytest.mark.engine_full
def test_direct_brings_stages_on_two_hosts_their_layers_by_memory_and_messages(tmp_path: Path, two: list[Host]) -> None:
    """Nothing is generated: vLLM 0.32 fails at that with stages on a CPU, by itself."""
    first, second = tmp_path / "A", tmp_path / "trained"
    tiny_model(first, seed=0, num_hidden_layers=4, **SIZES)
    tiny_tokenizer(first)
    alpha, beta = two
    stages = ("--tensor-parallel-size=1", "--pipeline-parallel-size=2")
    with nodes(first, tmp_path, two, *stages) as found, engine_of(found, first) as engine:
        with job_on(alpha, alpha, beta, beta) as job:
            job.run(training.begin, str(first), (4,))
            job.run(training.connect, [engine.url], {"bucket_bytes": 1 << 14})
            job.run(training.train, str(second))
            (row,) = json.loads(job.run(training.update, 1)[0][0])["targets"]
        assert (row["transport"], row["proof"], row["digests_matched"]) == ("direct", "resident", 2)
        assert {(leg["by"], *leg["ranks"], *leg["trainers"]) for leg in row["legs"]} == BOTH_WAYS
        assert verify(second, engine) == (0, set())
        code, differing = verify(first, engine)
        assert code == 3
        assert {f"model.layers.{layer}.mlp.up_proj.weight" for layer in (0, 3)} <= differing
