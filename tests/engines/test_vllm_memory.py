"""Real vLLM on this CPU: staging inside its memory budget, and updates around its sleep."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.engines.test_vllm_cpu import COUNT, PROMPTS, SIZES
from tests.engines.vllm_server import greedy_tokens, vllm
from tests.helpers.engines import Engine, push, status, verify, weightcast
from tests.helpers.tiny import greedy, tiny_model, tiny_tokenizer
from weightcast import Target
from weightcast.exporters.checkpoint import CheckpointExporter
from weightcast.lab.connect import connect as connect_in_lab

pytestmark = [pytest.mark.engine]

DEV = {"VLLM_SERVER_DEV_MODE": "1"}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[list[int]]]]:
    """Two checkpoints of one model with a padded vocabulary, and what transformers answers with each."""
    root = tmp_path_factory.mktemp("weights")
    found: dict[str, tuple[Path, list[list[int]]]] = {}
    for seed, name in enumerate("AB"):
        model: Any = tiny_model(root / name, family="qwen2", seed=seed, **SIZES, vocab_size=500)
        tiny_tokenizer(root / name)
        found[name] = root / name, [greedy(model, prompt, COUNT) for prompt in PROMPTS]
    assert found["A"][1] != found["B"][1]
    return found


def ask(engine: Engine, path: str) -> int:
    return engine.client.post(engine.url + path).status_code


def held_still(engine: Engine) -> bool:
    return engine.get("/is_paused")["is_paused"]


def mapped_bytes(engine: Engine) -> list[int]:
    """Memory of each rank's weights that were mapped."""
    return [int(found) for found in engine.post("/collective_rpc", method="mapped_bytes")["results"]]


