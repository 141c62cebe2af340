"""Real vLLM on this CPU with prefix caching, its default: an update in place leaves nobody the old weights' cache."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.engines.test_vllm_cpu import SIZES
from tests.engines.vllm_server import vllm
from tests.helpers.clock import PATIENCE_S
from tests.helpers.engines import Engine
from tests.helpers.tiny import greedy, tiny_model, tiny_tokenizer
from weightcast import Target, WeightUpdater
from weightcast.exporters.checkpoint import CheckpointExporter

pytestmark = [pytest.mark.engine]

BLOCK = 128  # tokens, on a CPU
SHARED = [(7 * at) % 400 + 10 for at in range(BLOCK + 8)]
PROMPTS = [[*SHARED, 20 + number, 33, 45 + number] for number in range(8)]
COUNT = 12


def ask(engine: Engine, prompts: list[list[int]], count: int = COUNT, *, replica: int = 0, **more: Any) -> list[Any]:
    body = {"model": "tiny", "prompt": prompts, "max_tokens": count, "temperature": 0, "ignore_eos": True}
    answer = engine.client.post(
        f"{engine.url}/v1/completions",
        json=body | {"return_token_ids": True} | more,
        headers={"X-data-parallel-rank": str(replica)},
    )
    assert answer.status_code == 200, answer.text
    return [choice["token_ids"] for choice in sorted(answer.json()["choices"], key=lambda choice: choice["index"])]


def metric(engine: Engine, name: str) -> int:
    """vLLM's own, summed over data-parallel engines."""
    page = engine.client.get(engine.url + "/metrics").text
    return int(sum(map(float, re.findall(rf"^vllm:{name}\{{.*\}} (\S+)$", page, re.MULTILINE))))


@contextmanager
def under_way(engine: Engine) -> Iterator[None]:
    """While requests with the same prompts run, on the first engine."""
    found: list[list[int]] = []
    requests = threading.Thread(target=lambda: found.extend(ask(engine, PROMPTS, 100)))
    requests.start()
    deadline = time.monotonic() + PATIENCE_S
    while not metric(engine, "num_requests_running"):
        assert requests.is_alive(), "no request was under way"
        assert time.monotonic() < deadline
    yield
    requests.join()
    assert [len(tokens) for tokens in found] == [100] * len(PROMPTS)


@pytest.mark.parametrize(
    ("tp", "replicas"),
    [(1, 1), *(pytest.param(*sizes, marks=pytest.mark.engine_full) for sizes in ((2, 1), (1, 2)))],
)
def test_prompts_in_the_cache_are_answered_by_the_new_weights(tmp_path: Path, tp: int, replicas: int) -> None:
    said: dict[str, list[list[int]]] = {}
    for seed, name in enumerate("AB"):
        model = tiny_model(tmp_path / name, seed=seed, **SIZES)
        tiny_tokenizer(tmp_path / name)
        said[name] = [greedy(model, prompt, COUNT) for prompt in PROMPTS]
    assert all(one != other for one, other in zip(said["A"], said["B"], strict=True))
    with vllm(tmp_path / "A", tmp_path, f"--data-parallel-size={replicas}", tp=tp) as engine:
        ways: list[dict[str, Any]] = [
            {"replica": replica} | salt for replica in range(replicas) for salt in ({}, {"cache_salt": "mine"})
        ]

        def check(name: str) -> None:
            """The first prompt is computed, all later ones are found: the answers are those of these weights alone."""
            for way in ways:
                hits = metric(engine, "prefix_cache_hits_total")
                assert ask(engine, PROMPTS[:1], **way) == said[name][:1]
                assert metric(engine, "prefix_cache_hits_total") == hits, "it was answered from an old cache"
                assert ask(engine, PROMPTS, **way) == said[name]
                assert metric(engine, "prefix_cache_hits_total") == hits + len(PROMPTS) * BLOCK

        check("A")
        for version, name in enumerate("BAB", 1):
            with (
                CheckpointExporter(tmp_path / name) as exporter,
                WeightUpdater.connect(
                    exporter, [Target(engine.url)], pause="in_place", timeout_s=PATIENCE_S
                ) as updater,
                under_way(engine),
            ):
                (row,) = updater.update(version=version).targets
                assert (row.proof, row.version_after) == ("resident", version)
                check(name)
