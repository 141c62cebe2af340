"""``direct`` on GPUs: engine ranks read trainer ranks' shards over CUDA IPC, or get them by NCCL messages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch

from tests.gpu.needs import needs
from tests.gpu.test_updates_gpu import digests, info, start_trainer, toy_engine, train
from tests.helpers.toy_engine import toy_weights
from weightcast.digest.definition import tensor_digest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

SHARED = {"backend": "gloo"}  # NCCL needs a GPU for each rank


def weights_of(seed: int, sign: int = 1, dtype: torch.dtype = torch.float32) -> dict[str, str]:
    """Digests of the toy engine's weights, or of their negatives."""
    return {name: tensor_digest((sign * tensor).to(dtype)) for name, tensor in toy_weights(seed=seed).items()}


@contextmanager
def engines(places: list[list[str]], *more: str, hosts: bool = False) -> Iterator[list[str]]:
    """Engines on these devices.  With ``hosts`` NCCL takes each for another machine's, so that they may share a GPU."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                toy_engine(
                    *("--tp", str(len(each)), "--devices", ",".join(each), "--seed", "1", *more),
                    **({"NCCL_HOSTID": f"engine-{number}"} if hosts else {}),
                )
            )[0]
            for number, each in enumerate(places)
        ]


def send(trainers: list[str], urls: list[str], **options: Any) -> None:
    answer = train(trainers, urls, **{"transport": "direct", "seed": 7, "bucket_bytes": 50_000} | options)
    assert answer["ok"], answer
    for report in answer["reports"]:
        assert [row["status"] for row in report["targets"]] == ["serving"] * len(urls)
        assert all(row["proof"] == "resident" for row in report["targets"])


SHARDS = {"direct_by": "shards", "keep_mapped": 1}


@pytest.mark.parametrize("way", [SHARDS, {"direct_by": "memory"}], ids=["shards", "memory"])
@pytest.mark.parametrize(
    ("world", "places"),
    [(1, [["cuda:0"]]), (2, [["cuda:0", "cuda:0"]]), (4, [["cuda:0", "cuda:0"], ["cuda:0", "cuda:0"]])],
    ids=["1 to tp1", "2 to tp2", "4 to 2 x tp2"],
)
def test_engine_ranks_read_shards_on_one_gpu(world: int, places: list[list[str]], way: dict[str, Any]) -> None:
    with engines(places) as urls:
        assert all(set(digests(url).values()).isdisjoint(weights_of(7).values()) for url in urls)
        send(["cuda:0"] * world, urls, versions="1,2,3", **way, **(SHARED if world > 1 else {}))
        for url in urls:
            assert digests(url) == weights_of(7)
            assert info(url)["version"] == 3


@pytest.mark.parametrize("transport", ["direct", "auto"])
@pytest.mark.parametrize("world", [1, 2])
def test_engine_ranks_cast_the_masters_that_they_read_on_one_gpu(world: int, transport: str) -> None:
    options = {"transport": transport, "keep_mapped": 1, "between": "moved", **(SHARED if world > 1 else {})}
    with engines([["cuda:0"] * world], "--dtype", "bfloat16") as [url]:
        answer = train(["cuda:0"] * world, [url], seed=7, versions="1,2", bucket_bytes=50_000, **options)
        assert answer["ok"], answer
        for report in answer["reports"]:
            assert (report["transport"], report["buckets"]) == ("direct", 1)  # there is nothing that was not mapped
            assert report["cast"] == {"bfloat16": len(weights_of(7))}
            assert [row["proof"] for row in report["targets"]] == ["resident"]
            assert [leg["by"] for leg in report["targets"][0]["legs"]] == ["mapped"]
        assert digests(url) == weights_of(7, -1, torch.bfloat16)


@needs(2)
def test_masters_for_engines_on_other_gpus_are_cast_into_buckets() -> None:
    with engines([["cuda:0", "cuda:1"]], "--dtype", "bfloat16") as [url]:
        answer = train(
            ["cuda:0", "cuda:1"], [url], seed=7, versions="1,2", bucket_bytes=50_000, transport="auto", keep_mapped=1
        )
        assert answer["ok"], answer
        assert all(report["transport"] == "direct" and report["buckets"] > 1 for report in answer["reports"])
        assert digests(url) == weights_of(7, dtype=torch.bfloat16)


@needs(2)
@pytest.mark.parametrize("way", [SHARDS, {"direct_by": "memory"}], ids=["shards", "memory"])
@pytest.mark.parametrize(
    ("trainers", "places"),
    [
        (["cuda:0", "cuda:1"], [["cuda:0", "cuda:1"]]),
        (["cuda:0", "cuda:1"], [["cuda:0"], ["cuda:1"]]),
        (["cuda:0"], [["cuda:1"]]),
        (["cuda:1", "cuda:0"], [["cuda:0", "cuda:1"]]),
    ],
    ids=["2 to tp2", "2 to 2 engines", "1+1", "2 to tp2, crossed"],
)
def test_engine_ranks_read_shards_on_other_gpus(
    trainers: list[str], places: list[list[str]], way: dict[str, Any]
) -> None:
    with engines(places) as urls:
        send(trainers, urls, versions="1,2,3", **way)
        for url in urls:
            assert digests(url) == weights_of(7)


@pytest.mark.parametrize("world", [1, 2])
def test_weights_that_have_moved_are_read_where_they_lie_now(world: int) -> None:
    with engines([["cuda:0"]]) as [url]:
        send(["cuda:0"] * world, [url], versions="1,2", between="moved", **SHARDS, **(SHARED if world > 1 else {}))
        assert digests(url) == weights_of(7, sign=-1)


def test_released_memory_is_mapped_again(record: Any) -> None:
    with engines([["cuda:0"]]) as [url]:
        send(["cuda:0"], [url], versions="1,2,3", between="released", **SHARDS)
        assert digests(url) == weights_of(7)


def test_memory_that_cannot_be_shared_is_refused_before_anything_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    with engines([["cuda:0"]]) as [url]:
        before = digests(url)
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # of the trainer alone
        answer = train(["cuda:0"], [url], transport="direct", seed=7, versions="1", **SHARDS)
        assert not answer["ok"]
        assert "cannot be shared" in answer["text"], answer
        assert digests(url) == before


@needs(2)
@pytest.mark.parametrize(
    ("trainers", "places", "way"),
    [
        (["cuda:0"], [["cuda:1"]], "messages"),
        pytest.param(["cuda:0", "cuda:1"], [["cuda:2", "cuda:3"]], "messages", marks=needs(4)),
        pytest.param(["cuda:0"], [["cuda:1"], ["cuda:2"]], "relay", marks=needs(3)),
    ],
    ids=["1+1", "2+2 tp2", "1+1+1 by relay"],
)
def test_trainer_ranks_send_shards_by_nccl(trainers: list[str], places: list[list[str]], way: str) -> None:
    with engines(places) as urls:
        send(trainers, urls, versions="1,2,3", direct_by=way)
        for url in urls:
            assert digests(url) == weights_of(7)


@needs(2)
@pytest.mark.parametrize("count", [2, 3])
def test_engines_on_one_gpu_pass_shards_on_as_hosts_do(count: int) -> None:
    with engines([["cuda:1"]] * count, hosts=True) as urls:
        send(["cuda:0"], urls, versions="1,2,3", direct_by="relay")
        for url in urls:
            assert digests(url) == weights_of(7)


def test_nccl_messages_on_one_gpu_are_refused() -> None:
    with engines([["cuda:0"]]) as [url]:
        [trainer] = start_trainer(["cuda:0"], [url], transport="direct", direct_by="messages", seed=7)
        output, _ = trainer.communicate(timeout=100)
        assert "NCCL needs a GPU for each rank" in output
