"""Our part of LMDeploy, without LMDeploy: settings, the launcher, pauses, and requests around a switch."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from fastapi import APIRouter, HTTPException, Request
from torch import nn

from tests.clock import PATIENCE_S
from weightcast.errors import ConfigError, EngineFailure, Refused
from weightcast.plugins.lmdeploy import hook_points, rank
from weightcast.plugins.lmdeploy.engine_calls import EngineCalls
from weightcast.plugins.lmdeploy.engine_hooks import LmdeployHooks
from weightcast.plugins.lmdeploy.folder import failure_words, note_failure
from weightcast.plugins.lmdeploy.requests_at_switch import MARK, RESET, SWITCH, RequestsAtSwitch
from weightcast.plugins.lmdeploy.settings import check_settings
from weightcast.plugins.lmdeploy.sleep import guard_sleep
from weightcast.plugins.lmdeploy.sleeping_weights import SleepingWeights
from weightcast.receiver.loader import residents_of


def config(**changes: Any) -> Any:
    """LMDeploy's ``PytorchEngineConfig`` as its command line makes it without options."""
    plain = {"dp": 1, "ep": 1, "device_type": "cuda", "role": SimpleNamespace(name="Hybrid"), "mp_engine_backend": "mp"}
    return SimpleNamespace(**plain | changes)


def test_plain_settings_are_taken() -> None:
    check_settings(
        "pytorch", config(tp=1, distributed_executor_backend="uni", enable_prefix_caching=True, model_format="hf"), None
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dp": 2}, "--dp"),
        ({"tp": 2}, "--tp"),
        ({"distributed_executor_backend": "mp"}, "--distributed-executor-backend"),
        ({"distributed_executor_backend": "ray"}, "--distributed-executor-backend"),
        ({"ep": 2}, "--ep"),
        ({"adapters": {"a": "b"}}, "--adapters"),
        ({"quant_policy": 8}, "--quant-policy"),
        ({"model_format": "awq"}, "--model-format"),
        ({"empty_init": True}, "--empty-init"),
        ({"enable_eplb": True}, "--enable-eplb"),
        ({"dllm_block_length": 4}, "--dllm-block-length"),
        ({"kv_transfer_config": {"a": 1}}, "--kv-transfer-config"),
        ({"role": SimpleNamespace(name="Prefill")}, "--role"),
        ({"device_type": "ascend"}, "--device"),
    ],
)
def test_settings_that_were_not_shown_to_work_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_settings("pytorch", config(**changes), None)


def test_several_wrong_settings_are_named_together() -> None:
    with pytest.raises(ConfigError, match=r"--dp.*--speculative-algorithm"):
        check_settings("pytorch", config(dp=2), object())


def test_another_backend_is_refused() -> None:
    with pytest.raises(ConfigError, match="not in turbomind") as caught:
        check_settings("turbomind", config(), None)
    assert "--backend pytorch" in (caught.value.hint or "")


@pytest.mark.parametrize("found", ["0.16.0", "0.19.0"])
def test_other_versions_are_refused_by_name(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    monkeypatch.setattr(hook_points, "version", lambda: found)
    with pytest.raises(ConfigError, match=f"this is LMDeploy {found}") as caught:
        hook_points.check({})
    assert "install LMDeploy 0.18.0" in (caught.value.hint or "")


def test_missing_hook_points_are_all_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook_points, "version", lambda: "0.18.0")
    needed = {"json:loads": ("s",), "json:dumps": ("obj", "nowhere"), "json:lost": (), "nowhere.at.all:f": ()}
    with pytest.raises(ConfigError) as caught:
        hook_points.check(needed)
    said = str(caught.value)
    assert "LMDeploy 0.18.0 is not as this plug-in expects" in said
    assert "json.dumps has no parameter nowhere" in said
    assert "json.lost is missing" in said
    assert "nowhere.at.all.f is missing" in said
    assert "json.loads" not in said


