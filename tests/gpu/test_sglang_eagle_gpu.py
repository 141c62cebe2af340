"""Real SGLang on a GPU with EAGLE heads, several draft steps at a time, in our receiver.

SGLang records no graphs of a head without DeepGEMM.

SGLang comes from where ``test_sglang_gpu`` has it from.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.engines.eagle_heads import Weights, after, follow, sglang_head, share
from tests.engines.environment import package_path
from tests.gpu.servers import PROMPTS, Record, Server, started
from tests.gpu.test_sglang_gpu import SITE
from tests.gpu.test_sglang_gpu import pytestmark as needs_sglang
from tests.helpers.harness import BeforeCommit
from weightcast import Target, WeightUpdater
from weightcast.config import PauseMode
from weightcast.errors import ConfigError
from weightcast.lab.connect import connect as connect_in_lab

pytestmark = [*needs_sglang[:-1], pytest.mark.timeout(500)]

COUNT = 48
LONG = 400
STEPS = 3
GRAPHS = [] if find_spec("deep_gemm") else ["--disable-cuda-graph"]
OPTIONS: dict[str, Any] = {"transport": "ipc", "bucket_bytes": 300_000, "timeout_s": 60.0}


def sglang(weights: Weights, log: Path, *options: str, draft: str) -> AbstractContextManager[Server]:
    """A server on the first GPU with our receiver, which keeps or updates the head."""

    def command(port: int) -> list[str]:
        words = ["-m", "sglang.launch_server", f"--model-path={weights.model}", "--host=127.0.0.1", f"--port={port}"]
        words += ["--skip-tokenizer-init", "--attention-backend=triton", "--sampling-backend=pytorch"]
        words += ["--grammar-backend=none", "--mem-fraction-static=0.3", "--context-length=1024"]
        words += ["--max-total-tokens=16384", "--max-running-requests=8", "--disable-radix-cache"]
        words += ["--speculative-algorithm=EAGLE", f"--speculative-draft-model-path={weights.head}"]
        return [*words, f"--speculative-num-steps={STEPS}", *GRAPHS, *options]

    path = [SITE, package_path(log.with_suffix(".metadata")), os.environ.get("PYTHONPATH", "")]
    environment = {
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(part for part in path if part),
        "SGLANG_ENABLE_JIT_DEEPGEMM": "0",
        "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",  # others may be on this GPU
        "SGLANG_IS_FLASHINFER_AVAILABLE": "0",
        "SGLANG_PLUGINS": "weightcast",
        "WEIGHTCAST_DRAFT": draft,
    }
    return started(command, gpus=(0,), log=log, environment=environment)


def generate(server: Server, prompt: Sequence[int], count: int) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
    return server.post("/generate", {"input_ids": list(prompt), "sampling_params": sampling})


def played(server: Server) -> tuple[list[list[int]], list[tuple[int, int]]]:
    """Returns the answer to each prompt, asked one after another, and how many tokens were accepted and tried."""
    answers = [generate(server, prompt, COUNT) for prompt in PROMPTS]
    told = [answer["meta_info"] for answer in answers]
    counts = [(each["spec_num_correct_drafts"], each["spec_num_proposed_drafts"]) for each in told]
    return [answer["output_ids"] for answer in answers], counts


def lengths(server: Server) -> list[float]:
    """The mean number of tokens of a step, for each prompt."""
    return [generate(server, prompt, COUNT)["meta_info"]["spec_accept_length"] for prompt in PROMPTS]


def check_switch_of_both(server: Server, old: Weights, new: Weights, version: int, pause: PauseMode) -> tuple[int, int]:
    """Updates model and head while requests run; returns how many of their tokens are of either version."""
    of_old, of_new = after(old), after(new)
    with ThreadPoolExecutor(4) as pool:
        running = BeforeCommit(lambda: [pool.submit(generate, server, [number, 7], LONG) for number in range(4)])
        options: dict[str, Any] = OPTIONS | {"pause": pause, "progress": running}
        with connect_in_lab(new.of_model, [Target(server.url)], draft=new.tensors, **options) as updater:
            (row,) = updater.update(version=version).targets
        assert (row.proof, row.version_after, row.not_updated) == ("resident", version, ())
        assert running.result is not None
        answers = [each.result()["output_ids"] for each in running.result]
    counts = [0, 0]
    for tokens in answers:
        made_by = [0 if to == of_old[at] else 1 if to == of_new[at] else 2 for at, to in pairwise([7, *tokens])]
        assert made_by == sorted(made_by)
        assert 2 not in made_by
        assert len(tokens) == LONG
        counts[0] += made_by.count(0)
        counts[1] += made_by.count(1)
    return counts[0], counts[1]


@pytest.mark.parametrize(
    ("topk", "tokens"), [pytest.param(1, STEPS + 1, id="a chain"), pytest.param(4, 8, id="a tree of four branches")]
)
def test_a_head_of_several_steps_is_updated_with_the_model(
    tmp_path: Path, record: Record, topk: int, tokens: int
) -> None:
    a, b, c = (
        sglang_head(tmp_path / name, "eagle", seed, several=True, on_gpu=True) for seed, name in enumerate("abc")
    )
    options = (f"--speculative-eagle-topk={topk}", f"--speculative-num-draft-tokens={tokens}")
    with (
        sglang(a, tmp_path / "updated.log", *options, draft="update") as server,
        sglang(b, tmp_path / "fresh.log", *options, draft="keep") as fresh,
    ):
        server.wait_ready()
        fresh.wait_ready()
        expected, first = played(fresh), played(server)
        expected_lengths = lengths(fresh)
        assert expected[0] == [follow(after(b), prompt, COUNT) for prompt in PROMPTS]
        assert first[0] != expected[0]
        assert min(expected_lengths) > 2  # so later steps of the head are accepted too
        said = server.log.read_text(errors="replace")
        assert ("Capture draft decode CUDA graph" in said) == (not GRAPHS)
        with pytest.raises(ConfigError, match=r"missing draft\."):
            WeightUpdater.connect(b.of_model, [Target(server.url)], **OPTIONS)
        with WeightUpdater.connect(b.of_model, [Target(server.url)], draft=b.tensors, **OPTIONS) as updater:
            (row,) = updater.update(version=1).targets
        assert (row.proof, row.version_after, row.not_updated) == ("resident", 1, ())
        # As many tokens of the head are accepted as by a server that was started on the same two checkpoints.
        assert played(server) == expected
        assert lengths(server) == expected_lengths
        # The head of other weights foresees nothing: model and head are both switched by each commit.
        with WeightUpdater.connect(b.of_model, [Target(server.url)], draft=c.tensors, **OPTIONS) as updater:
            (row,) = updater.update(version=2).targets
        assert (row.proof, row.version_after, row.not_updated) == ("resident", 2, ())
        answers, counts = played(server)
        assert answers == expected[0]
        assert share(counts) < 0.1
        made_by = check_switch_of_both(server, b, a, 3, "retract")
        assert made_by[1] > 0
        assert played(server) == first
        # A server that keeps its head says so, and serves it on.
        with WeightUpdater.connect(a.of_model, [Target(fresh.url)], **OPTIONS) as updater:
            (row,) = updater.update(version=1).targets
        assert (row.proof, row.version_after, row.not_updated) == ("resident", 1, ("the draft model",))
        answers, counts = played(fresh)
        assert answers == first[0]
        assert share(counts) < 0.1
        with WeightUpdater.connect(b.of_model, [Target(fresh.url)], **OPTIONS) as updater:
            (row,) = updater.update(version=2).targets
        assert row.not_updated == ("the draft model",)
        assert played(fresh) == expected
        record("engine", row.engine)
        record("case", {"topk": topk, "steps": STEPS, "draft_tokens": tokens})
        record("accepted_of_tried", expected[1])
        record("tokens_of_a_step", expected_lengths)
        record("tokens_by_old_and_new_weights", made_by)
