"""Real engines in chains: each passes the trainer's shards on to the next, and one that is late copies from another.

A server that was started on the pushed weights, and transformers, say what is right.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors import safe_open

from tests.e2e.test_peer_copy import Streaming, at_first_chunk
from tests.e2e.test_peer_copy import relay as passing_chunks
from tests.engines import sglang_server, test_sglang_cpu, test_vllm_cpu, training, vllm_server
from tests.engines.test_vllm_cpu import COUNT, PROMPTS
from tests.engines.test_vllm_short import said_by
from tests.helpers.clock import PATIENCE_S
from tests.helpers.engines import Engine, weightcast
from tests.helpers.ranks import Ranks
from tests.helpers.tiny import tiny_model, tiny_tokenizer

Tokens = list[list[int]]


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of engine: how a server is started on a folder, and how it is asked."""

    sizes: dict[str, Any]
    start: Callable[[Path, Path, int], AbstractContextManager[Engine]]
    says: Callable[[Engine, Tokens, int], Tokens]


@contextmanager
def start_sglang(folder: Path, logs: Path, tp: int) -> Iterator[Engine]:
    with sglang_server.sglang(logs, (folder, tp, ()), receiver=True) as (engine,):
        yield engine


def start_vllm(folder: Path, logs: Path, tp: int) -> AbstractContextManager[Engine]:
    return vllm_server.vllm(folder, logs, tp=tp)


VLLM = Kind(test_vllm_cpu.SIZES, start_vllm, vllm_server.greedy_tokens)
SGLANG = Kind(test_sglang_cpu.DENSE, start_sglang, sglang_server.greedy_tokens)


class Fleet:
    """Servers of one kind and size, and two trainer ranks; all begin with the weights of one checkpoint."""

    def __init__(self, kind: Kind, root: Path, stack: ExitStack, *, tp: int) -> None:
        self.kind = kind
        self.root = root
        self.tp = tp
        self.first = root / "first"
        self.version = 0
        tiny_model(self.first, **kind.sizes)
        tiny_tokenizer(self.first)
        self._stack = stack
        self.ranks = stack.enter_context(closing(Ranks(2)))
        self.ranks.run(training.begin, str(self.first), (2,))

    def start(self, name: str, folder: Path | None = None) -> Engine:
        """Starts a server on the first weights, or on others."""
        logs = self.root / name
        logs.mkdir()
        return self._stack.enter_context(self.kind.start(folder or self.first, logs, self.tp))

    def connect(self, engines: list[Engine], **options: Any) -> None:
        self.ranks.run(training.connect, [engine.url for engine in engines], options)

    def train(self) -> Path:
        """Takes a step of training; returns the checkpoint of its weights."""
        self.version += 1
        self.ranks.run(training.train, str(self.trained))
        return self.trained

    @property
    def trained(self) -> Path:
        return self.root / f"version {self.version}"

    def update(self, strike: Callable[[], object] | None = None) -> tuple[list[dict[str, Any]], int]:
        """Sends the weights: the rows of the report, and the bytes that both trainer ranks sent."""
        (report, first), (same, second) = self.ranks.run(training.update, self.version, strike)
        assert json.loads(report) == json.loads(same)
        assert json.loads(report)["transport"] == "direct"
        return json.loads(report)["targets"], first + second

    def says(self, engine: Engine) -> Tokens:
        return self.kind.says(engine, PROMPTS, COUNT)

    def check(self, *engines: Engine) -> None:
        """Every engine answers with the last weights, proves the same digest of them, and names their version."""
        expected = said_by(self.trained)
        assert expected != said_by(self.first)
        assert [self.says(engine) for engine in engines] == [expected] * len(engines)
        found = [engine.digests() for engine in engines]
        assert found == [found[0]] * len(engines)
        told = [engine.info() for engine in engines]
        assert [(info["version"], info["state"]) for info in told] == [(self.version, "serving")] * len(engines)
        assert len({info["digest"] for info in told}) == 1
        assert told[0]["digest"]


def is_proven(fleet: Fleet, row: dict[str, Any]) -> bool:
    return (row["status"], row["proof"], row["version_after"], row["digests_matched"]) == (
        "serving",
        "resident",
        fleet.version,
        fleet.tp,
    )