def test_the_launcher_takes_only_lmdeploys_server() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "weightcast.plugins.lmdeploy", "chat", "m"], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "serve api_server MODEL" in done.stderr


def test_the_launcher_without_lmdeploy_says_so() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "weightcast.plugins.lmdeploy", "serve", "api_server", "m"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "weightcast cannot run in this LMDeploy: this is LMDeploy of an unknown version" in done.stderr


def test_the_first_reason_of_a_failed_start_is_kept(tmp_path: Path) -> None:
    assert failure_words(str(tmp_path)) == ""
    note_failure(str(tmp_path), ConfigError("no memory", hint="use less"))
    note_failure(str(tmp_path), ConfigError("the engine process is gone"))
    assert failure_words(str(tmp_path)) == "no memory (use less)"


# -- the API server's half


class Engine:
    """The engine process as the API server calls it."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.answers: dict[str, Any] = {}

    async def _collective_rpc_async(self, name: str, *arguments: Any) -> Any:
        self.calls.append((name, *arguments))
        answer = self.answers.get(name, "")
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """The server's event loop, on a thread."""
    made = asyncio.new_event_loop()
    thread = threading.Thread(target=made.run_forever, daemon=True)
    thread.start()
    yield made
    made.call_soon_threadsafe(made.stop)
    thread.join(PATIENCE_S)
    made.close()


def hooks_of(engine: Engine, loop: asyncio.AbstractEventLoop) -> LmdeployHooks:
    calls = EngineCalls(engine)
    calls.set_loop(loop)
    return LmdeployHooks(SimpleNamespace(is_sleeping=False, sleeping_tags=set()), calls)


def test_abort_and_wait_hold_requests_back_and_the_other_modes_do_not(loop: asyncio.AbstractEventLoop) -> None:
    engine = Engine()
    hooks = hooks_of(engine, loop)
    for mode in ("in_place", "retract"):
        hooks.pause(mode, PATIENCE_S)
        assert not hooks.paused
        hooks.resume()
    assert engine.calls == []
    hooks.pause("wait", PATIENCE_S)
    assert hooks.paused
    hooks.resume()
    assert not hooks.paused
    assert engine.calls == [("weightcast_pause", "wait", PATIENCE_S), ("weightcast_resume",)]


def test_a_pause_that_fails_says_why_and_can_be_resumed(loop: asyncio.AbstractEventLoop) -> None:
    engine = Engine()
    hooks = hooks_of(engine, loop)
    engine.answers["weightcast_pause"] = "the requests that run did not end within 1 s"
    with pytest.raises(Refused, match="did not end within 1 s"):
        hooks.pause("wait", 1.0)
    hooks.resume()
    assert engine.calls[-1] == ("weightcast_resume",)


def test_an_engine_process_that_is_gone_is_named(loop: asyncio.AbstractEventLoop) -> None:
    engine = Engine()
    hooks = hooks_of(engine, loop)
    engine.answers["weightcast_pause"] = RuntimeError("PyTorch ZMQ engine process is not alive.")
    with pytest.raises(EngineFailure, match="engine process is not alive"):
        hooks.pause("abort", PATIENCE_S)


# -- sleep


class AsyncEngine:
    """LMDeploy's ``AsyncEngine``, as far as it sleeps."""

    def __init__(self) -> None:
        self.is_sleeping, self.sleeping_tags = False, set[str]()
        self.levels: list[int] = []
        self.failure = ""

    async def sleep(self, level: int = 1) -> None:
        if self.failure:
            raise RuntimeError(self.failure)
        self.levels.append(level)
        self.is_sleeping, self.sleeping_tags = True, {"weights", "kv_cache"}

    def wakeup(self, tags: list[str] | None = None) -> None:
        wanted = set(tags or self.sleeping_tags)
        if wanted <= self.sleeping_tags:
            self.sleeping_tags -= wanted
        self.is_sleeping = bool(self.sleeping_tags)


