"""Real vLLM on this CPU with EAGLE and EAGLE 3 heads, which an update writes together with the model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.engines.eagle_heads import Weights, made, share
from tests.engines.test_vllm_cpu import PROMPTS
from tests.engines.test_vllm_draft import UPDATE
from tests.engines.vllm_server import greedy_tokens, vllm
from tests.helpers.engines import Engine, push, verify
from weightcast import Target, WeightUpdater
from weightcast.errors import ConfigError, WeightcastError

# `make test` has a draft in test_vllm_draft.py and test_vllm_mtp.py.
pytestmark = [pytest.mark.engine, pytest.mark.engine_full]

COUNT = 24
OPTIONS: dict[str, Any] = {"bucket_bytes": 1 << 16, "timeout_s": 60.0}


def options(weights: Weights, method: str) -> list[str]:
    """vLLM's options for the head, which foresees two tokens or three."""
    config = {"method": method, "model": str(weights.head), "num_speculative_tokens": 3 if method == "eagle3" else 2}
    return ["--speculative-config", json.dumps(config)]


def played(engine: Engine) -> tuple[list[list[int]], list[tuple[int, int]]]:
    """Returns the answer to each prompt, asked one after another, and how many tokens were accepted and tried."""
    tokens: list[list[int]] = []
    counts: list[tuple[int, int]] = []
    for prompt in PROMPTS:
        before = _counted(engine)
        tokens += greedy_tokens(engine, [prompt], COUNT)
        after = _counted(engine)
        counts.append((after[0] - before[0], after[1] - before[1]))
    return tokens, counts


def _counted(engine: Engine) -> tuple[int, int]:
    page = engine.client.get(f"{engine.url}/metrics").text
    accepted, tried = (
        sum(
            float(value) for value in re.findall(rf"^vllm:spec_decode_num_{name}_tokens_total{{.*}} (\S+)$", page, re.M)
        )
        for name in ("accepted", "draft")
    )
    return int(accepted), int(tried)


@pytest.mark.parametrize(
    ("method", "tp"),
    [("eagle3", 1), ("eagle", 1), ("eagle3", 2), ("eagle", 2)],
)
def test_a_head_is_updated_with_the_model(tmp_path: Path, method: str, tp: int) -> None:
    a, b, c = (made(tmp_path / name, method, seed, several=method == "eagle3") for seed, name in enumerate("abc"))
    with vllm(b.model, tmp_path, *options(b, method), tp=tp) as fresh:
        expected = played(fresh)
    with vllm(a.model, tmp_path, *options(a, method), *UPDATE, tp=tp) as engine:
        first = played(engine)
        assert first[0] != expected[0]
        info = engine.info()
        optional = {spec["name"] for spec in info["optional"]}
        assert optional == ({"draft.t2d"} if method == "eagle3" else set())  # vLLM does not read this table
        assert {f"draft.{name}" for name in a.tensors} <= {spec["name"] for spec in info["tables"][0]} | optional
        with pytest.raises(ConfigError, match=r"missing draft\."):
            WeightUpdater.connect(b.of_model, [Target(engine.url)], **OPTIONS)
        with WeightUpdater.connect(b.of_model, [Target(engine.url)], draft=b.tensors, **OPTIONS) as updater:
            (row,) = updater.update().targets
        assert (row.proof, row.digests_matched, row.not_updated) == ("resident", tp, ())
        # As many tokens of the head are accepted as by a server that was started on the same two checkpoints.
        assert played(engine) == expected
        assert 0.4 < share(expected[1]) < 1
        # The head of other weights foresees nothing: model and head are both switched by each commit.
        with WeightUpdater.connect(
            b.of_model, [Target(engine.url)], draft=c.tensors, transport="broadcast", **OPTIONS
        ) as updater:
            (row,) = updater.update().targets
        assert (row.proof, row.version_after) == ("resident", 2)
        tokens, counts = played(engine)
        assert tokens == expected[0]
        assert share(counts) < 0.2
        assert verify(b.model, engine, "--draft", str(c.head)) == (0, set())
        # The command line takes both checkpoints too.
        [said] = push(b.model, [engine], 3, "--draft", str(b.head))["targets"]
        assert (said["proof"], said["version_after"], said["not_updated"]) == ("resident", 3, [])
        assert played(engine) == expected
        code, differing = verify(b.model, engine, "--draft", str(a.head))
        assert code != 0
        assert {name.partition(".")[0] for name in differing} == {"draft"}


@pytest.mark.parametrize(("method", "tp"), [("eagle3", 1), ("eagle", 2)])
def test_a_heads_copy_of_the_embeddings_must_stay_one(tmp_path: Path, method: str, tp: int) -> None:
    # vLLM computes with the model's embeddings in the place of such a copy, also once the two differ.
    a, b = (
        made(tmp_path / name, method, seed, copies=True, several=method == "eagle3") for seed, name in enumerate("ab")
    )
    other = b.tensors | {"embed_tokens.weight": b.tensors["embed_tokens.weight"].flip(0).contiguous()}
    without = {name: tensor for name, tensor in b.tensors.items() if name != "embed_tokens.weight"}
    with vllm(b.model, tmp_path, *options(b, method), tp=tp) as fresh:
        expected = played(fresh)
    with vllm(a.model, tmp_path, *options(a, method), *UPDATE, tp=tp) as engine:
        first = played(engine)
        assert first != expected
        assert "draft.embed_tokens.weight" in {spec["name"] for spec in engine.info()["optional"]}
        with (
            WeightUpdater.connect(b.of_model, [Target(engine.url)], draft=other, **OPTIONS) as updater,
            pytest.raises(
                WeightcastError, match=r"draft\.embed_tokens\.weight differs from model\.embed_tokens\.weight"
            ),
        ):
            updater.update()
        assert played(engine) == first
        for version, head in enumerate((b.tensors, without), 1):
            with WeightUpdater.connect(b.of_model, [Target(engine.url)], draft=head, **OPTIONS) as updater:
                (row,) = updater.update().targets
            assert (row.proof, row.version_after, row.not_updated) == ("resident", version, ())
            assert played(engine) == expected


def test_a_head_that_is_kept_is_named(tmp_path: Path) -> None:
    a, b = (made(tmp_path / name, "eagle3", seed, several=True) for seed, name in enumerate("ab"))
    with vllm(a.model, tmp_path, *options(a, "eagle3")) as engine:
        tokens, counts = played(engine)
        assert share(counts) > 0.4
        assert any("the draft model keeps the weights" in hazard for hazard in engine.info()["hazards"])
        with pytest.raises(ConfigError, match=r"draft\."):
            WeightUpdater.connect(b.of_model, [Target(engine.url)], draft=b.tensors, **OPTIONS)
        (row,) = push(b.model, [engine], 1)["targets"]
        assert (row["proof"], row["not_updated"]) == ("resident", ["the draft model"])
        after, counts = played(engine)
        assert after != tokens
        assert share(counts) < 0.2
