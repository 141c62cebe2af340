"""An update in a process of its own stays under the limit of extra memory that was set."""

from __future__ import annotations

import json
import re

import pytest
import torch
import transformers

from tests.helpers.commands import COMMAND, run
from tests.helpers.engines import ENVIRONMENT, engines

pytestmark = pytest.mark.wide  # a model of 150 MiB, in three processes
MIB = 1 << 20
LIMIT = 100 * MIB
PUSH_S = 300


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two versions of a model that is larger than the limit."""
    config = transformers.LlamaConfig(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=5,
        num_attention_heads=16,
        num_key_value_heads=8,
        vocab_size=8192,
        dtype="bfloat16",
        tie_word_embeddings=False,
    )
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
        found.append(tmp_path_factory.mktemp(f"version-{seed}"))
        model.save_pretrained(found[-1])
    return found


def push(folder, url, *options):
    """The document of a push that succeeded, or the errors of one that did not."""
    command = ["push", str(folder), "--to", url, "--version", "1", "--timeout", "250", "--json", *options]
    done = run(COMMAND, *command, env=ENVIRONMENT, timeout_s=PUSH_S)
    return json.loads(done.stdout) if done.returncode == 0 else done.stderr


@pytest.mark.parametrize("via", ["ipc", "broadcast"])
def test_a_push_stays_under_its_limit_or_says_what_it_needs(via, folders, tmp_path):
    first, second = folders
    with engines(first, tmp_path, {"dtype": "bfloat16"}) as [engine]:
        before = engine.digests()
        refused = push(second, engine.url, "--via", via, "--max-extra-bytes", "32MiB")
        assert isinstance(refused, str)
        (needed,) = re.findall(r"max_extra_bytes=33554432: .*: (\d+) bytes are needed", refused)
        assert engine.digests() == before

        report = push(second, engine.url, "--via", via, "--max-extra-bytes", str(LIMIT))
        assert isinstance(report, dict), report
        assert report["bytes"] > LIMIT
        assert report["buckets"] > 2
        assert int(needed) <= report["planned_extra_bytes"] <= LIMIT
        assert 16 * MIB < report["peak_extra_bytes"] <= LIMIT
        assert all(row["proof"] == "resident" for row in report["targets"])
        assert engine.digests() != before
