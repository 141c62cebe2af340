"""Transport ``direct``: engine ranks read trainer ranks' shards; nothing is gathered."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from transformers import AutoModelForCausalLM

from tests.helpers.clock import PATIENCE_S
from tests.helpers.engines import engines
from tests.helpers.harness import (
    SMALL_BUCKETS,
    ToyTrainer,
    next_version,
    on_every_rank,
    serves_whole,
    set_shards,
    share_memory,
    trainer_of,
)
from tests.helpers.ranks import Ranks, trainer_jobs
from tests.helpers.tiny import tiny_model
from tests.helpers.toy_engine import toy_weights
from weightcast import ConfigError, UpdateFailed
from weightcast.comm import nixl
from weightcast.comm.group_moves import Move
from weightcast.comm.trainer_group import TrainerGroup
from weightcast.comm.update_group import UpdateGroup
from weightcast.digest.definition import tensor_digest
from weightcast.errors import WeightcastError
from weightcast.lab.connect import connect as connect_in_lab
from weightcast.update.head import Head
from weightcast.update.packs import Packs


@pytest.fixture(scope="module")
def jobs() -> Iterator[Callable[[int], Ranks]]:
    """Trainer jobs of two and four ranks."""
    with trainer_jobs() as job:
        yield job


def sharded(version: int, mesh_shape: tuple[int, ...]) -> ToyTrainer:
    model = trainer_of(version)
    names = ("replicate", "shard")[-len(mesh_shape) :]
    fully_shard(model, mesh=init_device_mesh("cpu", mesh_shape, mesh_dim_names=names))
    return model


def in_shared_memory(version: int, mesh_shape: tuple[int, ...]) -> ToyTrainer:
    """As ``sharded``, with each rank's shards in a buffer that other processes can map."""
    names = ("replicate", "shard")[-len(mesh_shape) :]
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    model = trainer_of(version)
    model.buffer = share_memory(model, mesh, [Replicate(), Shard(0)][-len(mesh_shape) :])
    return model


DIRECT = {"transport": "direct"}
MEMORY = {"direct_by": "memory"}
MESSAGES = {"direct_by": "messages"}
RDMA = {"transport": "rdma"}
RELAY = {"direct_by": "relay"}
SHARDS = {"direct_by": "shards", "keep_mapped": True}
needs_nixl = pytest.mark.skipif(bool(nixl.missing()), reason=nixl.missing())
BY_RDMA = pytest.param(RDMA, marks=needs_nixl, id="rdma")
WAYS = [
    pytest.param(MEMORY, id="memory"),
    pytest.param(MESSAGES, id="messages"),
    pytest.param(RELAY, id="relay"),
    pytest.param(SHARDS, id="shards"),
]
EVERY_WAY = pytest.mark.parametrize("way", [*WAYS, BY_RDMA])
# While somebody waits, NIXL keeps a processor busy in every process: half a minute of them for a process that dies,
# and nearly as much for four trainer ranks.
LATE_BY_RDMA = pytest.param(RDMA, marks=[needs_nixl, pytest.mark.wide], id="rdma")


def no_moves(*_, **__) -> None:
    raise AssertionError("direct gathered something")


def update_directly(urls: list[str], versions: list[int], mesh_shape: tuple[int, ...], options: dict) -> list[str]:
    """The report of each update; the weights are changed before each."""
    move, TrainerGroup.move = TrainerGroup.move, no_moves
    model = (in_shared_memory if options.get("keep_mapped") else sharded)(versions[0], mesh_shape)
    reports: list[str] = []
    try:
        with connect_in_lab(model, urls, **{"transport": "direct", "timeout_s": PATIENCE_S} | options) as updater:
            for version in versions:
                set_shards(model, version)
                reports.append(on_every_rank(updater.update(version=version)))
    finally:
        TrainerGroup.move = move
    return reports


