"""Updates over CUDA IPC and NCCL between processes, with the toy engine: sessions, ranks, failure."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import torch

from tests.gpu.memory import held_bytes, process_tree
from tests.gpu.needs import needs
from weightcast.comm.ports import quiet_port

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

Record = Callable[[str, Any], None]
PYTHONPATH = os.pathsep.join(["src", ".", os.environ.get("PYTHONPATH", "")])
ENVIRONMENT = {**os.environ, "PYTHONPATH": PYTHONPATH}


@contextmanager
def toy_engine(*arguments: str, **environment: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.helpers.toy_engine", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT | environment,
    )
    try:
        assert process.stdout is not None
        word, _, port = process.stdout.readline().partition(" ")
        assert word == "ready"
        yield f"http://127.0.0.1:{port.strip()}", process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def start_trainer(devices: list[str], targets: list[str], **options: object) -> list[subprocess.Popen[str]]:
    port = quiet_port()
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    return [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.gpu.trainer",
                f"--rank={rank}",
                f"--world={len(devices)}",
                f"--port={port}",
                f"--device={device}",
                f"--targets={','.join(targets)}",
                *arguments,
            ],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": PYTHONPATH},
        )
        for rank, device in enumerate(devices)
    ]


def results(trainers: list[subprocess.Popen[str]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for trainer in trainers:
        output, _ = trainer.communicate(timeout=240)
        found.append(json.loads(output.strip().splitlines()[-1]))
    return found


def train(devices: list[str], targets: list[str], **options: object) -> dict[str, Any]:
    """Rank 0's answer, with the bytes that each rank has sent by messages."""
    answers = results(start_trainer(devices, targets, **options))
    sent_bytes = [answer.pop("sent_bytes") for answer in answers]
    first, *others = answers
    heard = {name: value for name, value in first.items() if name != "held_bytes"}  # only rank 0 watches
    assert all(answer == heard for answer in others), "every rank hears the same report"
    return first | {"sent_bytes": sent_bytes}


def digests(url: str) -> dict[str, str]:
    return httpx.get(f"{url}/weightcast/digests", timeout=60, trust_env=False).json()["resident"]


def info(url: str) -> dict[str, Any]:
    return httpx.get(f"{url}/weightcast/info", timeout=60, trust_env=False).json()


APART = [
    (["cuda:0"], [["cuda:1"]], 2, "1+1"),
    (["cuda:0", "cuda:1"], [["cuda:2", "cuda:3"]], 4, "2+2 tp2"),
    (["cuda:0", "cuda:1"], [["cuda:2"], ["cuda:3"]], 4, "2+2 engines"),
]
SHARED = [
    (["cuda:0"], [["cuda:0"]], 1, "shared"),
    (["cuda:0"], [["cuda:0", "cuda:1"]], 2, "1 to tp2, shared"),
    (["cuda:0", "cuda:1"], [["cuda:0", "cuda:1"]], 2, "2 to tp2, shared"),
    (["cuda:0", "cuda:1"], [["cuda:0"], ["cuda:1"]], 2, "2 to 2 engines, shared"),
]


@pytest.mark.parametrize(
    ("transport", "trainer", "engines"),
    [
        pytest.param(transport, trainer, engines, id=f"{name}, {transport}", marks=needs(gpus))
        # nccl wants a GPU for each rank: trainers and engines that share one have ipc only.
        for transport, places in (("ipc", [*SHARED, *APART]), ("broadcast", APART))
        for trainer, engines, gpus, name in places
    ],
)
def test_update_over_gpus(transport: str, trainer: list[str], engines: list[list[str]]) -> None:
    with toy_engine("--local", "--seed", "7") as (reference, _):
        train_once = [toy_engine("--tp", str(len(e)), "--devices", ",".join(e), "--seed", "1") for e in engines]
        opened = [context.__enter__() for context in train_once]
        try:
            urls = [url for url, _ in opened]
            want = digests(reference)  # the trainer's weights (seed 7), digested on a CPU
            assert all(set(digests(url).values()).isdisjoint(want.values()) for url in urls)
            answer = train(trainer, urls, transport=transport, versions="1,2", seed=7, bucket_bytes=50_000)
            assert answer["ok"], answer
            for report in answer["reports"]:
                assert [row["status"] for row in report["targets"]] == ["serving"] * len(urls)
                assert all(row["digests_matched"] == row["ranks"] for row in report["targets"])
                assert all(row["proof"] == "resident" for row in report["targets"])
            for url in urls:
                assert digests(url) == want
                assert info(url)["version"] == 2
        finally:
            for context in train_once:
                context.__exit__(None, None, None)


