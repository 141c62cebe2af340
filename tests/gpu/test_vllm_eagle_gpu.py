"""Real vLLM on a GPU with CUDA graphs and EAGLE 3 heads, three tokens at a time, in our receiver.

vLLM comes from where ``test_vllm_gpu`` has it from.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.engines.eagle_heads import Weights, after, follow, made, share
from tests.gpu.servers import PROMPTS, Record, Server
from tests.gpu.test_vllm_gpu import pytestmark as needs_vllm
from tests.gpu.test_vllm_gpu import vllm
from tests.helpers.harness import BeforeCommit
from weightcast import Target, WeightUpdater
from weightcast.errors import ConfigError
from weightcast.lab.connect import connect as connect_in_lab

pytestmark = [*needs_vllm[:-1], pytest.mark.timeout(500)]

COUNT = 48
LONG = 200
STEPS = 3
OPTIONS: dict[str, Any] = {"transport": "ipc", "bucket_bytes": 300_000, "timeout_s": 60.0}
UPDATE = ["--additional-config", json.dumps({"weightcast": {"draft": "update"}})]


def speculative(weights: Weights) -> list[str]:
    config = {"method": "eagle3", "model": str(weights.head), "num_speculative_tokens": STEPS}
    return ["--speculative-config", json.dumps(config)]


def generate(server: Server, prompt: Sequence[int], count: int) -> list[int]:
    body = {"model": "m", "prompt": list(prompt), "max_tokens": count, "temperature": 0, "ignore_eos": True}
    return server.post("/v1/completions", body | {"return_token_ids": True})["choices"][0]["token_ids"]


def counted(server: Server) -> list[int]:
    """How many tokens vLLM has tried so far, and how many it has accepted at each of the places."""
    page = server.get("/metrics").text
    tried = re.findall(r"^vllm:spec_decode_num_draft_tokens_total{.*} (\S+)$", page, re.M)
    accepted = re.findall(
        r"^vllm:spec_decode_num_accepted_tokens_per_pos_total{.*position=\"(\d)\".*} (\S+)$", page, re.M
    )
    return [int(float(tried[0])), *(int(float(value)) for _, value in sorted(accepted))]


def played(server: Server) -> tuple[list[list[int]], list[list[int]]]:
    """Returns the answer to each prompt, asked one after another, and by how much each count grew."""
    tokens: list[list[int]] = []
    counts: list[list[int]] = []
    for prompt in PROMPTS:
        before = counted(server)
        tokens.append(generate(server, prompt, COUNT))
        counts.append([now - then for now, then in zip(counted(server), before, strict=True)])
    return tokens, counts


def accepted(counts: list[list[int]]) -> float:
    """The accepted share of all tokens that the head has tried."""
    return share([(sum(places), tried) for tried, *places in counts])


def test_a_head_of_several_tokens_is_updated_with_the_model(tmp_path: Path, record: Record) -> None:
    a, b, c = (made(tmp_path / name, "eagle3", seed, several=True, on_gpu=True) for seed, name in enumerate("abc"))
    common: dict[str, Any] = {"backend": "weightcast", "gpus": [0], "eager": False}
    with (
        vllm(a.model, tmp_path / "updated.log", options=[*speculative(a), *UPDATE], **common) as server,
        vllm(b.model, tmp_path / "fresh.log", options=speculative(b), **common) as fresh,
    ):
        server.wait_ready()
        fresh.wait_ready()
        record("vllm", server.get("/version").json()["version"])
        expected, first = played(fresh), played(server)
        assert expected[0] == [follow(after(b), prompt, COUNT) for prompt in PROMPTS]
        assert first[0] != expected[0]
        assert accepted(expected[1]) > 0.4
        assert sum(places[-1] for places in expected[1]) > 0  # the last of the tokens too
        assert "Graph capturing finished" in server.log.read_text(errors="replace")
        with pytest.raises(ConfigError, match=r"missing draft\."):
            WeightUpdater.connect(b.of_model, [Target(server.url)], **OPTIONS)
        with WeightUpdater.connect(b.of_model, [Target(server.url)], draft=b.tensors, **OPTIONS) as updater:
            (row,) = updater.update(version=1).targets
        assert (row.proof, row.version_after, row.not_updated) == ("resident", 1, ())
        # As many tokens are accepted at each place as by a server that was started on the same two checkpoints.
        assert played(server) == expected
        # The head of other weights foresees nothing: model and head are both switched by each commit.
        with WeightUpdater.connect(b.of_model, [Target(server.url)], draft=c.tensors, **OPTIONS) as updater:
            (row,) = updater.update(version=2).targets
        assert (row.proof, row.version_after, row.not_updated) == ("resident", 2, ())
        answers, counts = played(server)
        assert answers == expected[0]
        assert accepted(counts) < 0.1
        # Requests go on over a switch of both.
        of_old, of_new = after(b), after(a)
        with ThreadPoolExecutor(4) as pool:
            running = BeforeCommit(lambda: [pool.submit(generate, server, [number, 7], LONG) for number in range(4)])
            options: dict[str, Any] = OPTIONS | {"pause": "in_place", "progress": running}
            with connect_in_lab(a.of_model, [Target(server.url)], draft=a.tensors, **options) as updater:
                (row,) = updater.update(version=3).targets
            assert (row.proof, row.version_after) == ("resident", 3)
            assert running.result is not None
            for answer in running.result:
                tokens = answer.result()
                made_by = [0 if to == of_old[at] else 1 if to == of_new[at] else 2 for at, to in pairwise([7, *tokens])]
                assert made_by == sorted(made_by)
                assert made_by[-1] == 1
                assert len(tokens) == LONG
        assert played(server) == first
        # A server that keeps its head says so, and serves it on.
        for version, weights in enumerate((a, b), 1):
            with WeightUpdater.connect(weights.of_model, [Target(fresh.url)], **OPTIONS) as updater:
                (row,) = updater.update(version=version).targets
            assert (row.proof, row.version_after, row.not_updated) == ("resident", version, ("the draft model",))
            if weights is a:
                answers, counts = played(fresh)
                assert answers == first[0]
                assert accepted(counts) < 0.1
        assert played(fresh) == expected
        record("case", {"method": "eagle3", "tokens": STEPS})
        record("tried_and_accepted_at_each_place", expected[1])
