"""Real vLLM on this CPU with Mamba2, whose loader keeps ``-exp(A_log)``: such tensors are proven like all others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engines.test_vllm_cpu import PROMPTS
from tests.engines.test_vllm_models import made, scores, verified
from tests.engines.vllm_server import greedy_tokens, vllm
from tests.helpers.engines import push
from tests.helpers.tiny import tiny_model
from weightcast import Target, WeightUpdater
from weightcast.exporters.checkpoint import CheckpointExporter

MAMBA2: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "state_size": 16,
    "num_heads": 8,
    "head_dim": 32,
    "n_groups": 1,
    "chunk_size": 64,
}
TENSORS = 21
COMPUTED = [f"backbone.layers.{layer}.mixer.A_log" for layer in range(2)]
KEPT = "backbone.layers.1.mixer.A"
FLIPS = ("--worker-extension-cls=tests.helpers.vllm_flips.Flips", "--no-enable-prefix-caching")
DEV = {"VLLM_SERVER_DEV_MODE": "1"}


@pytest.mark.engine
@pytest.mark.parametrize("tp", [1, 2])
def test_what_the_loader_computes_is_proven_as_what_it_copies(tmp_path: Path, tp: int) -> None:
    folders = made(tmp_path, "mamba2", **MAMBA2)
    said: dict[str, Any] = {}
    for name in "BA":
        with vllm(folders[name], tmp_path, *FLIPS, tp=tp, extra=DEV) as engine:
            said[name] = greedy_tokens(engine, PROMPTS, 12), scores(engine)
            if name == "B":
                continue
            assert said["A"][0] != said["B"][0]
            assert verified(folders["A"], engine)[0] == 0  # it read once more what it had computed from
            # At defaults, and strict: whatever is not proven would be refused.
            with (
                CheckpointExporter(folders["B"]) as checkpoint,
                WeightUpdater.connect(checkpoint, targets=[Target(engine.url)], strict=True) as updater,
            ):
                report = updater.update(version=1)
            (row,) = report.targets
            assert (row.status, row.version_after, row.proof, row.not_updated) == ("serving", 1, "resident", ())
            assert row.digest == report.digest == engine.info()["digest"]
            assert (greedy_tokens(engine, PROMPTS, 12), scores(engine)) == said["B"]
            code, found = verified(folders["B"], engine)
            assert (code, found["equal"], found["unreadable"]) == (0, TENSORS, [])
            code, found = verified(folders["A"], engine)
            assert {difference["name"] for difference in found["differences"]} >= set(COMPUTED)

            (target,) = push(folders["A"], [engine], 2, "--via", "broadcast")["targets"]
            assert target["proof"] == "resident"
            assert (greedy_tokens(engine, PROMPTS, 12), scores(engine)) == said["A"]
            module = tiny_model(tmp_path / "live", family="mamba2", seed=1, **MAMBA2)  # as B was made
            with WeightUpdater.connect(module, targets=[Target(engine.url)], transport="direct") as updater:
                (row,) = updater.update(version=3).targets
            assert row.proof == "resident"
            assert (greedy_tokens(engine, PROMPTS, 12), scores(engine)) == said["B"]

            assert engine.post("/collective_rpc", method="flip", args=[KEPT])["results"] == ["torch.float32"] * tp
            code, found = verified(folders["B"], engine)
            assert (code, [one["name"] for one in found["differences"]]) == (3, [COMPUTED[1]])
            push(folders["B"], [engine], 4)
            assert verified(folders["B"], engine)[0] == 0
