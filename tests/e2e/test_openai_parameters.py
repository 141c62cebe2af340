"""Parameters of requests: those that the reference engine has change the answer, all others are refused by name."""

from __future__ import annotations

import time
from collections import Counter

import pytest
import torch

from tests.e2e.test_openai_server import Served, counters, model
from tests.helpers.clock import PATIENCE_S
from tests.helpers.tiny import VOCAB

__all__ = ["model"]
PROMPT = [5, 6, 7, 8]
CHAT = [{"role": "user", "content": "what is two plus two?"}]


@pytest.fixture(scope="module")
def served(model):
    engine = Served(model[0])
    yield engine
    engine.close()


def expected(whole, count, *, repetition=1.0, frequency=0.0, presence=0.0, bias=None, allowed=None):
    """Greedy decoding by transformers' model, with each change of the logits written out."""
    tokens = list(PROMPT)
    for _ in range(count):
        with torch.no_grad():
            row = whole(torch.tensor([tokens])).logits[0, -1].tolist()
        counts = Counter(tokens[len(PROMPT) :])
        best = None
        for token, logit in enumerate(row):
            if allowed is not None and token not in allowed:
                continue
            value = logit + (bias or {}).get(token, 0.0)
            if token in tokens:
                value = value / repetition if value > 0 else value * repetition
            value -= frequency * counts[token] + presence * (counts[token] > 0)
            if best is None or value > best[0]:
                best = (value, token)
        tokens.append(best[1])
    return tokens[len(PROMPT) :]


@pytest.mark.parametrize(
    ("body", "meaning"),
    [
        ({}, {}),
        ({"frequency_penalty": 2.0}, {"frequency": 2.0}),
        ({"presence_penalty": 2.0}, {"presence": 2.0}),
        ({"repetition_penalty": 3.0}, {"repetition": 3.0}),
        ({"logit_bias": {"40": 100, "7": 99.5}, "presence_penalty": 1}, {"bias": {40: 100, 7: 99.5}, "presence": 1}),
    ],
)
@pytest.mark.parametrize("n", [1, 3])
def test_penalties_biases_and_allowed_tokens(served, model, body, meaning, n):
    few = [7, 40, 41, 300, 403]  # so few that answers repeat tokens
    body = {"max_tokens": 12, "ignore_eos": True, "n": n, "allowed_token_ids": few, **body}
    tokens = expected(model[1], 12, allowed=few, **meaning)
    other = expected(model[1], 12, allowed=few if meaning else None)
    assert tokens != other, "a test that cannot fail"
    assert [choice["token_ids"] for choice in served.complete(PROMPT, **body)["choices"]] == [tokens] * n


def test_min_p_of_one_is_greedy(served):
    plain = served.complete(PROMPT, max_tokens=12, ignore_eos=True)["choices"][0]["token_ids"]
    hot = {"max_tokens": 12, "ignore_eos": True, "temperature": 2.0, "seed": 1}
    assert served.complete(PROMPT, **hot)["choices"][0]["token_ids"] != plain
    assert served.complete(PROMPT, **hot, min_p=1.0)["choices"][0]["token_ids"] == plain


REFUSED = [
    ({"temprature": 0.2}, "there is no parameter temprature; did you mean temperature?"),
    ({"surprise": None}, "there is no parameter surprise"),
    ({"response_format": {"type": "json_object"}}, "this engine does not support response_format"),
    ({"tools": [{"type": "function"}], "best_of": 4}, "this engine does not support tools, best_of"),
    ({"tool_choice": "required"}, "does not support tool_choice"),
    ({"guided_regex": "a+"}, "does not support guided_regex"),
    ({"guided_json": {}}, "does not support guided_json"),
    ({"structured_outputs": {"regex": "a"}}, "does not support structured_outputs"),
    ({"suffix": "!"}, "does not support suffix"),
    ({"best_of": True}, "does not support best_of"),
    ({"use_beam_search": True}, "does not support use_beam_search"),
    ({"min_tokens": 3}, "does not support min_tokens"),
    ({"bad_words": ["x"]}, "does not support bad_words"),
    ({"frequency_penalty": 3}, "frequency_penalty: "),
    ({"repetition_penalty": 0}, "repetition_penalty: "),
    ({"min_p": 1.5}, "min_p: "),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"word": 1}}, "logit_bias"),
    ({"logit_bias": {str(VOCAB): 1}}, f"logit_bias: token ids go from 0 to {VOCAB - 1}"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [1, VOCAB]}, f"allowed_token_ids: token ids go from 0 to {VOCAB - 1}"),
    ({"stream_options": {"include_usage": True}}, "stream_options needs stream: true"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
]


@pytest.mark.parametrize(("body", "words"), REFUSED)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_what_the_engine_does_not_do_is_refused_by_name(served, path, body, words):
    asked = {"messages": CHAT} if "chat" in path else {"prompt": PROMPT}
    reply = served.post(path, **asked, **body)
    assert reply.status_code == 400, reply.text
    assert words in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"messages": [{"role": "robot", "content": "hi"}]}, "messages.0.role: "),
        ({"messages": CHAT, "top_logprobs": 2}, "top_logprobs needs logprobs: true"),
        ({"messages": CHAT, "prompt": "x"}, "there is no parameter prompt"),
    ],
)
def test_chat_mistakes(served, body, words):
    reply = served.post("/v1/chat/completions", **body)
    assert reply.status_code == 400, reply.text
    assert words in reply.json()["error"]["message"]


def test_parameters_that_ask_for_nothing_change_nothing(served):
    nothing = {
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "best_of": 1,
        "suffix": None,
        "tools": None,
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "guided_json": None,
        "min_tokens": 0,
        "skip_special_tokens": True,
        "frequency_penalty": None,
        "logit_bias": None,
    }
    plain = served.complete(PROMPT, max_tokens=6, ignore_eos=True)["choices"]
    assert served.complete(PROMPT, max_tokens=6, ignore_eos=True, **nothing)["choices"] == plain


def test_more_tokens_than_the_context_holds_are_refused_with_the_numbers(served):
    refused = served.post("/v1/completions", prompt=[1] * 250, max_tokens=7)
    assert refused.status_code == 400
    words = "max_tokens is 7; the context holds 256 tokens, of which the prompt takes 250 and leaves 6"
    assert words in refused.json()["error"]["message"]
    assert served.post("/v1/chat/completions", messages=CHAT, max_tokens=99999).status_code == 400
    assert served.post("/v1/chat/completions", messages=CHAT, max_completion_tokens=99999).status_code == 400
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


def test_a_model_is_found_by_its_name(served):
    listed = served.client.get("/v1/models").json()["data"][0]
    assert served.client.get(f"/v1/models/{listed['id']}").json() == listed
    other = served.client.get("/v1/models/org/A")
    assert other.status_code == 404
    assert "it serves 'tiny'" in other.json()["error"]["message"]
