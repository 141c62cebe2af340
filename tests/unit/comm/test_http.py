"""HTTP to engines that answer late, wrongly, in drips or not at all."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest

from tests.helpers.clock import PATIENCE_S, wait_until
from weightcast.comm import event_loop, http, http_session
from weightcast.comm.http import Client
from weightcast.config import Target
from weightcast.errors import ConfigError, DeadlineExceeded, TargetLost, TargetRejected, TargetUnreachable

Talk = Callable[[socket.socket, bytes], None]


def answer(status: int, body: bytes, *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status} x", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def frame(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


class Server:
    """Speaks as it is told to, to one connection after the other."""

    def __init__(self, talk: Talk) -> None:
        self.talk = talk
        self.requests: list[bytes] = []
        self.closed = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                end, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(end,), daemon=True).start()

    def _serve(self, end: socket.socket) -> None:
        with end:
            while True:
                data = b""
                try:
                    while b"\r\n\r\n" not in data:
                        chunk = end.recv(65536)
                        if not chunk:
                            self.closed.set()
                            return
                        data += chunk
                    head, _, body = data.partition(b"\r\n\r\n")
                    length = next(
                        (int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")),
                        0,
                    )
                    while len(body) < length:
                        body += end.recv(65536)
                    self.requests.append(head + b"\r\n\r\n" + body)
                    self.talk(end, body)
                except OSError:
                    self.closed.set()
                    return

    def close(self) -> None:
        self._listener.close()


@contextmanager
def talking(
    talk: Talk, *, timeout_s: float = PATIENCE_S, api_key: str | None = None
) -> Iterator[tuple[Client, Server]]:
    server = Server(talk)
    client = Client(Target(f"http://127.0.0.1:{server.port}/", api_key=api_key), timeout_s=timeout_s)
    try:
        yield client, server
    finally:
        client.close()
        client.close()
        server.close()


def say(data: bytes) -> Talk:
    return lambda end, _: end.sendall(data)


def hang_up(end: socket.socket, _: bytes) -> None:
    end.shutdown(socket.SHUT_RDWR)
    raise ConnectionError


def test_get_and_post():
    with talking(lambda end, body: end.sendall(answer(200, b"got " + body)), api_key="secret") as (client, server):
        assert client.post_json("/apply", b'{"a":1}') == b'got {"a":1}'
        assert client.get_json("/info") == b"got "
        post, get = server.requests
        assert post.startswith(b"POST /apply HTTP/1.1")
        assert b"authorization: Bearer secret" in post.replace(b"Authorization", b"authorization")
        assert b"application/json" in post
        assert get.startswith(b"GET /info HTTP/1.1")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"error":{"message":"no such session"}}', "no such session"),
        (b'{"error":"in short"}', "in short"),
        (b'{"detail":"as fastapi says it"}', "as fastapi says it"),
        (b'{"detail":[{"loc":["body"]}]}', "loc"),
        (b'{"message":"as vllm says it"}', "as vllm says it"),
        (b'{"other":1}', '{"other":1}'),
        (b"[1,2]", "[1,2]"),
        (b"plain words", "plain words"),
        (b"\xff\xfe", "\ufffd"),
        (b"", "no text"),
        (b"[" * 100_000, "[[["),
    ],
)
def test_a_refusal_has_the_engines_own_words(body, words):
    with talking(say(answer(409, body))) as (client, _):
        for ask in (lambda: client.post_json("/apply", b"{}"), lambda: client.open_lease("/apply", b"{}")):
            with pytest.raises(TargetRejected) as caught:
                ask()
            assert words in str(caught.value)
            assert "status 409" in str(caught.value)
            assert caught.value.status == 409
            assert caught.value.url == client.target.url
            assert len(str(caught.value)) < 3000


def test_the_engines_own_words_do_nothing_to_a_terminal_and_forge_no_line_of_a_log():
    # Clears the screen, sets the clipboard, begins another line; controls of C0, of C1 and of Unicode.
    told = json.dumps({"error": "\x1b[2J\x1b]52;c;cm0=\x07\nINFO all is well\x9b1m \u202e"}).encode()
    with talking(say(answer(500, told))) as (client, _), pytest.raises(TargetRejected) as caught:
        client.get_json("/info")
    words = str(caught.value)
    assert words.isprintable()
    assert "\\x1b[2J\\x1b]52;c;cm0=\\x07 INFO all is well\\x9b1m \\u202e" in words


@pytest.mark.parametrize("status", [301, 307, 308])
@pytest.mark.parametrize("there", ["https://engine.example/v2/info?x=1", "/v2/info", "https://engine.example/login"])
def test_a_redirect_says_where_to(status, there):
    with talking(say(answer(status, b"", f"Location: {there}"))) as (client, _):
        for ask in (lambda: client.get_json("/info"), lambda: client.open_lease("/info", b"{}")):
            with pytest.raises(TargetLost, match=r"redirects (GET|POST) /info to .* not followed") as caught:
                ask()
            base = client.target.url if there.startswith("/") else ""
            assert f"to {base}{there} (status {status})" in str(caught.value)
            assert f"use {base}{there.removesuffix('/info?x=1').removesuffix('/info')} as the URL" in caught.value.hint


def test_a_connection_on_which_a_server_failed_is_not_used_again():
    # uvicorn closes it a moment after a route has raised; what was sent into it meanwhile would be lost.
    def fail_and_hang_up(end: socket.socket, _: bytes) -> None:
        end.sendall(answer(500, b"Internal Server Error"))
        assert end.recv(65536) == b""
        raise ConnectionError

    def talk(end: socket.socket, body: bytes) -> None:
        (fail_and_hang_up if body else say(answer(200, b"fine")))(end, body)

    with talking(talk) as (client, server):
        for ask in (client.post_json, client.open_lease):
            with pytest.raises(TargetRejected, match="status 500"):
                ask("/apply", b"{}")
            assert client.get_json("/info") == b"fine"
        assert len(server.requests) == 4


def test_a_wrong_key_gets_a_hint_and_is_never_printed():
    with talking(say(answer(401, b"no")), api_key="hunter2") as (client, _):
        with pytest.raises(TargetRejected) as caught:
            client.get_json("/info")
        assert "api_key" in (caught.value.hint or "")
        assert "hunter2" not in str(caught.value) + repr(client.target)


def test_closed_port_is_unreachable():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    for url in (f"http://127.0.0.1:{port}", "http://no-such-host.invalid:80"):
        client = Client(Target(url), timeout_s=PATIENCE_S)
        for ask in (lambda: client.get_json("/x"), lambda: client.open_lease("/x", b"")):  # noqa: B023
            with pytest.raises(TargetUnreachable, match="cannot connect") as caught:
                ask()
            assert caught.value.url == url
        client.close()


def error_of(ask: Callable[[], object]) -> BaseException:
    """Returns the request's error; fails if the request waits long after its deadline."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            ask()
        except Exception as error:  # noqa: BLE001  raised on another thread, looked at on this one
            raised.append(error)

    asking = threading.Thread(target=run, daemon=True)
    asking.start()
    asking.join(PATIENCE_S)
    assert raised, f"no error after {PATIENCE_S:g} s"
    return raised[0]


