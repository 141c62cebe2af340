"""A request with an endless head is refused before it fills memory; other requests are read as usual."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
import uvicorn

from tests.helpers.clock import PATIENCE_S
from tests.helpers.harness import wait_for
from weightcast.rollout.launch import http_settings

FLOOD = 32 << 20


async def echo(scope, receive, send) -> None:
    """Answers with the number of bytes in the body."""
    size, more = 0, True
    while more:
        message = await receive()
        size, more = size + len(message.get("body", b"")), message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"8")]})
    await send({"type": "http.response.body", "body": b"%8d" % size})


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(http_settings(echo))
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    wait_for(lambda: server.started, "the server")
    yield listening.getsockname()[1]
    server.should_exit = True
    thread.join(PATIENCE_S)


def send_all(end: socket.socket, parts: Iterator[bytes]) -> tuple[int, bytes]:
    """Sends data; returns the number of bytes that the server took, and its answer."""
    sent, said = 0, b""
    try:
        for part in parts:
            end.sendall(part)
            sent += len(part)
        while chunk := end.recv(65536):
            said += chunk
            if said.startswith(b"HTTP/1.1 200") and len(said.partition(b"\r\n\r\n")[2]) == 8:
                break
    except ConnectionError:  # the server closed the connection with unread bytes
        pass
    return sent, said


HEAD = b"POST / HTTP/1.1\r\nHost: x\r\n"
FLOODS = {
    "one long header": (HEAD + b"a: ", b"a" * 65536),
    "many headers": (HEAD, b"name: value\r\n" * 5000),
    "a long path": (b"GET /", b"a" * 65536),
    "what follows a body": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n", b"name: value\r\n" * 5000),
}


@pytest.mark.parametrize("name", FLOODS)
def test_an_endless_head_is_refused(port, name):
    first, again = FLOODS[name]
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as end:

        def parts() -> Iterator[bytes]:
            yield first
            for _ in range(FLOOD // len(again)):
                yield again

        sent, said = send_all(end, parts())
    assert sent < FLOOD // 2, "all of it was taken"
    assert said == b"" or said.startswith((b"HTTP/1.1 400", b"HTTP/1.1 200")), said[:200]


def test_large_heads_and_bodies_are_read(port):
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as end:
        for size in (0, 5 << 20, 3):  # on one connection
            head = HEAD + b"a: " + b"a" * (62 << 10) + b"\r\nContent-Length: %d\r\n\r\n" % size
            _, said = send_all(end, iter([head, b"x" * size]))
            assert said.endswith(b"%8d" % size)
