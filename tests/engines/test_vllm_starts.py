"""Real vLLM on this CPU, started without the weights that it is to serve, or in ways that weightcast refuses."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.engines.test_vllm_cpu import COUNT, EXPERTS, PROMPTS, SIZES
from tests.engines.vllm_server import greedy_tokens, vllm
from tests.helpers.engines import push, verify
from tests.helpers.tiny import tiny_model, tiny_tokenizer, two_checkpoints

pytestmark = [pytest.mark.engine]


# Experts, whose packed form vLLM makes from random weights at the start; B is what a fresh server would be started on.
def test_a_start_on_random_weights_serves_nobody_before_the_first_update(tmp_path: Path) -> None:
    said = two_checkpoints(tmp_path, PROMPTS, COUNT, family="qwen3_moe", **SIZES, **EXPERTS)
    # It also runs the sizes of batches for which vLLM may compile kernels, and one request, before it serves anybody.
    warm = ["--max-num-batched-tokens=300", "--additional-config", json.dumps({"weightcast": {"warm_up": True}})]
    with vllm(tmp_path / "A", tmp_path, "--load-format=dummy", *warm, tp=2) as engine, ThreadPoolExecutor(1) as pool:
        log = (tmp_path / "vllm.log").read_text()
        assert set(re.findall(r"rank (\d) ran \d+ sizes of batches from 1 to 300 tokens", log)) == {"0", "1"}
        page = engine.client.get(engine.url + "/metrics").text
        assert re.search(r"^vllm:prompt_tokens_total\{.*\} 8\.0$", page, re.MULTILINE)
        info = engine.info()
        assert (info["state"], info["version"], info["paused"]) == ("quarantined", None, True)
        assert "--load-format dummy" in info["message"]
        early = pool.submit(greedy_tokens, engine, PROMPTS, COUNT)
        for version, name in ((1, "B"), (2, "A")):
            report = push(tmp_path / name, [engine], version, "--pause", "retract", "--bucket-bytes", "64KiB")
            (target,) = report["targets"]
            assert (target["status"], target["proof"], target["version_after"]) == ("serving", "resident", version)
            if version == 1:
                assert early.result() == said["B"]  # it waited for the first update
            assert greedy_tokens(engine, PROMPTS, COUNT) == said[name]
            assert verify(tmp_path / name, engine) == (0, set())


def test_a_start_on_random_weights_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    tiny_model(tmp_path / "A", **SIZES)
    tiny_tokenizer(tmp_path / "A")
    (tmp_path / "A" / "model.safetensors").unlink()
    with (
        pytest.raises(AssertionError, match="vLLM did not start"),
        vllm(tmp_path / "A", tmp_path, "--load-format=dummy"),
    ):
        pass
    log = (tmp_path / "vllm.log").read_text()
    assert "has no readable checkpoint" in log
    assert "start vLLM from a folder with the checkpoint's safetensors files" in log


def test_a_pooling_model_is_refused_and_says_why(tmp_path: Path) -> None:
    tiny_model(tmp_path / "A", **SIZES)
    tiny_tokenizer(tmp_path / "A")
    with (
        pytest.raises(AssertionError, match="vLLM did not start"),
        vllm(tmp_path / "A", tmp_path, "--runner=pooling", "--convert=embed"),
    ):
        pass
    log = (tmp_path / "vllm.log").read_text()
    assert "vLLM was started with --runner pooling, and weightcast updates models that generate text" in log
    assert "stages updates" not in log  # nothing was allocated for them


def test_vllms_own_reload_puts_no_other_weights_under_a_version(tmp_path: Path) -> None:
    said = two_checkpoints(tmp_path, PROMPTS, COUNT, **SIZES)
    with vllm(tmp_path / "A", tmp_path, extra={"VLLM_SERVER_DEV_MODE": "1"}) as engine:
        push(tmp_path / "B", [engine], 1)
        answer = engine.client.post(engine.url + "/collective_rpc", json={"method": "reload_weights"})
        assert answer.status_code >= 400
        assert "send an update" in answer.text
        assert greedy_tokens(engine, PROMPTS, COUNT) == said["B"]
        assert verify(tmp_path / "B", engine) == (0, set())
        push(tmp_path / "A", [engine], 2)
        assert greedy_tokens(engine, PROMPTS, COUNT) == said["A"]
