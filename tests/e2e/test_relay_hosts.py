"""Three engines on hosts of their own get one trainer's weights over links of a known rate."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import httpx
import pytest
from transformers import AutoModelForCausalLM

from tests.helpers.engines import ANSWER_S, ENVIRONMENT, NO_KEEP_ALIVE, Engine
from tests.helpers.hosts import Host, cannot, hosts
from tests.helpers.ranks import Ranks
from tests.helpers.tiny import tiny_model
from weightcast.digest.definition import tensor_digest
from weightcast.lab.connect import connect as connect_in_lab

pytestmark = [pytest.mark.wide, pytest.mark.skipif(bool(cannot()), reason=cannot())]

MBIT_S = 100
NUM_ENGINES = 3


def start(stack: ExitStack, host: Host, folder: Path, log: Path) -> Engine:
    """A reference engine on a host; ``ready`` waits for it."""
    serve = ["-m", "weightcast", "serve", str(folder), "--port=0", "--json", "--threads=1", f"--host={host.address}"]
    with log.open("w") as words:
        command = [sys.executable, *host.command(serve)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=words, env=ENVIRONMENT)
    client = httpx.Client(timeout=ANSWER_S, trust_env=False, limits=NO_KEEP_ALIVE)
    engine = Engine(process=process, url="", folder=folder, tp=1, client=client)
    stack.callback(engine.stop)
    return engine


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> Iterator[list[Host]]:
    with hosts(("trainer", "first", "second", "third"), tmp_path_factory.mktemp("hosts")) as found:
        for host in found:
            host.limit(MBIT_S)
        yield found


def run_on(host: Host, rank: int) -> None:
    """Gives a trainer rank a host's network."""
    host.enter_network()


def update_each(folder: str, urls: list[str], versions: list[int], way: str) -> tuple[list[float], dict[str, str], int]:
    """Seconds until all engines serve, in each update; the digests of the last weights; and the bytes of the model."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    seconds = []
    options = dict(transport="direct", direct_by=way, bucket_bytes=2 << 20, timeout_s=120.0)
    with connect_in_lab(model, urls, **options) as updater:
        for version in versions:
            for parameter in model.parameters():
                parameter.data.mul_(1 + version / 100)
            report = updater.update(version=version)
            rows = json.loads(report.to_json())["targets"]
            assert [(row["version_after"], row["proof"]) for row in rows] == [(version, "resident")] * len(urls)
            seconds.append(report.seconds)
    state = model.state_dict()
    return seconds, {name: tensor_digest(t) for name, t in state.items()}, sum(t.nbytes for t in state.values())


def test_an_update_takes_the_time_of_one_engine_although_there_are_three(tmp_path, places):
    trainer, *others = places
    tiny_model(tmp_path / "model", hidden_size=384, head_dim=32, intermediate_size=1024, num_hidden_layers=4)
    with ExitStack() as stack:
        logs = [tmp_path / f"{host.name}.log" for host in others]
        chosen = [start(stack, host, tmp_path / "model", log) for host, log in zip(others, logs, strict=True)]
        for engine, log in zip(chosen, logs, strict=True):
            engine.ready(log)
        urls = [engine.url for engine in chosen]
        job = Ranks(1, place=partial(run_on, trainer))
        stack.callback(job.close)
        usual: dict[str, float] = {}
        for number, way in enumerate(("messages", "relay")):
            versions = [3 * number + one for one in (1, 2, 3)]
            [(seconds, digests, size_bytes)] = job.run(update_each, str(tmp_path / "model"), urls, versions, way)
            assert [engine.digests() for engine in chosen] == [digests] * NUM_ENGINES
            usual[way] = statistics.median(seconds)
        once_s = 8 * size_bytes / (MBIT_S * 1e6)
        print(f"{size_bytes / 2**20:.0f} MiB once: {once_s:.2f} s; {usual}")
        assert usual["messages"] > 2.5 * once_s
        assert usual["relay"] < 2 * once_s
