"""Our part of vLLM's API server, without vLLM: its ranks are threads here, its engine client a few coroutines."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection, Listener
from typing import Any

import pytest
import torch
from fastapi import HTTPException

from tests.helpers.clock import PATIENCE_S
from tests.helpers.echo import Echo
from tests.helpers.sessions import Sender
from tests.helpers.sleep_session import Session
from weightcast.config import PauseMode
from weightcast.errors import ConfigError, DeadlineExceeded, EngineFailure
from weightcast.plugins import rank_sockets as module_of_sockets
from weightcast.plugins.other_hosts import RankInvitation
from weightcast.plugins.rank_sockets import READY, Hello, socket_path, switch_of
from weightcast.plugins.vllm.cached_prefixes import NEXT_GENERATION
from weightcast.plugins.vllm.core_switch import ASK, STAY_PAUSED, SWITCH_BETWEEN
from weightcast.plugins.vllm.engine_hooks import VllmHooks
from weightcast.plugins.vllm.rank_sockets import VllmExecutor
from weightcast.plugins.vllm.sleep import guard_sleep
from weightcast.plugins.vllm.token_versions import SAY_VERSION
from weightcast.receiver import rank_connections
from weightcast.receiver.rank_connections import serve_messages
from weightcast.wire.answers import RankAck
from weightcast.wire.codec import encode
from weightcast.wire.layout import TensorSpec
from weightcast.wire.messages import Abort, Commit, Leave, Message, Readback

SESSION = "ab" * 16
SPECS = tuple(TensorSpec(name=name, dtype="float32", shape=(4,)) for name in "ab")


class Rank(Echo):
    """A worker of vLLM: a commit waits until its main thread has been there."""

    def __init__(self, rank: int, *, manner: str = "") -> None:
        """``manner``: ``deaf`` greets and reads nothing; ``mute`` says nothing; ``rude`` hangs up at once."""
        super().__init__(rank, 2, "")
        self.manner = manner
        self.connection: Connection | None = None
        self.committed = ""
        self.been, self.over, self.alone = threading.Event(), threading.Event(), threading.Event()

    def apply(self, message: Message) -> RankAck:
        switches, self.committed = switch_of(message, self.committed)
        if switches:
            assert self.connection is not None
            self.connection.send_bytes(READY)
            assert self.been.wait(PATIENCE_S)
        return super().apply(message)

    def listen(self, folder: str) -> None:
        listener = Listener(socket_path(folder, self.rank), family="AF_UNIX")
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
            greeting = Hello(
                rank=self.rank,
                pid=os.getpid(),
                device="cpu",
                staging="host",
                staging_bytes=8,
                specs=SPECS,
                places=("a",),
            )
            connection.send_bytes(encode(greeting))
        if self.manner == "deaf":
            self.over.wait(3 * PATIENCE_S)
            return
        self.connection = connection
        serve_messages(connection, self, rank=self.rank, on_note=lambda note: None)


@pytest.fixture
def workers() -> Iterator[Callable[..., list[Rank]]]:
    made: list[Rank] = []

    def make(second: str = "") -> list[Rank]:
        made.extend((Rank(0), Rank(1, manner=second)))
        return made

    yield make
    for worker in made:
        worker.over.set()


def meet(workers: list[Rank], on_main: Callable[[float, str], None] = lambda timeout_s, version: None) -> VllmExecutor:
    def listen(invitation: RankInvitation) -> None:
        for worker in workers:
            worker.listen(invitation.folder)

    return VllmExecutor(len(workers), listen=listen, on_main=on_main)


@pytest.mark.parametrize(
    "error",
    [
        DeadlineExceeded(who="vLLM", waiting_for="finish_weight_update", timeout_s=1),
        LookupError("it is out of order"),
    ],
)
def test_late_answers_are_never_taken_for_later_ones(workers, error):
    made = workers()

    def fail(timeout_s: float, version: str) -> None:
        raise error

    executor = meet(made, fail)
    with pytest.raises(EngineFailure, match=r"finish_weight_update|out of order") as caught:
        executor.apply(Commit(session=SESSION), timeout_s=PATIENCE_S)
    assert caught.value.ranks == (0, 1)
    for worker in made:
        worker.been.set()  # the main thread comes after all, and the answers to the commit with it
    for message in (Abort(session=SESSION), Leave()):
        with pytest.raises(EngineFailure, match=r"finish_weight_update|out of order") as caught:
            executor.apply(message, timeout_s=PATIENCE_S)
        assert caught.value.hint == "restart the engine"
    executor.close()


def test_rank_that_reads_nothing_is_lost_and_blocks_no_other(workers, monkeypatch):
    monkeypatch.setattr(rank_connections, "_SEND_S", 3)
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
    interrupting.join(PATIENCE_S)
    asking.join(PATIENCE_S)
    assert (interrupting.is_alive(), asking.is_alive()) == (False, False)
    assert "rank 1 did not take a message within 3 s" in str(failed[0])
    assert failed[0].ranks == (1,)
    executor.close()


def test_after_the_end_nothing_is_asked(workers):
    made = workers()

    def go(timeout_s: float, version: str) -> None:
        for worker in made:
            worker.been.set()

    executor = meet(made, go)
    for message in (Readback(), Commit(session=SESSION), Abort(session=SESSION)):
        name = type(message).__name__
        acks = executor.apply(message, timeout_s=PATIENCE_S)
        assert [(ack.rank, ack.error) for ack in acks] == [(0, name), (1, name)]
    assert executor.pids() == (os.getpid(),) * 2
    executor.close()
    executor.close()
    with pytest.raises(EngineFailure, match="shutting down"):
        executor.apply(Readback(), timeout_s=PATIENCE_S)


@pytest.mark.parametrize(
    ("manner", "words"), [("rude", "rank 1 is gone during its greeting"), ("mute", "rank 1 did not give its greeting")]
)
def test_connections_are_closed_when_a_rank_does_not_greet(workers, monkeypatch, manner, words):
    monkeypatch.setattr(module_of_sockets, "_GREETING_S", 3.0)
    made = workers(manner)
    with pytest.raises(EngineFailure, match=words) as caught:
        meet(made)
    # The error is still held here, and with it all that its frames hold.
    assert made[0].alone.wait(PATIENCE_S)
    assert caught.value.ranks == (1,)


class Client:
    """vLLM's engine client; it goes on when told how often it has to be asked."""

    def __init__(self) -> None:
        self.refusals = 0
        self.held = False
        self.stays_paused = False
        self.said: list[str] = []
        self.engine_core: Any = None
        self.no_room = ["", ""]  # of each rank

    async def collective_rpc(self, method: str, timeout: float, kwargs: dict[str, Any]) -> list[str]:
        assert (method, list(kwargs)) == ("weightcast_restore", ["tags"])
        return self.no_room

    async def is_paused(self) -> bool:
        return self.held

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self.said.append(f"pause {mode} {clear_cache}")
        self.held = True

    async def resume_generation(self) -> None:
        self.refusals -= 1
        if self.refusals >= 0:
            raise RuntimeError("not now")
        self.said.append("resume")
        self.held = False

    async def reset_encoder_cache(self) -> None:
        self.said.append("encoders" if self.held else "encoders, while it runs")

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        self.said.append(f"sleep {level} {mode}")
        self.held = True

    async def wake_up(self, tags: list[str] | None = None) -> None:
        self.said.append(f"wake {tags}")
        if (tags is None or "kv_cache" in tags) and not self.stays_paused:
            self.held = False  # vLLM resumes by itself


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


