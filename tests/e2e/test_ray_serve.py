"""``weightcast serve --executor ray``: groups, shared memory and a lost rank, as with the other executors."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import httpx
import pytest

from tests.helpers.clock import PATIENCE_S
from tests.helpers.engines import Engine, push
from tests.helpers.tiny import greedy, tiny_model


@pytest.fixture
def engine(tmp_path: Path):
    tiny_model(tmp_path / "a", seed=1)
    started = Engine.start(tmp_path / "a", tp=2, log=tmp_path / "log", executor="ray", ray_address="local")
    try:
        started.ready(tmp_path / "log")
        yield started
    finally:
        code = started.stop()
    assert code == 0


def test_ranks_as_actors(engine, tmp_path):
    model = tiny_model(tmp_path / "b", seed=2)
    ours = greedy(model, [5, 6, 7], 8)
    assert engine.greedy([[5, 6, 7]], 8) != [ours]
    pids = [rank["pid"] for rank in engine.info()["ranks"]]
    assert len(set(pids)) == 2
    assert engine.process.pid not in pids
    for version, transport in ((1, "ipc"), (2, "broadcast")):  # handles mapped, then a group joined and left
        report = push(tmp_path / "b", [engine], version, "--via", transport)
        [row] = report["targets"]
        assert (row["status"], row["proof"], row["digests_matched"], row["ranks"]) == ("serving", "resident", 2, 2)
        assert engine.greedy([[5, 6, 7]], 8) == [ours]
    os.kill(pids[1], signal.SIGKILL)
    deadline = time.monotonic() + PATIENCE_S
    while True:
        answer = httpx.get(f"{engine.url}/health", trust_env=False, verify=False, timeout=300)
        if answer.status_code == 503:
            break
        assert time.monotonic() < deadline
        httpx.post(
            f"{engine.url}/v1/completions", json={"prompt": [5], "max_tokens": 2}, trust_env=False, timeout=60
        )  # somebody asks; an idle engine finds out later
    assert f"rank 1 (pid {pids[1]} on " in answer.json()["error"]
    assert "is gone" in answer.json()["error"]