class Session:
    """As much of ``SessionHandler`` as sleep asks."""

    def __init__(self) -> None:
        self.state, self.busy = "serving", False

    @contextmanager
    def between_updates(self) -> Iterator[None]:
        if self.busy:
            raise Refused("being updated by process 1", hint="wait for it to finish, or end it")
        yield

    def discarded(self, why: str) -> None:
        self.state = "quarantined"


class Sleeper:
    """A server with the guard around sleep."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop, self.engine, self.lmdeploy, self.session = loop, Engine(), AsyncEngine(), Session()
        calls = EngineCalls(self.engine)
        self.hooks = LmdeployHooks(self.lmdeploy, calls)
        self.router = APIRouter()
        self.router.post("/wakeup")(lambda: None)
        guard_sleep(self.router, self.lmdeploy, self.session, self.hooks, calls)  # type: ignore[arg-type]

    def sleep(self, level: int = 1) -> None:
        asyncio.run_coroutine_threadsafe(self.lmdeploy.sleep(level), self.loop).result(PATIENCE_S)

    def wake(self, *tags: str) -> None:
        query = "&".join(f"tags={tag}" for tag in tags).encode()
        request = Request({"type": "http", "query_string": query, "headers": []})
        endpoint: Any = self.router.routes[0]
        asyncio.run_coroutine_threadsafe(endpoint.endpoint(request), self.loop).result(PATIENCE_S)

    @property
    def asked(self) -> list[str]:
        return [call[0].removeprefix("weightcast_") for call in self.engine.calls]


def test_requests_are_held_from_the_beginning_of_sleep_until_all_memory_is_back(
    loop: asyncio.AbstractEventLoop,
) -> None:
    server = Sleeper(loop)
    server.sleep()
    assert (server.asked, server.hooks.asleep) == (["pause"], {"weights", "kv_cache"})
    server.wake("weights")
    server.hooks.pause("abort", PATIENCE_S)  # an update
    server.hooks.resume()
    assert (server.asked, server.hooks.paused) == (["pause"], True)
    server.wake("weights", "kv_cache")
    server.wake("weights")
    assert (server.asked, server.hooks.paused) == (["pause", "resume"], False)


def test_engine_without_its_weights_lets_requests_go_on_after_an_update(loop: asyncio.AbstractEventLoop) -> None:
    server = Sleeper(loop)
    server.sleep(2)
    assert server.session.state == "quarantined"
    server.wake()
    assert (server.asked, server.hooks.paused, server.hooks.asleep) == (["pause"], True, frozenset())
    server.hooks.pause("retract", PATIENCE_S)
    server.hooks.resume()
    assert (server.asked[-1], server.hooks.paused) == ("resume", False)


def test_sleep_that_cannot_be_is_refused_and_requests_go_on(loop: asyncio.AbstractEventLoop) -> None:
    server = Sleeper(loop)
    server.engine.answers["weightcast_pause"] = "the forward that runs did not end within 30 s"
    with pytest.raises(HTTPException, match="did not end within 30 s") as caught:
        server.sleep(2)
    assert (caught.value.status_code, server.asked, server.session.state) == (409, ["pause", "resume"], "serving")
    assert server.lmdeploy.levels == []
    server.engine.answers.clear()
    server.session.busy = True
    for refused in (server.sleep, server.wake):
        with pytest.raises(HTTPException, match="being updated by process 1"):
            refused()
    server.session.busy = False
    server.lmdeploy.failure = "no memory on the host"
    with pytest.raises(EngineFailure, match="no memory on the host"):
        server.sleep()
    assert (server.asked[-1], server.hooks.paused) == ("resume", False)
    server.lmdeploy.failure = ""
    server.sleep()
    with pytest.raises(HTTPException, match="sleeps already: weights"):
        server.sleep()
    with pytest.raises(HTTPException, match="no memory of LMDeploy is called cache"):
        server.wake("cache")
    with pytest.raises(HTTPException, match="the KV cache cannot wake before the weights"):
        server.wake("kv_cache")
    assert server.hooks.asleep == {"weights", "kv_cache"}


class Tied(nn.Module):
    """A model with tied weights, and a buffer that an update writes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 2)
        self.head = nn.Linear(3, 2, bias=False)
        self.head.weight = nn.Parameter(self.body.weight.data)
        self.register_buffer("bias", torch.tensor([1.0, 2.0]))


