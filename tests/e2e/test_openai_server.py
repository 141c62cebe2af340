"""The reference engine as a process of its own, used over HTTP."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.helpers.clock import PATIENCE_S
from tests.helpers.commands import Started
from tests.helpers.engines import NO_KEEP_ALIVE
from tests.helpers.procs import wait_until_gone
from tests.helpers.server_events import lines_of
from tests.helpers.tiny import VOCAB, greedy, tiny_model, tiny_tokenizer
from weightcast.errors import ConfigError
from weightcast.rollout.launch import ServeConfig, serve

KEY = "a key"
PROMPTS = [[5, 6, 7], [100, 200, 300, 400, 17], [9], [33, 44]]


class Served:
    """One engine: a process, its URL and a client."""

    def __init__(self, folder: Path, *options: str, key: str | None = None):
        command = [str(folder), "--port", "0", "--threads", "1", *options, *(("--api-key", key) if key else ())]
        self.process = Started("weightcast.rollout.launch", *command, stderr=subprocess.PIPE)
        self.lines: list[str] = []
        ready = threading.Event()

        def read() -> None:
            for line in self.process.stderr:
                self.lines.append(line)
                if line.startswith("serving "):
                    ready.set()
            ready.set()

        self._reader = threading.Thread(target=read, daemon=True)
        self._reader.start()
        assert ready.wait(PATIENCE_S)
        assert self.process.poll() is None, self.lines
        self.url = re.search(r"http://\S+", self.lines[-1]).group()
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.client = httpx.Client(
            base_url=self.url, headers=headers, timeout=300, trust_env=False, limits=NO_KEEP_ALIVE
        )

    def post(self, path, **body):
        return self.client.post(path, json=body)

    def complete(self, prompt, **body):
        reply = self.post("/v1/completions", prompt=prompt, **({"temperature": 0, "return_token_ids": True} | body))
        assert reply.status_code == 200, reply.text
        return reply.json()

    def stream(self, path, **body):
        events = []
        with self.client.stream("POST", path, json={"stream": True} | body) as reply:
            assert reply.status_code == 200
            assert reply.headers["content-type"].startswith("text/event-stream")
            for line in lines_of(reply):
                if line:
                    assert line.startswith("data: ")
                    events.append(line.removeprefix("data: "))
        assert events[-1] == "[DONE]"
        return [json.loads(event) for event in events[:-1]]

    def ranks(self):
        return [rank["pid"] for rank in self.client.get("/weightcast/info").json()["ranks"]]

    def close(self):
        self.client.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        self.process.stderr.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model folder, and transformers' model of it."""
    folder = tmp_path_factory.mktemp("served") / "tiny"
    whole = tiny_model(folder)
    tiny_tokenizer(folder)
    return folder, whole


@pytest.fixture(scope="module")
def served(model):
    engine = Served(model[0], key=KEY)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def ranked(model):
    engine = Served(model[0], "--tp", "2")
    yield engine
    engine.close()


