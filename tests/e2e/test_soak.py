"""A soak in small: a few updates, half of them hit, and nothing wrong at the end."""

from __future__ import annotations

import json

import pytest

from tests.e2e.engines import weightcast


@pytest.mark.wide
@pytest.mark.timeout(400)
def test_a_few_updates_with_faults():
    done = weightcast("bench", "soak", "--updates", 8, "--fault-rate", 0.5, "--seed", 3, "--json", timeout_s=380)
    assert done.returncode == 0, done.stderr + done.stdout
    result = json.loads(done.stdout)
    assert result["updates"] >= 8
    assert result["attempts"] > result["updates"] - 1
    assert sum(result["faults"].values()) > 0
    assert result["answers_checked"] > 0
    assert not result["details"]


def test_a_soak_says_what_it_needs(tmp_path):
    done = weightcast("bench", "soak", "--model", tmp_path)
    assert done.returncode == 2
    assert "config.json" in done.stderr
