"""Our part of LMDeploy's engine process, without LMDeploy: requests around a switch, and weights that sleep."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.clock import PATIENCE_S
from weightcast.plugins.engine_needs import EngineNeeds
from weightcast.plugins.hook_points import OWN_UPDATES
from weightcast.plugins.lmdeploy import rank
from weightcast.plugins.lmdeploy.folder import take_written
from weightcast.plugins.lmdeploy.requests_at_switch import MARK, RESET, SWITCH, LmdeployRequests
from weightcast.plugins.lmdeploy.sleeping_weights import SleepingWeights
from weightcast.receiver.loader import residents_of


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


def test_an_update_of_lmdeploys_own_leaves_the_tensors_that_the_receiver_knows() -> None:
    with torch.inference_mode():
        model = Tied()
        known = residents_of(model)
        weights = SleepingWeights(model)
        model.body.weight.fill_(3.0)
        model.body.weight = nn.Parameter(model.body.weight.data)  # over the same memory, as LMDeploy ends an update
        model.body.bias = nn.Parameter(torch.tensor([5.0, 6.0]))  # over other memory
        model.head.weight = nn.Parameter(torch.zeros(2, 3))
        weights.reattach()
        assert all(tensor is known[name] for name, tensor in residents_of(model).items())
        assert model.body.bias.tolist() == [5.0, 6.0]
        assert model.head.weight.data_ptr() == model.body.weight.data_ptr()
        assert model.head.weight.eq(3.0).all()


class Loaded(nn.Module):
    """A model with LMDeploy's loader."""

    def load_weights(self, weights: str) -> None:
        if weights != "known":
            raise KeyError(weights)


def test_a_worker_tells_of_its_sleep_and_of_what_lmdeploy_writes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Also that weights are whole before a worker that wakes up captures graphs.
    done: list[str] = []

    class Agent:
        async def _async_step(self, **inputs: Any) -> None: ...
        def wakeup(self, tags: Any = None) -> None:
            done.append(f"wake {tags}")

        async def sleep(self, level: int = 1) -> None:
            done.append(f"sleep {level}")

        patched_model = SimpleNamespace(get_model=lambda: model)

        def update_params(self, request: Any) -> None:
            for weights in request:
                model.load_weights(weights)

        update_weights_from_distributed = update_weights_from_ipc = update_params

    model = Loaded()
    agent = SimpleNamespace(load_model_weights=lambda: None, BaseModelAgent=Agent)
    monkeypatch.setitem(sys.modules, "lmdeploy.pytorch.engine.model_agent", SimpleNamespace(agent=agent))
    drafts = "lmdeploy.pytorch.spec_decode"
    of_drafts = SimpleNamespace(BaseSpecModelAgent=SimpleNamespace(build_model=None))
    monkeypatch.setitem(sys.modules, f"{drafts}.base", of_drafts)
    of_drafts = SimpleNamespace(SpecModelAgent=SimpleNamespace(build_model=None))
    monkeypatch.setitem(sys.modules, f"{drafts}.spec_agent", of_drafts)
    monkeypatch.setattr(EngineNeeds, "check", lambda needs, part: None)  # pyright: ignore[reportUnknownLambdaType]
    rank.install(str(tmp_path))
    weights = SimpleNamespace(
        wake=lambda: done.append("ours wake"),
        sleep=lambda discard: done.append(f"ours sleep {discard}"),
        replaced=lambda: done.append("ours replaced"),
    )
    monkeypatch.setattr(rank, "_rank", weights)
    worker = Agent()
    asyncio.run(worker.sleep(2))
    worker.wakeup()
    assert done == ["ours sleep True", "sleep 1", "wake ['weights']", "ours wake", "wake ['kv_cache']"]
    done.clear()
    worker.wakeup(["kv_cache"])
    assert done == ["wake ['kv_cache']"]
    for name in OWN_UPDATES:
        done.clear()
        getattr(worker, name)([])
        assert not take_written(str(tmp_path))
        with pytest.raises(KeyError, match="unknown"):
            getattr(worker, name)(["known", "unknown"])
        assert take_written(str(tmp_path))
        assert not take_written(str(tmp_path))
        assert done == ["ours replaced"] * 2
        model.load_weights("known")  # not an update of LMDeploy's own
        assert not take_written(str(tmp_path))


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
        self.most: int | None = None  # number of forwards that it may end
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
            while self.most is not None and len(self.log) >= self.most:
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
        requests = LmdeployRequests(loop)
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
    async def switch(loop: Loop, requests: LmdeployRequests) -> None:
        loop.arrive("a")
        await until(lambda: loop.log.count("forward") > 3)
        assert await requests.mark() == ""
        await until(lambda: loop.scheduler.all()[0].status == "stopped")
        place = loop.log.index(SWITCH)
        assert 3 < place < len(loop.log) - 1
        assert loop.log[place + 1] == "forward"

    play(switch)


