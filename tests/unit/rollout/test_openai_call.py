"""Answers of ``/v1/completions``, whole and streamed, and what ends them."""

from __future__ import annotations

import json

import pytest

from tests.helpers.clock import wait_until
from tests.helpers.tiny import greedy
from tests.unit.rollout.test_server import Served, models

__all__ = ["models"]


@pytest.fixture(scope="module")
def served(models):
    served = Served(models[0])
    yield served
    served.close()


def ask(served, prompt, **body):
    asked = {"prompt": prompt, "max_tokens": 20, "temperature": 0, "return_token_ids": True, "logprobs": 2} | body
    return served.http.post("/v1/completions", json=asked)


def streamed(served, prompt, **body):
    *events, last, end = ask(served, prompt, stream=True, **body).text.split("\n\n")
    assert (last, end) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def numbers(choices, field):
    """Values of one choice, which may come in parts."""
    return [value for choice in choices for value in choice["logprobs"][field] or ()]


@pytest.mark.parametrize("stop", [None, "e"])
def test_stream_says_the_same_as_a_whole_answer(served, models, stop):
    prompts = [[5, 6], [9, 100, 200]]
    whole = ask(served, prompts, n=2, stop=stop).json()
    events = streamed(served, prompts, n=2, stop=stop)
    for index, choice in enumerate(whole["choices"]):
        parts = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        assert [part["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [token for part in parts for token in part["token_ids"]] == choice["token_ids"]
        assert numbers(parts, "tokens") == numbers([choice], "tokens")
        assert numbers(parts, "token_logprobs") == pytest.approx(numbers([choice], "token_logprobs"), abs=1e-4)
        assert len(numbers(parts, "top_logprobs")) == len(choice["token_ids"])
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
        assert parts[-1]["weight_versions"] == choice["weight_versions"]
    assert {event["weight_version"] for event in events} == {0}
    counts = [len(choice["token_ids"]) for choice in whole["choices"]]
    assert whole["usage"] == {"prompt_tokens": 5, "completion_tokens": sum(counts), "total_tokens": 5 + sum(counts)}
    assert whole["weight_versions"] == [{"version": 0, "tokens": sum(counts)}]
    for choice, prompt in zip(whole["choices"], [prompt for prompt in prompts for _ in range(2)], strict=True):
        assert choice["token_ids"] == greedy(models[1], prompt, 20)[: len(choice["token_ids"])]


def test_stop_string_ends_an_answer_and_is_not_part_of_it(served):
    text = ask(served, [5, 6], max_tokens=40).json()["choices"][0]["text"]
    stop = text[len(text) // 2 : len(text) // 2 + 2]
    cut = ask(served, [5, 6], max_tokens=40, stop=["never there", stop]).json()["choices"][0]
    assert (cut["text"], cut["finish_reason"]) == (text[: text.index(stop)], "stop")
    assert len(cut["token_ids"]) < 40


def test_a_call_of_which_one_part_is_refused_leaves_no_request(served):
    reply = ask(served, [[5, 6], [1] * 64])
    assert reply.status_code == 400
    assert "the context holds 64" in reply.json()["error"]["message"]
    wait_until(lambda: (served.scheduler.stats().running, served.scheduler.stats().waiting) == (0, 0), "its end")


def test_an_engine_that_fails_ends_its_streams_and_answers_with_the_reason(models, monkeypatch):
    served = Served(models[0])
    try:
        monkeypatch.setattr(served.ranks._executor, "run", lambda _: (_ for _ in ()).throw(RuntimeError("no rank")))
        [event] = streamed(served, [5, 6])
        assert "no rank" in event["error"]["message"]
        reply = ask(served, [5, 6])
        assert reply.status_code == 503
        assert "no rank" in reply.json()["error"]["message"]
        assert served.scheduler.failure is not None
    finally:
        served.close()