@pytest.mark.parametrize(
    ("mesh_shape", "bucket_bytes", "way"),
    [
        pytest.param(shape, size, *way.values, id=f"{name}-{way.id}", marks=way.marks)
        for name, shape, size, by_rdma in (
            ("2 ranks", (2,), SMALL_BUCKETS, BY_RDMA),
            ("2 x 2 ranks", (2, 2), 1 << 20, LATE_BY_RDMA),
        )
        for way in (*WAYS, by_rdma)
    ],
)
def test_engines_read_shards_and_prove_them_update_after_update(fresh, jobs, mesh_shape, bucket_bytes, way):
    chosen = [fresh("--local"), fresh("--tp", "2"), fresh("--local", "--staging", "none", "--computed")]
    weights = toy_weights(seed=0)
    whole = sum(tensor.nbytes for tensor in weights.values())
    twice = sum(tensor.nbytes for name, tensor in weights.items() if ".up." not in name and ".down." not in name)
    versions = [next_version() for _ in range(3)]
    urls = [engine.url for engine in chosen]
    ranks = jobs(2 * len(mesh_shape))
    options = {"bucket_bytes": bucket_bytes, **way}
    for reports in ranks.run(update_directly, urls, versions, mesh_shape, options):
        for version, text in zip(versions, reports, strict=True):
            report = json.loads(text)
            assert [row["version_after"] for row in report["targets"]] == [version] * 3
            assert [row["proof"] for row in report["targets"]] == ["resident"] * 3
            for row, expected in zip(report["targets"], [whole, whole + twice, whole], strict=True):
                (leg,) = row["legs"]
                assert leg["bytes"] == expected
                assert 0 < leg["seconds"] < report["seconds"]
    assert [serves_whole(engine) for engine in chosen[:2]] == [versions[-1]] * 2


def flip_in_a_pack() -> Callable[[], None]:
    """The first run that rank 1 has packed for an engine rank."""
    packing = Packs.pack

    def flipping(self, bucket, plan, out):
        packing(self, bucket, plan, out)
        assert plan.packed_bytes
        if dist.get_rank() == 1:
            out[0] ^= 1

    Packs.pack = flipping
    return lambda: setattr(Packs, "pack", packing)


def flip_on_the_way() -> Callable[[], None]:
    """A message from rank 1 to the second engine rank."""
    start = UpdateGroup.start_moves

    def flipping(self, sends, receives=()):
        moves = [Move(peer, data.clone()) for peer, data in sends]
        for peer, data in moves:
            if self.rank == 1 and peer == 3:
                data[0] ^= 1
        kept.append(moves)
        return start(self, moves, receives)

    kept: list = []
    UpdateGroup.start_moves = flipping
    return lambda: setattr(UpdateGroup, "start_moves", start)


def update_with_a_flipped_bit(url: str, version: int, options: dict, flip: Callable[[], Callable[[], None]]) -> str:
    restore = flip()
    model = (in_shared_memory if options.get("keep_mapped") else sharded)(version, (2,))
    try:
        with connect_in_lab(model, [url], bucket_bytes=4 << 20, timeout_s=PATIENCE_S, **(DIRECT | options)) as updater:
            updater.update(version=version)
    except UpdateFailed as error:
        return str(error)
    finally:
        restore()
    return "updated"


@pytest.mark.parametrize(
    ("options", "flip", "name"),
    [
        (MESSAGES, flip_on_the_way, ""),
        pytest.param(RDMA, flip_in_a_pack, "embed.weight", marks=needs_nixl),
    ],
    ids=["message", "pack"],
)
def test_a_bit_that_flips_on_any_leg_is_found_before_the_commit(fresh, jobs, options, flip, name):
    engine, version = fresh("--tp", "2"), next_version()
    for text in jobs(2).run(update_with_a_flipped_bit, engine.url, version, options, flip):
        assert "received something else than was sent" in text
        assert name in text
        assert "(on any of 2 ranks)" in text
    assert serves_whole(engine) == 0


