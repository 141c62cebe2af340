"""The reference engine's routes: sleep and updates exclude each other, and scores are of one version."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from fastapi.testclient import TestClient

from tests.helpers.clock import PATIENCE_S
from tests.helpers.sessions import Sender
from tests.helpers.tiny import VOCAB, greedy, tiny_model, tiny_tokenizer
from weightcast.receiver.engine_state import EngineFacts
from weightcast.receiver.executor import LocalExecutor
from weightcast.receiver.session import SessionHandler
from weightcast.rollout import commands
from weightcast.rollout.batch import Limits
from weightcast.rollout.engine import RolloutEngine
from weightcast.rollout.requests import GenerationRequest
from weightcast.rollout.scheduler import Scheduler
from weightcast.rollout.server import build_app
from weightcast.rollout.text import TextTokenizer
from weightcast.rollout.worker import WorkerSettings, make_worker
from weightcast.wire.messages import Commit, Readback

TEXT = [5, 9, 100, 200, 3, 44]


class Held:
    """A real executor that a test can stop before a step and in the middle of a commit."""

    def __init__(self, executor):
        self._executor = executor
        self.generate, self.commit = threading.Event(), threading.Event()
        self.generate.set()
        self.commit.set()
        self.arrived = threading.Event()

    def run(self, command):
        if isinstance(commands.decode_command(command), commands.Prefill | commands.Decode):
            self._stand_still(self.generate)
        return self._executor.run(command)

    def apply(self, message, **settings):
        if isinstance(message, Commit):
            self._stand_still(self.commit)
        return self._executor.apply(message, **settings)

    def _stand_still(self, gate):
        if not gate.is_set():
            self.arrived.set()
            assert gate.wait(PATIENCE_S)

    @contextmanager
    def held(self, gate):
        gate.clear()
        self.arrived.clear()
        try:
            yield
        finally:
            gate.set()

    def __getattr__(self, name):
        return getattr(self._executor, name)


class Served:
    def __init__(self, folder):
        settings = WorkerSettings(
            model_dir=str(folder), dtype="float32", device="cpu", max_batch=4, max_len=64, staging="device", threads=1
        )
        worker = make_worker(0, 1, "", settings=settings)
        self.ranks = Held(LocalExecutor(worker))
        self.scheduler = Scheduler(
            self.ranks, limits=Limits(max_batch=4, max_len=64), eos_token_ids=frozenset(), vocab_size=VOCAB
        )
        facts = EngineFacts(
            engine="e",
            model="m",
            host_id="",
            ranks=(),
            staging="device",
            transports=("ipc",),
            specs=tuple(worker._model.expected_weights()),
        )
        self.receiver = SessionHandler(self.ranks, self.scheduler, facts)
        text = TextTokenizer.load(folder, max_len=64)
        engine = RolloutEngine(scheduler=self.scheduler, text=text, model="m", receiver=self.receiver)
        self.http = TestClient(build_app(engine), raise_server_exceptions=False)

    def send(self, model):
        """Sends a complete session without its commit."""
        sender = Sender(dict(model.state_dict()), bucket_bytes=1 << 20, timeout_s=PATIENCE_S)
        for message in sender.transfer():
            assert self.receiver.apply(message).ok
        return sender

    def score(self):
        return self.http.post("/weightcast/score", json={"token_ids": TEXT})

    def close(self):
        self.ranks.generate.set()
        self.ranks.commit.set()
        self.receiver.close()
        self.scheduler.close()
        self.ranks.close()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    first = tiny_model(folder / "a")
    tiny_tokenizer(folder / "a")
    return folder / "a", first, tiny_model(folder / "b", seed=1)


@pytest.fixture
def served(models):
    served = Served(models[0])
    yield served
    served.close()


@pytest.fixture
def pool():
    with ThreadPoolExecutor(4) as pool:
        yield pool


def logprobs(model):
    with torch.no_grad():
        found = model(torch.tensor([TEXT])).logits[0].log_softmax(-1)
    return pytest.approx(found[torch.arange(len(TEXT) - 1), torch.tensor(TEXT[1:])].tolist(), abs=1e-4)


def test_scores_are_of_one_version(served, models, pool):
    _, old, new = models
    sender = served.send(new)
    assert served.score().json()["logprobs"] == logprobs(old), "nothing is switched yet"
    with served.ranks.held(served.ranks.commit):
        commit = pool.submit(served.receiver.apply, sender.commit())
        assert served.ranks.arrived.wait(PATIENCE_S)
        half_way = served.score()
    assert (half_way.status_code, commit.result(PATIENCE_S).ok) == (409, True)
    assert "the engine is paused by an update" in half_way.text
    assert served.score().json()["logprobs"] == logprobs(new)


def test_a_quarantined_engine_does_not_score(served):
    served.receiver._engine.quarantine("half an update")
    served.scheduler.resume()  # even if it is not paused
    assert served.score().status_code == 409
    assert "quarantined" in served.score().text


def test_sleep_that_waits_for_requests_does_not_block_an_update(served, models, pool):
    _, old, new = models
    with served.ranks.held(served.ranks.generate):
        answer = served.scheduler.submit(GenerationRequest(request_id="a", prompt=(5, 6), max_tokens=4, temperature=0))
        assert served.ranks.arrived.wait(PATIENCE_S)
        sleep = pool.submit(served.http.post, "/sleep", json={"mode": "wait", "timeout_s": PATIENCE_S})
        while not served.scheduler._pauses:
            threading.Event().wait(0.01)
        assert pool.submit(served.receiver.apply, Readback()).result(PATIENCE_S / 4).ok
        sender = pool.submit(served.send, new).result(PATIENCE_S / 4)
    assert answer.result(PATIENCE_S).tokens == greedy(old, [5, 6], 4)
    refused = sleep.result(PATIENCE_S)
    assert (refused.status_code, "being updated" in refused.text) == (409, True)
    # The pause has ended with the sleep, so the update succeeds and the engine generates.
    assert served.receiver.apply(sender.commit()).ok
    assert served.http.get("/health").json()["state"] == "serving"
    reply = served.http.post(
        "/v1/completions", json={"prompt": [5, 6], "max_tokens": 4, "temperature": 0, "return_token_ids": True}
    )
    assert reply.json()["choices"][0]["token_ids"] == greedy(new, [5, 6], 4)


def test_sleep_during_an_update_ends_no_request(served, models):
    with served.ranks.held(served.ranks.generate):
        answer = served.scheduler.submit(GenerationRequest(request_id="a", prompt=(5, 6), max_tokens=4, temperature=0))
        served.send(models[2])
        assert served.http.post("/sleep", json={"mode": "abort"}).status_code == 409
    assert answer.result(PATIENCE_S).tokens == greedy(models[1], [5, 6], 4)


def test_a_prompt_that_is_no_text_is_refused_with_the_reason(served):
    headers = {"content-type": "application/json"}
    reply = served.http.post("/v1/completions", content=rb'{"prompt": "\ud800"}', headers=headers)
    assert reply.status_code == 400, reply.text
    assert "not text" in reply.json()["error"]["message"]


def test_a_chat_is_refused_with_what_to_do(served):
    reply = served.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}]})
    assert reply.status_code == 404
    assert "send the token ids to /v1/completions" in reply.json()["error"]["message"]
