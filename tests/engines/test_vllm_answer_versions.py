"""Real vLLM on this CPU: each answer of its OpenAI routes says which weights computed its tokens."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.engines.test_vllm_cpu import SIZES
from tests.engines.test_vllm_in_flight import plug_in
from tests.engines.vllm_server import vllm
from tests.helpers.clock import PATIENCE_S
from tests.helpers.engines import Engine
from tests.helpers.tiny import greedy, tiny_model, tiny_tokenizer
from weightcast import Target, WeightUpdater
from weightcast.exporters.checkpoint import CheckpointExporter

pytestmark = [pytest.mark.engine]

PROMPT = [5, 17, 200, 33]
COUNT = 200
GREEDY = {"model": "tiny", "temperature": 0, "ignore_eos": True, "return_token_ids": True}
CHAT = {"messages": [{"role": "user", "content": "a b"}]}


def spans(*pairs: tuple[int, int]) -> list[dict[str, int]]:
    return [{"version": version, "tokens": tokens} for version, tokens in pairs]


def stream(engine: Engine, route: str, began: threading.Event, **body: Any) -> list[dict[str, Any]]:
    """All events; ``began`` is set after the first."""
    found: list[dict[str, Any]] = []
    asked = GREEDY | {"stream": True, "stream_options": {"include_usage": True}} | body
    with engine.client.stream("POST", engine.url + route, json=asked) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                found.append(json.loads(line[6:]))
                began.set()
            else:
                assert line in ("", "data: [DONE]")
    assert line == ""
    return found


def check_at_rest(engine: Engine, version: int) -> None:
    """Every form of an answer has one version."""
    several = engine.post("/v1/completions", **GREEDY, prompt=[PROMPT, PROMPT[:3]], max_tokens=5, n=1)
    assert [choice["weight_versions"] for choice in several["choices"]] == [spans((version, 5))] * 2
    assert (several["weight_version"], several["weight_versions"]) == (version, spans((version, 10)))
    chat = engine.post("/v1/chat/completions", **GREEDY, **CHAT, max_tokens=4)
    assert (chat["weight_version"], chat["weight_versions"]) == (version, spans((version, 4)))
    assert chat["choices"][0]["weight_version"] == version
    assert chat["usage"]["completion_tokens"] == 4
    *events, last = stream(engine, "/v1/chat/completions", threading.Event(), **CHAT, max_tokens=4)
    ends = [choice for event in events for choice in event["choices"] if choice["finish_reason"]]
    assert [end["weight_versions"] for end in ends] == [spans((version, 4))]
    assert (last["choices"], last["weight_version"]) == ([], version)
    listed = engine.get("/v1/models")  # another route is as it was
    assert "weight_version" not in listed
    refused = engine.client.post(engine.url + "/v1/completions", json=GREEDY | {"prompt": PROMPT, "model": "other"})
    assert refused.status_code == 404
    assert "weight_version" not in refused.json()


def check_across(events: list[dict[str, Any]], whole: dict[str, Any], old: int, tokens: list[int]) -> bool:
    """Says whether the streamed answer ran over the switch; ``tokens`` are what the old weights alone would say."""
    streamed = [event["weight_version"] for event in events if event["choices"]]
    assert streamed == sorted(streamed)
    (end,) = [choice for event in events for choice in event["choices"] if choice["finish_reason"]]
    counts = {span["version"]: span["tokens"] for span in end["weight_versions"]}
    assert list(counts) == sorted(set(streamed))
    assert sum(counts.values()) == COUNT
    said = [token for event in events for choice in event["choices"] for token in choice["token_ids"]]
    assert said[: counts.get(old, 0)] == tokens[: counts.get(old, 0)]
    (choice,) = whole["choices"]
    for found in (whole, choice):
        assert found["weight_version"] == found["weight_versions"][-1]["version"]
        assert sum(span["tokens"] for span in found["weight_versions"]) == COUNT
    before = [span["tokens"] for span in choice["weight_versions"] if span["version"] == old]
    assert choice["token_ids"][: sum(before)] == tokens[: sum(before)]
    return len(counts) == len(choice["weight_versions"]) == 2


@pytest.mark.parametrize("ahead", [False, pytest.param(True, marks=pytest.mark.engine_full)])
def test_answers_say_which_weights_computed_their_tokens(tmp_path: Path, ahead: bool) -> None:
    tokens: dict[str, list[int]] = {}
    for seed, name in enumerate("AB"):
        tokens[name] = greedy(tiny_model(tmp_path / name, seed=seed, **SIZES), PROMPT, COUNT)
        tiny_tokenizer(tmp_path / name)
    assert tokens["A"] != tokens["B"]
    extra = plug_in(tmp_path / "ahead") if ahead else {}  # with a batch in flight at the switch, as on GPUs
    across = 0
    with vllm(tmp_path / "A", tmp_path, extra=extra) as engine:
        check_at_rest(engine, 0)
        for version, (old, new) in enumerate(("AB", "BA", "AB", "BA", "AB", "BA"), 1):
            began = threading.Event()
            body = {"prompt": PROMPT, "max_tokens": COUNT}
            with (
                ThreadPoolExecutor(2) as pool,
                CheckpointExporter(tmp_path / new) as exporter,
                WeightUpdater.connect(
                    exporter, [Target(engine.url)], pause="in_place", timeout_s=PATIENCE_S
                ) as updater,
            ):
                answer = pool.submit(engine.post, "/v1/completions", **GREEDY, **body)
                events = pool.submit(stream, engine, "/v1/completions", began, **body)
                assert began.wait(PATIENCE_S)
                updater.update(version=version)
                across += check_across(events.result(), answer.result(), version - 1, tokens[old])
            check_at_rest(engine, version)
    assert across, "no answer was under way at a switch"