def test_in_place_needs_engine_cores_that_part_the_prefixes_of_versions(loop):
    client = Client()
    client.engine_core = core = Core(client, "alone", "alone")
    core.generations = False
    hooks = VllmHooks(client, loop, prefix_caching=True, replicas=2)
    hooks.meet_cores()
    assert "--no-enable-prefix-caching" in hooks.no_pause["in_place"]
    assert client.said == []
    core.generations = True
    hooks.meet_cores()
    assert hooks.no_pause == {}


@pytest.mark.parametrize("kind", ["alone", "lockstep"])
def test_an_engine_that_stages_nothing_is_paused_until_the_switch_is_proven(loop, kind):
    client = Client()
    client.engine_core = Core(client, kind)
    hooks = VllmHooks(client, loop, prefix_caching=False)
    hooks.meet_cores()
    commit(hooks, "in_place")
    commit(hooks, "retract")
    kept = ["pause keep False", "switch 0: rest keep", "resume"]
    assert client.said == [*kept, "pause keep True", "switch 0: rest", "resume"]


def test_another_engine_core_is_refused_at_the_start(loop):
    client = Client()
    client.engine_core = Core(client, "")
    with pytest.raises(ConfigError, match=r"vLLM .*is not as this plug-in expects: .*no attribute"):
        VllmHooks(client, loop, prefix_caching=False).meet_cores()


