"""Trainers and engines as Ray actors: an update from one to the other, a death on either side, both placements."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest
import ray
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from tests.helpers.clock import PATIENCE_S
from tests.helpers.harness import ToyTrainer, share_memory
from tests.helpers.raycluster import cluster  # noqa: F401  a fixture
from tests.helpers.toy_engine import toy_weights
from weightcast import ConfigError, TargetUnreachable, TrainerRankFailed
from weightcast.ray import EngineKind, RolloutEngines, TrainWorkers, colocated, disaggregated


class Learner:
    """A model of a few matrices, sharded, that an "optimiser step" only shifts."""

    def __init__(self, device: torch.device) -> None:
        torch.set_num_threads(1)
        model = nn.Module()
        for name, tensor in toy_weights(seed=7).items():
            *path, last = name.split(".")
            home = model
            for part in path:
                if part not in home._modules:
                    home.add_module(part, nn.Module())
                home = home.get_submodule(part)
            home.register_parameter(last, nn.Parameter(tensor.to(device)))
        self.model = fully_shard(model)

    def step(self, by: float) -> int:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(by)
        return torch.distributed.get_rank()

    def stumble(self) -> None:
        if torch.distributed.get_rank() == 1:
            raise LookupError("no such batch")

    def die(self) -> None:
        if torch.distributed.get_rank() == 1:
            os._exit(5)


class SharedLearner(Learner):
    """Its shards are in memory that engines on this host can map."""

    def __init__(self, device: torch.device) -> None:
        torch.set_num_threads(1)
        self.model = ToyTrainer(toy_weights(seed=7))
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        self._buffer = share_memory(self.model, mesh, [Shard(0)])

    def memory(self) -> str:
        """The name under which processes map the shards."""
        address = self._buffer.data.data_ptr()
        for mapping in psutil.Process().memory_maps(grouped=False):
            first, _, end = mapping.addr.partition("-")
            if int(first, 16) <= address < int(end, 16):
                return mapping.path
        raise AssertionError("the shards are mapped nowhere")


# Has no language model, so it starts as fast as torch does.
TOY = EngineKind(
    command=(
        sys.executable,
        "-m",
        "tests.helpers.toy_engine",
        "--fork",
        "--host",
        "{host}",
        "--port",
        "{port}",
        "--tp",
        "{tp}",
    ),
    health="/weightcast/info",
)


def info(url: str) -> dict[str, Any]:
    answer = httpx.get(f"{url}/weightcast/info", timeout=300, trust_env=False, verify=False)
    assert answer.status_code == 200, answer.text
    return answer.json()


def versions(urls: Sequence[str]) -> list[int]:
    return [info(url)["version"] for url in urls]


def server_of(url: str) -> psutil.Process:
    port = url.rpartition(":")[2]
    [keeper] = [
        process
        for process in psutil.process_iter(["cmdline"])
        if "weightcast.ray.engine_supervisor" in (process.info["cmdline"] or ()) and port in process.info["cmdline"]
    ]
    [server] = keeper.children()
    return server


def mapped_by(server: psutil.Process, memory: str) -> int:
    """How many of a server's processes map some memory."""
    family = [server, *server.children(recursive=True)]
    return sum(any(memory == mapping.path for mapping in each.memory_maps()) for each in family)


def ask_until_it_is_gone(url: str) -> None:
    for _ in range(100):
        info(url)
        time.sleep(0.2)


def start(place: Any, transport: str, learner: type[Learner] = Learner, **options: object) -> SimpleNamespace:
    """Trainers and engines, started side by side."""
    trainer_bundles, engine_bundles = place
    with ThreadPoolExecutor() as pool:
        engines = pool.submit(RolloutEngines, TOY, engine_bundles, start_timeout_s=120, health_timeout_s=20)
        trainers = pool.submit(
            TrainWorkers,
            learner,
            trainer_bundles,
            update={"transport": transport, "timeout_s": 60.0, "on_failure": "quarantine", **options},
            env={"OMP_NUM_THREADS": "1"},
            timeout_s=120,
        )
        return SimpleNamespace(trainers=trainers.result(), engines=engines.result())


@pytest.fixture(scope="module")
def job(cluster: None) -> Iterator[SimpleNamespace]:  # noqa: F811
    """Two trainer ranks and two engines, nobody in a bundle with another."""
    started = start(disaggregated(2, 2), "broadcast")
    try:
        yield started
    finally:
        started.engines.close()
        started.trainers.close()


def test_every_engine_gets_every_version_and_says_so(job):
    assert len(job.engines.urls) == 2
    assert job.trainers.call("step", 0.01) == [0, 1]
    report = job.trainers.update(job.engines, version=1)
    assert report.ok
    assert [row.digests_matched for row in report.targets] == [1, 1]
    assert versions(job.engines.urls) == [1, 1]


def test_an_error_of_all_ranks_arrives_as_it_was(job):
    with pytest.raises(TargetUnreachable, match="cannot connect") as caught:
        job.trainers.update(["http://127.0.0.1:9"], version=2)
    assert caught.value.url == "http://127.0.0.1:9"
    assert job.trainers.update(job.engines, version=3).ok  # and nothing is broken by it