def lose_an_engine(
    urls: list[str], victim: int, versions: list[int], options: dict, timeout_s: float = 10.0
) -> list[str]:
    """Two updates; the engine's process is killed after the third bucket of the first one."""

    def kill(done: int, total: int) -> None:
        seen.append(done)
        if len(seen) == 3:
            os.kill(victim, signal.SIGKILL)

    seen: list[int] = []
    told = []
    model = (in_shared_memory if options.get("keep_mapped") else sharded)(versions[0], (2,))
    with connect_in_lab(
        model,
        urls,
        bucket_bytes=30_000,
        timeout_s=timeout_s,
        on_failure="quarantine",
        progress=kill,
        **(DIRECT | options),
    ) as updater:
        for version in versions:
            set_shards(model, version)
            told.append(on_every_rank(updater.update(version=version)))
    return told


def lose_an_engine_slowly(*args, seconds: float) -> list[str]:
    """As ``lose_an_engine``; the head takes ``seconds`` to learn what the loss means."""
    learn = Head.exchange_failed

    def slowly(self: Head, failures, *rest) -> None:
        if any(failures):
            time.sleep(seconds)
        learn(self, failures, *rest)

    Head.exchange_failed = slowly
    try:
        return lose_an_engine(*args)
    finally:
        Head.exchange_failed = learn


@pytest.mark.deadlines
def test_trainer_ranks_wait_while_the_head_is_busy_with_a_lost_engine(fresh, jobs):
    lost, kept = fresh("--tp", "2"), fresh("--tp", "2")
    versions = [next_version(), next_version()]
    victim = lost.info().ranks[1].pid
    told = jobs(2).run(
        partial(lose_an_engine_slowly, seconds=5.0), [lost.url, kept.url], victim, versions, MESSAGES, 4.0
    )
    assert json.loads(told[1][0])["targets"][0]["status"] != "serving"
    assert serves_whole(kept) == versions[-1]


def move_and_release(url: str, versions: list[int]) -> list[str]:
    """Updates after the weights were moved, after ``release``, and from memory that cannot be mapped."""
    model = in_shared_memory(versions[0], (2,))
    told: list[str] = []
    with connect_in_lab(
        model, [url], transport="direct", bucket_bytes=1 << 20, timeout_s=PATIENCE_S, **SHARDS
    ) as updater:
        told.append(on_every_rank(updater.update(version=versions[0])))
        before = model.buffer
        other = in_shared_memory(versions[1], (2,))
        replace(model, dict(other.named_parameters()))
        before.data.fill_(255)  # what an engine would read that had not noticed
        told.append(on_every_rank(updater.update(version=versions[1])))
        updater.release()
        before.close()
        set_shards(model, versions[2])
        told.append(on_every_rank(updater.update(version=versions[2])))
        replace(model, dict(sharded_alone(versions[3]).named_parameters()))
        try:
            updater.update(version=versions[3])
        except WeightcastError as error:
            told.append(str(error))
    return told


