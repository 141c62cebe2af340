"""Parameters of requests: those that the reference engine has change the answer, all others are refused by name."""

from __future__ import annotations

import time

import pytest

from tests.e2e.test_openai_server import Served, counters, model
from tests.helpers.clock import PATIENCE_S

__all__ = ["model"]
PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def served(model):
    engine = Served(model[0])
    yield engine
    engine.close()


def test_min_p_of_one_is_greedy(served):
    plain = served.complete(PROMPT, max_tokens=12, ignore_eos=True)["choices"][0]["token_ids"]
    hot = {"max_tokens": 12, "ignore_eos": True, "temperature": 2.0, "seed": 1}
    assert served.complete(PROMPT, **hot)["choices"][0]["token_ids"] != plain
    assert served.complete(PROMPT, **hot, min_p=1.0)["choices"][0]["token_ids"] == plain


REFUSED = [
    ({"temprature": 0.2}, "temprature: this engine has no such parameter; did you mean temperature?"),
    ({"surprise": None}, "surprise: this engine has no such parameter; leave it out"),
    ({"response_format": {"type": "text"}}, "response_format: "),
    ({"echo": True}, "echo: "),
    ({"repetition_penalty": 1.5}, "repetition_penalty: "),
    ({"logit_bias": {"5": 1}}, "logit_bias: "),
    ({"messages": []}, "messages: "),
    ({"min_p": 1.5}, "min_p: "),
    ({"stream": True, "stream_options": {"include_usage": True}}, "stream_options: "),
]


@pytest.mark.parametrize(("body", "words"), REFUSED)
def test_what_the_engine_does_not_do_is_refused_by_name(served, body, words):
    reply = served.post("/v1/completions", prompt=PROMPT, **body)
    assert reply.status_code == 400, reply.text
    assert words in reply.json()["error"]["message"]


def test_null_is_the_default(served):
    nothing = {"top_k": None, "seed": None, "logprobs": None, "stop": None, "n": None}
    plain = served.complete(PROMPT, max_tokens=6, ignore_eos=True)["choices"]
    assert served.complete(PROMPT, max_tokens=6, ignore_eos=True, **nothing)["choices"] == plain


def test_more_tokens_than_the_context_holds_are_refused_with_the_numbers(served):
    refused = served.post("/v1/completions", prompt=[1] * 250, max_tokens=7)
    assert refused.status_code == 400
    words = "max_tokens is 7; the context holds 256 tokens, of which the prompt takes 250 and leaves 6"
    assert words in refused.json()["error"]["message"]
    # Neither the default of 16 nor null asks for more than there is.
    for body in ({}, {"max_tokens": None}, {"max_tokens": 6}):
        reply = served.complete([1] * 250, ignore_eos=True, **body)
        assert reply["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize("stream", [False, True])
def test_metrics_count_a_stop_string_as_a_stop(served, stream):
    whole = served.complete("over the", max_tokens=40, ignore_eos=True)["choices"][0]
    stop = whole["text"][8:10]
    body = {"prompt": "over the", "max_tokens": 40, "temperature": 0, "ignore_eos": True, "stop": stop}
    before = counters(served)
    if stream:
        events = served.stream("/v1/completions", **body)
        reasons = [event["choices"][0]["finish_reason"] for event in events]
        assert reasons[-1] == "stop"
    else:
        reply = served.complete(**body)
        assert reply["choices"][0]["finish_reason"] == "stop"
    after, changed = before, dict[str, float]()
    deadline = time.monotonic() + PATIENCE_S
    while "stop" not in changed and time.monotonic() < deadline:  # an answer may come before it is counted
        after = counters(served)
        changed = {
            reason: after[key] - before.get(key, 0)
            for key in after
            if isinstance(key, tuple) and (reason := key[1]) and after[key] != before.get(key, 0)
        }
    assert changed.get("stop") == 1
    assert changed.keys() <= {"stop", "length"}  # the first request may have been counted late as well
    # Nothing is generated beyond the stop string.
    made = after["weightcast_generated_tokens_total"] - before["weightcast_generated_tokens_total"]
    assert made < 40 + (40 if "length" in changed else 0)