def test_an_error_in_one_rank_is_named_and_the_job_goes_on(job):
    with pytest.raises(TrainerRankFailed, match=r"stumble: trainer rank 1 \(pid \d+ .*LookupError: no such batch"):
        job.trainers.call("stumble")
    assert job.trainers.call("step", 0.0) == [0, 1]


def test_a_dead_engine_comes_back_with_the_current_version_before_anybody_is_sent_to_it(job):
    job.trainers.call("step", 0.01)
    before = job.trainers.update(job.engines, version=20)
    survivor, victim = job.engines.urls
    server_of(victim).kill()
    deadline = time.monotonic() + PATIENCE_S
    while job.engines.urls != (survivor,):
        assert time.monotonic() < deadline
        found = job.engines.check()
    assert found[1].state == "dead"
    assert "exit code 137" in found[1].words  # ended by signal 9
    assert job.engines.restart_dead() == [1]
    [waiting] = job.engines.waiting
    assert job.engines.urls == (survivor,)  # it is up, with the weights of its folder
    assert versions([waiting.url]) == [0]
    report = job.trainers.recover(job.engines)
    assert [row.url for row in report.targets] == [waiting.url]  # the other one was left in peace
    assert report.digest == before.digest
    assert job.engines.urls == (survivor, waiting.url)
    assert versions(job.engines.urls) == [20, 20]
    assert job.trainers.recover(job.engines) is None


def test_weights_that_have_changed_are_not_given_to_an_engine_under_the_old_version(job):
    job.trainers.update(job.engines, version=25)
    survivor, victim = job.engines.urls
    server_of(victim).kill()
    deadline = time.monotonic() + PATIENCE_S
    while job.engines.urls != (survivor,):
        assert time.monotonic() < deadline
        job.engines.check()
    job.trainers.call("step", 0.01)  # the next optimiser step has run
    with pytest.raises(ConfigError, match="no longer those of version 25"):
        job.trainers.recover(job.engines)
    [waiting] = job.engines.waiting
    assert job.engines.urls == (survivor,)
    assert versions([survivor, waiting.url]) == [25, 0]
    assert job.trainers.update(job.engines, version=26).ok
    assert versions(job.engines.urls) == [26, 26]


def test_an_update_starts_again_an_engine_whose_actor_was_killed(job):
    first = job.engines.urls[0]
    os.kill(job.engines.pids()[0], signal.SIGKILL)
    job.trainers.call("step", 0.01)
    report = job.trainers.update(job.engines, version=30)
    assert report.ok
    assert len(report.targets) == 2
    assert first not in job.engines.urls
    assert versions(job.engines.urls) == [30, 30]
    with pytest.raises(httpx.ConnectError):  # the server went with its actor
        ask_until_it_is_gone(first)


def test_colocated_ranks_share_bundles_and_a_lost_trainer_is_named(cluster):  # noqa: F811
    place = colocated(2, 1, tp=2)
    assert place[0].indices == place[1][0].indices
    started = start(place, "ipc")
    try:
        [url] = started.engines.urls
        started.trainers.call("step", 0.01)
        report = started.trainers.update(started.engines, version=1)
        assert report.ok
        assert report.transport == "ipc"
        assert report.targets[0].ranks == 2
        assert versions([url]) == [1]
        with pytest.raises(ConfigError, match="engines of this kind cannot sleep"):
            started.engines.sleep()
        with pytest.raises(TrainerRankFailed, match=r"trainer rank 1 \(pid \d+ .* is gone: The actor is dead"):
            started.trainers.call("die", timeout_s=30)
        with pytest.raises(TrainerRankFailed, match="is gone") as caught:
            started.trainers.call("step", 0.0)
        assert caught.value.hint == "start the trainers again"
        assert versions([url]) == [1]  # engines do not mind
    finally:
        started.engines.close()
        started.trainers.close()
    deadline = time.monotonic() + PATIENCE_S
    while ray.available_resources().get("CPU", 0) < 3:  # the bundles are back
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.wide  # seventeen seconds; test_direct.py and test_first_update.py have it without Ray
def test_released_weights_are_mapped_by_no_engine_until_the_next_update(cluster):  # noqa: F811
    started = start(colocated(2, 1, tp=2), "direct", SharedLearner, keep_mapped=True)
    try:
        started.trainers.release()  # nothing was sent yet
        server = server_of(started.engines.urls[0])
        memories = started.trainers.call("memory")
        assert len(set(memories)) == 2
        for version in (1, 2):
            started.trainers.call("step", 0.01)
            report = started.trainers.update(started.engines, version=version)
            assert [row.proof for row in report.targets] == ["resident"]
            assert all(mapped_by(server, memory) for memory in memories)
            started.trainers.release()
            assert not any(mapped_by(server, memory) for memory in memories)
    finally:
        started.engines.close()
        started.trainers.close()