def replace(model: ToyTrainer, parameters: dict[str, nn.Parameter]) -> None:
    """Gives each parameter the other one's memory, as an offload and a reload do."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter._local_tensor.set_(parameters[name].to_local())  # ``to_local`` is another view of the memory


def sharded_alone(version: int) -> ToyTrainer:
    """Shards in memory of this process alone."""
    model = in_shared_memory(version, (2,))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter._local_tensor.set_(parameter.to_local().clone())
    return model


def test_weights_that_have_moved_are_read_where_they_lie_and_private_memory_is_refused(fresh, jobs):
    engine = fresh("--tp", "2")
    versions = [next_version() for _ in range(4)]
    for told in jobs(2).run(move_and_release, engine.url, versions):
        for version, text in zip(versions, told[:3], strict=False):
            assert [(row["version_after"], row["proof"]) for row in json.loads(text)["targets"]] == [
                (version, "resident")
            ]
        assert "memory that other processes cannot map" in told[3] or "trainer rank" in told[3]
    assert serves_whole(engine) == versions[2]


def keep_some_private(url: str, versions: list[int]) -> list[str]:
    """Two updates of weights of which rank 1 keeps one in memory of its own."""
    model = in_shared_memory(versions[0], (2,))
    if dist.get_rank() == 1:
        with torch.no_grad():
            shard = model.get_parameter("layers.1.up.weight")._local_tensor
            shard.set_(shard.clone())
    told = []
    with connect_in_lab(model, [url], transport="direct", bucket_bytes=4096, timeout_s=PATIENCE_S, **SHARDS) as updater:
        for version in versions:
            set_shards(model, version)
            told.append(on_every_rank(updater.update(version=version)))
    return told


def test_a_tensor_that_cannot_be_mapped_goes_by_bucket_in_the_same_session(fresh, jobs):
    engine = fresh("--tp", "2")
    versions = [next_version(), next_version()]
    for told in jobs(2).run(keep_some_private, engine.url, versions):
        for version, text in zip(versions, told, strict=True):
            report = json.loads(text)
            assert [(row["version_after"], row["proof"]) for row in report["targets"]] == [(version, "resident")]
            size_bytes = 256 * 64 * 4
            assert report["buckets"] == 1 + size_bytes // 4096  # one for all others, and those of this tensor
            mapped, buffer = report["targets"][0]["legs"]
            assert (mapped["by"], buffer["by"], buffer["bytes"]) == ("mapped", "buffer", size_bytes)
    assert serves_whole(engine) == versions[-1]


def refused(url: str, options: dict) -> str:
    try:
        with connect_in_lab(sharded(1, (2,)), [url], transport="direct", **options):
            return "connected"
    except ConfigError as error:
        return str(error)


def test_what_cannot_be_proven_is_refused_by_name(fresh, jobs):
    narrow = fresh("--local", "--dtype", "bfloat16")
    for text in jobs(2).run(refused, narrow.url, {"wire_dtype": "float32"}):
        assert "keeps embed.weight in bfloat16, and it travels in float32" in text
    for options in ({}, {"wire_dtype": "bf16"}):
        for text in jobs(2).run(refused, narrow.url, options):
            assert text == "connected"


def train_and_update(
    folder: str, urls: list[str], versions: list[int], options: dict
) -> list[tuple[str, dict[str, str]]]:
    """The report of each update of a Hugging Face model, and the digests of the whole model then."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    for layer in model.model.layers:
        fully_shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    told: list[tuple[str, dict[str, str]]] = []
    with connect_in_lab(model, urls, bucket_bytes=1 << 16, timeout_s=60.0, **(DIRECT | options)) as updater:
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
@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        pytest.param(2, {}, id="2 ranks"),
        pytest.param(4, {}, id="4 ranks"),
        *(pytest.param(size, RDMA, marks=needs_nixl, id=f"{size} ranks by rdma") for size in (1, 2, 4)),
    ],
)
def test_reference_engines_of_any_width_keep_what_was_trained(tmp_path, jobs, world_size, options):
    tiny_model(tmp_path / "model")
    with engines(tmp_path / "model", tmp_path, {"tp": 1}, {"tp": 2}, {"tp": 3}) as chosen:
        before = [engine.digests() for engine in chosen]
        urls = [engine.url for engine in chosen]
        for told in jobs(world_size).run(train_and_update, str(tmp_path / "model"), urls, [1, 2, 3], options):
            for version, (text, _) in enumerate(told, start=1):
                rows = json.loads(text)["targets"]
                assert [(row["version_after"], row["proof"]) for row in rows] == [(version, "resident")] * 3
            assert told[0][1] != told[1][1] != told[2][1]
        assert [engine.digests() for engine in chosen] == [told[2][1]] * 3
        assert told[2][1] not in before
