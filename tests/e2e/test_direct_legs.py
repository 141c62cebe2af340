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

from tests.helpers.clock import PATIENCE_S
from tests.helpers.harness import ToyTrainer, next_version, on_every_rank
from tests.helpers.hosts import INTERFACE, Host, cannot, enter, hosts
from tests.helpers.placed import SpreadEngine
from tests.helpers.ranks import Ranks
from tests.helpers.stolen import Inexcusable
from tests.helpers.toy_engine import toy_weights
from weightcast.comm.trainer_group import TrainerGroup
from weightcast.digest.definition import model_digest, tensor_digest
from weightcast.errors import TrainerRankFailed
from weightcast.lab.connect import connect as connect_in_lab
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

    def start(*places: Host, stranger: int | None = None) -> SpreadEngine:
        """``stranger`` is a rank that the kernel refuses the trainer's memory."""
        strange = [] if stranger is None else [f"--stranger={stranger}"]
        started.append(SpreadEngine(*places, options=[f"--rows={ROWS}", *strange]))
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
        if info.digest not in (None, model_digest(digests)) or engine.digests() != digests:
            raise Inexcusable(f"{engine.url} says version {version} and keeps other weights")


def no_moves(*_, **__) -> None:
    raise AssertionError("direct gathered something")


def begin(urls: list[str], version: int, mesh: tuple[int, ...], options: dict) -> None:
    """Keeps an updater in this rank for ``go_on``."""
    TrainerGroup.move = no_moves
    model = trainer_of(version, mesh)
    options = {"transport": "direct", "bucket_bytes": 1 << 20, "timeout_s": PATIENCE_S} | options
    kept.update(model=model, mesh=mesh, updater=connect_in_lab(model, urls, **options))


def go_on(version: int) -> str:
    set_shards(kept["model"], version, kept["mesh"])
    return on_every_rank(kept["updater"].update(version=version))


def finish() -> None:
    kept.pop("updater").close()


kept: dict = {}


def wanted_bytes(places: list[Host], holder: Host) -> int:
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
        ((0,), "buffer", on_alpha),
        ((0,), "group", on_beta),
        ((1,), "buffer", on_beta),
        ((1,), "group", on_alpha),
    }
    assert legs(rows[1]) == {((0,), "buffer", on_alpha), ((0,), "group", on_beta)}
    assert legs(rows[2]) == {((0, 1), "buffer", on_beta), ((0, 1), "group", on_alpha)}
    everywhere = [leg for row in rows for leg in row["legs"]]
    assert sum(leg["bytes"] for leg in everywhere if leg["by"] == "group") == sum(outward)
    assert sum(leg["bytes"] for leg in rows[1]["legs"]) == sum(tensor.nbytes for tensor in weights_of(0).values())


def update_all(job: Ranks, engines: list[SpreadEngine], mesh: tuple[int, ...], **options: object) -> list[dict]:
    """Updates twice with one trainer; returns each engine's row of the second report, and checks what is served."""
    job.run(begin, [engine.url for engine in engines], next_version(), mesh, options)
    versions = [next_version(), next_version()]
    reports = [job.run(go_on, version) for version in versions]
    job.run(finish)
    check_serves(engines, versions[-1])
    rows = json.loads(reports[-1][0])["targets"]
    assert [(row["proof"], row["version_after"]) for row in rows] == [("resident", versions[-1])] * len(engines)
    return rows


def test_replica_on_the_ranks_own_host_is_read_and_hosts_without_trainers_get_messages(places, job, spread) -> None:
    alpha, beta, gamma = places
    engines = [spread(alpha, gamma), spread(beta), spread(gamma, gamma)]
    before = [host.sent_bytes() for host in (alpha, beta)]
    rows = update_all(job, engines, (2, 2))
    sent = sum(host.sent_bytes() - old for host, old in zip((alpha, beta), before, strict=True))
    everybody = (0, 1, 2, 3)
    assert legs(rows[0]) == {((0,), "buffer", (0, 1)), ((1,), "group", everybody)}
    assert legs(rows[1]) == {((0,), "buffer", (2, 3))}
    assert legs(rows[2]) == {((0, 1), "group", everybody)}
    # The embedding once for each of the three ranks on gamma, in each of two updates.
    embedding = weights_of(0)["embed.weight"].nbytes
    assert 6 * embedding < sent < 9 * embedding


def test_one_trainer_rank_reaches_its_host_by_memory_and_another_by_messages(places, spread) -> None:
    alpha, beta, _ = places
    ranks = job_on(alpha)
    try:
        [first, second] = update_all(ranks, [spread(alpha, beta), spread(alpha)], (1,), bucket_bytes=100_000)
        [alone] = update_all(ranks, [spread(alpha)], (1,), direct_by="mixed")
    finally:
        ranks.close()
    assert legs(first) == {((0,), "buffer", (0,)), ((1,), "group", (0,))}
    assert legs(second) == legs(alone) == {((0,), "buffer", (0,))}