def every_way(client: Client, timeout_s: float) -> list[Callable[[], object]]:
    """A short deadline for each request; the server takes as long as the test does."""
    return [
        lambda: client.get_json("/x", timeout_s=timeout_s),
        lambda: client.post_json("/x", b"", timeout_s=timeout_s),
        lambda: client.open_lease("/x", b"", timeout_s=timeout_s),
    ]


def again_and_again(first: bytes, then: bytes, over: threading.Event) -> Talk:
    """Says something, and a little more every moment, until the test is over."""

    def talk(end: socket.socket, _: bytes) -> None:
        end.sendall(first)
        while not over.wait(0.01):
            end.sendall(then)

    return talk


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (b"", b""),
        (b"", b"HTTP/1.1 102 Processing\r\n\r\n"),
        (b"HTTP/1.1 200 OK\r\nX-Slow: ", b"a"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n\0\0\xff\xff", b"x"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\n\x01\r\n"),
    ],
    ids=["silence", "102 again and again", "a head in drips", "a body in drips", "chunks in drips"],
)
def test_the_deadline_ends_every_way_of_not_answering(first, then):
    over = threading.Event()
    with talking(again_and_again(first, then, over)) as (client, _):
        try:
            for ask in every_way(client, 1.0):
                error = error_of(ask)
                assert isinstance(error, DeadlineExceeded), error
                assert error.who == client.target.url
                assert error.timeout_s == 1.0
                assert "/x" in error.waiting_for
        finally:
            over.set()


def test_deadline_ends_a_request_that_the_server_does_not_read():
    with socket.create_server(("127.0.0.1", 0)) as listener:  # the kernel accepts, and takes what its buffers hold
        client = Client(Target(f"http://127.0.0.1:{listener.getsockname()[1]}"), timeout_s=1.0)
        error = error_of(lambda: client.post_json("/x", b"x" * (64 << 20)))
        client.close()
    assert isinstance(error, DeadlineExceeded), error