@pytest.mark.parametrize("maps", [False, pytest.param(True, marks=pytest.mark.engine_full)])
def test_no_update_and_no_read_back_while_it_sleeps_and_no_word_of_discarded_weights(weights, tmp_path, maps) -> None:
    a, b = weights["A"], weights["B"]
    extension = ["--worker-extension-cls=tests.helpers.vllm_mapped.Mapped"] if maps else []

    def asleep() -> bool:
        return not maps or mapped_bytes(engine) == [0, 0]

    with vllm(a[0], tmp_path, *extension, tp=2, extra=DEV) as engine:
        if maps:
            both_copies = mapped_bytes(engine)
            assert all(both_copies)
        push(b[0], [engine], 1)
        assert greedy_tokens(engine, PROMPTS, COUNT) == b[1]

        # Level 1 keeps the weights on the host; nothing may touch them on the device.
        assert ask(engine, "/sleep?level=1") == 200
        assert asleep()
        info = engine.info()
        assert (info["state"], info["paused"], info["version"]) == ("serving", True, 1)
        assert "asleep: kv_cache, weights" in info["message"]
        for command in (("push", a[0], "--to", engine.url, "--version", 2), ("verify", b[0], "--at", engine.url)):
            refused = weightcast(*command)
            assert refused.returncode != 0
            assert "the engine is asleep (POST /wake_up?tags=weights" in refused.stderr + refused.stdout
        assert engine.info()["version"] == 1
        if maps:
            engine.post("/collective_rpc", method="leave_room", args=[0])
            answer = engine.client.post(engine.url + "/wake_up?tags=weights")
            assert (answer.status_code, asleep()) == (503, True), answer.text
            assert "rank 1 has no room for its weights, which sleep on" in answer.text
            assert "asleep: kv_cache, weights" in engine.info()["message"]
            engine.post("/collective_rpc", method="leave_room", args=[1])
        assert ask(engine, "/wake_up?tags=weights") == 200
        if maps:  # they are back, and a trainer still has the memory for the next version
            refused = weightcast("push", a[0], "--to", engine.url, "--version", 2)
            assert "no room for new weights beside those that serve since vLLM woke up" in refused.stderr
            engine.post("/collective_rpc", method="leave_room", args=[2])
            push(b[0], [engine], 2)
        assert not maps or mapped_bytes(engine) == both_copies
        assert verify(b[0], engine) == (0, set())

        # Half awake it has no cache: the update leaves it paused, and vLLM resumes when the cache is back.
        row = push(a[0], [engine], 3)["targets"][0]
        assert row["status"] == "serving"
        assert row["message"].startswith("asleep: kv_cache; it has the new weights, and answers no request until")
        assert held_still(engine)
        assert engine.info()["message"] == "asleep: kv_cache"
        assert ask(engine, "/wake_up?tags=kv_cache") == 200
        assert not held_still(engine)
        assert greedy_tokens(engine, PROMPTS, COUNT) == a[1]

        # Level 2 discards them: whatever is woken then is not served before a full update.
        assert ask(engine, "/sleep?level=2") == 200
        assert asleep()
        info = engine.info()
        assert (info["state"], info["version"], info["digest"]) == ("quarantined", None, None)
        assert "full update" in info["message"]
        with ThreadPoolExecutor(1) as pool:
            early = pool.submit(greedy_tokens, engine, PROMPTS[:1], COUNT)
            assert ask(engine, "/wake_up") == 200
            assert held_still(engine)
            assert engine.info()["state"] == "quarantined"
            push(b[0], [engine], 1)  # a lower version than before: what it had is gone
            assert early.result()[0] in ([], b[1][0])  # dropped, or answered after the update
        assert [(row["state"], row["version"]) for row in status(engine)] == [("serving", 1)]
        assert greedy_tokens(engine, PROMPTS, COUNT) == b[1]
        assert verify(b[0], engine) == (0, set())

        # As RL trainers do it: weights, update, cache.
        assert [ask(engine, path) for path in ("/sleep?level=2", "/wake_up?tags=weights")] == [200, 200]
        push(a[0], [engine], 2)
        assert ask(engine, "/wake_up?tags=kv_cache") == 200
        assert greedy_tokens(engine, PROMPTS, COUNT) == a[1]

        # Sleep waits for no update, and an operator's pause outlasts one.
        answers: list[int] = []

        def sleep_now(done: int, total: int) -> None:
            if done < total and not answers:
                answers.append(ask(engine, "/sleep?level=1"))

        with (
            CheckpointExporter(b[0]) as exporter,
            connect_in_lab(exporter, [Target(engine.url)], bucket_bytes=1 << 16, progress=sleep_now) as updater,
        ):
            updater.update(version=3)
        assert answers == [409]
        assert greedy_tokens(engine, PROMPTS, COUNT) == b[1]
        assert ask(engine, "/pause?mode=keep") == 200
        push(a[0], [engine], 4)
        assert held_still(engine)
        assert ask(engine, "/resume") == 200
        assert greedy_tokens(engine, PROMPTS, COUNT) == a[1]


def test_the_cache_is_sized_with_the_staging_set(weights, tmp_path) -> None:
    folder, said = weights["A"]
    budget = {"VLLM_CPU_KVCACHE_SPACE": None}  # sized by --gpu-memory-utilization, as on a GPU
    options = ("--gpu-memory-utilization=0.1", "--no-enable-prefix-caching")
    with vllm(folder, tmp_path, *options, extra=budget) as engine:
        log = (tmp_path / "vllm.log").read_text()
        told = re.search(
            r"rank 0 stages updates on: device \(setting: auto\), (\S+) GiB; KV cache: (\S+) GiB of (\S+) GiB", log
        )
        assert told is not None, log[-3000:]
        staged, left, whole = map(float, told.groups())
        assert left == pytest.approx(whole - staged, abs=0.02)
        (row,) = status(engine)
        size_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        assert row["staging"] == "device"
        assert row["staging_bytes"] == pytest.approx(size_bytes, rel=0.2)
        push(weights["B"][0], [engine], 1, "--pause", "in_place")  # goes on afterwards
        assert greedy_tokens(engine, PROMPTS, COUNT) == weights["B"][1] != said


def test_staging_is_switched_off_by_its_setting(weights, tmp_path) -> None:
    setting = '{"weightcast": {"staging": "none"}}'
    with vllm(weights["A"][0], tmp_path, "--additional-config", setting) as engine:
        (row,) = status(engine)
        assert (row["staging"], row["staging_bytes"]) == ("none", 0)
        push(weights["B"][0], [engine], 1)
        assert greedy_tokens(engine, PROMPTS, COUNT) == weights["B"][1]