@needs(2)
def test_only_who_shares_memory_minds_expandable_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    with toy_engine("--devices", "cuda:1", "--seed", "1") as (url, _):
        before = digests(url)
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # of the trainer alone
        options = {"seed": 7, "bucket_bytes": 50_000, "versions": "1"}
        answer = train(["cuda:0"], [url], transport="ipc", **options)
        assert not answer["ok"]
        assert "cannot be shared" in answer["text"], answer
        assert digests(url) == before
        answer = train(["cuda:0"], [url], transport="broadcast", **options)
        assert answer["ok"], answer
        assert info(url)["version"] == 1
        assert set(digests(url).values()).isdisjoint(before.values())


@needs(2)
def test_an_engine_keeps_nothing_of_a_group_whose_trainer_has_left(record: Record) -> None:
    held: list[int] = []
    with toy_engine("--devices", "cuda:1", "--seed", "1") as (url, engine):
        for version in range(1, 6):
            answer = train(["cuda:0"], [url], transport="broadcast", seed=version, versions=str(version))
            assert answer["ok"], answer
            amount, whose = held_bytes(process_tree(engine.pid), {1})
            held.append(amount)
    record("held_bytes_after_each_trainer", held)
    record("held_by", whose)
    assert held[-1] - held[0] <= 64 << 20, "a communicator takes about 500 MB"


@pytest.mark.parametrize(
    ("transport", "engine"), [("ipc", "cuda:0"), pytest.param("broadcast", "cuda:1", marks=needs(2))]
)
@pytest.mark.parametrize("die_after", [1, 4])
def test_a_killed_trainer_leaves_the_old_version(transport: str, engine: str, die_after: int) -> None:
    with toy_engine("--devices", engine, "--seed", "1") as (url, _):
        before = digests(url)
        [trainer] = start_trainer(
            ["cuda:0"], [url], transport=transport, seed=7, bucket_bytes=50_000, die_after=die_after
        )
        trainer.communicate(timeout=100)
        assert trainer.returncode == -signal.SIGKILL
        deadline = time.monotonic() + 20
        while info(url)["state"] != "serving" and time.monotonic() < deadline:
            time.sleep(0.1)
        assert info(url)["state"] == "serving"
        assert info(url)["version"] == 0
        assert digests(url) == before
        answer = train(["cuda:0"], [url], transport=transport, seed=7, bucket_bytes=50_000, versions="1")
        assert answer["ok"], answer
        assert set(digests(url).values()).isdisjoint(before.values())


@pytest.mark.parametrize(
    ("transport", "engine"), [("ipc", "cuda:0"), pytest.param("broadcast", "cuda:1", marks=needs(2))]
)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_engine_is_named_within_the_deadline(transport: str, engine: str, how: signal.Signals) -> None:
    with toy_engine("--devices", engine, "--seed", "1") as (url, process):
        pids = [rank["pid"] for rank in info(url)["ranks"]]
        [trainer] = start_trainer(
            ["cuda:0"], [url], transport=transport, seed=7, rows=1_000_000, bucket_bytes=1 << 20, timeout=6
        )
        deadline = time.monotonic() + 60
        while info(url)["state"] != "updating" and time.monotonic() < deadline:
            time.sleep(0.01)
        for pid in [*pids, process.pid]:
            os.kill(pid, how)
        try:
            [answer] = results([trainer])
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGKILL) if how == signal.SIGSTOP else None
        assert not answer["ok"]
        assert url in answer["text"]
