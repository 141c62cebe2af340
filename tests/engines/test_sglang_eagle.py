"""Real SGLang on a CPU with EAGLE and EAGLE 3 heads; stand-ins of ours take the place of kernels that it lacks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.engines.eagle_heads import Weights, after, follow, sglang_head, share
from tests.engines.sglang_server import generate, sglang
from tests.engines.test_sglang_cpu import PROMPTS
from tests.helpers.engines import Engine
from tests.helpers.harness import BeforeCommit
from weightcast import Target, WeightUpdater
from weightcast.errors import ConfigError
from weightcast.lab.connect import connect as connect_in_lab

pytestmark = [pytest.mark.engine]

COUNT = 24
NEWEST = "0.5.23"
OPTIONS: dict[str, Any] = {"bucket_bytes": 300_000, "timeout_s": 60.0}


def options(weights: Weights, method: str, version: str = NEWEST) -> list[str]:
    """SGLang's options for the head, which foresees one token; several need kernels that have no stand-in here."""
    return [
        f"--speculative-algorithm={method.upper()}",
        f"--speculative-draft-model-path={weights.head}",
        "--speculative-num-steps=1",
        "--speculative-eagle-topk=1",
        "--speculative-num-draft-tokens=2",
        "--prefill-attention-backend=intel_amx",
        # Version 0.5.17 takes neither if both are named.
        *(["--decode-attention-backend=intel_amx"] if version == NEWEST else []),
    ]


def played(engine: Engine) -> tuple[list[list[int]], list[tuple[int, int]]]:
    """Returns the answer to each prompt, asked one after another, and how many tokens were accepted and tried."""
    answers = [generate(engine, [prompt], COUNT)[0] for prompt in PROMPTS]
    told = [answer["meta_info"] for answer in answers]
    counts = [(each["spec_num_correct_drafts"], each["spec_num_proposed_drafts"]) for each in told]
    return [answer["output_ids"] for answer in answers], counts


@pytest.mark.engine_full
@pytest.mark.parametrize(("method", "via"), [("eagle3", "ipc"), ("eagle", "broadcast")])
def test_stock_sglang_keeps_its_head(tmp_path: Path, method: str, via: str) -> None:
    a, b = (sglang_head(tmp_path / name, method, seed) for seed, name in enumerate("ab"))
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
    ("method", "tp", "version"),
    [
        ("eagle3", 1, NEWEST),
        pytest.param("eagle", 1, NEWEST, marks=pytest.mark.engine_full),
        pytest.param("eagle3", 2, NEWEST, marks=pytest.mark.engine_full),
        pytest.param("eagle3", 1, "0.5.17", marks=pytest.mark.engine_full),
        pytest.param("eagle", 1, "0.5.17", marks=pytest.mark.engine_full),
        pytest.param("eagle3", 2, "0.5.17", marks=pytest.mark.engine_full),
    ],
)
def test_a_head_is_updated_with_the_model(tmp_path: Path, method: str, tp: int, version: str) -> None:
    a, b, c = (sglang_head(tmp_path / name, method, seed) for seed, name in enumerate("abc"))
    settings = [(each.model, tp, options(each, method, version)) for each in (a, b)]
    updates = {"WEIGHTCAST_DRAFT": "update"}
    with sglang(tmp_path, *settings, receiver=True, version=version, extra=updates) as (engine, fresh):
        expected = played(fresh)
        assert share(expected[1]) > 0.4
        first = played(engine)
        assert first[0] != expected[0]
        info = engine.get("/weightcast/info")
        optional = {spec["name"] for spec in info["optional"]}
        # SGLang computes with the model's embeddings, and does not read this table.
        assert optional == {"draft.embed_tokens.weight"} | ({"draft.t2d"} if method == "eagle3" else set())
        assert {f"draft.{name}" for name in a.tensors} <= {spec["name"] for spec in info["tables"][0]} | optional
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
@pytest.mark.parametrize("played_version", [NEWEST, "0.5.17"])
def test_a_head_that_is_kept_is_named(tmp_path: Path, played_version: str) -> None:
    a, b = (sglang_head(tmp_path / name, "eagle3", seed) for seed, name in enumerate("ab"))
    settings = (a.model, 1, options(a, "eagle3", played_version))
    with sglang(tmp_path, settings, receiver=True, version=played_version) as [engine]:
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


@pytest.mark.engine_full
@pytest.mark.parametrize(
    ("pause", "version"),
    [("retract", NEWEST), ("in_place", NEWEST), ("wait", NEWEST), ("retract", "0.5.17"), ("in_place", "0.5.17")],
)
def test_requests_go_on_over_a_switch_of_both(tmp_path: Path, pause: Any, version: str) -> None:
    a, b = (sglang_head(tmp_path / name, "eagle3", seed) for seed, name in enumerate("ab"))
    settings = (a.model, 1, options(a, "eagle3", version))
    updates = {"WEIGHTCAST_DRAFT": "update"}
    with sglang(tmp_path, settings, receiver=True, version=version, extra=updates) as [engine]:
        # With a draft, SGLang has no overlap loop on a CPU, so no mode is refused.
        assert engine.get("/weightcast/info")["no_pause"] == {}
        if version == NEWEST:
            assert "Non-overlap (synchronous) spec" in (tmp_path / "sglang-0.log").read_text()
        with ThreadPoolExecutor(1) as pool:
            started = BeforeCommit(lambda: pool.submit(generate, engine, [PROMPTS[0]], 200))
            during: dict[str, Any] = OPTIONS | {"pause": pause, "progress": started}
            with connect_in_lab(b.of_model, [Target(engine.url)], draft=b.tensors, **during) as updater:
                (row,) = updater.update(version=1).targets
            assert (row.proof, row.version_after) == ("resident", 1)
            assert started.result is not None
            [answer] = started.result.result()
        tokens = answer["output_ids"]
        assert len(tokens) == 200
        of_a, of_b = after(a), after(b)
        made_by = ["a" if new == of_a[old] else "b" if new == of_b[old] else "?" for old, new in pairwise(tokens)]
        assert made_by == sorted(made_by)
        if version == NEWEST:
            # The stamps of the tokens say so too, although a step makes up to two.
            old = sum(
                part["end"] - part["start"] for part in answer["meta_info"]["weight_versions"] if part["version"] != "1"
            )
            assert made_by == ["a"] * max(old - 1, 0) + ["b"] * (200 - max(old, 1))
            assert (old == 200) == (pause == "wait")
        else:
            assert set(made_by) <= {"a", "b"}
            assert made_by[-1] == "b"
        assert played(engine)[0] == [follow(of_b, prompt, COUNT) for prompt in PROMPTS]
