"""What stands in vLLM's API server, without vLLM: its ranks are threads here, its engine client a few coroutines."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection, Listener
from typing import Any

import pytest

from tests.unit.echo import Echo
from weightcast.errors import DeadlineExceeded, EngineFailure
from weightcast.plugins.vllm import executor as meeting
from weightcast.plugins.vllm.executor import VllmExecutor
from weightcast.plugins.vllm.hooks import VllmHooks
from weightcast.plugins.vllm.words import Hello, meeting_place
from weightcast.receiver import executor as module
from weightcast.receiver.executor import serve_messages
from weightcast.wire.layout import TensorSpec
from weightcast.wire.messages import Abort, Commit, Leave, Message, RankAck, Readback, encode

pytestmark = pytest.mark.timeout(60)

SESSION = "ab" * 16
JOIN_S = 20.0
SPECS = tuple(TensorSpec(name=name, dtype="float32", shape=(4,)) for name in "ab")


class Rank(Echo):
    """A worker of vLLM: a commit waits until its main thread has been there."""

    def __init__(self, rank: int, *, manner: str = "") -> None:
        """``manner``: ``deaf`` greets and reads nothing; ``mute`` says nothing; ``rude`` hangs up at once."""
        super().__init__(rank, 2, "")
        self.manner = manner
        self.been, self.over, self.alone = threading.Event(), threading.Event(), threading.Event()

    def apply(self, message: Message) -> RankAck:
        if isinstance(message, Commit):
            assert self.been.wait(JOIN_S)
        return super().apply(message)

    def listen(self, folder: str) -> None:
        listener = Listener(meeting_place(folder, self.rank), family="AF_UNIX")
        threading.Thread(target=self._serve, args=(listener,), daemon=True).start()

    def _serve(self, listener: Listener) -> None:
        with listener.accept() as connection, suppress(BrokenPipeError):  # let go before it has said who it is
            self._answer(connection)
        self.alone.set()
        with suppress(FileNotFoundError):  # who has met removes the meeting place
            listener.close()

    def _answer(self, connection: Connection) -> None:
        if self.manner == "rude":
            return
        if self.manner != "mute":
            greeting = Hello(rank=self.rank, pid=os.getpid(), device="cpu", staging="host", specs=SPECS, places=("a",))
            connection.send_bytes(encode(greeting))
        if self.manner == "deaf":
            self.over.wait(3 * JOIN_S)
            return
        serve_messages(connection, self, rank=self.rank)


@pytest.fixture
def workers() -> Iterator[Callable[..., list[Rank]]]:
    made: list[Rank] = []

    def make(second: str = "") -> list[Rank]:
        made.extend((Rank(0), Rank(1, manner=second)))
        return made

    yield make
    for worker in made:
        worker.over.set()


def meet(workers: list[Rank], on_main: Callable[[float], None] = lambda timeout_s: None) -> VllmExecutor:
    def listen(folder: str) -> None:
        for worker in workers:
            worker.listen(folder)

    return VllmExecutor(len(workers), listen=listen, on_main=on_main)


@pytest.mark.parametrize(
    "error",
    [
        DeadlineExceeded(who="vLLM", waiting_for="finish_weight_update", timeout_s=1),
        LookupError("it is out of order"),
    ],
)
def test_answers_that_nobody_waited_for_are_never_taken_for_others(workers, error):
    made = workers()

    def fail(timeout_s: float) -> None:
        raise error

    executor = meet(made, fail)
    with pytest.raises(EngineFailure, match=r"finish_weight_update|out of order") as caught:
        executor.apply(Commit(session=SESSION), timeout_s=5)
    assert caught.value.ranks == (0, 1)
    for worker in made:
        worker.been.set()  # the main thread comes after all, and the answers to the commit with it
    for message in (Abort(session=SESSION), Leave()):
        with pytest.raises(EngineFailure, match=r"finish_weight_update|out of order") as caught:
            executor.apply(message, timeout_s=5)
        assert caught.value.hint == "restart the engine"
    executor.close()


def test_a_rank_that_reads_nothing_is_given_up_and_holds_nobody_up(workers, monkeypatch):
    monkeypatch.setattr(module, "_SEND_S", 1)
    executor = meet(workers("deaf"))
    failed: list[EngineFailure] = []

    def ask() -> None:
        try:
            executor.apply(Abort(session=SESSION, reason="x" * 5_000_000), timeout_s=60)  # more than a socket holds
        except EngineFailure as error:
            failed.append(error)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(0.3)
    assert asking.is_alive()
    interrupting = threading.Thread(target=executor.interrupt, args=("the trainer is gone",), daemon=True)
    interrupting.start()
    interrupting.join(JOIN_S)
    asking.join(JOIN_S)
    assert (interrupting.is_alive(), asking.is_alive()) == (False, False)
    assert "rank 1 did not take a message within 1 s" in str(failed[0])
    assert failed[0].ranks == (1,)
    executor.close()


def test_after_the_end_nothing_is_asked(workers):
    made = workers()

    def go(timeout_s: float) -> None:
        for worker in made:
            worker.been.set()

    executor = meet(made, go)
    for message in (Readback(), Commit(session=SESSION), Abort(session=SESSION)):
        name = type(message).__name__
        acks = executor.apply(message, timeout_s=5)
        assert [(ack.rank, ack.error, ack.unproven) for ack in acks] == [(0, name, ("b",)), (1, name, ("b",))]
    assert executor.pids() == (os.getpid(),) * 2
    executor.close()
    executor.close()
    with pytest.raises(EngineFailure, match="shutting down"):
        executor.apply(Readback(), timeout_s=5)


@pytest.mark.parametrize(
    ("manner", "words"), [("rude", "rank 1 is gone during its greeting"), ("mute", "rank 1 did not give its greeting")]
)
def test_who_was_met_is_let_go_when_another_does_not_greet(workers, monkeypatch, manner, words):
    monkeypatch.setattr(meeting, "_MEET_S", 0.3)
    made = workers(manner)
    with pytest.raises(EngineFailure, match=words) as caught:
        meet(made)
    # The error is still held here, and with it all that its frames hold.
    assert made[0].alone.wait(5)
    assert caught.value.ranks == (1,)


class Client:
    """vLLM's engine client; it goes on when told how often it has to be asked."""

    def __init__(self) -> None:
        self.refusals = 0

    async def pause_generation(self, **how: Any) -> None:
        pass

    async def resume_generation(self) -> None:
        self.refusals -= 1
        if self.refusals >= 0:
            raise RuntimeError("not now")


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    thread = threading.Thread(target=made.run_forever)
    thread.start()
    yield made
    made.call_soon_threadsafe(made.stop)
    thread.join()
    made.close()


def test_an_engine_that_did_not_resume_is_still_paused(loop):
    client = Client()
    hooks = VllmHooks(client, loop, prefix_caching=True)
    hooks.pause("retract", 5.0)
    client.refusals = 1
    with pytest.raises(EngineFailure, match="RuntimeError: not now"):
        hooks.resume()
    assert hooks.paused
    hooks.resume()
    assert not hooks.paused
