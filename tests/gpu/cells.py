"""A trainer of two ranks and several engines, in processes of their own, and what is checked about cells on them.

The checks are the same on CPUs (``tests/e2e/test_cells_apart.py``) and on GPUs.  Each rank of a group seems to run on a
host of its own to NCCL (``tests/gpu/elsewhere.py``), so all of them may be on one GPU.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tests.gpu.test_updates_gpu import ENVIRONMENT, digests, info
from tests.helpers.toy_engine import toy_weights
from weightcast.comm.ports import quiet_port
from weightcast.digest.definition import tensor_digest

ROWS = 60_000  # 15 MB of embeddings
BUCKET_BYTES = 1 << 20
START_S = 300.0
AMPLE_S = 90.0  # of an update in which nothing is struck: kernels are compiled in the first one
KILLED_S = 30.0
HEARD_S = 20.0  # after a death, which nobody learns by waiting until a deadline
STOPPED_S = 10.0
ALPHA, BETA = "host-alpha", "host-beta"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where processes run.

    Attributes:
        trainer: Device of both trainer ranks.
        engines: Device of all engines.
        together: Numbers of the engines that NCCL takes for processes of the first trainer rank's machine.
    """

    trainer: str
    engines: str
    together: tuple[int, ...] = ()


class Engine:
    """A toy engine of one rank, in one process; ``wait_ready`` before anything else."""

    def __init__(self, layout: Layout, number: int, host: str) -> None:
        self.host = host
        environment = {} if number in layout.together else {"NCCL_HOSTID": f"engine-{number}"}
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.helpers.toy_engine", "--local", f"--devices={layout.engines}"),
                *(f"--rows={ROWS}", "--seed=0", "--grace-s=2", f"--host-id={host}"),
            ],
            stdout=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT | environment,
        )
        self.url = ""

    @property
    def pid(self) -> int:
        return self.process.pid

    def wait_ready(self) -> None:
        assert self.process.stdout is not None
        word, _, port = self.process.stdout.readline().partition(" ")
        assert word == "ready", f"the engine ended with {self.process.wait()}"
        self.url = f"http://127.0.0.1:{port.strip()}"

    def serves(self, version: int) -> None:
        """Fails unless it serves exactly this version."""
        deadline = time.monotonic() + AMPLE_S
        while (now := info(self.url))["state"] == "updating":
            assert time.monotonic() < deadline, now
            time.sleep(0.05)
        assert (now["state"], now["version"]) == ("serving", version), now
        assert digests(self.url) == weights_of(version)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


