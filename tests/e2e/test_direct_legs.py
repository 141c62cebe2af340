"""``direct`` where trainer ranks and engine ranks share some hosts: memory on one host, messages between two.

The hosts are namespaces with networks and shared memory of their own; this process is on neither.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.clock import PATIENCE_S
from tests.harness import ToyTrainer, next_version, on_every_rank
from tests.hosts import INTERFACE, Host, cannot, enter, hosts
from tests.placed import SpreadEngine
from tests.toy_engine import toy_weights
from tests.unit.ranks import Ranks
from weightcast import UpdateFailed, WeightUpdater
from weightcast.comm.trainer_group import TrainerGroup
from weightcast.comm.update_group import UpdateGroup
from weightcast.digest.definition import model_digest, tensor_digest
from weightcast.errors import TrainerRankFailed
from weightcast.update.served_parts import ServedParts

pytestmark = [pytest.mark.skipif(bool(cannot()), reason=cannot())]

ROWS = 12_000  # of the embedding: 3 MB, so that what is said about the weights is little beside them
RANKS_ON_ALPHA = 2
KILLED_S = 10.0  # deadline of an update that loses somebody


def live_on(places: list[Host], rank: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    enter(places[rank])


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> Iterator[list[Host]]:
    with hosts(("alpha", "beta", "gamma"), tmp_path_factory.mktemp("hosts")) as found:
        yield found


def job_on(*places: Host) -> Ranks:
    return Ranks(len(places), place=partial(live_on, list(places)), address=places[0].address)


@pytest.fixture(scope="module")
def job(places: list[Host]) -> Iterator[Ranks]:
    """Two trainer ranks on each of the first two hosts."""
    alpha, beta, _ = places
    ranks = job_on(alpha, alpha, beta, beta)
    yield ranks
    ranks.close()


@pytest.fixture
def spread() -> Iterator[Callable[..., SpreadEngine]]:
    """Starts engines with a rank on each of some hosts."""
    started: list[SpreadEngine] = []

    def start(*places: Host) -> SpreadEngine:
        started.append(SpreadEngine(*places, options=[f"--rows={ROWS}"]))
        return started[-1]

    yield start
    for engine in started:
        engine.close()


def weights_of(version: int) -> dict[str, torch.Tensor]:
    return toy_weights(seed=version, rows=ROWS)


def trainer_of(version: int, mesh: tuple[int, ...]) -> ToyTrainer:
    model = ToyTrainer(weights_of(version))
    fully_shard(model, mesh=init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard")[-len(mesh) :]))
    return model


def set_shards(model: ToyTrainer, version: int, mesh: tuple[int, ...]) -> None:
    new = dict(trainer_of(version, mesh).named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.to_local().copy_(new[name].to_local())


def check_serves(engines: list[SpreadEngine], version: int) -> None:
    """The engines serve exactly this version."""
    digests = {name: tensor_digest(tensor) for name, tensor in weights_of(version).items()}
    for engine in engines:
        info = engine.info()
        assert (info.state, info.version) == ("serving", version), info.message
        assert info.digest in (None, model_digest(digests))
        assert engine.digests() == digests


def no_moves(*_, **__) -> None:
    raise AssertionError("direct gathered something")


def begin(urls: list[str], version: int, mesh: tuple[int, ...], options: dict) -> None:
    """Keeps an updater in this rank for ``go_on``."""
    TrainerGroup.move = no_moves
    model = trainer_of(version, mesh)
    options = {"transport": "direct", "bucket_bytes": 1 << 20, "timeout_s": PATIENCE_S} | options
    kept.update(model=model, mesh=mesh, updater=WeightUpdater.connect(model, urls, **options))


def go_on(version: int) -> str:
    set_shards(kept["model"], version, kept["mesh"])
    return on_every_rank(kept["updater"].update(version=version))


def finish() -> None:
    kept.pop("updater").close()


kept: dict = {}


def wanted_bytes(places: list[Host], holder: Host, mesh_is_replicated: bool = False) -> int:
    """Bytes that the ranks of a toy engine, one on each of some hosts, keep of what one trainer host has.

    The trainer has four shards, two on each of its hosts.
    """
    total = 0
    for name, tensor in weights_of(0).items():
        owner = torch.zeros_like(tensor, dtype=torch.bool)
        chunks = owner.chunk(4)
        for chunk in chunks[:RANKS_ON_ALPHA] if holder.name == "alpha" else chunks[RANKS_ON_ALPHA:]:
            chunk.fill_(True)
        for rank in range(len(places)):
            part = owner
            for word, dim in ((".up.", 0), (".down.", 1)):
                if word in name:
                    size = owner.shape[dim] // len(places)
                    part = owner.narrow(dim, rank * size, size)
            total += int(part.sum()) * tensor.itemsize if places[rank] is not holder else 0
    return total


def legs(row: dict) -> set[tuple[tuple[int, ...], str, tuple[int, ...]]]:
    return {(tuple(leg["ranks"]), leg["by"], tuple(leg["trainers"])) for leg in row["legs"]}


def test_bytes_between_ranks_of_one_host_go_by_memory_and_only_the_rest_on_the_wire(places, job, spread) -> None:
    alpha, beta, _ = places
    where = [[alpha, beta], [alpha], [beta, beta]]
    engines = [spread(*some) for some in where]
    check_serves(engines, 0)
    job.run(begin, [engine.url for engine in engines], 1, (4,), {})
    versions = [next_version() for _ in range(2)]
    job.run(go_on, versions[0])
    check_serves(engines, versions[0])
    counters = [(host, interface) for host in (alpha, beta) for interface in (INTERFACE, "lo")]
    before = [host.sent_bytes(interface) for host, interface in counters]
    reports = [json.loads(text) for text in job.run(go_on, versions[1])]
    sent = [host.sent_bytes(name) - old for (host, name), old in zip(counters, before, strict=True)]
    job.run(finish)
    check_serves(engines, versions[1])

    # Each byte of a shard crosses the network once for each rank elsewhere that keeps it.  None goes by the loopback.
    outward = [sum(wanted_bytes(some, host) for some in where) for host in (alpha, beta)]
    print(f"wanted from the other host: {outward}; sent to others and to itself: {sent}")
    for expected, wire, loopback in zip(outward, sent[0::2], sent[1::2], strict=True):
        assert expected <= wire < 1.1 * expected + (200 << 10)
        assert loopback < 0.1 * expected

    rows = reports[0]["targets"]
    assert {(row["transport"], row["proof"], row["version_after"]) for row in rows} == {
        ("direct", "resident", versions[1])
    }
    assert all(report == reports[0] for report in reports)
    on_alpha, on_beta = (0, 1), (2, 3)
    assert legs(rows[0]) == {
        ((0,), "memory", on_alpha),
        ((0,), "messages", on_beta),
        ((1,), "memory", on_beta),
        ((1,), "messages", on_alpha),
    }
    assert legs(rows[1]) == {((0,), "memory", on_alpha), ((0,), "messages", on_beta)}
    assert legs(rows[2]) == {((0, 1), "memory", on_beta), ((0, 1), "messages", on_alpha)}