@pytest.mark.parametrize(
    ("mode", "encoders", "said"),
    [
        ("in_place", True, ["pause keep False", "encoders", "resume"]),
        ("in_place", False, ["pause keep False", "resume"]),
        ("retract", True, ["pause keep True", "resume"]),  # vLLM drops all its caches as it pauses
    ],
)
def test_encoder_outputs_of_old_weights_are_dropped(loop, mode, encoders, said):
    client = Client()
    hooks = VllmHooks(client, loop, prefix_caching=False, encoders=encoders)
    hooks.pause(mode, 5.0)
    hooks.drop_caches()
    hooks.resume()
    assert client.said == said


class Core:
    """vLLM's client of the engine cores, whose answers are lists here."""

    def __init__(self, client: Client, *kinds: str) -> None:
        self.client = client
        self.core_engines = list(range(len(kinds)))
        self.kinds = kinds
        self.answers: list[Any] = [["", False, True]] * len(kinds)
        self.stamps: list[str] = []
        self.versions: list[str] = []
        self.generations = True

    async def call_utility_async(self, method: str, *arguments: Any) -> Any:
        return await self._call_utility_async(method, *arguments, engine=0)

    async def _call_utility_async(self, method: str, *arguments: Any, engine: int) -> Any:
        if method == ASK:
            if not self.kinds[engine]:
                raise RuntimeError("Call to weightcast_core method failed: no attribute")
            return self.kinds[engine]
        if method == STAY_PAUSED:
            self.client.stays_paused = arguments[0]
            return None
        if method == SAY_VERSION:
            self.versions.append(arguments[0])
            return True
        if method == NEXT_GENERATION:
            self.client.said += [f"generation {engine}"] if arguments[0] else []
            return self.generations
        assert method == SWITCH_BETWEEN
        *wishes, timeout_s, stamp = arguments
        self.stamps.append(stamp)
        assert timeout_s == 7.0
        names = ("rest", "keep", "cache", "encoders", "resume")
        said = " ".join(name for name, wish in zip(names, wishes, strict=True) if wish)
        self.client.said.append(f"switch {engine}: {said}")
        if isinstance(self.answers[engine], Exception):
            raise self.answers[engine]
        return self.answers[engine]

    async def pause_scheduler_async(self, *, mode: str, clear_cache: bool) -> None:
        self.client.said.append(f"pause {mode} {clear_cache}, at once")
        self.client.held = True


def switching(
    loop: asyncio.AbstractEventLoop, *kinds: str, in_order: bool = True, waits: bool = False, **more: Any
) -> tuple[Client, Core, VllmHooks]:
    """Hooks that switch in one call into each engine core, of these kinds."""
    client = Client()
    client.engine_core = core = Core(client, *kinds)
    hooks = VllmHooks(client, loop, prefix_caching=False, replicas=len(kinds), **more)
    hooks.meet_cores()
    hooks.pause_in_switch(in_order=in_order, waits=waits)
    return client, core, hooks


def commit(hooks: VllmHooks, mode: PauseMode) -> None:
    """Asks for what a session does in a commit."""
    hooks.pause(mode, 5.0)
    hooks.switch(7.0)
    hooks.drop_caches()
    hooks.resume()


@pytest.mark.parametrize(
    ("mode", "encoders", "in_order", "said"),
    [
        ("in_place", False, True, ["switch 0: keep"]),
        ("in_place", False, False, ["switch 0: rest keep"]),
        ("in_place", True, True, ["switch 0: rest keep encoders"]),
        ("retract", False, True, ["switch 0: rest cache"]),
        ("retract", True, True, ["switch 0: rest cache encoders"]),
        ("wait", False, True, ["pause wait False, at once", "switch 0: rest cache resume"]),
        ("abort", False, True, ["pause abort False, at once", "switch 0: rest cache resume"]),
    ],
)
def test_a_commit_is_one_call_after_the_last_request_that_must_end(loop, mode, encoders, in_order, said):
    client, _, hooks = switching(loop, "alone", encoders=encoders, in_order=in_order)
    commit(hooks, mode)
    assert client.said == said
    assert not hooks.paused