@pytest.mark.parametrize("discards", [False, True])
def test_tensors_keep_their_identity_and_stay_tied_through_sleep(discards: bool) -> None:
    with torch.inference_mode():
        model = Tied()
        known, body = residents_of(model), model.body.weight.clone()
        weights = SleepingWeights(model)
        if discards:
            weights.discard()
            assert sum(parameter.numel() for parameter in model.parameters()) == 0
        for module in model.modules():  # as a move to another device does
            for name, parameter in module.named_parameters(recurse=False):
                getattr(module, name).data = parameter.data.clone()
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.clone())
        weights.restore()
        assert all(tensor is known[name] for name, tensor in residents_of(model).items())
        assert list(residents_of(model)) == list(known) == ["body.weight", "body.bias", "bias"]
        assert model.head.weight.data_ptr() == model.body.weight.data_ptr()
        assert model.get_buffer("bias").tolist() == [1.0, 2.0]
        assert model.body.weight.shape == (2, 3)
        if not discards:
            assert torch.equal(model.body.weight, body)


def test_weights_are_whole_before_a_waking_worker_captures_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    class Agent:
        async def _async_step(self, **inputs: Any) -> None: ...
        def wakeup(self, tags: Any = None) -> None:
            done.append(f"wake {tags}")

        async def sleep(self, level: int = 1) -> None:
            done.append(f"sleep {level}")

    agent = SimpleNamespace(load_model_weights=lambda: None, BaseModelAgent=Agent)
    monkeypatch.setitem(sys.modules, "lmdeploy.pytorch.engine.model_agent", SimpleNamespace(agent=agent))
    monkeypatch.setattr(rank, "check", lambda needed: None)  # pyright: ignore[reportUnknownLambdaType]
    rank.install("/nowhere")
    weights = SimpleNamespace(
        wake=lambda: done.append("ours wake"), sleep=lambda discard: done.append(f"ours sleep {discard}")
    )
    monkeypatch.setattr(rank, "_rank", weights)
    worker = Agent()
    asyncio.run(worker.sleep(2))
    worker.wakeup()
    assert done == ["ours sleep True", "sleep 1", "wake ['weights']", "ours wake", "wake ['kv_cache']"]
    done.clear()
    worker.wakeup(["kv_cache"])
    assert done == ["wake ['kv_cache']"]


# -- the engine process's half, with a loop that sends forwards as LMDeploy's does


class Sequence:
    def __init__(self, scheduler: Scheduler, name: str) -> None:
        self.name, self.status, self.tokens, self.cached = name, "waiting", 0, 0
        self.resp = SimpleNamespace(is_done=False, why="")
        self.state = SimpleNamespace(release_paging_resources=self.release)

    def release(self) -> None:
        self.cached = 0


