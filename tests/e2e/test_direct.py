"""Transport ``direct``: engine ranks read trainer ranks' shards; nothing is gathered."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from transformers import AutoModelForCausalLM

from tests.e2e.engines import engines
from tests.harness import SMALL_BUCKETS, ToyTrainer, next_version, on_every_rank, serves_whole, trainer_of
from tests.tiny import tiny_model
from tests.unit.ranks import Ranks
from weightcast import ConfigError, UpdateFailed, WeightUpdater
from weightcast.comm.shared_buckets import SharedSlot
from weightcast.comm.trainer_group import TrainerGroup
from weightcast.digest.definition import tensor_digest
from weightcast.errors import TrainerRankFailed


@pytest.fixture(scope="module")
def jobs() -> Iterator[Callable[[int], Ranks]]:
    """Trainer jobs of two and four ranks."""
    started: dict[int, Ranks] = {}

    def job(world_size: int) -> Ranks:
        if world_size not in started:
            started[world_size] = Ranks(world_size)
        return started[world_size]

    yield job
    for ranks in started.values():
        ranks.close()


def sharded(version: int, mesh_shape: tuple[int, ...]) -> ToyTrainer:
    model = trainer_of(version)
    names = ("replicate", "shard")[-len(mesh_shape) :]
    fully_shard(model, mesh=init_device_mesh("cpu", mesh_shape, mesh_dim_names=names))
    return model


def no_moves(*_, **__) -> None:
    raise AssertionError("direct gathered something")


def update_directly(urls: list[str], versions: list[int], mesh_shape: tuple[int, ...], options: dict) -> list[str]:
    """The report of each update; the weights are changed before each."""
    move, TrainerGroup.move = TrainerGroup.move, no_moves
    model = sharded(versions[0], mesh_shape)
    reports: list[str] = []
    try:
        with WeightUpdater.connect(
            model, urls, **{"transport": "direct", "timeout_s": 30.0, "min_proven_share": 0.5} | options
        ) as updater:
            for version in versions:
                source = dict(trainer_of(version).named_parameters())
                with torch.no_grad():
                    for name, parameter in model.named_parameters():
                        where = parameter.device_mesh, parameter.placements
                        parameter.to_local().copy_(distribute_tensor(source[name].data, *where).to_local())
                reports.append(on_every_rank(updater.update(version=version)))
    finally:
        TrainerGroup.move = move
    return reports


@pytest.mark.parametrize(
    ("mesh_shape", "bucket_bytes"), [((2,), SMALL_BUCKETS), ((2, 2), 1 << 20)], ids=["2 ranks", "2 x 2 ranks"]
)
def test_engines_read_shards_and_prove_them_update_after_update(fresh, jobs, mesh_shape, bucket_bytes):
    chosen = [fresh("--local"), fresh("--tp", "2"), fresh("--local", "--staging", "none", "--computed")]
    versions = [next_version() for _ in range(3)]
    urls = [engine.url for engine in chosen]
    ranks = jobs(2 * len(mesh_shape))
    for reports in ranks.run(update_directly, urls, versions, mesh_shape, {"bucket_bytes": bucket_bytes}):
        for version, text in zip(versions, reports, strict=True):
            report = json.loads(text)
            assert [row["version_after"] for row in report["targets"]] == [version] * 3
            assert [row["proof"] for row in report["targets"]] == ["resident", "resident", "partial"]
    assert [serves_whole(engine) for engine in chosen[:2]] == [versions[-1]] * 2


def update_with_a_flipped_bit(url: str, version: int) -> str:
    share = SharedSlot.share

    def flipping(self, **options):
        if dist.get_rank() == 1:
            self.data[-3] ^= 1  # of the last rows, which this rank has
        return share(self, **options)

    SharedSlot.share = flipping
    model = sharded(version, (2,))
    try:
        with WeightUpdater.connect(model, [url], transport="direct", bucket_bytes=4 << 20, timeout_s=30.0) as updater:
            updater.update(version=version)
    except UpdateFailed as error:
        return str(error)
    finally:
        SharedSlot.share = share
    return "updated"


def test_a_bit_that_flips_in_a_trainers_buffer_is_found_before_the_commit(fresh, jobs):
    engine, version = fresh("--tp", "2"), next_version()
    for text in jobs(2).run(update_with_a_flipped_bit, engine.url, version):
        assert "received something else than was sent" in text
    assert serves_whole(engine) == 0


def die_in_an_update(url: str, version: int) -> str:
    share, shared = SharedSlot.share, []

    def dying(self, **options):
        shared.append(1)
        if dist.get_rank() == 1 and len(shared) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return share(self, **options)

    SharedSlot.share = dying
    model = sharded(version, (2,))
    try:
        with WeightUpdater.connect(model, [url], transport="direct", bucket_bytes=30_000, timeout_s=10.0) as updater:
            updater.update(version=version)
    except TrainerRankFailed as error:
        return str(error)
    return "updated"


def test_a_trainer_rank_that_dies_is_named_and_the_engine_keeps_its_weights(fresh):
    engine, ranks = fresh("--local"), Ranks(2)
    try:
        ranks.start(die_in_an_update, engine.url, next_version())
        assert "trainer rank 1" in ranks.answer(0)
    finally:
        ranks.close()
    assert serves_whole(engine) == 0


def refused(url: str, options: dict) -> str:
    try:
        with WeightUpdater.connect(sharded(1, (2,)), [url], transport="direct", **options):
            return "connected"
    except ConfigError as error:
        return str(error)


def test_what_cannot_be_proven_is_refused_by_name(fresh, jobs):
    wide, narrow = fresh("--local"), fresh("--local", "--dtype", "bfloat16")
    for text in jobs(2).run(refused, wide.url, {"digest": "sha256"}):
        assert "digest='sha256' does not add up over shards" in text
    for text in jobs(2).run(refused, narrow.url, {}):
        assert "keeps embed.weight in bfloat16, and it travels in float32" in text
    for text in jobs(2).run(refused, narrow.url, {"wire_dtype": "bf16"}):
        assert text == "connected"


def train_and_update(folder: str, urls: list[str], versions: list[int]) -> list[tuple[str, dict[str, str]]]:
    """The report of each update of a Hugging Face model, and the digests of the whole model then."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    for layer in model.model.layers:
        fully_shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    told: list[tuple[str, dict[str, str]]] = []
    with WeightUpdater.connect(model, urls, transport="direct", bucket_bytes=1 << 16, timeout_s=60.0) as updater:
        for version in versions:
            tokens = torch.tensor([[5 + version, 17, 3, 29]])
            model(tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            report = on_every_rank(updater.update(version=version))
            whole = {name: tensor.full_tensor().detach() for name, tensor in model.named_parameters()}
            told.append((report, {name: tensor_digest(tensor) for name, tensor in whole.items()}))
    return told


@pytest.mark.wide
@pytest.mark.parametrize("world_size", [2, 4])
def test_reference_engines_of_any_width_keep_what_was_trained(tmp_path, jobs, world_size):
    tiny_model(tmp_path / "model")
    with engines(tmp_path / "model", tmp_path, {"tp": 1}, {"tp": 2}, {"tp": 3}) as chosen:
        before = [engine.digests() for engine in chosen]
        urls = [engine.url for engine in chosen]
        for told in jobs(world_size).run(train_and_update, str(tmp_path / "model"), urls, [1, 2, 3]):
            for version, (text, _) in enumerate(told, start=1):
                rows = json.loads(text)["targets"]
                assert [(row["version_after"], row["proof"]) for row in rows] == [(version, "resident")] * 3
            assert told[0][1] != told[1][1] != told[2][1]
        assert [engine.digests() for engine in chosen] == [told[2][1]] * 3
        assert told[2][1] not in before
