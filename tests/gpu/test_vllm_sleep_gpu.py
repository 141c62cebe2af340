"""Real vLLM with sleep mode on a GPU: commits map memory, and what serves sleeps, wakes and is freed as vLLM's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.gpu.servers import Record, Server
from tests.gpu.test_vllm_fp8_gpu import checkpoints, push
from tests.gpu.test_vllm_gpu import Vllm, vllm
from tests.gpu.test_vllm_gpu import pytestmark as needs_vllm

pytestmark = [*needs_vllm[:-1], pytest.mark.timeout(400)]

# 0.6 GB, in matrices that have segments of their own and small ones that share some.
LARGE: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
}
SLACK_BYTES = 256 << 20


def ask(server: Server, path: str) -> None:
    answer = httpx.post(server.url + path, timeout=120, trust_env=False)
    assert answer.status_code == 200, f"{path}: {answer.status_code} {answer.text}"


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_weights_that_a_commit_maps_sleep_and_wake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: Record, eager: bool
) -> None:
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    models = checkpoints(tmp_path, "qwen3", LARGE, "")
    size_bytes = (models[0] / "model.safetensors").stat().st_size
    common: dict[str, Any] = {"backend": "weightcast", "gpus": [0], "eager": eager}
    with vllm(models[1], tmp_path / "other.log", **common, options=["--dtype=bfloat16"]) as other:
        other.wait_ready()
        answers = [[], Vllm().answers(other)]
    options = ["--dtype=bfloat16", "--enable-sleep-mode"]
    with vllm(models[0], tmp_path / "sleeps.log", **common, options=options) as server:
        server.wait_ready()
        assert "without a copy" in server.log.read_text(errors="replace")
        answers[0] = Vllm().answers(server)
        assert all(old != new for old, new in zip(*answers, strict=True))
        awake, counted = server.held_bytes()
        stalls: list[float] = []
        version = 0

        def pushed(index: int) -> None:
            nonlocal version
            version += 1
            row = push(models[index], server, version)
            assert (row["proof"], row["not_updated"]) == ("resident", []), row
            stalls.append(row["stall_s"])

        def asleep(level: int) -> None:
            ask(server, f"/sleep?level={level}")
            held, _ = server.held_bytes()
            # Both copies of the weights, and the KV cache of 1 GiB.
            assert awake - held > 2 * size_bytes + (1 << 30) - SLACK_BYTES, (awake, held, counted)

        # After an odd and an even number of commits, what serves lies in the first and in the second memory.
        for index in (1, 0, 1):
            pushed(index)
            assert Vllm().answers(server) == answers[index]
            asleep(1)
            ask(server, "/wake_up")
            assert Vllm().answers(server) == answers[index]
        for level, index in ((1, 0), (2, 1), (2, 0)):
            asleep(level)
            ask(server, "/wake_up?tags=weights")
            pushed(index)
            ask(server, "/wake_up?tags=kv_cache")
            assert Vllm().answers(server) == answers[index]
        pushed(1)
        assert Vllm().answers(server) == answers[1]
        now, _ = server.held_bytes()
        assert abs(now - awake) < SLACK_BYTES, (awake, now, counted)
        record("stall_s", stalls)
        record("awake_bytes", awake)
