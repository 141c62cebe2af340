"""A trainer on two hosts with a vLLM and a reference engine on each: one host disappears, and comes back.

The hosts are namespaces with networks of their own; this process is on neither.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_relay_hosts import start as start_reference
from tests.engines import training
from tests.engines.test_vllm_cpu import COUNT, PROMPTS, SIZES
from tests.engines.test_vllm_short import said_by
from tests.engines.vllm_hosts import vllm_on
from tests.engines.vllm_server import greedy_tokens
from tests.helpers.clock import PATIENCE_S
from tests.helpers.engines import Engine
from tests.helpers.harness import wait_for
from tests.helpers.hosts import INTERFACE, Host, cannot, enter, hosts
from tests.helpers.ranks import Ranks
from tests.helpers.tiny import tiny_model, tiny_tokenizer
from weightcast import Target, copy_from_peer

pytestmark = [pytest.mark.engine_full, pytest.mark.skipif(bool(cannot()), reason=cannot())]

TP = 2  # of each vLLM
SILENCE_S = 20.0  # deadline of the update that loses a host


def live_on(places: list[Host], rank: int) -> None:
    """Moves a trainer rank to its host: the first half of the ranks to the first one."""
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    enter(places[rank])


@contextmanager
def job_on(*places: Host) -> Iterator[Ranks]:
    """A trainer with a rank on each of these hosts; a host may come several times."""
    with closing(Ranks(len(places), place=partial(live_on, list(places)), address=places[0].address)) as ranks:
        yield ranks


def says(engine: Engine) -> list[list[int]]:
    return greedy_tokens(engine, PROMPTS, COUNT) if engine.tp == TP else engine.greedy(PROMPTS, COUNT)


class Fleet:
    """The engines of both hosts, by name, and the versions that were trained."""

    def __init__(self, root: Path, stack: ExitStack, places: list[Host]) -> None:
        self.root = root
        self.places = dict(zip(("alpha", "beta"), places, strict=True))
        self.version = 0
        tiny_model(self.trained, **SIZES)
        tiny_tokenizer(self.trained)
        self.first = self.trained
        self.engines: dict[str, Engine] = {}
        self.stops: dict[str, Callable[[], object]] = {}
        self._stack = stack
        for host in self.places:
            self.start(f"vllm on {host}")
            self.start(f"reference on {host}")

    @property
    def trained(self) -> Path:
        return self.root / f"version {self.version}"

    @property
    def urls(self) -> list[str]:
        return [engine.url for engine in self.engines.values()]

    def start(self, name: str) -> None:
        """Starts an engine on the first weights."""
        kind, _, host = name.split()
        place = self.places[host]
        one = self._stack.enter_context(ExitStack())
        if kind == "vllm":
            logs = self.root / f"{name} {len(list(self.root.iterdir()))}"
            logs.mkdir()
            self.engines[name] = one.enter_context(vllm_on(place, self.first, logs, tp=TP))
        else:
            log = self.root / f"{name}.log"
            self.engines[name] = start_reference(one, place, self.first, log)
            self.engines[name].ready(log)
        self.stops[name] = one.close

    def train(self, job: Ranks) -> None:
        self.version += 1
        job.run(training.train, str(self.trained))

    def update(self, job: Ranks) -> dict[str, dict[str, Any]]:
        """The row of each engine."""
        reports = [report for report, _ in job.run(training.update, self.version)]
        assert [json.loads(report) for report in reports] == [json.loads(reports[0])] * len(reports)
        names = {engine.url: name for name, engine in self.engines.items()}
        return {names[row["url"]]: row for row in json.loads(reports[0])["targets"]}

    def check(self, *names: str, version: int | None = None) -> None:
        """These engines serve a version, by default the last one: its answers, its digest, the same from all."""
        version = self.version if version is None else version
        expected = said_by(self.root / f"version {version}")
        chosen = [self.engines[name] for name in names or self.engines]
        assert [says(engine) for engine in chosen] == [expected] * len(chosen)
        told = [engine.info() for engine in chosen]
        assert [(info["version"], info["state"]) for info in told] == [(version, "serving")] * len(chosen)
        assert len({info["digest"] for info in told}) == 1
        digests = [engine.digests() for engine in chosen]
        assert digests == [digests[0]] * len(digests)


def proven(row: dict[str, Any], version: int) -> bool:
    return (row["status"], row["proof"], row["version_after"]) == ("serving", "resident", version)


def test_host_that_disappears_is_named_and_comes_back_by_its_peers(tmp_path: Path) -> None:
    with ExitStack() as stack:
        alpha, beta = stack.enter_context(hosts(("alpha", "beta"), tmp_path))
        (tmp_path / "fleet").mkdir()
        fleet = Fleet(tmp_path / "fleet", stack, [alpha, beta])
        on_alpha, on_beta = ([name for name in fleet.engines if name.endswith(host)] for host in ("alpha", "beta"))
        expected = [said_by(fleet.first)]

        # Each host's engines read the replica of their own host.
        with job_on(alpha, alpha, beta, beta) as job:
            job.run(training.begin, str(fleet.first), (2, 2))
            options = {"direct_by": "memory", "timeout_s": SILENCE_S}
            job.run(training.connect, fleet.urls, options)
            fleet.train(job)
            sent = [host.sent_bytes() for host in (alpha, beta)]
            rows = fleet.update(job)
            sent = [host.sent_bytes() - before for host, before in zip((alpha, beta), sent, strict=True)]
            assert {(row["transport"], proven(row, fleet.version)) for row in rows.values()} == {("direct", True)}
            size = (fleet.trained / "model.safetensors").stat().st_size
            print(f"over the network: {sent} bytes; the model has {size}")
            assert max(sent) < size
            fleet.check()
            expected.append(said_by(fleet.trained))

            # In the middle of the next update, a host says nothing more to anybody.
            fleet.train(job)
            job.start(training.failed_update, fleet.version, beta.cut_off)
            for rank in (0, 1):
                words = job.answer(rank)
                assert "host beta" in words, words
        fleet.check(*on_alpha, version=1)

        # The trainer goes on where it still is, from what was saved, and names the engines that are gone.
        with job_on(alpha, alpha) as job:
            job.run(training.begin, str(fleet.trained), (2,))
            job.run(training.connect, fleet.urls, {"direct_by": "messages"})
            rows = fleet.update(job)
            assert [name for name, row in rows.items() if proven(row, fleet.version)] == on_alpha
            assert all(rows[name]["status"] != "serving" and rows[name]["message"] for name in on_beta)
            fleet.check(*on_alpha)
            expected.append(said_by(fleet.trained))
            fleet.train(job)  # its weights are no longer those that are served

            # The host is back: one engine has lived on, the other was started anew.  Both copy from their peers.
            fleet.stops["vllm on beta"]()
            beta.come_back()
            fleet.start("vllm on beta")
            lived = fleet.engines["reference on beta"]
            wait_for(lambda: lived.info()["state"] == "serving", "the end of its session", timeout_s=PATIENCE_S)
            fleet.check("reference on beta", version=1)
            for name in on_beta:
                peer = fleet.engines[name.replace("beta", "alpha")]
                copied = copy_from_peer(Target(fleet.engines[name].url), Target(peer.url), timeout_s=PATIENCE_S)
                assert copied.version == 2
            fleet.check(version=2)
            job.run(training.connect, fleet.urls, {"direct_by": "messages"})

            # They take part in the next update again, though no trainer rank is on their host.
            rows = fleet.update(job)
            assert {(row["transport"], proven(row, fleet.version)) for row in rows.values()} == {("direct", True)}
            fleet.check()
            expected.append(said_by(fleet.trained))

        # And the trainer is on both hosts again.
        with job_on(alpha, alpha, beta, beta) as job:
            job.run(training.begin, str(fleet.trained), (2, 2))
            job.run(training.connect, fleet.urls, {"direct_by": "memory"})
            fleet.train(job)
            rows = fleet.update(job)
            assert all(proven(row, fleet.version) for row in rows.values())
            fleet.check()
            expected.append(said_by(fleet.trained))
        assert len({json.dumps(said) for said in expected}) == len(expected)
