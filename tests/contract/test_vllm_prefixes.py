"""The real scheduler of each version of vLLM around a switch: who finds which blocks, and which weights tokens are of.

``vllm_prefix_rig.py`` runs in each.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.contract.test_vllm_stock import rig_output

pytestmark = [pytest.mark.engine]

# `make test` plays the newest version, `make engine-test` all.
PLAYED = (
    "0.33.0",
    *(pytest.param(version, marks=pytest.mark.engine_full) for version in ("0.32.0", "0.31.0", "0.26.0", "0.25.1")),
)
# Four blocks of 16 tokens and one token, of which all four can be found.
ALL, NONE = 64, 0


@pytest.fixture(scope="module", params=PLAYED)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Tokens of prompts that were found, for each case."""
    return rig_output("vllm_prefix_rig.py", request.param, tmp_path_factory.mktemp("stand-ins"))


def test_prefixes_are_found_within_a_version_only(found: dict[str, Any]) -> None:
    assert found["within_and_across"] == [NONE, ALL, NONE, ALL, NONE, ALL]
    assert found["preempted_without_a_switch"] == [ALL]


def test_a_request_that_waits_or_is_made_at_a_switch_finds_nothing_old(found: dict[str, Any]) -> None:
    assert found["a_request_that_waits"] == [NONE, ALL]
    assert found["a_request_that_is_made_during_the_switch"] == [NONE, ALL]


def test_nobody_finds_what_a_request_computes_that_runs_across_a_switch(found: dict[str, Any]) -> None:
    first, tokens, text, prompt, again = found["a_request_that_runs"]
    assert (first, text) == (NONE, NONE)
    assert tokens == 41
    assert prompt == ALL  # of the request before it, which computed the same text with the new weights
    assert again == (65 + 41 - 1) // 16 * 16


def test_a_preempted_request_is_computed_anew_and_others_find_that(found: dict[str, Any]) -> None:
    assert found["a_request_that_is_preempted"] == [NONE, ALL, NONE]


def test_salts_of_users_hold_and_cannot_look_like_ours(found: dict[str, Any]) -> None:
    assert found["salts"] == [NONE, ALL, NONE, NONE] * 2
    assert found["forged"] == [NONE] * 6
    assert found["names_before_the_first_switch"] == [True]


def test_tokens_say_the_weights_that_their_batch_began_with(found: dict[str, Any]) -> None:
    first, told, *spans = found["versions_of_tokens"]
    assert first == {"weightcast-version": "0"}
    # A request's first output says it, and the first one with another version.
    assert told == [{"weightcast-version": "7"}, None, None, {"weightcast-version": "8"}, None, None]
    assert spans == [[[7, 3], [8, 3]], [[7, 3], [8, 1]], [[7, 2]]]