@pytest.mark.parametrize("mode", ["abort", "retract"])
def test_a_switch_while_the_last_forward_of_all_requests_runs(mode: str) -> None:
    # The forward after a request's last one is sent before its end is known.  After it the main loop has nothing to do.
    async def switch(loop: Loop, requests: LmdeployRequests) -> None:
        loop.most = 1
        loop.arrive("a")
        await until(lambda: loop.scheduler.all() and loop.scheduler.all()[0].status == "stopped")
        stops = requests.pause("abort", PATIENCE_S) if mode == "abort" else requests.retract(PATIENCE_S)
        stopping = asyncio.create_task(stops)
        await asyncio.sleep(0.01)
        assert not stopping.done()
        loop.most = None
        assert await stopping == ""
        await requests.mark()
        await until(lambda: loop.log[-1] == SWITCH)

    play(switch, limit=1)


def test_an_idle_engine_takes_the_mark_too() -> None:
    async def switch(loop: Loop, requests: LmdeployRequests) -> None:
        assert await requests.retract(PATIENCE_S) == ""
        assert await requests.mark() == ""
        await until(lambda: loop.log == [RESET, SWITCH])
        loop.arrive("a")
        await until(lambda: loop.scheduler.all()[0].status == "stopped")

    play(switch)


def test_retracted_requests_keep_their_tokens_and_are_computed_anew() -> None:
    async def switch(loop: Loop, requests: LmdeployRequests) -> None:
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
    async def switch(loop: Loop, requests: LmdeployRequests) -> None:
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
    async def switch(loop: Loop, requests: LmdeployRequests) -> None:
        loop.chunk = True
        loop.arrive("a")
        await until(lambda: len(loop.log) > 3)
        assert "did not end within 0.05 s" in await requests.retract(0.05)
        loop.chunk = False
        before = len(loop.log)
        await until(lambda: len(loop.log) > before + 5)

    play(switch, limit=10_000)


def test_abort_drops_what_is_here_and_holds_new_requests_back() -> None:
    async def switch(loop: Loop, requests: LmdeployRequests) -> None:
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
    async def switch(loop: Loop, requests: LmdeployRequests) -> None:
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


def test_a_pause_that_waits_ends_at_a_resume_and_is_late_by_name() -> None:
    async def switch(loop: Loop, requests: LmdeployRequests) -> None:
        loop.arrive("a")
        await until(lambda: loop.log)
        assert "did not end within 0.05 s" in await requests.pause("wait", 0.05)
        pause = asyncio.create_task(requests.pause("wait", PATIENCE_S))
        await asyncio.sleep(0.02)
        requests.resume()
        assert await pause == "the pause was cancelled"
        before = len(loop.log)
        await until(lambda: len(loop.log) > before + 5)

    play(switch, limit=10_000)


def test_sleep_rejects_what_is_held_and_forgets_a_forward_whose_output_is_lost() -> None:
    async def sleep(loop: Loop, requests: LmdeployRequests) -> None:
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
    async def switch(loop: Loop, requests: LmdeployRequests) -> None:
        loop.scheduler.block_trie = SimpleNamespace(enabled=True, leaves={1, 2}, evict=print)
        assert "2 prefixes of the old weights are in use" in await requests.retract(PATIENCE_S)
        loop.arrive("a")
        await until(lambda: loop.scheduler.all()[0].status == "stopped")

    play(switch)