@pytest.mark.parametrize("kind", ["served", "ranked"])
def test_completions_equal_transformers(request, model, kind):
    engine = request.getfixturevalue(kind)
    reply = engine.complete(PROMPTS, max_tokens=10, ignore_eos=True, logprobs=2)
    assert [choice["token_ids"] for choice in reply["choices"]] == [greedy(model[1], p, 10) for p in PROMPTS]
    assert reply["usage"] == {"prompt_tokens": 11, "completion_tokens": 40, "total_tokens": 51}
    assert reply["weight_version"] == 0
    assert reply["weight_versions"] == [{"version": 0, "tokens": 40}]
    numbers = reply["choices"][0]["logprobs"]
    assert [len(numbers[field]) for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset")] == [10] * 4
    assert all(value <= 0 for value in numbers["token_logprobs"])


def test_stream_says_the_same_as_a_whole_answer(served):
    whole = served.complete("the quick", max_tokens=15, ignore_eos=True)["choices"][0]
    events = served.stream(
        "/v1/completions",
        prompt="the quick",
        max_tokens=15,
        temperature=0,
        ignore_eos=True,
        return_token_ids=True,
        logprobs=0,
    )
    choices = [event["choices"][0] for event in events]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    assert [token for choice in choices for token in choice["token_ids"]] == whole["token_ids"]
    assert sum(len(choice["logprobs"]["tokens"]) for choice in choices) == 15
    assert [choice["finish_reason"] for choice in choices][-1] == "length"
    assert choices[-1]["weight_versions"] == [{"version": 0, "tokens": 15}]


def test_stop_strings_end_an_answer_and_are_not_part_of_it(served):
    whole = served.complete("over the", max_tokens=30, ignore_eos=True)["choices"][0]
    stop = whole["text"][8:10]
    cut = served.complete("over the", max_tokens=30, ignore_eos=True, stop=[stop, "never there"])["choices"][0]
    assert cut["finish_reason"] == "stop"
    assert cut["text"] == whole["text"][: whole["text"].index(stop)]
    assert len(cut["token_ids"]) < 30
    assert cut["weight_versions"] == [{"version": 0, "tokens": len(cut["token_ids"])}]
    events = served.stream(
        "/v1/completions", prompt="over the", max_tokens=30, temperature=0, stop=stop, ignore_eos=True
    )
    assert "".join(event["choices"][0]["text"] for event in events) == cut["text"]


def test_many_samples_and_seeds(served):
    settings = {"max_tokens": 8, "temperature": 1.0, "n": 4, "ignore_eos": True}
    first = served.complete("fox", **settings, seed=5)["choices"]
    again = served.complete("fox", **settings, seed=5)["choices"]
    assert first == again
    assert [choice["index"] for choice in first] == [0, 1, 2, 3]
    assert len({tuple(choice["token_ids"]) for choice in first}) > 1


def test_many_requests_at_once(ranked, model):
    prompts = [[3 + i, 90 + i, 200 - i][: 1 + i % 3] for i in range(40)]
    with ThreadPoolExecutor(40) as pool:
        replies = pool.map(lambda p: ranked.complete(p, max_tokens=10, ignore_eos=True), prompts)
        answers = [reply["choices"][0]["token_ids"] for reply in replies]
    assert answers == [greedy(model[1], prompt, 10) for prompt in prompts]


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place", "wait"])
def test_pause_and_continue(served, model, mode):
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(served.complete, p, max_tokens=200, ignore_eos=True) for p in PROMPTS[:2]]
        while served.client.get("/health").json()["running"] < 2:
            time.sleep(0.001)
        assert served.post("/pause", mode=mode).json()["state"] == "paused"
        late = pool.submit(served.complete, PROMPTS[2], max_tokens=5, ignore_eos=True)
        status = served.client.get("/health").json()
        assert status["status"] == "ok"
        if mode in ("abort", "wait"):
            done = [future.result(PATIENCE_S)["choices"][0] for future in running]
            assert [choice["finish_reason"] for choice in done] == ["abort" if mode == "abort" else "length"] * 2
        else:
            assert not any(future.done() for future in running)
        assert not late.done()
        served.post("/continue")
        for prompt, future in zip(PROMPTS, running, strict=False):
            tokens = future.result(PATIENCE_S)["choices"][0]["token_ids"]
            assert tokens == greedy(model[1], prompt, 200)[: len(tokens)]
            assert mode == "abort" or len(tokens) == 200
        assert late.result(PATIENCE_S)["choices"][0]["token_ids"] == greedy(model[1], PROMPTS[2], 5)


def test_sleep_and_wake(served, model):
    digests = served.client.get("/weightcast/digests").json()["resident"]
    assert served.client.post("/sleep").json()["state"] == "asleep"
    assert served.client.post("/wake").json()["state"] == "serving"
    assert served.complete(PROMPTS[0], max_tokens=5, ignore_eos=True)["choices"][0]["token_ids"] == greedy(
        model[1], PROMPTS[0], 5
    )
    assert digests
    assert served.client.get("/weightcast/digests").json()["resident"] == digests


