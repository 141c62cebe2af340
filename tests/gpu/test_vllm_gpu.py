"""Real vLLM on GPUs: its own weight transfer (nccl, ipc), and our receiver in it (ipc, broadcast).

vLLM comes from this Python, or from a folder::

    mkdir -p /tmp/site_vllm && cat vllm.tar.xz.part-* | tar -xJ -C /tmp/site_vllm
    WEIGHTCAST_VLLM_SITE=/tmp/site_vllm make gpu-test PYTHON=python3 TEST_ARGS="-k vllm --results DIR"

``WEIGHTCAST_VLLM_FLAGS`` replaces the flags that a build without FlashAttention needs.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engines.environment import package_path
from tests.gpu.needs import needs
from tests.gpu.servers import (
    PROMPTS,
    START_S,
    TOKENS,
    Record,
    Server,
    check_updates,
    models,
    started,
)
from tests.gpu.test_updates_gpu import digests, train
from weightcast.comm import nixl
from weightcast.lab.connect import connect as connect_in_lab
from weightcast.wire.vllm_versions import vllm_version

SITE = os.environ.get("WEIGHTCAST_VLLM_SITE", "")
FLAGS = os.environ.get("WEIGHTCAST_VLLM_FLAGS", "--attention-backend=TRITON_ATTN").split()
COMMUNICATOR_BYTES = 512 << 20  # a rank; 486 MiB were seen, for a trainer and one rank
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(not SITE and importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here"),
    pytest.mark.timeout(580),
]


class Vllm:
    def answers(self, server: Server) -> list[list[int]]:
        common = {"model": "m", "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        replies = [server.post("/v1/completions", common | {"prompt": prompt}) for prompt in PROMPTS]
        return [reply["choices"][0]["token_ids"] for reply in replies]

    def checksum(self, server: Server) -> str:
        return ""  # its own hashes empty tensors in some versions


def vllm(
    model: Path, log: Path, *, backend: str, gpus: list[int], eager: bool, host: str = "", options: Sequence[str] = ()
) -> AbstractContextManager[Server]:
    """vLLM on these GPUs, one rank on each; ``backend`` is of its weight transfer, ``weightcast`` is ours.

    It is started as ``vllm serve`` does, which knows ``--api-server-count``, if ``options`` has that.

    NCCL takes it for another machine if ``host`` names one (``NCCL_HOSTID``): what it then sends goes through sockets,
    and a rank of a group may be on the GPU of another rank.
    """
    path = [package_path(log.with_suffix(".metadata")), SITE, os.environ.get("PYTHONPATH", "")]
    environment = {
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(part for part in path if part),
        "VLLM_CACHE_ROOT": str(log.with_suffix(".cache")),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }
    if host:
        environment["NCCL_HOSTID"] = host
    if backend == "weightcast":
        environment["VLLM_PLUGINS"] = "weightcast"
    else:
        environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"

    def command(port: int) -> list[str]:
        several = any(option.startswith("--api-server-count") for option in options)
        program = ["vllm.entrypoints.cli.main", "serve"] if several else ["vllm.entrypoints.openai.api_server"]
        words = ["-m", *program, f"--model={model}", f"--port={port}", "--host=127.0.0.1"]
        words += ["--served-model-name=m", "--max-model-len=256", "--max-num-seqs=8", *FLAGS]
        # Others may be on these GPUs, so what is free is not counted.
        words += ["--gpu-memory-utilization=0.05", f"--kv-cache-memory-bytes={1 << 30}", "--no-enable-prefix-caching"]
        words += [f"--tensor-parallel-size={len(gpus)}", "--weight-transfer-config", f'{{"backend": "{backend}"}}']
        return [*words, *(["--enforce-eager"] if eager else []), *options]

    return started(command, gpus=tuple(gpus), log=log, environment=environment)


ONE = [0]
CASES = [
    pytest.param("llama", "ipc", "ipc", ["cuda:0"], ONE, True, id="vllm stock ipc, tp1, eager"),
    pytest.param("llama", "weightcast", "ipc", ["cuda:0"], ONE, False, id="vllm plug-in ipc, tp1, graphs"),
    pytest.param("qwen3_moe", "weightcast", "ipc", ["cuda:0"], ONE, True, id="vllm plug-in ipc, experts, eager"),
    pytest.param("qwen3_moe", "ipc", "ipc", ["cuda:0"], ONE, False, id="vllm stock ipc, experts, graphs"),
    pytest.param(
        "llama", "nccl", "broadcast", ["cuda:0"], [1], False, id="vllm stock nccl, tp1, graphs", marks=needs(2)
    ),
    pytest.param(
        "qwen3_moe", "nccl", "broadcast", ["cuda:0"], [1], True, id="vllm stock nccl, experts, eager", marks=needs(2)
    ),
    pytest.param(
        "llama", "weightcast", "broadcast", ["cuda:0"], [1], True, id="vllm plug-in nccl, tp1, eager", marks=needs(2)
    ),
    pytest.param(
        "llama", "ipc", "ipc", ["cuda:0", "cuda:1"], [0, 1], False, id="vllm stock ipc, tp2, graphs", marks=needs(2)
    ),
    pytest.param(
        *("llama", "weightcast", "ipc", ["cuda:0", "cuda:1"], [0, 1], True),
        id="vllm plug-in ipc, tp2, eager",
        marks=needs(2),
    ),
    pytest.param(
        "llama", "nccl", "broadcast", ["cuda:0"], [1, 2], True, id="vllm stock nccl, tp2, eager", marks=needs(3)
    ),
    pytest.param(
        *("llama", "nccl", "broadcast", ["cuda:0"], [0, 1], True),
        id="vllm stock nccl, tp2 as on another machine, eager",
        marks=needs(2),
    ),
    pytest.param(
        *("qwen3_moe", "weightcast", "broadcast", ["cuda:0"], [1, 2], False),
        id="vllm plug-in nccl, experts, tp2, graphs",
        marks=needs(3),
    ),
]


@pytest.mark.parametrize(("family", "backend", "via", "trainer", "gpus", "eager"), CASES)
def test_an_updated_engine_answers_as_one_started_on_the_weights(
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    record: Record,
    family: str,
    backend: str,
    via: str,
    trainer: list[str],
    gpus: list[int],
    eager: bool,
) -> None:
    a, b = models(tmp_path_factory, family)
    # Two implementations may route a token to different experts, with the same weights.
    stock_verify = "behaviour" if family == "llama" else "none"
    verify = "resident" if backend == "weightcast" else stock_verify
    # NCCL refuses a group that has a GPU twice, on one machine.
    host = "of-the-engine" if via == "broadcast" and "cuda:0" in trainer and 0 in gpus else ""
    common: dict[str, Any] = {"backend": backend, "gpus": gpus, "eager": eager, "host": host}
    with (
        vllm(a, tmp_path / "updated.log", **common) as server,
        vllm(b, tmp_path / "other.log", **common) as other,
    ):
        server.wait_ready()
        version = server.get("/version").json()["version"]
        record("vllm", version)
        # 0.25.1 drops an old group's communicator without destroying it and has no route for that, as 0.32 has.
        group_bytes = (
            COMMUNICATOR_BYTES * len(gpus) if backend == "nccl" and (vllm_version(version) or (0, 32)) < (0, 32) else 0
        )
        check_updates(
            *(Vllm(), server, other, (a, b)),
            via=via,
            trainer=trainer,
            verify=verify,
            record=record,
            group_bytes=group_bytes,
        )


def test_updates_reach_either_of_two_api_servers_and_no_value_is_read_twice(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, record: Record
) -> None:
    a, b = models(tmp_path_factory, "llama")
    common: dict[str, Any] = {"backend": "weightcast", "gpus": ONE, "eager": True}
    with (
        vllm(a, tmp_path / "updated.log", **common, options=["--api-server-count=2"]) as server,
        vllm(b, tmp_path / "other.log", **common) as other,
    ):
        server.wait_ready()
        record("vllm", server.get("/version").json()["version"])
        check_updates(*(Vllm(), server, other, (a, b)), via="ipc", trainer=["cuda:0"], verify="resident", record=record)
        log = server.log.read_text()
    assert "API server 1 hands requests that concern updates on to API server 0" in log
    assert "rank 0 read the checkpoint's names and shapes" in log


RDMA = pytest.param("rdma", 0, marks=pytest.mark.skipif(bool(nixl.missing()), reason=nixl.missing()))


@pytest.mark.parametrize(("way", "copies"), [("messages", 2), ("relay", 1), RDMA])
def test_two_servers_get_the_shards_of_two_trainer_ranks(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, record: Record, way: str, copies: int
) -> None:
    """All ranks are on one GPU, and for NCCL each on a host of its own; by relay a server passes on what it got.

    ``copies`` is how often all trainer ranks together send the model by messages.
    """
    a, b = models(tmp_path_factory, "llama")
    common: dict[str, Any] = {"backend": "weightcast", "gpus": ONE, "eager": True}
    with (
        vllm(a, tmp_path / "one.log", **common, host="one") as one,
        vllm(a, tmp_path / "two.log", **common, host="two") as two,
        vllm(b, tmp_path / "other.log", **common) as other,
    ):
        for server in (one, two, other):
            server.wait_ready()
        answers = {a: Vllm().answers(one), b: Vllm().answers(other)}
        assert all(old != new for old, new in zip(*answers.values(), strict=True))
        assert Vllm().answers(two) == answers[a]
        seconds: list[float] = []
        for model, versions in ((b, [1, 2]), (a, [3]), (b, [4])):
            result = train(
                ["cuda:0", "cuda:0"],
                [one.url, two.url],
                **({"transport": "rdma"} if way == "rdma" else {"transport": "direct", "direct_by": way}),
                apart=1,
                backend="gloo",
                model=model,
                dtype="bfloat16",
                versions=",".join(map(str, versions)),
                bucket_bytes=64 << 20,
                timeout=120.0,
            )
            assert result["ok"], result
            for row in (row for report in result["reports"] for row in report["targets"]):
                assert (row["status"], row["transport"], row["proof"]) == ("serving", "direct", "resident"), row
            size_bytes = copies * sum(report["bytes"] for report in result["reports"])
            assert size_bytes <= sum(result["sent_bytes"]) <= 1.02 * size_bytes, result["sent_bytes"]
            assert Vllm().answers(one) == Vllm().answers(two) == answers[model]
            seconds += [round(report["seconds"], 4) for report in result["reports"]]
        record("seconds", seconds)


@pytest.mark.parametrize("way", ["streams", "copies"])
def test_forward_passes_are_ordered_behind_the_exchange(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, record: Record, way: str
) -> None:
    a, b = models(tmp_path_factory, "llama")
    common: dict[str, Any] = {"backend": "weightcast", "gpus": ONE, "eager": False}
    with (
        vllm(
            a, tmp_path / "watched.log", **common, options=[f"--worker-extension-cls=tests.helpers.vllm_{way}.Streams"]
        ) as server,
        vllm(b, tmp_path / "expected.log", **common) as other,
    ):
        server.wait_ready()
        record("vllm", server.get("/version").json()["version"])
        other.wait_ready()
        server.post("/collective_rpc", {"method": "watch_streams"})
        loaded: list[Any] = [AutoModelForCausalLM.from_pretrained(each, dtype=torch.bfloat16) for each in (b, a)]
        trained = [model.to("cuda:0") for model in loaded]
        asked = {"model": "m", "prompt": PROMPTS[0], "max_tokens": 200, "temperature": 0, "ignore_eos": True}
        with ThreadPoolExecutor() as pool:
            running = [pool.submit(server.post, "/v1/completions", asked) for _ in range(8)]
            version = 0
            while not all(each.done() for each in running) or version % 2 == 0:
                model = trained[version % 2]
                with connect_in_lab(model, [server.url], transport="ipc", pause="in_place") as updater:
                    version += 1
                    [row] = updater.update(version=version).targets
                assert row.proof == "resident", row
            assert all(each.result()["usage"]["completion_tokens"] == 200 for each in running)
        [seen] = server.post("/collective_rpc", {"method": "streams_seen"})["results"]
        [mappings] = server.post("/collective_rpc", {"method": "mappings_seen"})["results"]
        record("streams", seen)
        record("mappings", mappings)
        assert len(seen["graph"]) == 1
        assert seen["module"] in ([], seen["graph"])  # a whole step may be one graph
        assert mappings["while a stream worked"] == 0
        if way == "copies":
            assert seen["exchange"] == seen["graph"]
            assert mappings["made"] == 0
        else:
            assert seen["exchange"] == []
            assert mappings["made"] >= version
        assert Vllm().answers(server) == Vllm().answers(other)


@needs(2)
def test_unproven_updates_by_broadcast_are_whole_when_they_end(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, record: Record
) -> None:
    a, b = models(tmp_path_factory, "llama")
    common: dict[str, Any] = {"backend": "weightcast", "gpus": ONE, "eager": False}
    with (
        vllm(a, tmp_path / "updated.log", **common) as server,
        vllm(b, tmp_path / "other.log", **common) as other,
    ):
        server.wait_ready()
        other.wait_ready()
        record("vllm", server.get("/version").json()["version"])
        resident = [digests(server.url), digests(other.url)]
        assert resident[0].keys() == resident[1].keys()
        assert resident[0] != resident[1]
        both: list[Any] = [AutoModelForCausalLM.from_pretrained(each, dtype=torch.bfloat16) for each in (a, b)]
        weights = [{name: tensor.to("cuda:1") for name, tensor in model.state_dict().items()} for model in both]
        trained = both[0].to("cuda:1")
        asked = {"model": "m", "prompt": PROMPTS[0], "max_tokens": 200, "temperature": 0, "ignore_eos": True}
        with (
            connect_in_lab(trained, [server.url], transport="broadcast", pause="in_place", verify="none") as updater,
            ThreadPoolExecutor() as pool,
        ):
            for version in range(1, 13):
                running = [pool.submit(server.post, "/v1/completions", asked) for _ in range(4)]
                trained.load_state_dict(weights[version % 2])
                [row] = updater.update(version=version).targets
                assert (row.version_after, row.proof) == (version, "none"), row
                assert digests(server.url) == resident[version % 2]
                assert all(each.result()["usage"]["completion_tokens"] == 200 for each in running)
            trained.load_state_dict(weights[1])
            updater.update(version=13)
        assert Vllm().answers(server) == Vllm().answers(other)


@needs(2)
def test_server_whose_experts_move_ends_at_its_start(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    a, _ = models(tmp_path_factory, "qwen3_moe")
    log = tmp_path / "balanced.log"
    options = ["--enable-expert-parallel", "--enable-eplb"]
    with vllm(a, log, backend="weightcast", gpus=[0, 1], eager=True, options=options) as server:
        assert server.process.wait(START_S) != 0
    assert "vLLM balances experts over ranks (enable_eplb)" in log.read_text(errors="replace")
