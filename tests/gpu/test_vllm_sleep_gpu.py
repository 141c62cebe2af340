"""Real vLLM on a GPU with its sleep mode and CUDA graphs, and weights that a commit maps all the same.

vLLM comes from where ``test_vllm_gpu`` has it from.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.gpu.servers import Record, Server, models, pushed
from tests.gpu.test_updates_gpu import PYTHONPATH, digests, info
from tests.gpu.test_vllm_gpu import SITE, Vllm, vllm
from tests.gpu.test_vllm_gpu import pytestmark as needs_vllm
from tests.helpers.answers import ALIKE, agreement

pytestmark = [*needs_vllm[:-1], pytest.mark.timeout(580)]

SLEEP = ["--enable-sleep-mode"]
MAPS = '--additional-config={"weightcast": {"staging": "device"}}'
COPIES = '--additional-config={"weightcast": {"map_with_sleep": false, "staging": "device"}}'
MORE_BYTES = 256 << 20  # one copy of the weights is over 1 GB


def asked(server: Server, *paths: str) -> None:
    """vLLM's own routes, one after another."""
    for path in paths:
        answer = httpx.post(server.url + path, timeout=120, trust_env=False)
        assert answer.status_code == 200, f"{path}: {answer.status_code} {answer.text}"


def cli(*words: object) -> subprocess.CompletedProcess[str]:
    """The command line, on the CPU."""
    path = os.pathsep.join(part for part in (PYTHONPATH, SITE) if part)
    return subprocess.run(
        [sys.executable, "-m", "weightcast", *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=os.environ | {"PYTHONPATH": path, "NO_COLOR": "1"},
    )


def asleep_bytes(server: Server) -> dict[int, int]:
    """GPU memory of a sleeping server by the level of its sleep; it is asleep afterwards, and has lost its weights."""
    found: dict[int, int] = {}
    for level in (1, 2):
        asked(server, f"/sleep?level={level}")
        found[level] = server.held_bytes()[0]
        if level == 1:
            asked(server, "/wake_up")
    return found


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_mapped_weights_sleep_and_wake_with_vllm(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, record: Record, family: str
) -> None:
    a, b = models(tmp_path_factory, family)
    common: dict[str, Any] = {"backend": "weightcast", "gpus": [0], "eager": False}
    # One after the other: where the driver does not say whose memory it is, all of the GPU's counts.
    with vllm(b, tmp_path / "copies.log", **common, options=[*SLEEP, COPIES]) as server:
        server.wait_ready()
        record("vllm", server.get("/version").json()["version"])
        fresh = Vllm().answers(server)
        held = digests(server.url)
        awake_before = server.held_bytes()[0]
        asleep_before = asleep_bytes(server)
    with vllm(a, tmp_path / "maps.log", **common, options=[*SLEEP, MAPS]) as server:
        server.wait_ready()
        assert re.search(r"rank 0 switches [\d.]+ GiB without a copy", server.log.read_text())
        expected = {a: Vllm().answers(server)}
        assert all(old != new for old, new in zip(expected[a], fresh, strict=True))
        awake = server.held_bytes()[0]
        record("awake", {"mapped": awake, "copied": awake_before})
        assert awake < awake_before + MORE_BYTES  # what the weights have left is free

        def check(model: Path) -> None:
            assert Vllm().answers(server) == expected[model]
            proven = cli("verify", model, "--at", server.url)
            assert proven.returncode == 0, proven.stdout + proven.stderr

        def falls_asleep(level: int) -> None:
            asked(server, f"/sleep?level={level}")
            asleep = server.held_bytes()[0]
            record(f"asleep {level}", {"mapped": asleep, "copied": asleep_before[level]})
            assert asleep < asleep_before[level] + MORE_BYTES

        record("stall_s", [pushed(server, b, 1)["stall_s"]])
        expected[b] = Vllm().answers(server)
        record("agreement", agreement(expected[b], fresh))
        assert agreement(expected[b], fresh) >= ALIKE > agreement(expected[a], fresh)
        pushed(server, a, 2)
        pushed(server, b, 3)
        check(b)
        assert digests(server.url) == held

        # Level 1 keeps weights, version and proof.
        before = info(server.url)
        falls_asleep(1)
        refused = cli("push", a, "--to", server.url, "--version", 4, "--via", "ipc")
        assert "the engine is asleep" in refused.stdout + refused.stderr
        asked(server, "/wake_up?tags=weights")
        assert digests(server.url) == held
        asked(server, "/wake_up?tags=kv_cache")
        after = info(server.url)
        assert [after[key] for key in ("state", "version", "digest")] == ["serving", 3, before["digest"]]
        check(b)

        # An update while the cache sleeps.
        falls_asleep(1)
        asked(server, "/wake_up?tags=weights")
        pushed(server, a, 4)
        asked(server, "/wake_up?tags=kv_cache")
        check(a)

        # Level 2 loses them.
        falls_asleep(2)
        assert (info(server.url)["state"], info(server.url)["version"]) == ("quarantined", None)
        asked(server, "/wake_up?tags=weights")
        pushed(server, b, 5)
        asked(server, "/wake_up?tags=kv_cache")
        check(b)
        assert digests(server.url) == held
        falls_asleep(2)
        asked(server, "/wake_up")
        pushed(server, a, 6)
        check(a)
        assert server.held_bytes()[0] < awake + MORE_BYTES
