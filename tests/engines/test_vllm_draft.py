"""Real vLLM on this CPU with a draft model, which an update writes together with the model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.engines.test_vllm_cpu import COUNT, PROMPTS, SIZES
from tests.engines.vllm_server import greedy_tokens, vllm
from tests.helpers.engines import Engine, push, weightcast
from tests.helpers.tiny import greedy, tiny_model, tiny_tokenizer
from weightcast import Target, WeightUpdater
from weightcast.errors import ConfigError

pytestmark = [pytest.mark.engine]

UPDATE = ["--additional-config", json.dumps({"weightcast": {"draft": "update"}})]


def drafts(folder: Path) -> list[str]:
    """vLLM's options for a draft model of the same shape as the model, three tokens at a time."""
    config = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 3}
    return ["--speculative-config", json.dumps(config)]


def accepted(engine: Engine) -> tuple[int, int]:
    """How many draft tokens vLLM has accepted, and how many it has tried."""
    page = engine.client.get(f"{engine.url}/metrics").text

    def total(name: str) -> int:
        return int(
            sum(float(value) for value in re.findall(rf"^vllm:{name}_total{{[^}}]*}} (\S+)$", page, re.MULTILINE))
        )

    return total("spec_decode_num_accepted_tokens"), total("spec_decode_num_draft_tokens")


def share(engine: Engine, expected: list[list[int]]) -> float:
    """Checks the answers; returns which share of the draft's tokens was accepted meanwhile."""
    before = accepted(engine)
    assert greedy_tokens(engine, PROMPTS, COUNT) == expected
    after = accepted(engine)
    assert after[1] > before[1]
    return (after[0] - before[0]) / (after[1] - before[1])


def made(root: Path) -> dict[str, tuple[Path, Any, list[list[int]]]]:
    """Checkpoints, their models, and what transformers answers with each."""
    found: dict[str, tuple[Path, Any, list[list[int]]]] = {}
    for seed, name in enumerate("ABD"):
        model = tiny_model(root / name, seed=seed, **SIZES)
        tiny_tokenizer(root / name)
        found[name] = root / name, model, [greedy(model, prompt, COUNT) for prompt in PROMPTS]
    return found


def test_a_draft_is_updated_with_the_model(tmp_path: Path) -> None:
    weights = made(tmp_path)
    (a, _, said_a), (_, b, said_b), (d, draft, _) = weights["A"], weights["B"], weights["D"]
    with vllm(a, tmp_path, *drafts(d), *UPDATE) as engine:
        assert share(engine, said_a) < 0.5  # an untrained draft is of no use, and changes no answer
        with pytest.raises(ConfigError, match=r"missing draft\.") as caught:
            WeightUpdater.connect(b, [Target(engine.url)])
        assert "draft=" in (caught.value.hint or "")
        assert share(engine, said_a) < 0.5
        options: dict[str, Any] = {"bucket_bytes": 1 << 16, "timeout_s": 60.0}
        # The draft gets the model's own weights, so that vLLM accepts all that it proposes.
        with WeightUpdater.connect(b, [Target(engine.url)], draft=b, **options) as updater:
            report = updater.update()
        (row,) = report.targets
        assert (row.proof, row.version_after, row.not_updated) == ("resident", 1, ())
        assert share(engine, said_b) > 0.8  # what is proposed beyond the last token is lost
        # A draft of the old model is of no use again: both were switched.
        with WeightUpdater.connect(b, [Target(engine.url)], draft=draft, transport="broadcast", **options) as updater:
            (row,) = updater.update().targets
        assert (row.proof, row.version_after) == ("resident", 2)
        assert share(engine, said_b) < 0.5


@pytest.mark.engine_full
def test_a_draft_that_is_kept_is_named(tmp_path: Path) -> None:
    weights = made(tmp_path)
    (a, _, said_a), (b, _, said_b) = weights["A"], weights["B"]
    with vllm(a, tmp_path, *drafts(a)) as engine:
        assert share(engine, said_a) > 0.8
        report = push(b, [engine], 1, "--bucket-bytes", "64KiB")
        assert report["targets"][0]["not_updated"] == ["the draft model"]
        assert share(engine, said_b) < 0.5
        # It is named before anything moves, too.
        assert any("the draft model keeps the weights" in hazard for hazard in engine.info()["hazards"])
        assert "the draft model keeps the weights" in " ".join(weightcast("doctor", engine.url).stdout.split())