def test_every_engine_core_gets_the_call_and_those_in_lockstep_a_pause_around_it(loop):
    client, _, hooks = switching(loop, "alone", "alone")
    commit(hooks, "retract")
    assert client.said == ["switch 0: rest cache", "switch 1: rest cache"]
    client, _, hooks = switching(loop, "lockstep", "lockstep")
    commit(hooks, "retract")
    calls = ["switch 0: ", "switch 1: "]
    assert client.said == ["pause keep True", *calls, "resume"]
    client.said.clear()
    commit(hooks, "in_place")
    assert client.said == ["switch 0: keep", "switch 1: keep"]


def test_tokens_in_flight_are_handed_out_before_a_switch_that_waits_for_the_device(loop):
    client, _, hooks = switching(loop, "alone", waits=True)
    commit(hooks, "in_place")
    assert client.said == ["switch 0: rest keep"]
    client, _, hooks = switching(loop, "lockstep", waits=True)  # such a core cannot rest by itself
    commit(hooks, "in_place")
    assert client.said == ["switch 0: keep"]


def test_quarantined_engine_is_paused_until_the_proof_of_its_next_update(loop):
    client, _, hooks = switching(loop, "alone")
    hooks.pause("abort", 5.0)
    client.said.clear()
    commit(hooks, "in_place")
    assert client.said == ["pause keep False", "switch 0: keep", "resume"]


@pytest.mark.parametrize("mode", ["retract", "abort"])
def test_core_that_failed_stays_paused_until_the_old_version_is_back(loop, mode):
    client, core, hooks = switching(loop, "alone", "alone")
    core.answers = [["", False, True], ["rank 1: out of order", False, False]]
    hooks.pause(mode, 5.0)
    hooks.switch(7.0)
    assert hooks.paused
    client.said.clear()
    core.answers = [["", False, True], ["", True, True]]
    hooks.switch(7.0)  # the abort
    assert hooks.paused
    hooks.resume()
    assert client.said == ["switch 0: rest cache", "switch 1: rest cache", "resume"]
    assert not hooks.paused


def test_a_lost_core_leaves_vllm_paused_and_an_operators_pause_outlasts_a_failed_switch(loop):
    client, core, hooks = switching(loop, "alone")
    core.answers = [RuntimeError("worker 0 is gone")]
    hooks.pause("in_place", 5.0)
    with pytest.raises(EngineFailure, match="worker 0 is gone"):
        hooks.switch(7.0)
    assert hooks.paused
    client, core, hooks = switching(loop, "alone")
    client.held = True
    core.answers = [["rank 0: out of order", True, False]]
    hooks.pause("retract", 5.0)
    hooks.switch(7.0)
    core.answers = [["", True, True]]
    hooks.switch(7.0)
    hooks.resume()
    assert "resume" not in client.said


def test_a_sleeping_engine_has_no_caches_to_drop(loop):
    client, core, hooks = switching(loop, "alone", encoders=True)
    core.answers = [["", True, True]]
    hooks.fell_asleep(("weights", "kv_cache"))
    commit(hooks, "retract")
    assert client.said == ["switch 0: "]
    assert hooks.paused


def test_operators_pause_outlasts_an_update(loop):
    client = Client()
    client.held = True
    hooks = VllmHooks(client, loop, prefix_caching=True)
    hooks.pause("retract", 5.0)
    hooks.resume()
    assert (client.held, hooks.paused) == (True, False)
    client.held = False
    hooks.pause("retract", 5.0)
    hooks.pause("abort", 5.0)  # quarantined: the pause that it finds is its own
    hooks.resume()
    assert (client.held, hooks.paused) == (False, False)


def test_a_half_woken_engine_is_neither_paused_again_nor_resumed(loop):
    client = Client()
    hooks = VllmHooks(client, loop, prefix_caching=True, encoders=True)
    hooks.fell_asleep(("weights", "kv_cache"))
    hooks.woke(["weights"])
    assert hooks.paused
    hooks.pause("abort", 5.0)
    hooks.drop_caches()
    hooks.resume()
    assert client.said == []
    hooks.woke(hooks.woken_by(["weights", "kv_cache"]))  # vLLM ignores a call that names what is awake
    assert hooks.asleep == {"kv_cache"}
    hooks.woke(["kv_cache"])
    assert not hooks.paused


