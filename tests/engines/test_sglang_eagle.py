"""Real SGLang on a CPU with EAGLE and EAGLE 3 heads; stand-ins of ours take the place of kernels that it lacks."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.e2e.engines import Engine
from tests.engines.eagle_heads import WIDTH, Weights, made
from tests.engines.sglang_server import generate, sglang
from tests.engines.test_sglang_cpu import PROMPTS
from tests.harness import BeforeCommit
from weightcast import Target, WeightUpdater
from weightcast.errors import ConfigError

pytestmark = [pytest.mark.engine]

COUNT = 24
OPTIONS: dict[str, Any] = {"bucket_bytes": 300_000, "timeout_s": 60.0}


def head(root: Path, method: str, seed: int) -> Weights:
    """Checkpoints as SGLang takes them: heads compute with the model's embeddings, and ``fc`` of EAGLE has a bias."""
    found = made(root, method, seed, copies=True)
    if method == "eagle":
        found.tensors["fc.bias"] = torch.randn(WIDTH) * 0.1
        save_file(found.tensors, found.head / "model.safetensors", {"format": "pt"})
        config = json.loads((found.head / "config.json").read_text())
        (found.head / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLMEagle"]}))
    return found


def options(weights: Weights, method: str) -> list[str]:
    """SGLang's options for the head, which foresees one token; several need kernels that have no stand-in here."""
    return [
        f"--speculative-algorithm={method.upper()}",
        f"--speculative-draft-model-path={weights.head}",
        "--speculative-num-steps=1",
        "--speculative-eagle-topk=1",
        "--speculative-num-draft-tokens=2",
        "--prefill-attention-backend=intel_amx",
        "--decode-attention-backend=intel_amx",
    ]


def played(engine: Engine) -> tuple[list[list[int]], list[tuple[int, int]]]:
    """Returns the answer to each prompt, asked one after another, and how many tokens were accepted and tried."""
    answers = [generate(engine, [prompt], COUNT)[0] for prompt in PROMPTS]
    told = [answer["meta_info"] for answer in answers]
    counts = [(each["spec_num_correct_drafts"], each["spec_num_proposed_drafts"]) for each in told]
    return [answer["output_ids"] for answer in answers], counts


def share(counts: list[tuple[int, int]]) -> float:
    """The accepted share of all tokens that a head has tried."""
    return sum(accepted for accepted, _ in counts) / sum(tried for _, tried in counts)


@pytest.mark.engine_full
@pytest.mark.parametrize(("method", "via"), [("eagle3", "ipc"), ("eagle", "broadcast")])
def test_stock_sglang_keeps_its_head(tmp_path: Path, method: str, via: str) -> None:
    a, b = (head(tmp_path / name, method, seed) for seed, name in enumerate("ab"))
    with sglang(tmp_path, *((each.model, 1, options(each, method)) for each in (a, b))) as (engine, fresh):
        expected, at_best = played(fresh)
        assert share(at_best) > 0.4
        first = played(engine)
        assert first[0] != expected
        assert share(first[1]) > 0.4
        with pytest.raises(ConfigError, match="takes no draft model"):
            WeightUpdater.connect(b.of_model, [Target(engine.url)], draft=b.tensors, **OPTIONS)
        with WeightUpdater.connect(b.of_model, [Target(engine.url)], transport=via, **OPTIONS) as updater:
            (row,) = updater.update(version=1).targets
        assert (row.status, row.version_after, row.not_updated) == ("serving", 1, ("the draft model",))
        tokens, counts = played(engine)
        assert tokens == expected  # a head changes no token
        assert share(counts) < 0.2
        # Both have a `norm.weight`: the head has kept its own, and foresees the first model's tokens as before.
        with WeightUpdater.connect(a.of_model, [Target(engine.url)], transport=via, **OPTIONS) as updater:
            updater.update(version=2)
        assert played(engine) == first


@pytest.mark.parametrize(
    ("method", "tp"),
    [
        ("eagle3", 1),
        pytest.param("eagle", 1, marks=pytest.mark.engine_full),
        pytest.param("eagle3", 2, marks=pytest.mark.engine_full),
    ],
)
def test_a_head_is_updated_with_the_model(tmp_path: Path, method: str, tp: int) -> None:
    a, b, c = (head(tmp_path / name, method, seed) for seed, name in enumerate("abc"))
    settings = [(each.model, tp, options(each, method)) for each in (a, b)]
    with sglang(tmp_path, *settings, receiver=True, extra={"WEIGHTCAST_DRAFT": "update"}) as (engine, fresh):
        expected = played(fresh)
        assert share(expected[1]) > 0.4
        first = played(engine)
        assert first[0] != expected[0]
        info = engine.get("/weightcast/info")
        optional = {spec["name"] for spec in info["optional"]}
        # SGLang computes with the model's embeddings, and does not read this table.
        assert optional == {"draft.embed_tokens.weight"} | ({"draft.t2d"} if method == "eagle3" else set())
        assert {f"draft.{name}" for name in a.tensors} <= {spec["name"] for spec in info["specs"]} | optional
        assert not info["hazards"]
        with pytest.raises(ConfigError, match=r"missing draft\."):
            WeightUpdater.connect(b.of_model, [Target(engine.url)], **OPTIONS)
        with WeightUpdater.connect(b.of_model, [Target(engine.url)], draft=b.tensors, **OPTIONS) as updater:
            (row,) = updater.update(version=1).targets
        assert (row.proof, row.digests_matched, row.not_updated) == ("resident", tp, ())
        # As many tokens of the head are accepted as by a server that was started on the same two checkpoints.
        assert played(engine) == expected
        # The head of other weights foresees nothing: model and head are both switched by each commit.
        more: dict[str, Any] = OPTIONS | {"transport": "broadcast", "pause": "retract"}
        with WeightUpdater.connect(b.of_model, [Target(engine.url)], draft=c.tensors, **more) as updater:
            (row,) = updater.update(version=2).targets
        assert (row.proof, row.version_after) == ("resident", 2)
        tokens, counts = played(engine)
        assert tokens == expected[0]
        assert share(counts) < 0.2


@pytest.mark.engine_full
def test_a_head_that_is_kept_is_named(tmp_path: Path) -> None:
    a, b = (head(tmp_path / name, "eagle3", seed) for seed, name in enumerate("ab"))
    with sglang(tmp_path, (a.model, 1, options(a, "eagle3")), receiver=True) as [engine]:
        first = played(engine)
        assert share(first[1]) > 0.4
        assert any(
            "the draft model keeps the weights" in hazard for hazard in engine.get("/weightcast/info")["hazards"]
        )
        with pytest.raises(ConfigError, match=r"draft\."):
            WeightUpdater.connect(b.of_model, [Target(engine.url)], draft=b.tensors, **OPTIONS)
        for version, weights in enumerate((b, a), 1):
            with WeightUpdater.connect(weights.of_model, [Target(engine.url)], **OPTIONS) as updater:
                (row,) = updater.update(version=version).targets
            assert (row.proof, row.version_after, row.not_updated) == ("resident", version, ("the draft model",))
            if weights is b:
                tokens, counts = played(engine)
                assert tokens != first[0]
                assert share(counts) < 0.2
        assert played(engine) == first


def after(weights: Weights) -> list[int]:
    """The token that the model makes after each token."""
    found = weights.of_model
    states = torch.nn.functional.rms_norm(found["model.embed_tokens.weight"], (WIDTH,)) * found["model.norm.weight"]
    return (states @ found["lm_head.weight"].t()).argmax(1).tolist()


def follow(after_each: list[int], prompt: list[int]) -> list[int]:
    """The tokens after a prompt."""
    tokens = [prompt[-1]]
    for _ in range(COUNT):
        tokens.append(after_each[tokens[-1]])
    return tokens[1:]


@pytest.mark.engine_full
@pytest.mark.parametrize("pause", ["retract", "in_place", "wait"])
def test_requests_go_on_over_a_switch_of_both(tmp_path: Path, pause: Any) -> None:
    a, b = (head(tmp_path / name, "eagle3", seed) for seed, name in enumerate("ab"))
    more = () if pause != "in_place" else ("--disable-overlap-schedule",)
    settings = (a.model, 1, [*options(a, "eagle3"), *more])
    with sglang(tmp_path, settings, receiver=True, extra={"WEIGHTCAST_DRAFT": "update"}) as [engine]:
        assert ("in_place" in engine.get("/weightcast/info")["no_pause"]) == (not more)
        with ThreadPoolExecutor(1) as pool:
            started = BeforeCommit(lambda: pool.submit(generate, engine, [PROMPTS[0]], 200))
            during: dict[str, Any] = OPTIONS | {"pause": pause, "progress": started}
            with WeightUpdater.connect(b.of_model, [Target(engine.url)], draft=b.tensors, **during) as updater:
                (row,) = updater.update(version=1).targets
            assert (row.proof, row.version_after) == ("resident", 1)
            assert started.result is not None
            [answer] = started.result.result()
        tokens = answer["output_ids"]
        assert len(tokens) == 200
        of_a, of_b = after(a), after(b)
        made_by = ["a" if new == of_a[old] else "b" if new == of_b[old] else "?" for old, new in pairwise(tokens)]
        # The stamps of the tokens say so too, although a step makes up to two.
        old = sum(
            part["end"] - part["start"] for part in answer["meta_info"]["weight_versions"] if part["version"] != "1"
        )
        assert made_by == ["a"] * max(old - 1, 0) + ["b"] * (200 - max(old, 1))
        assert (old == 200) == (pause == "wait")
        assert played(engine)[0] == [follow(of_b, prompt) for prompt in PROMPTS]
