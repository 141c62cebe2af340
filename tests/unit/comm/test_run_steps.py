"""Steps that an adapter wrote down, held against a server that answers or refuses."""

from __future__ import annotations

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.helpers.clock import PATIENCE_S
from weightcast.comm.http import Client
from weightcast.comm.run_steps import EngineRequest, converse
from weightcast.config import Target
from weightcast.errors import DeadlineExceeded, TargetRejected
from weightcast.runtime.deadline import Deadline


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(200, b"got " + self.path.encode())

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.path == "/slow":
            self.server.released.wait(PATIENCE_S)
        self.server.seen.append((self.path, body))
        self.answer(409 if self.path == "/refuse" else 200, body[::-1])

    def answer(self, status, body):
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.seen, server.released = [], threading.Event()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    server.client = Client(Target(f"http://127.0.0.1:{server.server_port}"), timeout_s=PATIENCE_S)
    yield server
    server.released.set()
    server.client.close()
    server.shutdown()
    server.server_close()
    thread.join()


def test_each_answer_decides_the_next_request(server):
    def steps():
        first = yield EngineRequest(path="/a", body=b"abc")
        second = yield EngineRequest(path="/b", body=first + b"!")
        third = yield EngineRequest(method="GET", path="/c?x=1")
        return second, third

    assert converse(server.client, steps(), timeout_s=PATIENCE_S) == (b"!abc", b"got /c?x=1")
    assert server.seen == [("/a", b"abc"), ("/b", b"cba!")]


def test_a_step_without_requests(server):
    def steps():
        return "nothing to say"
        yield EngineRequest(path="/never")

    assert converse(server.client, steps(), timeout_s=PATIENCE_S) == "nothing to say"
    assert server.seen == []


def test_a_refusal_is_raised_where_the_request_was_made(server):
    def steps():
        try:
            yield EngineRequest(path="/refuse", body=b"x")
        except TargetRejected as error:
            status = error.status
        yield EngineRequest(path="/undo", body=b"y")
        return status

    assert converse(server.client, steps(), timeout_s=PATIENCE_S) == 409
    assert [path for path, _ in server.seen] == ["/refuse", "/undo"]


def test_unhandled_refusal_ends_the_step(server):
    cleaned = []

    def steps():
        try:
            yield EngineRequest(path="/refuse", body=b"words")
            yield EngineRequest(path="/never")
        finally:
            cleaned.append(True)

    with pytest.raises(TargetRejected, match="sdrow"):
        converse(server.client, steps(), timeout_s=PATIENCE_S)
    assert cleaned == [True]
    assert [path for path, _ in server.seen] == ["/refuse"]


def test_the_deadline_is_of_the_whole_conversation(server):
    deadline = Deadline(PATIENCE_S)

    def steps():
        yield EngineRequest(path="/a", body=b"")
        deadline.limit_s -= deadline.left_s() - 0.3  # as if the first request had taken all but 0.3 s
        yield EngineRequest(path="/slow", body=b"")
        yield EngineRequest(path="/never", body=b"")

    with pytest.raises(DeadlineExceeded, match="/slow"):
        converse(server.client, steps(), timeout_s=deadline)
    assert [path for path, _ in server.seen] == ["/a"]


def test_a_request_may_have_a_shorter_deadline_of_its_own(server):
    def steps():
        yield EngineRequest(path="/slow", body=b"", timeout_s=0.3)

    started = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        converse(server.client, steps(), timeout_s=PATIENCE_S)
    assert time.monotonic() - started < PATIENCE_S
