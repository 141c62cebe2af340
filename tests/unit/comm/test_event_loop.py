"""The event loop of requests: waiting on it, interrupts, forks and the end of the interpreter."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tests.helpers.clock import PATIENCE_S, wait_until
from weightcast.comm import event_loop, http_session
from weightcast.comm.http import Client
from weightcast.config import Target
from weightcast.runtime.deadline import Deadline

_AGAIN_S = 10.0


async def twice(number: int) -> int:
    await asyncio.sleep(0)
    if number < 0:
        raise ValueError(f"{number} is negative")
    return 2 * number


def test_results_and_errors_come_back_to_the_caller() -> None:
    assert event_loop.run(twice(4)) == 8
    with pytest.raises(ValueError, match="-1 is negative"):
        event_loop.run(twice(-1))
    good, bad = event_loop.submit([twice(1), twice(-2)])
    assert good.result(PATIENCE_S) == 2
    assert isinstance(bad.exception(PATIENCE_S), ValueError)
    assert event_loop.submit([]) == []
    errors = event_loop.run_each([twice(1), twice(-3), twice(-4)])
    assert errors[0] is None
    assert [str(error) for error in errors[1:]] == ["-3 is negative", "-4 is negative"]
    assert event_loop.run_each([]) == []


def test_code_on_the_loop_is_refused_to_wait_there() -> None:
    async def waits() -> int:
        return event_loop.run(twice(1))

    with pytest.raises(RuntimeError, match="cannot wait"):
        event_loop.run(waits())


def test_interrupt_of_the_caller_cancels_what_it_waits_for() -> None:
    began, cancelled = threading.Event(), threading.Event()

    async def long() -> None:
        began.set()
        try:
            await asyncio.sleep(PATIENCE_S)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    def interrupt() -> None:
        assert began.wait(PATIENCE_S)
        os.kill(os.getpid(), signal.SIGINT)
        # A signal that comes as the main thread enters its wait does not wake it.
        while not cancelled.wait(_AGAIN_S):
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            event_loop.run(long())
        assert cancelled.wait(PATIENCE_S)
    finally:
        thread.join()
        signal.signal(signal.SIGINT, before)


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    """A server whose connections are accepted by the kernel, and never answered."""
    with socket.create_server(("127.0.0.1", 0), backlog=256) as listener:
        yield listener


def client_of(listener: socket.socket) -> Client:
    return Client(Target(f"http://127.0.0.1:{listener.getsockname()[1]}"), timeout_s=PATIENCE_S)


def test_many_requests_under_way_take_no_thread_each(silent: socket.socket) -> None:
    client = client_of(silent)
    event_loop.run(twice(0))
    before = threading.active_count()
    asked = event_loop.submit([client.get("/x", timeout_s=PATIENCE_S) for _ in range(100)])
    ends = [silent.accept()[0] for _ in asked]  # all are under way
    assert threading.active_count() <= before
    for end in ends:
        end.recv(65536)
        end.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
    assert [one.result(PATIENCE_S) for one in asked] == [b"ok"] * 100
    for end in ends:
        end.close()
    client.close()


def test_connection_is_used_again(silent: socket.socket) -> None:
    client = client_of(silent)
    (first,) = event_loop.submit([client.get("/first")])
    end, _ = silent.accept()
    with end:
        assert end.recv(65536).startswith(b"GET /first")
        end.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n1")
        assert first.result(PATIENCE_S) == b"1"
        (second,) = event_loop.submit([client.post("/second", b"{}")])
        assert end.recv(65536).startswith(b"POST /second")
        end.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n2")
        assert second.result(PATIENCE_S) == b"2"
    client.close()


def test_closing_the_client_ends_the_requests_under_way(silent: socket.socket) -> None:
    client = client_of(silent)
    (asked,) = event_loop.submit([client.get("/x")])
    with silent.accept()[0] as end:
        assert end.recv(65536)
        client.close()
        assert end.recv(65536) == b""
    assert "GET /x ended because this client is closed" in str(asked.exception(PATIENCE_S))


def test_closing_the_client_ends_a_request_that_the_engine_does_not_read(silent: socket.socket) -> None:
    client = client_of(silent)
    (asked,) = event_loop.submit([client.post("/x", b"x" * (64 << 20), timeout_s=10 * PATIENCE_S)])
    with silent.accept()[0] as end:
        assert end.recv(1000)
        client.close()
        assert "POST /x ended because this client is closed" in str(asked.exception(PATIENCE_S))


def test_lease_that_is_dropped_is_closed(silent: socket.socket) -> None:
    client = client_of(silent)
    asked = event_loop.submit([client.lease("/open", b"{}")])
    end, _ = silent.accept()
    with end:
        assert end.recv(65536)
        end.sendall(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\n\0\0\0\0\r\n")
        assert asked.pop().result(PATIENCE_S)[0] == b""
        end.settimeout(PATIENCE_S)
        assert end.recv(65536) == b""
    client.close()


def test_look_ups_of_names_are_shared_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_session, "_MAX_LOOK_UPS", 2)
    asked: list[str] = []
    go = threading.Event()

    def slow(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        asked.append(host)
        assert go.wait(PATIENCE_S)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    names = http_session._Names()
    hosts = ["a.example", "a.example", "b.example", "c.example", "d.example"]
    found = event_loop.submit([names.resolve(host, 80) for host in hosts])
    wait_until(lambda: len(asked) == 2, "two look-ups")
    assert sorted(asked) == ["a.example", "b.example"]
    go.set()
    assert [[one["host"] for one in each.result(PATIENCE_S)] for each in found] == [["127.0.0.1"]] * len(hosts)
    assert len(asked) == len(set(asked))  # requests for one name share a look-up


def test_deadline_whose_clock_starts_late_is_waited_for() -> None:
    started = time.monotonic()
    begins: list[float] = []

    async def waits() -> None:
        asyncio.get_running_loop().call_later(0.05, lambda: begins.append(time.monotonic()))
        async with event_loop.Limited(Deadline(0.2, begins=lambda: begins[0] if begins else None)):
            await asyncio.sleep(PATIENCE_S)

    with pytest.raises(TimeoutError):
        event_loop.run(waits())
    assert time.monotonic() - started >= 0.25
