"""A soak in small: a few updates, half of them hit, and nothing wrong at the end."""

from __future__ import annotations

import json

import pytest

from tests.e2e.engines import weightcast
from tests.helpers.pages import check_alone


@pytest.mark.wide
def test_a_few_updates_with_faults(tmp_path):
    html = tmp_path / "soak.html"
    options = ("--updates", 8, "--fault-rate", 0.5, "--seed", 3, "--json", "--html", html)
    done = weightcast("bench", "soak", *options, timeout_s=380)
    assert done.returncode == 0, done.stderr + done.stdout
    result = json.loads(done.stdout)
    assert result["updates"] >= 8
    assert result["attempts"] > result["updates"] - 1
    assert sum(result["faults"].values()) > 0
    assert result["answers_checked"] > 0
    assert not result["details"]
    check_alone(html.read_text())
    assert "clean" in html.read_text()


def test_a_soak_says_what_it_needs(tmp_path):
    done = weightcast("bench", "soak", "--model", tmp_path)
    assert done.returncode == 2
    assert "config.json" in done.stderr
