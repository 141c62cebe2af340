"""Tests of the demo's completion requests and of the parsing of answers."""

from __future__ import annotations

import json

import pytest

from weightcast.errors import TargetRejected
from weightcast.lab.demo.rollouts import completion_request, parse_completions


def reply(**changes):
    choice = {
        "index": 0,
        "text": " Paris.",
        "token_ids": [5, 6, 2],
        "logprobs": {"tokens": [" Paris", ".", ""], "token_logprobs": [-0.5, -0.25, -0.125]},
        "finish_reason": "stop",
    } | changes
    return json.dumps({"object": "text_completion", "weight_version": "7", "choices": [choice]}).encode()


def test_request_asks_for_what_training_needs():
    body = json.loads(completion_request([1, 2], group_size=8, max_tokens=16, seed=3))
    assert body["prompt"] == [1, 2]
    assert (body["n"], body["max_tokens"], body["temperature"], body["seed"]) == (8, 16, 1.0, 3)
    assert body["logprobs"] is not None


def test_answer_becomes_completions():
    [completion] = parse_completions(reply(), url="http://engine")
    assert completion.token_ids == [5, 6, 2]
    assert completion.logprobs == [-0.5, -0.25, -0.125]
    assert completion.finished
    assert completion.version == 7
    [cut] = parse_completions(reply(finish_reason="length"), url="http://engine")
    assert not cut.finished


@pytest.mark.parametrize(
    "changes", [{"token_ids": None}, {"logprobs": None}, {"token_ids": [5]}, {"token_ids": []}, {"finish_reason": None}]
)
def test_an_answer_that_cannot_be_trained_on_names_the_engine(changes):
    with pytest.raises(TargetRejected, match="http://engine"):
        parse_completions(reply(**changes), url="http://engine")


def test_an_engine_that_does_not_tell_the_version_with_its_answer_is_asked_for_it():
    silent = json.loads(reply())
    del silent["weight_version"]
    [completion] = parse_completions(json.dumps(silent).encode(), url="http://engine", version=3)
    assert completion.version == 3
    with pytest.raises(TargetRejected, match="has no weight version"):
        parse_completions(json.dumps(silent).encode(), url="http://engine")