def test_every_route_but_health_requires_the_key(served):
    with httpx.Client(base_url=served.url, trust_env=False) as nobody:
        assert nobody.get("/health").status_code == 200
        for method, path in [
            ("GET", "/v1/models"),
            ("GET", "/metrics"),
            ("POST", "/v1/completions"),
            ("POST", "/pause"),
            ("POST", "/weightcast/apply"),
            ("GET", "/weightcast/info"),
            ("GET", "/openapi.json"),
            ("GET", "/nothing"),
        ]:
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY}):
                reply = nobody.request(method, path, headers=headers)
                assert reply.status_code == 401, path
                assert reply.json()["error"]["type"] == "authentication_error"


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/v1/completions", {"prompt": [1], "max_tokens": 0}, 400, "max_tokens: "),
        ("/v1/completions", {"prompt": [1], "max_tokens": "many"}, 400, "max_tokens: "),
        ("/v1/completions", {"prompt": [1], "n": 1000}, 400, "n: "),
        ("/v1/completions", {"prompt": [1], "temperature": -1}, 400, "temperature: "),
        ("/v1/completions", {"prompt": [1], "top_p": 1.5}, 400, "top_p: "),
        ("/v1/completions", {"prompt": [1], "echo": True}, 400, "echo"),
        ("/v1/completions", {"prompt": []}, 400, "prompt"),
        ("/v1/completions", {"prompt": [VOCAB]}, 400, "token ids go from 0 to 511"),
        ("/v1/completions", {"prompt": [1] * 256}, 400, "the context holds 256"),
        ("/v1/completions", {"prompt": "x" * 100_000}, 400, "cannot fit"),
        ("/v1/completions", {}, 400, "prompt"),
        ("/v1/completions", {"prompt": [1], "model": "gpt-4"}, 404, "it serves 'tiny'"),
        ("/v1/chat/completions", {"messages": []}, 404, "send the token ids to /v1/completions"),
        ("/pause", {"mode": "stop"}, 400, "mode"),
        ("/sleep", {"mode": "in_place"}, 400, "in_place"),
        ("/nothing", {}, 404, "Not Found"),
        ("/health", {}, 405, "Not Allowed"),
    ],
)
def test_mistakes_are_explained_in_openai_shape(served, path, body, status, words):
    reply = served.post(path, **body)
    assert reply.status_code == status
    assert words in reply.json()["error"]["message"]


def test_invalid_json_is_refused_and_null_is_accepted(served):
    assert served.client.post("/v1/completions", content=b"{").status_code == 400
    reply = served.complete([1], max_tokens=None, n=None, top_p=None, stop=None, ignore_eos=True)
    assert len(reply["choices"][0]["token_ids"]) == 255


def test_models_and_metrics(served):
    listed = served.client.get("/v1/models").json()["data"]
    assert [entry["id"] for entry in listed] == ["tiny"]
    assert listed[0]["max_model_len"] == 256
    before = counters(served)
    served.complete([1, 2], max_tokens=3, ignore_eos=True)
    after = counters(served)
    assert after["weightcast_generated_tokens_total"] - before["weightcast_generated_tokens_total"] == 3
    assert after["weightcast_prompt_tokens_total"] - before["weightcast_prompt_tokens_total"] == 2
    assert after["weightcast_healthy"] == 1


def counters(engine):
    lines = engine.client.get("/metrics").text.splitlines()
    pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    found = {}
    for name, _, value in pairs:
        reason = re.search(r'finish_reason="(\w+)"', name)
        key = name.partition("{")[0]
        found[(key, reason.group(1)) if reason else key] = float(value)
    return found


