"""One deadline over a wait of many parts, and two buckets in flight that both get a whole one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers.clock import PATIENCE_S, Clock, wait_until
from weightcast.comm import event_loop
from weightcast.comm.http import Client
from weightcast.comm.run_steps import EngineRequest
from weightcast.config import Target
from weightcast.errors import DeadlineExceeded, TargetLost
from weightcast.runtime import deadline as module
from weightcast.runtime.deadline import Deadline
from weightcast.transports import link as link_module
from weightcast.transports.ipc import MemoryCarrier
from weightcast.transports.link import Link, margin_s
from weightcast.transports.session import LinkSession
from weightcast.wire.answers import Ack


@pytest.fixture
def clock() -> Iterator[Clock]:
    with Clock().within(module, link_module) as clock:
        yield clock


def test_deadline_counts_from_its_creation(clock: Clock) -> None:
    deadline = Deadline(5.0)
    clock.move(3.0)
    assert deadline.left_s() == pytest.approx(2.0)
    assert deadline.at_most(1.5).left_s() == pytest.approx(1.5)
    assert deadline.at_most(9.0) is deadline
    clock.move(3.0)
    assert deadline.left_s() == pytest.approx(-1.0)


def test_deadline_that_has_not_begun_keeps_its_limit_up_to_twice_the_limit(clock: Clock) -> None:
    began: list[float] = []
    deadline = Deadline(5.0, begins=lambda: began[0] if began else None)
    clock.move(4.0)
    assert deadline.left_s() == pytest.approx(5.0)
    began.append(clock.monotonic())
    clock.move(2.0)
    assert deadline.left_s() == pytest.approx(3.0)
    began.clear()
    clock.move(3.0)
    assert deadline.left_s() == pytest.approx(1.0)  # of twice the limit
    assert Deadline(5.0, begins=lambda: 0.0).left_s() == pytest.approx(5.0)  # long before it was made


def test_deadline_passes_with_that_of_the_wait_before_it_and_not_a_limit_later(clock: Clock) -> None:
    first = Deadline(5.0)
    clock.move(1.0)
    ended: list[float] = []
    second = Deadline(5.0, begins=lambda: ended[0] if ended else first)
    clock.move(4.5)
    assert first.left_s() == pytest.approx(-0.5)
    assert second.left_s() == pytest.approx(0.5)
    clock.move(1.0)
    assert second.left_s() == pytest.approx(-0.5)
    ended.append(clock.monotonic() - 3.0)  # it ended in time after all
    assert second.left_s() == pytest.approx(2.0)


def test_deadline_waits_for_the_wait_before_it_that_began_late(clock: Clock) -> None:
    late: list[float] = []
    first = Deadline(5.0, begins=lambda: late[0] if late else None)
    second = Deadline(5.0, begins=lambda: first)
    clock.move(3.0)
    late.append(clock.monotonic())
    clock.move(4.0)
    assert first.left_s() == pytest.approx(1.0)
    assert second.left_s() == pytest.approx(1.0)
    clock.move(2.0)
    assert second.left_s() == pytest.approx(-1.0)


class Engine(ThreadingHTTPServer):
    """Answers to each bucket when it is told to."""

    daemon_threads = True

    def __init__(self) -> None:
        self.asked = [threading.Event() for _ in range(2)]
        self.answers = [threading.Event() for _ in range(2)]
        super().__init__(("127.0.0.1", 0), Handler)


class Handler(BaseHTTPRequestHandler):
    server: Engine

    def do_POST(self) -> None:
        index = int(self.path.rpartition("/")[2])
        self.server.asked[index].set()
        self.server.answers[index].wait(PATIENCE_S)
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


class Adapter:
    in_flight = 2
    leased = True

    def renew(self, info: object) -> None:
        pass

    def bucket(self, session: str, layout: Any, **_: object) -> Any:
        yield EngineRequest(path=f"/bucket/{layout.index}", body=b"{}")
        return Ack(ok=True, state="updating")

    def leave(self, group: object) -> Any:
        yield from ()
        return Ack(ok=True)


TIMEOUT_S = 1.0
LIMIT_S = TIMEOUT_S + margin_s(TIMEOUT_S)


@pytest.fixture
def deadlines(monkeypatch: pytest.MonkeyPatch) -> dict[int, Deadline]:
    """The deadline of each bucket's request, by its index."""
    found: dict[int, Deadline] = {}
    converse = Link._converse

    async def noting(self: Link, kind: str, steps: Any, limit: Any, bucket: Any = None, **more: Any) -> Ack:
        if bucket is not None:
            found[bucket] = limit
        return await converse(self, kind, steps, limit, bucket, **more)

    monkeypatch.setattr(Link, "_converse", noting)
    return found


