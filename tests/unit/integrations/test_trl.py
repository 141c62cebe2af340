"""Rollouts for TRL against servers that misbehave; a whole run is in tests/integrations/test_trl.py."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest

from weightcast.errors import ConfigError, TargetRejected, TargetUnreachable
from weightcast.integrations.trl import GrpoEngines


@contextmanager
def server(**changes: Any) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """An engine that answers every completion with two tokens; yields its URL and the requests that it got."""
    asked: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer({"data": [{"id": "the-model"}]})

        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            choice = {"token_ids": [7, 8], "logprobs": {"token_logprobs": [-1.0, -2.0]}}
            self.answer({"choices": [choice], "weight_version": 3} | changes)

        def answer(self, body: dict[str, Any]) -> None:
            data = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None: ...

    found = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=found.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{found.server_address[1]}", asked
    finally:
        found.shutdown()
        thread.join()
        found.server_close()


class Words:
    """A tokenizer: each letter is a token."""

    def __call__(self, text: str, *, add_special_tokens: bool) -> Any:
        assert not add_special_tokens
        return SimpleNamespace(input_ids=[ord(letter) for letter in text])

    def apply_chat_template(self, messages: Any, *, tokenize: bool, add_generation_prompt: bool) -> str:
        return "".join(message["content"] for message in messages) + ">"


def trainer(**changes: Any) -> Any:
    settings: dict[str, Any] = {"max_completion_length": 4, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None}
    settings |= {"repetition_penalty": 1.0, "generation_kwargs": None, "seed": 5}
    return SimpleNamespace(
        processing_class=Words(),
        args=SimpleNamespace(**(settings | changes)),
        accelerator=SimpleNamespace(num_processes=2, process_index=1),
    )


def rollout(url: str, prompts: list[Any], version: int | None = 3, **changes: Any) -> dict[str, list[Any]]:
    engines = GrpoEngines(url)
    engines.version = version
    return engines.rollout(prompts, trainer(**changes))


def test_answers_come_in_the_order_of_the_prompts() -> None:
    with server() as (url, asked):
        found = rollout(url, ["ab", [{"role": "user", "content": "c"}], "ab"])
    assert found["prompt_ids"] == [[97, 98], [99, 62], [97, 98]]
    assert found["completion_ids"] == [[7, 8]] * 3
    assert found["logprobs"] == [[-1.0, -2.0]] * 3
    assert {body["model"] for body in asked} == {"the-model"}
    assert len({body["seed"] for body in asked}) == 3


def test_settings_that_change_nothing_are_left_out() -> None:
    with server() as (url, asked):
        rollout(url, ["a"])
        rollout(url, ["a"], top_k=20, min_p=0.1, generation_kwargs={"ignore_eos": True})
    assert not {"top_p", "top_k", "min_p", "repetition_penalty"} & asked[0].keys()
    assert (asked[1]["top_k"], asked[1]["min_p"], asked[1]["ignore_eos"]) == (20, 0.1, True)


def test_seeds_differ_between_rollouts_and_repeat_between_runs() -> None:
    seeds: list[list[int]] = []
    with server() as (url, asked):
        for _ in range(2):
            engines = GrpoEngines(url)
            engines.version = 3
            engines.rollout(["a", "b"], trainer())
            engines.rollout(["a", "b"], trainer())
            seeds.append(sorted(body["seed"] for body in asked))
            asked.clear()
    assert len(set(seeds[0])) == 4
    assert seeds[0] == seeds[1]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"weight_version": 2}, "sampled with version 2, and the trainer sent version 3 last"),
        ({"weight_version": None}, "answers without weight_version, so nobody knows which weights sampled"),
        (
            {"weight_versions": [{"version": 2, "tokens": 1}, {"version": 3, "tokens": 1}]},
            "sampled with version 2 and then 3, and the trainer sent version 3 last",
        ),
        *(
            (
                {"choices": [{"token_ids": [], "logprobs": none, "finish_reason": "abort"}], "weight_version": None},
                "ended a completion before its first token, with finish_reason 'abort'",
            )
            for none in (None, {"token_logprobs": []})
        ),
        ({"choices": []}, "without token ids or log-probabilities"),
        ({"choices": [{"text": "hello"}]}, "without token ids or log-probabilities"),
    ],
)
def test_answers_that_cannot_be_trained_on_are_refused(changes: dict[str, Any], words: str) -> None:
    with server(**changes) as (url, _), pytest.raises(TargetRejected, match=words):
        rollout(url, ["a"])


def test_rollout_before_the_first_update_is_refused() -> None:
    with pytest.raises(ConfigError, match="no weights were sent"):
        rollout("http://127.0.0.1:9", ["a"], version=None)


def test_engine_that_is_gone_is_named() -> None:
    with pytest.raises(TargetUnreachable, match=r"127\.0\.0\.1:9"):
        rollout("http://127.0.0.1:9", ["a"])