def test_memory_that_cannot_be_mapped_gives_way_to_messages_in_the_same_update(places, job, spread) -> None:
    alpha, beta, _ = places
    refused, other = spread(alpha, beta, stranger=1), spread(alpha)
    rows = update_all(job, [refused, other], (4,), on_failure="quarantine")
    assert legs(rows[0]) == {((0, 1), "group", (0, 1, 2, 3))}
    assert legs(rows[1]) == {((0,), "buffer", (0, 1)), ((0,), "group", (2, 3))}


def lose_a_trainer(urls: list[str], version: int, victim: int) -> str:
    look, seen = ServedParts.look, []

    def dying(self, bucket):
        seen.append(1)
        if dist.get_rank() == victim and len(seen) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return look(self, bucket)

    ServedParts.look = dying
    try:
        begin(urls, version, (4,), {"bucket_bytes": 100_000, "timeout_s": KILLED_S})
        go_on(version)
    except TrainerRankFailed as error:
        return str(error)
    return "updated"


@pytest.mark.deadlines
@pytest.mark.parametrize(
    "victim",
    [
        pytest.param(1, id="beside the first rank", marks=pytest.mark.wide),
        pytest.param(3, id="beside the second rank"),
    ],
)
def test_trainer_rank_that_is_killed_is_named_with_its_host(places, spread, victim) -> None:
    alpha, beta, _ = places
    engines = [spread(alpha, beta), spread(beta)]
    ranks = job_on(alpha, alpha, beta, beta)
    try:
        ranks.start(lose_a_trainer, [engine.url for engine in engines], next_version(), victim)
        host = "alpha" if victim < RANKS_ON_ALPHA else "beta"
        for rank in {0, 1, 2, 3} - {victim}:
            assert f"trainer rank {victim} (host {host})" in ranks.answer(rank)
    finally:
        ranks.close()
    check_serves(engines, 0)


def lose_an_engine_rank(
    urls: list[str], version: int, pid: int, mesh: tuple[int, ...] = (4,), more: dict | None = None
) -> str:
    def kill(done: int, total: int) -> None:
        seen.append(done)
        if len(seen) == 3:
            os.kill(pid, signal.SIGKILL)

    seen: list[int] = []
    options = {"bucket_bytes": 100_000, "timeout_s": KILLED_S, "on_failure": "quarantine", "progress": kill}
    begin(urls, next_version(), mesh, options | (more or {}))
    try:
        return go_on(version)
    finally:
        finish()


@pytest.mark.deadlines
@pytest.mark.parametrize("victim", [0, 1])
def test_engine_rank_that_is_killed_is_named_and_the_other_engine_is_updated(places, job, spread, victim) -> None:
    alpha, beta, _ = places
    engine, other = spread(alpha, beta), spread(beta)
    version, pid = next_version(), engine.info().ranks[victim].pid
    for text in job.run(lose_an_engine_rank, [engine.url, other.url], version, pid):
        lost, good = json.loads(text)["targets"]
        assert (good["proof"], good["version_after"]) == ("resident", version)
        assert lost["status"] != "serving"
        assert f"rank {victim} (pid {pid})" in lost["message"], lost
    check_serves([other], version)


def cells_of(urls: list[str], options: dict) -> tuple[tuple[str, ...], ...]:
    begin(urls, next_version(), (4,), options)
    try:
        return kept["updater"].cells
    finally:
        finish()


@pytest.mark.deadlines
@pytest.mark.parametrize("direct_by", ["auto", "mixed"])
def test_ranks_that_get_messages_are_in_cells_and_the_rest_of_one_goes_on(places, job, spread, direct_by) -> None:
    alpha, beta, _ = places
    engine, doomed, rest = engines = spread(alpha, beta), spread(beta), spread(alpha)
    check_serves([*engines], 0)
    urls, options = [one.url for one in engines], {"advanced": {"cell_ranks": 2}, "direct_by": direct_by}
    assert job.run(cells_of, urls, options)[0] == ((engine.url,), (doomed.url, rest.url))
    version, pid = next_version(), doomed.info().ranks[0].pid
    for text in job.run(lose_an_engine_rank, urls, version, pid, (4,), options):
        report = json.loads(text)
        whole, lost, other = report["targets"]
        assert lost["status"] != "serving"
        assert f"rank 0 (pid {pid})" in lost["message"], lost
        for row in (whole, other):
            assert (row["proof"], row["version_after"], row["message"]) == ("resident", version, "")
            assert {by for _, by, _ in legs(row)} == {"buffer", "group"}
    check_serves([engine, rest], version)


@pytest.mark.deadlines
def test_cell_with_a_rank_that_gets_no_messages_starts_over_without_the_engine_that_failed(places, job, spread) -> None:
    alpha, beta, gamma = places
    doomed, rest, apart = engines = spread(alpha, gamma), spread(beta, gamma), spread(gamma)
    version, pid, options = next_version(), doomed.info().ranks[1].pid, {"advanced": {"cell_ranks": 2}}
    urls = [one.url for one in engines]
    for text in job.run(lose_an_engine_rank, urls, version, pid, (2, 2), options):
        lost, *rows = json.loads(text)["targets"]
        assert f"rank 1 (pid {pid})" in lost["message"], lost
        for row in rows:
            assert (row["proof"], row["version_after"]) == ("resident", version), row
    check_serves([rest, apart], version)