class Scheduler:
    """Knows its sequences' states, as LMDeploy's scheduler does."""

    def __init__(self) -> None:
        self.sessions: dict[str, Any] = {}
        self.block_trie = SimpleNamespace(enabled=False, leaves=set())
        self.seq_manager = SimpleNamespace(get_sequences=self.of)

    def of(self, status: str) -> dict[str, Sequence]:
        return {sequence.name: sequence for sequence in self.all() if sequence.status == status}

    def all(self) -> list[Sequence]:
        return [sequence for session in self.sessions.values() for sequence in session.sequences.values()]

    def add(self, name: str) -> Sequence:
        sequence = Sequence(self, name)
        self.sessions[name] = SimpleNamespace(session_id=name, sequences={name: sequence})
        return sequence

    def has_unfinished(self) -> bool:
        return bool(self.of("waiting"))

    def num_running(self) -> int:
        return len(self.of("running"))

    def preempt_seqs(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            sequence.status = "waiting"

    def end_session(self, name: str) -> None:
        del self.sessions[name]


class Loop:
    """LMDeploy's main loop: it sends the next forward while it waits for the output of one."""

    def __init__(self, limit: int = 40) -> None:
        self.scheduler = Scheduler()
        self.limit = limit
        self.queue: asyncio.Queue[Any] = asyncio.Queue()
        self.outputs: asyncio.Queue[list[Sequence]] = asyncio.Queue()
        self.log: list[str] = []  # what the worker did, in order
        self.chunk = False
        self.resets = 0
        self.woken = asyncio.Event()
        self.has_runable_event = SimpleNamespace(extra_runable_checker=None, set=self.set)
        self.executor = SimpleNamespace(forward_async=self.forward, get_output_async=self.outputs.get)
        self.inputs_maker = SimpleNamespace(
            send_next_inputs=self.send,
            prefetch_next_inputs=self.send,
            has_pending_long_context_chunk=lambda: self.chunk,
            reset_runtime_state=self.reset,
        )
        self.req_manager = SimpleNamespace(
            callbacks={"ADD_MESSAGE": self.add}, bind_func=self.bind, reject_request=self.reject
        )

    def bind(self, kind: str, callback: Any) -> None:
        self.req_manager.callbacks[kind] = callback

    def arrive(self, *names: str) -> None:
        """New requests, as they come from clients."""
        self.req_manager.callbacks["ADD_MESSAGE"](list(names))
        self.set()

    def add(self, names: list[str]) -> None:
        for name in names:
            self.scheduler.add(name)

    def reject(self, response: Any, reason: str) -> None:
        response.is_done, response.why = True, reason

    def reset(self) -> None:
        self.resets += 1

    def reset_runtime_state(self) -> None:
        """LMDeploy's last step of falling asleep."""
        self.log.append("asleep")

    def runnable(self) -> bool:
        also = self.has_runable_event.extra_runable_checker
        return self.scheduler.has_unfinished() or (also is not None and also())

    def set(self) -> None:
        self.woken.set() if self.runnable() else self.woken.clear()

    async def forward(self, inputs: Any) -> None:
        await asyncio.sleep(0)
        self.queue.put_nowait(inputs)

    async def send(self) -> Any:
        batch = [sequence for sequence in self.scheduler.all() if sequence.status in ("waiting", "running")]
        if not batch:
            return None, None
        for sequence in batch:
            sequence.status = "running"
        await self.executor.forward_async({"batch": batch})
        return "inputs", batch

    async def worker(self) -> None:
        while True:
            inputs = await self.queue.get()
            if MARK in inputs:
                self.log.append(inputs[MARK])
                continue
            await asyncio.sleep(0.001)
            fresh = [sequence.name for sequence in inputs["batch"] if not sequence.cached]
            self.log.append(f"forward{' prefill' if fresh else ''}")
            self.outputs.put_nowait(inputs["batch"])

    async def main(self) -> None:
        batch = None
        while True:
            if batch is None:
                if not self.runnable():
                    await self.woken.wait()
                _, batch = await self.inputs_maker.send_next_inputs()
                if batch is None:
                    await asyncio.sleep(0.001)
                    continue
            _, ahead = await self.inputs_maker.prefetch_next_inputs()
            for sequence in await self.executor.get_output_async():
                if sequence.status != "running":
                    continue
                sequence.tokens += 1
                sequence.cached = sequence.tokens
                if sequence.tokens == self.limit:
                    sequence.status = "stopped"
            batch = ahead
            self.set()


@pytest.fixture(autouse=True)
def modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules of LMDeploy that our code imports."""
    contents: dict[str, Any] = {
        "lmdeploy.pytorch.engine.request": {"RequestType": SimpleNamespace(ADD_MESSAGE="ADD_MESSAGE")},
        "lmdeploy.pytorch.messages": {"MessageStatus": SimpleNamespace(RUNNING="running", READY="ready")},
    }
    for name, found in contents.items():
        module = ModuleType(name)
        vars(module).update(found)
        monkeypatch.setitem(sys.modules, name, module)


def play(what: Any, *, limit: int = 40) -> None:
    """Runs a loop and its worker, and a coroutine beside them that gets the loop and our requests."""

    async def everything() -> None:
        loop = Loop(limit)
        requests = RequestsAtSwitch(loop)
        tasks = [asyncio.create_task(loop.main()), asyncio.create_task(loop.worker())]
        other = asyncio.create_task(what(loop, requests))
        done, _ = await asyncio.wait([*tasks, other], timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        assert other in done, "it stands still" if not done else [task.exception() for task in done]
        await other

    asyncio.run(everything())


async def until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def test_a_mark_goes_between_two_forwards_and_nothing_pauses() -> None:
    async def switch(loop: Loop, requests: RequestsAtSwitch) -> None:
        loop.arrive("a")
        await until(lambda: loop.log.count("forward") > 3)
        assert await requests.mark() == ""
        await until(lambda: loop.scheduler.all()[0].status == "stopped")
        place = loop.log.index(SWITCH)
        assert 3 < place < len(loop.log) - 1
        assert loop.log[place + 1] == "forward"

    play(switch)


def test_an_idle_engine_takes_the_mark_too() -> None:
    async def switch(loop: Loop, requests: RequestsAtSwitch) -> None:
        assert await requests.retract(PATIENCE_S) == ""
        assert await requests.mark() == ""
        await until(lambda: loop.log == [RESET, SWITCH])
        loop.arrive("a")
        await until(lambda: loop.scheduler.all()[0].status == "stopped")

    play(switch)


def test_retracted_requests_keep_their_tokens_and_are_computed_anew() -> None:
    async def switch(loop: Loop, requests: RequestsAtSwitch) -> None:
        loop.arrive("a", "b")
        await until(lambda: loop.log.count("forward") > 3)
        assert await requests.retract(PATIENCE_S) == ""
        assert loop.outputs.empty()
        tokens = [sequence.tokens for sequence in loop.scheduler.all()]
        assert min(tokens) > 3
        assert [sequence.status for sequence in loop.scheduler.all()] == ["waiting", "waiting"]
        await asyncio.sleep(0.02)
        assert [sequence.tokens for sequence in loop.scheduler.all()] == tokens
        assert await requests.mark() == ""
        await until(lambda: all(sequence.status == "stopped" for sequence in loop.scheduler.all()))
        place = loop.log.index(SWITCH)
        assert loop.log[place - 1 : place + 2] == [RESET, SWITCH, "forward prefill"]
        assert loop.resets == 1

    play(switch)


def test_a_prompt_that_is_half_read_is_read_to_its_end_before_a_retraction() -> None:
    async def switch(loop: Loop, requests: RequestsAtSwitch) -> None:
        loop.chunk = True
        loop.arrive("a")
        await until(lambda: len(loop.log) > 3)
        retraction = asyncio.create_task(requests.retract(PATIENCE_S))
        before = len(loop.log)
        await until(lambda: len(loop.log) > before + 3)
        assert not retraction.done()
        loop.chunk = False
        assert await retraction == ""

    play(switch, limit=10_000)


def test_a_forward_that_does_not_end_in_time_fails_the_retraction_and_the_engine_goes_on() -> None:
    async def switch(loop: Loop, requests: RequestsAtSwitch) -> None:
        loop.chunk = True
        loop.arrive("a")
        await until(lambda: len(loop.log) > 3)
        assert "did not end within 0.05 s" in await requests.retract(0.05)
        loop.chunk = False
        before = len(loop.log)
        await until(lambda: len(loop.log) > before + 5)

    play(switch, limit=10_000)


def test_abort_drops_what_is_here_and_holds_new_requests_back() -> None:
    async def switch(loop: Loop, requests: RequestsAtSwitch) -> None:
        loop.arrive("a")
        await until(lambda: loop.log.count("forward") > 3)
        [dropped] = loop.scheduler.all()
        pause = asyncio.create_task(requests.pause("abort", PATIENCE_S))
        await asyncio.sleep(0)
        loop.arrive("b")
        assert await pause == ""
        assert dropped.resp.why == "weights are switched"
        assert loop.scheduler.all() == []
        assert await requests.mark() == ""
        before = list(loop.log)
        await asyncio.sleep(0.02)
        assert [entry for entry in loop.log[len(before) :] if entry != SWITCH] == []
        requests.resume()
        await until(lambda: loop.scheduler.all()[0].status == "stopped")
        assert loop.log[loop.log.index(SWITCH) + 1] == "forward prefill"

    play(switch)


def test_wait_lets_requests_end_first() -> None:
    async def switch(loop: Loop, requests: RequestsAtSwitch) -> None:
        loop.arrive("a")
        await until(lambda: loop.log)
        [running] = loop.scheduler.all()
        pause = asyncio.create_task(requests.pause("wait", PATIENCE_S))
        await asyncio.sleep(0)
        loop.arrive("b")
        assert await pause == ""
        assert (running.tokens, running.status) == (40, "stopped")
        assert loop.scheduler.all() == [running]
        requests.resume()
        await until(lambda: len(loop.scheduler.all()) == 2 and loop.scheduler.all()[1].status == "stopped")

    play(switch)


def test_a_pause_that_waits_can_be_cancelled_and_is_late_by_name() -> None:
    async def switch(loop: Loop, requests: RequestsAtSwitch) -> None:
        loop.arrive("a")
        await until(lambda: loop.log)
        assert "did not end within 0.05 s" in await requests.pause("wait", 0.05)
        pause = asyncio.create_task(requests.pause("wait", PATIENCE_S))
        await asyncio.sleep(0.02)
        requests.stop_waiting()
        assert await pause == "the pause was cancelled"
        requests.resume()
        before = len(loop.log)
        await until(lambda: len(loop.log) > before + 5)

    play(switch, limit=10_000)


def test_sleep_rejects_what_is_held_and_forgets_a_forward_whose_output_is_lost() -> None:
    async def sleep(loop: Loop, requests: RequestsAtSwitch) -> None:
        response = SimpleNamespace(is_done=False, why="")
        assert await requests.pause("abort", PATIENCE_S) == ""
        loop.req_manager.callbacks["ADD_MESSAGE"]([SimpleNamespace(resp=response)])
        await loop.executor.forward_async({"batch": []})  # sent ahead; nobody takes its output
        await until(lambda: not loop.outputs.empty())
        loop.outputs.get_nowait()
        loop.reset_runtime_state()
        assert (response.is_done, response.why) == (True, "engine sleep")
        assert await requests.retract(PATIENCE_S) == ""  # the engine is at rest
        assert await requests.mark() == ""
        loop.arrive("a")  # still held: the engine may wake without weights
        await asyncio.sleep(0.02)
        assert loop.scheduler.all() == []
        requests.resume()
        await until(lambda: loop.scheduler.all()[0].status == "stopped")

    play(sleep)


def test_prefixes_that_cannot_be_dropped_fail_the_retraction() -> None:
    async def switch(loop: Loop, requests: RequestsAtSwitch) -> None:
        loop.scheduler.block_trie = SimpleNamespace(enabled=True, leaves={1, 2}, evict=print)
        assert "2 prefixes of the old weights are in use" in await requests.retract(PATIENCE_S)
        loop.arrive("a")
        await until(lambda: loop.scheduler.all()[0].status == "stopped")

    play(switch)