@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnected_client_frees_its_slots(served, stream):
    body = {"prompt": [1], "max_tokens": None, "ignore_eos": True, "n": 128, "stream": stream}
    with socket.create_connection((served.client.base_url.host, served.client.base_url.port)) as client:
        client.sendall(raw_request("/v1/completions", body))
        while served.client.get("/health").json()["running"] == 0:
            time.sleep(0.001)
    deadline = time.monotonic() + PATIENCE_S
    while True:
        status = served.client.get("/health").json()
        if status["running"] == status["waiting"] == 0:
            break
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert counters(served)["weightcast_requests_total", "abort"] > 0


def raw_request(path, body):
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


def test_sigterm_ends_requests_and_every_process(model):
    engine = Served(model[0], "--tp", "2")
    try:
        ranks = engine.ranks()
        assert len(ranks) == 2
        with ThreadPoolExecutor(1) as pool:
            request = pool.submit(engine.complete, [1], max_tokens=None, n=64, ignore_eos=True)
            while engine.client.get("/health").json()["running"] == 0:
                time.sleep(0.001)
            engine.process.send_signal(signal.SIGTERM)
            assert {choice["finish_reason"] for choice in request.result(PATIENCE_S)["choices"]} <= {"abort", "length"}
        assert engine.process.wait(PATIENCE_S) == 0
        wait_until_gone(ranks)
    finally:
        engine.close()


def lose_a_rank(engine, request=None):
    """Kills rank 1, checks that requests and health fail, and returns the processes of all ranks."""
    ranks = engine.ranks()
    os.kill(ranks[1], signal.SIGKILL)
    if request is not None:
        reply = request.result(PATIENCE_S)
        assert reply.status_code == 503
        assert f"rank 1 (pid {ranks[1]}) was killed by signal 9" in reply.json()["error"]["message"]
    deadline = time.monotonic() + PATIENCE_S
    while (health := engine.client.get("/health")).status_code == 200:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert health.status_code == 503
    assert health.json()["state"] == "failed"
    assert "rank 1" in health.json()["error"]
    assert engine.post("/v1/completions", prompt=[1]).status_code == 503
    return ranks


def test_a_rank_that_dies_idle_and_an_engine_that_is_killed(model):
    engine = Served(model[0], "--tp", "2")
    try:
        ranks = lose_a_rank(engine)
        engine.process.kill()
        wait_until_gone(ranks)
    finally:
        engine.close()


def test_a_rank_that_dies_while_generating_and_sigterm_afterwards(model):
    engine = Served(model[0], "--tp", "2")
    try:
        with ThreadPoolExecutor(1) as pool:
            request = pool.submit(engine.post, "/v1/completions", prompt=[1], max_tokens=None, n=128)
            while engine.client.get("/health").json()["running"] == 0:
                time.sleep(0.001)
            ranks = lose_a_rank(engine, request)
        engine.process.send_signal(signal.SIGTERM)
        assert engine.process.wait(PATIENCE_S) == 0
        wait_until_gone(ranks)
    finally:
        engine.close()


def test_a_port_in_use_is_reported_before_the_model_is_read():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        command = [sys.executable, "-m", "weightcast.rollout", "/nowhere", "--port", str(taken.getsockname()[1])]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 1
    assert re.fullmatch(r"error: cannot listen on 127\.0\.0\.1:\d+: Address already in use\nhint: .*\n", done.stderr)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tp": 5}, "tensor parallel degree 5 does not divide"),
        ({"device": "cuda:99"}, "GPU"),
        ({"dtype": "int8"}, "not a dtype for weights"),
        ({"tp": 2, "executor": "local"}, "local executor"),
        ({"staging": "somewhere"}, "staging"),
        ({"port": 70000}, "port"),
        ({"model_dir": "/nowhere"}, "not a model folder"),
    ],
)
def test_unservable_models_are_refused_before_anything_starts(model, options, words):
    with pytest.raises(ConfigError, match=words):
        serve(ServeConfig(**({"model_dir": str(model[0]), "port": 0} | options)))