class Trainer:
    """The ranks of ``tests/gpu/cell_trainer.py``, the first on one host and the second on another."""

    def __init__(self, layout: Layout) -> None:
        port = quiet_port()
        self.ranks = [
            subprocess.Popen(
                [
                    *(sys.executable, "-m", "tests.gpu.cell_trainer", f"--rank={rank}", "--world=2", f"--port={port}"),
                    *(f"--device={layout.trainer}", f"--rows={ROWS}", f"--host-id={host}"),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=ENVIRONMENT | ({} if rank == 0 and layout.together else {"NCCL_HOSTID": f"trainer-{rank}"}),
            )
            for rank, host in enumerate((ALPHA, BETA))
        ]

    def wait_ready(self) -> None:
        for rank in range(len(self.ranks)):
            assert self._line(rank) == "ready\n"

    def update(
        self, engines: Sequence[Engine], version: int, options: dict[str, Any], strike: dict[str, Any] | None = None
    ) -> list[dict[str, Any]]:
        """Each rank's answer; a trainer with other options or engines than before makes a new updater."""
        order = {"urls": [engine.url for engine in engines], "version": version, "options": options, "strike": strike}
        for rank in self.ranks:
            assert rank.stdin is not None
            rank.stdin.write(json.dumps(order) + "\n")
            rank.stdin.flush()
        answers = [json.loads(self._line(rank)) for rank in range(len(self.ranks))]
        assert all(answer.get("report") == answers[0].get("report") for answer in answers), answers
        assert "report" in answers[0], answers
        return answers

    def _line(self, rank: int) -> str:
        process = self.ranks[rank]
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, f"trainer rank {rank} ended with {process.wait()}"
        return line

    def close(self) -> None:
        for process in self.ranks:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()


class Fleet:
    """The trainer, and five engines, of which the third is on the host of the second trainer rank."""

    def __init__(self, layout: Layout) -> None:
        self.trainer = Trainer(layout)
        self.engines = [Engine(layout, number, BETA if number == 2 else ALPHA) for number in range(5)]
        self._version = 0

    def wait_ready(self) -> None:
        self.trainer.wait_ready()
        for engine in self.engines:
            engine.wait_ready()

    def next_version(self) -> int:
        self._version += 1
        return self._version

    def doomed(self) -> Engine:
        """An engine that no test needs any more."""
        assert len(self.engines) > 3, "each of the engines that may die was killed"
        return self.engines.pop()

    def close(self) -> None:
        self.trainer.close()
        for engine in self.engines:
            engine.close()


@contextmanager
def fleet_on(layout: Layout) -> Iterator[Fleet]:
    """A fleet that is ready."""
    fleet = Fleet(layout)
    try:
        fleet.wait_ready()
        yield fleet
    finally:
        fleet.close()


@functools.lru_cache(maxsize=8)
def weights_of(version: int) -> dict[str, str]:
    return {name: tensor_digest(tensor) for name, tensor in toy_weights(seed=version, rows=ROWS).items()}


@functools.cache
def shard_bytes(rank: int) -> int:
    """Bytes that a trainer rank has of the model."""
    tensors = toy_weights(seed=0, rows=ROWS).values()
    return sum(chunks[rank].nbytes for tensor in tensors if rank < len(chunks := tensor.chunk(2)))


def check_sent(answers: list[dict[str, Any]], expected: Sequence[int]) -> None:
    """Each trainer rank has put the planned bytes on the wire, and hardly any beside them."""
    for answer, size_bytes in zip(answers, expected, strict=True):
        assert size_bytes <= answer["sent_bytes"] <= 1.02 * size_bytes + (64 << 10), (answer["sent_bytes"], size_bytes)


def check_three_updates(
    fleet: Fleet, options: dict[str, Any], *, cells: Sequence[Sequence[int]], copies: int
) -> list[dict[str, Any]]:
    """Three engines hold, update after update, what was sent.

    Args:
        cells: Numbers of the engines in each cell, as they must be.
        copies: How often each trainer rank sends its share by messages.

    Returns:
        Each rank's last answer.
    """
    engines = fleet.engines[:3]
    options = {"timeout_s": AMPLE_S, "bucket_bytes": BUCKET_BYTES} | options
    answers: list[dict[str, Any]] = []
    for _ in range(3):
        version = fleet.next_version()
        for engine in engines:
            assert set(digests(engine.url).values()).isdisjoint(weights_of(version).values())
        answers = fleet.trainer.update(engines, version, options)
        report = answers[0]["report"]
        assert answers[0]["ok"], answers[0]
        assert answers[0]["cells"] == [[engines[number].url for number in cell] for cell in cells]
        assert report["buckets"] > 10
        for row in report["targets"]:
            assert (row["status"], row["version_after"], row["proof"]) == ("serving", version, "resident"), row
            assert row["notes"] == [], row
        for engine in engines:
            engine.serves(version)
        check_sent(answers, [copies * shard_bytes(rank) for rank in range(2)])
    return answers


def check_killed(fleet: Fleet, options: dict[str, Any]) -> dict[str, Any]:
    """An engine is killed half way: the rest of its cell and the other cell commit in this update, and in the next.

    Returns the answer of rank 0 to the first.
    """
    doomed, (one, two, three) = fleet.doomed(), fleet.engines[:3]
    others, version = [one, two, three], fleet.next_version()
    options = {
        "on_failure": "quarantine",
        "advanced": {"cell_ranks": 2},
        "timeout_s": KILLED_S,
        "bucket_bytes": BUCKET_BYTES,
    } | options
    engines = [doomed, one, two, three]
    try:
        strike = {"pids": [doomed.pid], "signal": int(signal.SIGKILL), "at": 0.4}
        first = fleet.trainer.update(engines, version, options, strike)[0]
        assert first["cells"] == [[doomed.url, one.url], [two.url, three.url]]
        check_rows(first, engines, lost=[doomed], version=version)
        assert first["seconds_after_strike"] < HEARD_S, first
        for engine in others:
            engine.serves(version)
        version = fleet.next_version()
        second = fleet.trainer.update(engines, version, options)[0]
        check_rows(second, engines, lost=[doomed], version=version)
        for engine in others:
            engine.serves(version)
        return first
    finally:
        doomed.close()


def check_stopped_in_two_cells(fleet: Fleet, options: dict[str, Any]) -> dict[str, Any]:
    """An engine of each cell stops at the same moment: the rest of both cells commit, and neither waits for ever.

    Returns the answer of rank 0.
    """
    engines = fleet.engines[:4]
    one, two, three, four = engines
    for number in range(2):  # the first one compiles, with ample time
        before = fleet.next_version()
        limit = {"timeout_s": AMPLE_S if number == 0 else STOPPED_S}
        common = {"on_failure": "quarantine", "advanced": {"cell_ranks": 2}, "bucket_bytes": BUCKET_BYTES}
        common |= options | limit
        healthy = fleet.trainer.update(engines, before, common)[0]
        assert healthy["ok"], healthy
    version = fleet.next_version()
    strike = {"pids": [one.pid, three.pid], "signal": int(signal.SIGSTOP), "at": 0.4}
    try:
        answer = fleet.trainer.update(engines, version, common, strike)[0]
    finally:
        for engine in (one, three):
            os.kill(engine.pid, signal.SIGCONT)
    assert answer["cells"] == [[one.url, two.url], [three.url, four.url]]
    check_rows(answer, engines, lost=[one, three], version=version)
    assert answer["seconds_after_strike"] < 4 * STOPPED_S + 20.0, answer
    for engine in engines:
        engine.serves(before if engine in (one, three) else version)
    version = fleet.next_version()
    healed = fleet.trainer.update(engines, version, common)[0]
    assert healed["ok"], healed
    for engine in engines:
        engine.serves(version)
    return answer


def check_rows(answer: dict[str, Any], engines: Sequence[Engine], *, lost: Sequence[Engine], version: int) -> None:
    """The report names the lost engines, and the others serve the version."""
    for engine, row in zip(engines, answer["report"]["targets"], strict=True):
        assert row["url"] == engine.url
        if engine in lost:
            assert row["status"] != "serving", row
            assert engine.url in row["message"], row
        else:
            assert (row["status"], row["version_after"], row["proof"]) == ("serving", version, "resident"), answer
            assert row["message"] == "", row


def check_mixed(fleet: Fleet) -> list[dict[str, Any]]:
    """Each engine reads the trainer rank on its host by memory, and gets messages from the other one alone.

    Returns each rank's answer.
    """
    engines = fleet.engines[:3]
    options = {"transport": "direct", "direct_by": "mixed", "advanced": {"cell_ranks": 2}}
    options |= {"timeout_s": AMPLE_S, "bucket_bytes": BUCKET_BYTES}
    answers: list[dict[str, Any]] = []
    for _ in range(3):
        version = fleet.next_version()
        answers = fleet.trainer.update(engines, version, options)
        assert answers[0]["ok"], answers[0]
        assert answers[0]["cells"] == [[engines[0].url, engines[1].url], [engines[2].url]]
        for engine, row in zip(engines, answers[0]["report"]["targets"], strict=True):
            near, far = (0, 1) if engine.host == ALPHA else (1, 0)
            assert (row["transport"], row["proof"], row["version_after"]) == ("direct", "resident", version), row
            legs = [(leg["ranks"], leg["by"], leg["trainers"]) for leg in row["legs"]]
            assert sorted(legs, key=str) == sorted([([0], "buffer", [near]), ([0], "group", [far])], key=str)
            engine.serves(version)
        # Two engines are on the first trainer rank's host and one on the second's.
        check_sent(answers, [shard_bytes(0), 2 * shard_bytes(1)])
    return answers