@pytest.fixture
def two_in_flight(clock: Clock) -> Iterator[tuple[Engine, MemoryCarrier, Link]]:
    """Both buckets have been told to the engine."""
    engine = Engine()
    serving = threading.Thread(target=engine.serve_forever, daemon=True)
    serving.start()
    info: Any = SimpleNamespace(staging="device")
    adapter: Any = Adapter()
    target = Target(f"http://127.0.0.1:{engine.server_port}")
    link = Link(client=Client(target, timeout_s=PATIENCE_S))
    link.meet(info, lambda _: adapter)
    transport = MemoryCarrier([link], timeout_s=TIMEOUT_S)
    for index in range(2):
        bucket: Any = SimpleNamespace(layout=SimpleNamespace(index=index))
        pump = transport._pump  # whose ``put`` would wait for the first bucket before it returns for the second
        pump._sending.append(pump._start_one(bucket, ()))
    for asked in engine.asked:
        assert asked.wait(PATIENCE_S)
    yield engine, transport, link
    for answer in engine.answers:
        answer.set()
    transport.close()
    engine.shutdown()
    engine.server_close()


def test_deadline_of_a_bucket_counts_from_the_answer_to_the_bucket_before(
    deadlines: dict[int, Deadline], two_in_flight: tuple[Engine, MemoryCarrier, Link], clock: Clock
) -> None:
    engine, transport, link = two_in_flight
    for index, answer in enumerate(engine.answers):
        clock.move(0.9 * LIMIT_S)
        # The loop's own timers follow the real clock, and look at this when they ring.
        assert deadlines[index].left_s() == pytest.approx(0.1 * LIMIT_S)
        answer.set()
        wait_until(lambda index=index: transport._pump._sending[index].done(), f"the answer to bucket {index}")
    transport.drain()
    assert link.session.sent == 2


def test_engine_that_stops_at_the_second_bucket_gets_one_deadline_for_it(
    two_in_flight: tuple[Engine, MemoryCarrier, Link], clock: Clock
) -> None:
    engine, transport, link = two_in_flight
    clock.move(0.9 * LIMIT_S)
    engine.answers[0].set()
    wait_until(lambda: transport._pump._sending[0].done(), "the answer to bucket 0")
    assert link.session.sent == 1
    clock.move(1.1 * LIMIT_S)
    with pytest.raises(TargetLost, match="no answer to bucket 1 within 1 s"):
        transport.drain()


def test_silent_engine_costs_one_deadline_and_not_one_for_each_bucket(
    deadlines: dict[int, Deadline], two_in_flight: tuple[Engine, MemoryCarrier, Link], clock: Clock
) -> None:
    _, transport, link = two_in_flight
    sending = list(transport._pump._sending)
    clock.move(1.1 * LIMIT_S)
    # The loop's timers may ring in either order: this one does not need to know that bucket 0 was given up.
    assert deadlines[1].left_s() == pytest.approx(-0.1 * LIMIT_S)
    for index, one in enumerate(sending):
        with pytest.raises(TargetLost, match=f"no answer to bucket {index} within 1 s"):
            one.result(PATIENCE_S)
    transport.settle()
    assert link.session.overdue


def test_engine_that_was_silent_to_the_end_of_its_session_is_not_waited_for_again(monkeypatch) -> None:
    limits: list[tuple[str, float]] = []

    async def never(client: Client, steps: str, *, timeout_s: float, send: object) -> Ack:
        limits.append((steps, timeout_s))
        raise DeadlineExceeded(who="engine", waiting_for=steps, timeout_s=timeout_s)

    monkeypatch.setattr(link_module, "converse_on_loop", never)
    adapter: Any = SimpleNamespace(leased=True, renew=id, abort=lambda *_: "abort", leave=lambda *_: "leave")
    info: Any = SimpleNamespace(staging="device")
    link = Link(client=Client(Target("http://127.0.0.1:9"), timeout_s=1.0), session=LinkSession(id="s", overdue=True))
    link.meet(info, lambda _: adapter)
    for one in (link.abort("lost"), link.leave("group"), link.leave(None)):
        event_loop.run(one)
    assert [what for what, _ in limits] == ["abort", "leave", "leave"]
    first_s, *others_s = (limit_s for _, limit_s in limits)
    assert sum(others_s) < first_s < TIMEOUT_S
