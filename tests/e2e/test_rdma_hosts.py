"""Engines on hosts of their own read two trainer ranks' buffers on a third host through NIXL, over TCP."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from tests.e2e.test_relay_hosts import start
from tests.helpers.engines import Engine
from tests.helpers.harness import wait_for
from tests.helpers.hosts import Host, cannot, enter, hosts, show_interfaces
from tests.helpers.ranks import Ranks
from tests.helpers.tiny import tiny_model
from weightcast.comm import nixl
from weightcast.digest.definition import tensor_digest
from weightcast.lab.connect import connect as connect_in_lab

pytestmark = [
    pytest.mark.wide,
    pytest.mark.skipif(bool(cannot()), reason=cannot()),
    pytest.mark.skipif(bool(nixl.missing()), reason=nixl.missing()),
]
SIZES: dict[str, Any] = {"hidden_size": 384, "head_dim": 32, "intermediate_size": 1024, "num_hidden_layers": 4}


@pytest.fixture
def places(tmp_path) -> Iterator[list[Host]]:
    with hosts(("trainer", "first", "second"), tmp_path) as found:
        yield found


def move_to(host: Host, rank: int) -> None:
    """Puts a trainer rank on a host."""
    enter(host)
    show_interfaces()


def update_each(
    folder: str, urls: list[str], versions: list[int], cut: str = "", **options: Any
) -> tuple[list[dict[str, Any]], dict[str, str], int]:
    """The rows of each update's report, the digests of the last weights, and the bytes of the model.

    The host ``cut`` disappears in the middle of the last update.
    """

    def progress(done: int, total: int) -> None:
        if cut and done > total / 3 and len(rows) == len(urls) * (len(versions) - 1):
            Host.read(cut).cut_off()

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder)
    size_bytes = sum(tensor.nbytes for tensor in model.state_dict().values())
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    rows: list[dict[str, Any]] = []
    options = {"bucket_bytes": 2 << 20, "timeout_s": 60.0, "progress": progress} | options
    with connect_in_lab(model, urls, transport="rdma", **options) as updater:
        for version in versions:
            for parameter in model.parameters():
                parameter.data.mul_(1 + version / 100)
            rows += json.loads(updater.update(version=version).to_json())["targets"]
    whole = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}
    return rows, {name: tensor_digest(tensor) for name, tensor in whole.items()}, size_bytes


@contextmanager
def started(folder: Path, hosts: Sequence[Host]) -> Iterator[list[Engine]]:
    """A reference engine on each host."""
    with ExitStack() as stack:
        logs = [folder / f"{host.name}.log" for host in hosts]
        chosen = [start(stack, host, folder / "model", log) for host, log in zip(hosts, logs, strict=True)]
        for engine, log in zip(chosen, logs, strict=True):
            engine.ready(log)
        yield chosen


@pytest.fixture
def job(places) -> Iterator[Ranks]:
    ranks = Ranks(2, place=partial(move_to, places[0]))
    yield ranks
    ranks.close()


def test_engines_on_other_hosts_read_what_they_keep_and_prove_it(tmp_path, places, job):
    trainer, *others = places
    tiny_model(tmp_path / "model", **SIZES)
    with started(tmp_path, others) as chosen:
        before = [engine.digests() for engine in chosen]
        sent = trainer.sent_bytes()
        answers = job.run(update_each, str(tmp_path / "model"), [engine.url for engine in chosen], [1, 2])
        assert answers[0] == answers[1]
        rows, digests, size_bytes = answers[0]
        assert [(row["transport"], row["proof"], row["version_after"]) for row in rows] == [
            ("rdma", "resident", version) for version in (1, 1, 2, 2)
        ]
        assert [engine.digests() for engine in chosen] == [digests] * 2
        assert all(set(each.values()).isdisjoint(digests.values()) for each in before)
        # Two updates of two engines: each byte leaves the trainer's host once for each engine.
        sent = trainer.sent_bytes() - sent
        assert 4 * size_bytes <= sent < 4.4 * size_bytes, (sent, size_bytes)


def test_a_host_that_disappears_is_named_and_the_other_goes_on(tmp_path, places, job):
    _, first, second = places
    tiny_model(tmp_path / "model", **SIZES)
    with started(tmp_path, [first, second]) as chosen:
        urls = [engine.url for engine in chosen]
        options = {"on_failure": "quarantine", "timeout_s": 10.0}
        answers = job.run(partial(update_each, cut=second.write(), **options), str(tmp_path / "model"), urls, [1, 2])
        rows, digests, _ = answers[0]
        assert [row["version_after"] for row in rows[:2]] == [1, 1]
        served, lost = rows[2:]
        assert (served["version_after"], served["proof"], served["status"]) == (2, "resident", "serving")
        assert lost["status"] != "serving", lost
        assert urls[1] in lost["message"], lost
        assert chosen[0].digests() == digests
        second.come_back()
        # It has to hear that the connection is lost, or it would wait for the trainer of before.
        wait_for(lambda: chosen[1].info()["state"] != "updating", "the end of the interrupted update")
        [answer, _] = job.run(update_each, str(tmp_path / "model"), urls, [3])
        assert [(row["version_after"], row["proof"]) for row in answer[0]] == [(3, "resident")] * 2
        assert [engine.digests() for engine in chosen] == [answer[1]] * 2