class Adapters(Session):
    """As much of all adapters as sleep asks."""

    def discarded(self, why: str = "") -> None:
        self.state = "gone"


def test_sleep_waits_for_updates_and_discarded_weights_do_not_serve(loop):
    client, session, adapters = Client(), Session(), Adapters()
    client.engine_core = Core(client, "alone")
    hooks = VllmHooks(client, loop, prefix_caching=True)
    guard_sleep(client, session, hooks, adapters)  # type: ignore[arg-type]

    def ask(work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(PATIENCE_S)

    for one in (session, adapters):
        one.busy = True
        for work in (client.sleep(1), client.wake_up()):
            with pytest.raises(HTTPException) as caught:
                ask(work)
            assert (caught.value.status_code, "being updated" in caught.value.detail) == (409, True)
        assert client.said == []
        one.busy = False

    ask(client.sleep(0))  # a pause, by another name: nothing is given up
    assert hooks.asleep == frozenset()
    ask(client.sleep(1, "keep"))
    client.no_room[1] = "rank 1 has no room"
    with pytest.raises(HTTPException, match="503: rank 1 has no room"):
        ask(client.wake_up(["weights"]))
    client.no_room[1] = ""
    assert (session.state, adapters.state, hooks.asleep) == ("serving", "serving", {"weights", "kv_cache"})
    ask(client.wake_up())
    assert client.said == ["sleep 0 abort", "sleep 1 keep", "wake None"]
    assert not client.held

    client.said.clear()
    ask(client.sleep(level=2))
    assert (session.state, adapters.state) == ("quarantined", "gone")
    ask(client.wake_up(["weights"]))
    ask(client.wake_up(["kv_cache"]))
    # Requests that came meanwhile are dropped, and vLLM does not resume when it wakes.
    assert client.said == ["sleep 2 abort", "wake ['weights']", "pause abort True", "wake ['kv_cache']"]
    assert (client.held, client.stays_paused, hooks.paused) == (True, False, True)
    with pytest.raises(HTTPException, match="this engine is quarantined and stays paused"):
        ask(client.resume_generation())
    hooks.pause("abort", 5.0)  # the update that ends the quarantine
    hooks.resume()
    assert not client.held


def test_tokens_are_stamped_at_the_switch_and_with_the_old_version_if_it_is_taken_back(loop):
    _, core, hooks = switching(loop, "alone", "alone")
    hooks.switch_model(7.0, "7")
    hooks.set_version(7)  # nothing more to do: this client has no call for it
    hooks.switch_model(7.0, "8")
    hooks.switch_model(7.0, "")  # its proof failed
    core.answers = [["", False, True], ["rank 1: out of order", False, False]]
    hooks.switch_model(7.0, "9")
    hooks.switch_model(7.0, "")
    hooks.switch(7.0)  # an adapter's
    assert core.stamps[::2] == core.stamps[1::2] == ["7", "8", "7", "9", "7", ""]
    _, core, hooks = switching(loop, "alone", "alone")
    hooks.set_version(7)  # no switch has said it
    hooks.set_version(7)
    assert core.versions == ["default", "default", "7", "7"]


def test_version_goes_with_the_commit_alone(workers):
    made = workers()
    said: list[str] = []

    def go(timeout_s: float, version: str) -> None:
        said.append(version)
        for worker in made:
            worker.been.set()

    executor = meet(made, go)
    sender = Sender({"a": torch.zeros(4)}, version=7)
    for message in (sender.open, Commit(session=sender.session), Abort(session=sender.session)):
        executor.apply(message, timeout_s=PATIENCE_S)
    executor.close()
    assert said == ["7", ""]


def test_nobody_else_ends_the_pause_of_an_update(loop):
    client, session = Client(), Session()
    hooks = VllmHooks(client, loop, prefix_caching=True)
    guard_sleep(client, session, hooks, Adapters())  # type: ignore[arg-type]

    def resume() -> None:
        asyncio.run_coroutine_threadsafe(client.resume_generation(), loop).result(PATIENCE_S)

    hooks.pause("retract", 5.0)
    with pytest.raises(HTTPException, match="paused for an update"):
        resume()
    hooks.resume()
    assert client.said == ["pause keep True", "resume"]
    client.held = True  # by an operator
    resume()
    assert not client.held