_LARGE = b"x" * (64 << 20)  # more than the kernel takes from a sender whose receiver does not read


@pytest.fixture
def handed_over_whole(monkeypatch):
    """The client holds all of a large body that the kernel does not take."""
    monkeypatch.setattr(http, "_WHOLE_BYTES", len(_LARGE))


@pytest.mark.usefixtures("handed_over_whole")
@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")
def test_body_of_a_request_that_failed_does_not_arrive_later():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = Client(Target(f"http://127.0.0.1:{listener.getsockname()[1]}"), timeout_s=1.0)
        assert isinstance(error_of(lambda: client.post_json("/x", _LARGE)), DeadlineExceeded)
        end, _ = listener.accept()
        end.settimeout(PATIENCE_S)
        came = 0
        with end, suppress(ConnectionResetError):
            while part := end.recv(1 << 20):
                came += len(part)
        assert came < len(_LARGE)
        client.close()


@pytest.mark.usefixtures("handed_over_whole")
@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")
@pytest.mark.parametrize("status", [413, 500])
def test_early_refusal_leaves_no_socket_behind(status):
    """The server answers before it has read the request, and never reads the rest."""

    def files() -> int:
        return len(os.listdir("/proc/self/fd"))

    with socket.create_server(("127.0.0.1", 0)) as listener, ExitStack() as ends:
        client = Client(Target(f"http://127.0.0.1:{listener.getsockname()[1]}"), timeout_s=PATIENCE_S)
        event_loop.run(asyncio.sleep(0))
        before = files()
        for _ in range(3):
            (asked,) = event_loop.submit([client.post("/x", _LARGE)])
            end = ends.enter_context(listener.accept()[0])
            end.recv(1000)
            end.sendall(answer(status, b"no"))
            with pytest.raises(TargetRejected, match=f"status {status}: no"):
                asked.result(PATIENCE_S)
        wait_until(lambda: files() <= before + 3, "the client's ends of the three connections to be closed")
        client.close()


@pytest.mark.parametrize("turns", range(4))
def test_connection_of_a_failure_is_given_to_no_other_request_while_its_body_comes(turns):
    began, ends = threading.Event(), threading.Event()

    def talk(end: socket.socket, body: bytes) -> None:
        if body == b"other":
            end.sendall(answer(200, b"fine"))
            return
        whole = answer(500, b"Internal Server Error")
        end.sendall(whole[:-5])
        began.set()
        assert ends.wait(PATIENCE_S)
        end.sendall(whole[-5:])
        end.recv(65536)  # what comes now is lost
        raise ConnectionError

    async def both(client: Client) -> list[object]:
        failing = asyncio.create_task(client.post("/apply", b"{}"))
        while not began.is_set():
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        ends.set()
        time.sleep(0.1)  # the rest of the body waits in the socket
        for _ in range(turns):
            await asyncio.sleep(0)
        return await asyncio.gather(failing, client.post("/apply", b"other"), return_exceptions=True)

    with talking(talk) as (client, _):
        failed, other = event_loop.run(both(client))
        assert isinstance(failed, TargetRejected)
        assert other == b"fine"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"5\r\nhello\r\nZZ\r\n", "ended early, after 5 bytes: Invalid character in chunk size"),
        (b"5\r\nhello\r\n5\r\nhelloXX", "ended early, after 10 bytes: Expected LF after chunk data"),
    ],
    ids=["size", "end"],
)
def test_malformed_chunk_after_a_good_one_is_explained_at_once(body, words):
    def talk(end: socket.socket, _: bytes) -> None:
        end.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body[:8])
        time.sleep(0.05)
        end.sendall(body[8:])
        end.recv(1)  # the connection stays open

    with talking(talk, timeout_s=10 * PATIENCE_S) as (client, _):
        error = error_of(lambda: client.post_json("/x", b"{}"))
        assert isinstance(error, TargetLost), error
        assert words in str(error)
        assert str(error).isprintable()


def test_deadline_ends_a_handshake_without_an_answer():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = Client(Target(f"https://127.0.0.1:{listener.getsockname()[1]}"), timeout_s=1.0)
        error = error_of(lambda: client.get_json("/x"))
        client.close()
    assert isinstance(error, TargetUnreachable), error


