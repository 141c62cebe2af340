"""Real vLLM on this CPU with caches that outlast requests: its own, and stores that no pause mode empties.

vLLM's ``ExampleConnector`` keeps KV caches in files.  After an update, a request with a known prompt would be answered
from the caches of the old weights, with every proof of the weights in order.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.engines.test_vllm_cpu import SIZES
from tests.engines.vllm_server import greedy_tokens, vllm
from tests.helpers.engines import Engine, push, weightcast
from tests.helpers.tiny import tiny_model, tiny_tokenizer, two_checkpoints

pytestmark = [pytest.mark.engine]

LONG = [[(7 * place + 3) % 200 + 5 for place in range(200)]]  # more than a block of 128 tokens
COUNT = 8
BLOCK = 128


def prefix_hits(engine: Engine) -> int:
    """How many tokens of prompts vLLM has taken from its cache so far."""
    page = engine.client.get(engine.url + "/metrics").text
    found = re.search(r"^vllm:prefix_cache_hits_total\{.*\} ([\d.e+]+)$", page, re.MULTILINE)
    assert found is not None
    return int(float(found[1]))


def store(folder: Path, kind: str) -> list[str]:
    folder.mkdir()
    settings = {
        f"{kind}_connector": "ExampleConnector" if kind == "kv" else "ECExampleConnector",
        f"{kind}_role": f"{kind}_both",
        f"{kind}_connector_extra_config": {"shared_storage_path": str(folder)},
    }
    return [f"--{kind}-transfer-config", json.dumps(settings)]


def test_no_pause_mode_leaves_others_vllms_own_cache_of_prefixes(tmp_path: Path) -> None:
    said = two_checkpoints(tmp_path, LONG, COUNT, **SIZES)
    with vllm(
        tmp_path / "A", tmp_path, "--additional-config", json.dumps({"weightcast": {"staging": "none"}})
    ) as engine:
        served = "A"
        for version, (name, pause) in enumerate(
            (("B", "retract"), ("A", "abort"), ("B", "wait"), ("A", "in_place")), 1
        ):
            assert greedy_tokens(engine, LONG, COUNT) == said[served]
            before = prefix_hits(engine)
            assert greedy_tokens(engine, LONG, COUNT) == said[served]
            assert prefix_hits(engine) == before + BLOCK, "the prompt is in no cache, so nothing can be stale"
            push(tmp_path / name, [engine], version, "--pause", pause)
            assert greedy_tokens(engine, LONG, COUNT) == said[name]
            assert prefix_hits(engine) == before + BLOCK
            served = name
        examined = weightcast("doctor", engine.url)
        assert '--additional-config \'{"weightcast": {"staging": "device"}}\'' in examined.stdout


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("kv", "the KV connector ExampleConnector keeps what the old weights computed"),
        ("ec", "the encoder connector ECExampleConnector keeps what the old weights computed"),
    ],
)
def test_a_store_that_no_update_can_empty_is_refused_at_the_start(tmp_path: Path, kind: str, words: str) -> None:
    tiny_model(tmp_path / "A", **SIZES)
    tiny_tokenizer(tmp_path / "A")
    with (
        pytest.raises(AssertionError, match="vLLM did not start"),
        vllm(tmp_path / "A", tmp_path, *store(tmp_path / "store", kind)),
    ):
        pass
    log = (tmp_path / "vllm.log").read_text()
    assert words in log
    assert f"start vLLM without --{kind}-transfer-config" in log


def test_a_stock_server_with_such_a_store_is_refused_before_anything_moves(tmp_path: Path) -> None:
    for seed, name in enumerate("AB"):
        tiny_model(tmp_path / name, seed=seed, **SIZES)
        tiny_tokenizer(tmp_path / name)
    options = ["--no-enable-prefix-caching", *store(tmp_path / "store", "kv")]
    with vllm(tmp_path / "A", tmp_path, *options, stock=True) as engine:
        before = greedy_tokens(engine, LONG, COUNT)
        assert list((tmp_path / "store").iterdir()), "vLLM keeps nothing outside, so there is nothing to refuse"
        examined = weightcast("doctor", engine.url)
        assert examined.returncode == 1
        assert "the KV connector ExampleConnector keeps what the old weights computed" in examined.stdout
        refused = weightcast("push", tmp_path / "B", "--to", engine.url, "--version", 1)
        assert refused.returncode == 2
        assert "ExampleConnector" in refused.stderr
        assert greedy_tokens(engine, LONG, COUNT) == before
