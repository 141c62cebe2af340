"""Real vLLM on this CPU with its executor for Ray: two ranks in actors, on two hosts or on one."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest

from tests.engines.test_vllm_cpu import COUNT, PROMPTS, SIZES
from tests.engines.test_vllm_hosts import connect, weights
from tests.engines.vllm_hosts import START_S, engine_of, is_on, ray_nodes
from tests.engines.vllm_server import greedy_tokens
from tests.helpers.hosts import cannot, hosts
from tests.helpers.tiny import tiny_model, tiny_tokenizer
from weightcast.errors import ConfigError, UpdateFailed

pytestmark = [
    pytest.mark.engine_full,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(cannot()), reason=cannot()),
]


def test_ranks_on_two_nodes_switch_together_and_a_lost_one_is_named(tmp_path: Path) -> None:
    models, said = weights(tmp_path)
    first = tmp_path / "A"
    with (
        hosts(("alpha", "beta"), tmp_path) as two,
        ray_nodes(first, tmp_path, two) as (alpha, _),
        engine_of((alpha,), first) as engine,
    ):
        assert greedy_tokens(engine, PROMPTS, COUNT) == said["A"]
        info = engine.info()
        assert (info["host_id"], info["tp_size"]) == ("", 2)
        assert "rank 0 on alpha, rank 1 on beta" in info["message"]
        pids = [rank["pid"] for rank in info["ranks"]]
        assert [is_on(host, pid) for host, pid in zip(two, pids, strict=True)] == [True, True]
        ways = ("B", "auto", "direct"), ("A", "broadcast", "broadcast"), ("B", "direct", "direct")
        for version, (name, asked, taken) in enumerate(ways, 1):
            with connect(models[name], engine, transport=asked) as updater:
                (target,) = updater.update(version=version).targets
            assert (target.transport, target.proof, target.digests_matched) == (taken, "resident", 2)
            assert greedy_tokens(engine, PROMPTS, COUNT) == said[name]
        with pytest.raises(ConfigError, match=r"runs on several hosts \(rank 0 on host alpha, rank 1 on host beta\)"):
            connect(models["A"], engine, transport="ipc")
        rank = psutil.Process(pids[1])

        def kill(done: int, total: int) -> None:
            if 0 < done < total and rank.is_running():
                rank.kill()

        with connect(models["A"], engine, progress=kill) as updater:
            begin = time.monotonic()
            with pytest.raises(UpdateFailed, match=r"rank 1 \(pid \d+ on host beta\) is gone") as caught:
                updater.update(version=4)
            assert time.monotonic() - begin < 60
        (row,) = caught.value.report.targets
        assert row.version_after != 4
        assert (row.status, row.proof) != ("serving", "resident")
        alpha.process.wait(60)  # vLLM cannot go on without that rank


@pytest.mark.parametrize("mode", ["retract", "wait", "abort", "in_place"])
def test_ranks_on_one_node_switch_together(tmp_path: Path, mode: str) -> None:
    models, said = weights(tmp_path)
    first = tmp_path / "A"
    with (
        hosts(("alpha",), tmp_path) as places,
        ray_nodes(first, tmp_path, places, "--no-enable-prefix-caching", gpus=2, settings={}) as nodes,
        engine_of(nodes, first) as engine,
    ):
        assert greedy_tokens(engine, PROMPTS, COUNT) == said["A"]
        for version, name in enumerate("BAB", 1):
            with connect(models[name], engine, pause=mode) as updater:
                (target,) = updater.update(version=version).targets
            assert (target.proof, target.digests_matched) == ("resident", 2)
            assert greedy_tokens(engine, PROMPTS, COUNT) == said[name]


def test_ranks_on_two_nodes_without_a_secret_do_not_start(tmp_path: Path) -> None:
    tiny_model(tmp_path / "A", **SIZES)
    tiny_tokenizer(tmp_path / "A")
    with (
        hosts(("alpha", "beta"), tmp_path) as two,
        ray_nodes(tmp_path / "A", tmp_path, two, settings={}) as (alpha, _),
    ):
        assert alpha.process.wait(START_S) != 0
        words = "rank 1 on host beta cannot serve the API server on host alpha: "
        assert words in alpha.words()
        assert "has no engine secret" in alpha.words()
        assert "WEIGHTCAST_ENGINE_SECRET" in alpha.words()


def test_killed_api_server_leaves_no_rank_behind(tmp_path: Path) -> None:
    tiny_model(tmp_path / "A", **SIZES)
    tiny_tokenizer(tmp_path / "A")
    with (
        hosts(("alpha", "beta"), tmp_path) as two,
        ray_nodes(tmp_path / "A", tmp_path, two) as (alpha, _),
        engine_of((alpha,), tmp_path / "A") as engine,
    ):
        ranks = [psutil.Process(rank["pid"]) for rank in engine.info()["ranks"]]
        for process in engine.family():
            process.kill()
        psutil.wait_procs(ranks, timeout=60)
        assert not [rank for rank in ranks if rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE]