def test_the_deadline_ends_the_search_for_an_address(monkeypatch):
    over = threading.Event()

    def slow(*_: object, **__: object) -> list[object]:
        over.wait(PATIENCE_S)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    client = Client(Target("http://engine.example:80"), timeout_s=1.0)
    error = error_of(lambda: client.get_json("/x"))
    over.set()
    client.close()
    assert isinstance(error, TargetUnreachable), error
    assert "the name engine.example was not resolved in time" in str(error)


def test_an_address_that_does_not_answer_leaves_time_for_the_next(monkeypatch):
    """192.0.2.1 belongs to nobody; some networks refuse it, others swallow what is sent there."""
    with talking(say(answer(200, b"fine"))) as (_, server):
        there = [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, server.port)) for host in ("192.0.2.1", "127.0.0.1")
        ]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: there)
        named = Client(Target(f"http://engine.example:{server.port}"), timeout_s=20.0)
        assert named.get_json("/x") == b"fine"
        named.close()


def test_an_answer_without_end_is_refused(monkeypatch):
    monkeypatch.setattr(http, "_MAX_REPLY_BYTES", 100_000)
    with talking(say(answer(200, b"x" * 200_000))) as (client, _), pytest.raises(TargetLost, match="more than 100000"):
        client.get_json("/x")


@pytest.mark.parametrize(
    "talk",
    [
        hang_up,
        say(b"this is not http\r\n\r\n"),
        say(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n"),
    ],
    ids=["hangs up", "no http", "bad chunks"],
)
def test_every_broken_answer_names_the_engine(talk):
    with talking(talk, timeout_s=PATIENCE_S) as (client, _), pytest.raises(TargetLost) as caught:
        client.post_json("/x", b"{}")
    assert caught.value.url == client.target.url
    assert "POST /x" in str(caught.value)


@pytest.mark.parametrize("status", [200, 409])
def test_compressed_answer_is_refused(status):
    with talking(say(answer(status, b"\x1f\x8b", "Content-Encoding: gzip"))) as (client, server):
        for ask in (client.post_json, client.open_lease):
            with pytest.raises(TargetLost, match="answered in gzip, which was not asked for") as caught:
                ask("/x", b"{}")
            assert caught.value.url == client.target.url
        assert b"accept-encoding: identity" in server.requests[0].lower()


def test_a_closed_client_sends_nothing():
    with talking(say(answer(200, b"fine"))) as (client, server):
        client.close()
        with pytest.raises(RuntimeError, match="this client is closed"):
            client.get_json("/x")
        assert not server.requests


def test_a_path_in_the_url_comes_before_every_route():
    with talking(say(answer(200, b"fine"))) as (client, server):
        behind = Client(Target(f"{client.target.url}/a b/engine/"), timeout_s=PATIENCE_S)
        assert behind.post_json("/x?y=1", b"{}") == b"fine"
        assert server.requests[0].startswith(b"POST /a%20b/engine/x?y=1 HTTP/1.1")
        assert f"host: 127.0.0.1:{server.port}".encode() in server.requests[0].lower()
        behind.close()


def test_a_host_that_cannot_be_one_is_refused_at_once():
    with pytest.raises(ConfigError, match="label"):
        Client(Target(f"http://{'x' * 80}.example"), timeout_s=PATIENCE_S)


def test_a_connection_that_was_closed_meanwhile_is_not_used_again():
    def once(end: socket.socket, _: bytes) -> None:
        end.sendall(answer(200, b"ok"))
        end.close()
        raise ConnectionError

    with talking(once) as (client, server):
        for _ in range(3):
            server.closed.clear()
            assert client.get_json("/x") == b"ok"
            assert server.closed.wait(PATIENCE_S)
        assert len(server.requests) == 3


def test_idle_connection_is_closed_before_the_server_does(monkeypatch):
    monkeypatch.setattr(http_session, "_KEEP_ALIVE_S", 0.05)
    with talking(say(answer(200, b"ok"))) as (client, server):
        assert client.get_json("/x") == b"ok"
        assert server.closed.wait(PATIENCE_S)


def test_connection_with_more_than_the_answer_is_not_used_again():
    with talking(say(answer(200, b"ok") + b"HTTP/1.1 200 OK\r\n")) as (client, server):
        for _ in range(2):
            server.closed.clear()
            assert client.get_json("/x") == b"ok"
            assert server.closed.wait(PATIENCE_S)


@pytest.mark.parametrize(
    "said",
    [
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 x\r\nlink: a\r\n\r\n" + answer(200, b"fine"),
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nfi\r\n2\r\nne\r\n0\r\n\r\n",
    ],
    ids=["after two heads of the kind 1xx", "chunked"],
)
@pytest.mark.parametrize("size", [1, 1000])
def test_answer_in_any_pieces(said, size):
    def talk(end: socket.socket, _: bytes) -> None:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for begin in range(0, len(said), size):
            end.sendall(said[begin : begin + size])

    with talking(talk) as (client, _):
        assert client.get_json("/x") == b"fine"
        assert client.get_json("/x") == b"fine"


def test_body_without_a_length_ends_with_the_connection():
    def talk(end: socket.socket, _: bytes) -> None:
        end.sendall(b"HTTP/1.0 200 OK\r\n\r\nall of it")
        end.close()
        raise ConnectionError

    with talking(talk) as (client, _):
        assert client.get_json("/x") == b"all of it"


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (b"", "it closed the connection without an answer"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc", "the answer ended early"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\nabc", "the answer ended early"),
        # aiohttp reports a switch of the protocol when the connection ends, or that the connection has ended.
        (b"HTTP/1.1 101 x\r\nUpgrade: y\r\n\r\n", "switches to another protocol|closed the connection"),
        (b"HTTP/1.1 200 OK\r\nx: " + b"y" * 200_000, "Got more than 8190 bytes"),
    ],
    ids=["nothing", "part of a body", "part of a chunk", "another protocol", "a head without end"],
)
def test_answer_that_is_cut_off_or_no_answer_is_explained(said, words):
    def talk(end: socket.socket, _: bytes) -> None:
        end.sendall(said)
        end.shutdown(socket.SHUT_WR)
        end.settimeout(10.0)
        with suppress(OSError):  # what is left unread at the close would break the connection before the answer is read
            while end.recv(1 << 16):
                pass
        end.close()
        raise ConnectionError

    with talking(talk) as (client, _):
        for ask in (client.post_json, client.open_lease):
            with pytest.raises(TargetLost, match=words):
                ask("/x", b"{}")