def size_bytes(checkpoint: Path) -> int:
    with safe_open(checkpoint / "model.safetensors", "pt") as file:
        return sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118  # it is no mapping


def catch_up(engine: Engine, *peers: str) -> dict[str, Any]:
    """``weightcast catch-up``; what it says."""
    places = [part for peer in peers for part in ("--from", peer)]
    done = weightcast("catch-up", engine.url, *places, "--json", timeout_s=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.engine
def test_vllm_passes_shards_on_and_a_late_server_copies_from_its_peer(tmp_path: Path) -> None:
    with ExitStack() as stack:
        fleet = Fleet(VLLM, tmp_path, stack, tp=1)
        engines = [fleet.start(name) for name in ("one", "two", "late")]
        fleet.connect(engines[:2], direct_by="relay")
        fleet.train()
        rows, sent = fleet.update()
        assert [is_proven(fleet, row) for row in rows] == [True] * 2
        assert size_bytes(fleet.trained) <= sent < 1.02 * size_bytes(fleet.trained)
        copied = catch_up(engines[2], engines[0].url)
        assert (copied["version"], copied["ranks"]) == (fleet.version, 1)
        fleet.check(*engines)


@pytest.mark.engine_full
@pytest.mark.parametrize("kind", [pytest.param(VLLM, id="vllm"), pytest.param(SGLANG, id="sglang")])
def test_engines_in_a_chain_get_lost_and_come_back(tmp_path: Path, kind: Kind) -> None:
    with ExitStack() as stack:
        fleet = Fleet(kind, tmp_path, stack, tp=2)
        one, two = fleet.start("one"), fleet.start("two")
        assert fleet.says(one) == fleet.says(two) == said_by(fleet.first)

        sent: dict[str, int] = {}
        for way in ("messages", "relay"):
            fleet.connect([one, two], direct_by=way)
            fleet.train()
            rows, sent[way] = fleet.update()
            assert [is_proven(fleet, row) for row in rows] == [True] * 2
            fleet.check(one, two)
        assert sent["messages"] == 2 * sent["relay"]
        # Norms are kept by both ranks of a server; everything else by one of them.
        assert size_bytes(fleet.trained) <= sent["relay"] < 1.05 * size_bytes(fleet.trained)
        with kind.start(fleet.trained, tmp_path, fleet.tp) as fresh:
            assert fleet.says(fresh) == fleet.says(two)
            assert fresh.digests() == two.digests()

        # A server that comes late copies from one that goes on generating meanwhile.
        late = fleet.start("late")
        assert late.digests() != one.digests()
        with Streaming(one) as load, passing_chunks(one.url, at_first_chunk(load.see_more)) as url:
            load.see_more(1)
            copied = catch_up(late, url, two.url)
            load.see_more()
        assert load.failures == []
        assert (copied["peer"], copied["version"], copied["ranks"]) == (url, fleet.version, 2)
        assert copied["proven"] == len(one.digests())
        fleet.check(one, two, late)

        # Now it is in the chain, as the last.  The middle one dies while it passes shards on.
        fleet.train()
        fleet.connect([one, two, late], direct_by="relay")
        rank = two.info()["ranks"][1]
        family = two.family()
        rows, _ = fleet.update(partial(os.kill, rank["pid"], signal.SIGKILL))
        by_url = {row["url"]: row for row in rows}
        lost = by_url.pop(two.url)
        assert lost["status"] != "serving"
        assert "rank 1" in lost["message"]
        assert [is_proven(fleet, row) for row in by_url.values()] == [True] * 2
        fleet.check(one, late)
        assert two.process.wait(PATIENCE_S) is not None
        assert psutil.wait_procs(family, timeout=PATIENCE_S)[1] == []

        # Another takes its place, asks the dead one in vain, and is in the chain again.
        again = fleet.start("again")
        copied = catch_up(again, two.url, late.url)
        assert (copied["peer"], copied["version"]) == (late.url, fleet.version)
        assert len(copied["passed_over"]) == 1
        assert two.url in copied["passed_over"][0]
        fleet.check(one, late, again)
        fleet.train()
        fleet.connect([one, late, again], direct_by="relay")
        rows, last = fleet.update()
        assert [is_proven(fleet, row) for row in rows] == [True] * 3
        assert last == sent["relay"]
        fleet.check(one, late, again)
