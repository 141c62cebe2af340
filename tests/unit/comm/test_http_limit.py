"""The bound on connections to all engines together: it holds, and nothing waits for ever because of it."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from tests.helpers.clock import PATIENCE_S
from weightcast.comm import event_loop, http_session
from weightcast.comm.http import Client
from weightcast.comm.http_session import most_requests, shared
from weightcast.config import Target
from weightcast.errors import DeadlineExceeded


def client_of(listener: socket.socket) -> Client:
    return Client(Target(f"http://127.0.0.1:{listener.getsockname()[1]}"), timeout_s=PATIENCE_S)


@pytest.fixture
def bound() -> Iterator[Callable[[int], None]]:
    """Sets the bound of this process."""

    async def set_to(most: int) -> int:
        before, shared().most = shared().most, most
        shared().room = asyncio.Semaphore(most)
        return before

    before: list[int] = []
    yield lambda most: before.append(event_loop.run(set_to(most)))
    event_loop.run(set_to(before[0]))


class Counting:
    """Engines that count how many connections are open to all of them together, and answer when they are told."""

    def __init__(self, count: int) -> None:
        self.listeners = [socket.create_server(("127.0.0.1", 0), backlog=8) for _ in range(count)]
        self.open = self.asked = 0
        self.answer = threading.Event()
        self.changed = threading.Condition()
        self._threads = [threading.Thread(target=self._accept, args=(one,), daemon=True) for one in self.listeners]
        for thread in self._threads:
            thread.start()

    def await_(self, ready: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(ready, PATIENCE_S)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                end, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(end,), daemon=True).start()

    def _serve(self, end: socket.socket) -> None:
        with self.changed:
            self.open += 1
        with end:
            while request := end.recv(65536):
                with self.changed:
                    self.asked += 1
                    self.changed.notify_all()
                if request.startswith(b"POST /open"):
                    end.sendall(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n6\r\n\0\0\0\2ok\r\n")
                    continue
                assert self.answer.wait(PATIENCE_S)
                end.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        with self.changed:
            self.open -= 1
            self.changed.notify_all()

    def close(self) -> None:
        self.answer.set()
        for listener in self.listeners:
            listener.shutdown(socket.SHUT_RDWR)
            listener.close()


@pytest.fixture
def engines() -> Iterator[Counting]:
    counting = Counting(12)
    yield counting
    counting.close()


def test_more_engines_than_connections_are_all_answered_within_the_bound(engines: Counting, bound) -> None:
    bound(4)
    clients = [client_of(one) for one in engines.listeners]
    asked = event_loop.submit([client.get("/x") for client in clients])
    engines.await_(lambda: engines.asked == 4)
    assert engines.open == 4  # the others wait
    engines.answer.set()
    assert [one.result(PATIENCE_S) for one in asked] == [b"ok"] * 12
    engines.await_(lambda: engines.open <= 4)  # only so many stay open without a request
    assert [client.get_json("/again") for client in reversed(clients)] == [b"ok"] * 12
    engines.await_(lambda: engines.open <= 4)
    for client in clients:
        client.close()
    engines.await_(lambda: engines.open == 0)


def test_connections_that_ended_leave_room_for_idle_ones(engines: Counting, bound) -> None:
    async def connections() -> int:
        return shared().connections

    bound(2)
    engines.answer.set()
    others = event_loop.run(connections())
    for _ in range(2):
        clients = [client_of(one) for one in engines.listeners]
        assert [client.get_json("/x") for client in clients] == [b"ok"] * 12
        for client in clients:
            client.close()
        engines.await_(lambda: engines.open == 0)
    client = client_of(engines.listeners[0])
    assert client.get_json("/x") == client.get_json("/again") == b"ok"
    assert (engines.open, event_loop.run(connections()) - others) == (1, 1)
    client.close()


def test_requests_that_engines_answer_together_go_above_the_bound(engines: Counting, bound) -> None:
    bound(4)
    clients = [client_of(one) for one in engines.listeners]
    asked = event_loop.submit([client.post("/bucket", b"{}", at_once=True) for client in clients])
    engines.await_(lambda: engines.asked == 12)  # none waits for the answer of another one
    engines.answer.set()
    assert [one.result(PATIENCE_S) for one in asked] == [b"ok"] * 12
    engines.await_(lambda: engines.open <= 4)  # and the others are closed
    for client in clients:
        client.close()


def test_sessions_that_stay_open_leave_room_for_requests(engines: Counting, bound) -> None:
    bound(1)
    engines.answer.set()
    clients = [client_of(one) for one in engines.listeners]
    opened = [one.result(PATIENCE_S) for one in event_loop.submit([client.lease("/open", b"{}") for client in clients])]
    assert [frame for frame, _ in opened] == [b"ok"] * 12
    assert [client.get_json("/x") for client in clients] == [b"ok"] * 12
    for _, lease in opened:
        lease.close()
    for client in clients:
        client.close()
    engines.await_(lambda: engines.open == 0)


def test_wait_for_other_engines_names_the_limit_of_open_files(engines: Counting, bound) -> None:
    bound(1)
    first, second = (client_of(one) for one in engines.listeners[:2])
    (busy,) = event_loop.submit([first.get("/busy")])
    engines.await_(lambda: engines.asked == 1)
    with pytest.raises(DeadlineExceeded, match="room for GET /late: 1 other requests were under way") as late:
        second.get_json("/late", timeout_s=0.1)
    assert "ulimit -n" in str(late.value.hint)
    engines.answer.set()
    assert busy.result(PATIENCE_S) == b"ok"
    assert second.get_json("/later") == b"ok"
    first.close()
    second.close()


@pytest.mark.parametrize(
    ("files", "most"), [(20, 32), (1024, 256), (1 << 20, 2048), (http_session.resource.RLIM_INFINITY, 2048)]
)
def test_bound_is_a_quarter_of_the_files_that_the_process_may_open(monkeypatch, files: int, most: int) -> None:
    monkeypatch.setattr(http_session.resource, "getrlimit", lambda _: (files, files))
    assert most_requests() == most


def test_request_that_waits_while_its_client_is_closed_is_not_sent(engines: Counting, bound) -> None:
    bound(1)
    first, second = (client_of(one) for one in engines.listeners[:2])
    (busy,) = event_loop.submit([first.get("/busy")])
    (waiting,) = event_loop.submit([second.get("/late")])
    engines.await_(lambda: engines.asked == 1)
    second.close()
    engines.answer.set()
    assert busy.result(PATIENCE_S) == b"ok"
    assert "this client is closed" in str(waiting.exception(PATIENCE_S))
    assert engines.asked == 1
    first.close()