def test_refusal_before_the_server_has_read_the_request_is_heard():
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def refuse() -> None:
            end, _ = listener.accept()
            with end:
                end.recv(1000)
                end.sendall(answer(413, b"too large"))
                over.wait(PATIENCE_S)

        threading.Thread(target=refuse, daemon=True).start()
        client = Client(Target(f"http://127.0.0.1:{listener.getsockname()[1]}"), timeout_s=PATIENCE_S)
        with pytest.raises(TargetRejected, match="status 413: too large"):
            client.post_json("/x", b"x" * (64 << 20))
        over.set()
        client.close()


def test_no_proxy_comes_between(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    with talking(say(answer(200, b"ok"))) as (client, _):
        assert client.get_json("/x") == b"ok"


# -- leases


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def leasing(*pieces: bytes) -> Talk:
    def talk(end: socket.socket, _: bytes) -> None:
        end.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for piece in pieces:
            end.sendall(chunk(piece))
            time.sleep(0.02)
        if not end.recv(1):
            raise ConnectionError

    return talk


@pytest.mark.parametrize("cut", [1, 3, 4, 5, 100])
def test_a_lease_gives_the_first_frame_and_stays_open_until_it_is_closed(cut):
    body = json.dumps({"ok": True}).encode()
    whole = frame(body) + b"\0\0\0\0"
    with talking(leasing(whole[:cut], whole[cut:] or b"\0\0\0\0")) as (client, server):
        reply, lease = client.open_lease("/open", b"{}")
        assert reply == body
        assert not server.closed.wait(0.1)
        assert client.target
        lease.close()
        lease.close()
        assert server.closed.wait(PATIENCE_S)


START = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("talk", "reused"),
    [
        (say(START + chunk(b"\0\0") + b"0\r\n\r\n"), True),
        (say(START + chunk(b"\xff\xff\xff\xff1234")), False),
        (hang_up, False),
    ],
    ids=["ends early", "too large", "hangs up"],
)
def test_an_answer_that_is_no_lease_is_no_lease(talk, reused):
    with talking(talk, timeout_s=PATIENCE_S) as (client, server):
        with pytest.raises(TargetLost):
            client.open_lease("/open", b"{}")
        assert reused or server.closed.wait(PATIENCE_S)


def test_a_lease_that_is_never_answered_is_closed_at_its_deadline():
    with talking(leasing(b"\0\0"), timeout_s=1.0) as (client, server):
        with pytest.raises(DeadlineExceeded):
            client.open_lease("/open", b"{}")
        assert server.closed.wait(PATIENCE_S)
