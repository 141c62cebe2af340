"""Real vLLM on this CPU with several data-parallel engines behind one URL."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.engines.test_vllm_cpu import COUNT, EXPERTS, PROMPTS, SIZES
from tests.engines.vllm_server import vllm
from tests.helpers.engines import Engine, push, status, verify
from tests.helpers.tiny import greedy, tiny_model, tiny_tokenizer
from weightcast import Target, WeightUpdater

pytestmark = [pytest.mark.engine]


def made(root: Path) -> dict[str, tuple[Path, Any, list[list[int]]]]:
    """Two checkpoints, their models, and what transformers answers with each."""
    found: dict[str, tuple[Path, Any, list[list[int]]]] = {}
    for seed, name in enumerate("AB"):
        model: Any = tiny_model(root / name, seed=seed, **SIZES)
        tiny_tokenizer(root / name)
        found[name] = root / name, model, [greedy(model, prompt, COUNT) for prompt in PROMPTS]
    assert found["A"][2] != found["B"][2]
    return found


def says(engine: Engine, replica: int, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy tokens of one data-parallel engine."""
    body: dict[str, Any] = {"model": "tiny", "prompt": prompts, "max_tokens": COUNT, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True}
    headers = {"X-data-parallel-rank": str(replica)}
    answer = engine.client.post(f"{engine.url}/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return [choice["token_ids"] for choice in sorted(answer.json()["choices"], key=lambda choice: choice["index"])]


def test_all_engines_behind_one_url_switch_together(tmp_path: Path) -> None:
    weights = made(tmp_path)
    a, b = weights["A"], weights["B"]
    with vllm(a[0], tmp_path, "--data-parallel-size=2") as engine:
        assert [says(engine, replica, PROMPTS) for replica in (0, 1)] == [a[2]] * 2
        (row,) = status(engine)
        assert "2 data-parallel engines with 1 rank each" in row["message"]
        for version, name, via in ((1, "B", "ipc"), (2, "A", "broadcast")):
            folder, _, said = weights[name]
            (target,) = push(folder, [engine], version, "--via", via, "--bucket-bytes", "64KiB")["targets"]
            assert (target["proof"], target["digests_matched"], target["version_after"]) == ("resident", 2, version)
            assert [says(engine, replica, PROMPTS) for replica in (0, 1)] == [said] * 2
            assert verify(folder, engine) == (0, set())
        # No answer mixes versions, whichever engine gives it, and the trainer scores every engine.
        with (
            ThreadPoolExecutor(2) as pool,
            WeightUpdater.connect(
                b[1], [Target(engine.url)], verify="behaviour", pause="wait", timeout_s=60.0
            ) as updater,
        ):
            running = [pool.submit(says, engine, replica, PROMPTS) for replica in (0, 1)]
            (report,) = updater.update(version=3).targets
            assert report.proof == "behaviour"
            assert all(answer in (a[2], b[2]) for future in running for answer in [future.result()])
        assert [says(engine, replica, PROMPTS) for replica in (0, 1)] == [b[2]] * 2


# On a CPU vLLM 0.32 ends at the first request with experts shared out like this, so nothing is generated here.
@pytest.mark.engine_full
def test_ranks_that_share_experts_out_keep_what_was_sent(tmp_path: Path) -> None:
    for seed, name in enumerate("AB"):
        tiny_model(tmp_path / name, family="qwen3_moe", seed=seed, **SIZES, **EXPERTS)
        tiny_tokenizer(tmp_path / name)
    with vllm(tmp_path / "A", tmp_path, "--enable-expert-parallel", tp=2) as engine:
        for version, name, other, via in ((1, "B", "A", "ipc"), (2, "A", "B", "broadcast")):
            (target,) = push(tmp_path / name, [engine], version, "--via", via, "--bucket-bytes", "64KiB")["targets"]
            assert (target["proof"], target["digests_matched"], target["version_after"]) == ("resident", 2, version)
            assert verify(tmp_path / name, engine) == (0, set())
            code, names = verify(tmp_path / other, engine)
            assert code == 3
            assert len([name for name in names if ".experts." in name]) == 2 * 4 * 3
