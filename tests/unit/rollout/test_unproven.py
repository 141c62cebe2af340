"""The reference engine generates while its new weights are read back, and delivers none of it before they are proven.

Events set the order: the read-back waits until the test has seen what it wants to see, and steps wait for the pause.
"""

from __future__ import annotations

import socket
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch
import uvicorn

from tests.helpers.clock import PATIENCE_S, wait_until
from tests.helpers.sessions import Sender
from tests.helpers.tiny import VOCAB, greedy, tiny_model
from weightcast import UpdateFailed, WeightUpdater
from weightcast.comm.ipc import host_id
from weightcast.errors import EngineFailure
from weightcast.receiver.engine_state import EngineFacts
from weightcast.receiver.executor import LocalExecutor
from weightcast.receiver.session import SessionHandler
from weightcast.rollout.batch import Limits
from weightcast.rollout.commands import Decode, Prefill, decode_command
from weightcast.rollout.engine import RolloutEngine
from weightcast.rollout.requests import Generation, GenerationRequest
from weightcast.rollout.scheduler import Scheduler
from weightcast.rollout.server import build_app
from weightcast.rollout.text import TextTokenizer
from weightcast.rollout.worker import WorkerSettings, make_worker
from weightcast.wire.answers import Ack
from weightcast.wire.engine_info import RankInfo
from weightcast.wire.messages import Commit, Readback

MODES = ("abort", "retract", "in_place", "wait")
PROMPT = [5, 6]


class Reading:
    """A real executor whose read-back waits for the test, and whose steps may wait for the switch."""

    def __init__(self, executor):
        self._executor = executor
        self._steps: int | None = None
        self.pausing = lambda: False
        self.told: list[object] = []
        self.arrived, self.go = threading.Event(), threading.Event()
        self.meanwhile = lambda: None
        self.dead = False

    def only(self, steps):
        """Lets so many steps run; the next ones wait until the engine is asked to pause."""
        self._steps = steps

    def run(self, command):
        if self._steps is not None and isinstance(decode_command(command), Prefill | Decode):
            if self._steps == 0:
                wait_until(lambda: self._steps is None or self.pausing(), "the pause")
            else:
                self._steps -= 1
        return self._executor.run(command)

    def apply(self, message, **settings):
        self.told.append(message)
        if isinstance(message, Commit):
            self._steps = None
        if isinstance(message, Readback):
            self.arrived.set()
            assert self.go.wait(PATIENCE_S)
            self.meanwhile()
        if self.dead:
            raise EngineFailure("rank 0 was killed by signal 9", ranks=[0], hint="restart the engine")
        return self._executor.apply(message, **settings)

    def __getattr__(self, name):
        return getattr(self._executor, name)


def settings_of(folder) -> WorkerSettings:
    return WorkerSettings(
        model_dir=str(folder), dtype="float32", device="cpu", max_batch=4, max_len=64, staging="device", threads=1
    )


class Served:
    def __init__(self, folder, executor=None):
        self.worker = make_worker(0, 1, "", settings=settings_of(folder)) if executor is None else None
        self.ranks = Reading(LocalExecutor(self.worker) if executor is None else executor)
        self.scheduler = Scheduler(
            self.ranks, limits=Limits(max_batch=4, max_len=64), eos_token_ids=frozenset(), vocab_size=VOCAB
        )
        self.ranks.pausing = lambda: self.scheduler._pauses.pending
        model = tiny_model(folder.parent / "specs") if self.worker is None else None
        specs = (
            self.worker._model.expected_weights()
            if self.worker is not None
            else Sender(dict(model.state_dict()), bucket_bytes=1 << 20).open.specs
        )
        facts = EngineFacts(
            engine="e",
            model="m",
            host_id=host_id(),
            ranks=tuple(RankInfo(rank=rank, pid=pid, device="cpu") for rank, pid in enumerate(self.ranks.pids())),
            staging="device",
            transports=("ipc",),
            specs=tuple(specs),
        )
        self.receiver = SessionHandler(self.ranks, self.scheduler, facts)
        self.engine = RolloutEngine(scheduler=self.scheduler, text=TextTokenizer(), model="m", receiver=self.receiver)
        self._pool = ThreadPoolExecutor(4)
        self._number = 0

    def send(self, model, *, pause="abort") -> Sender:
        """Sends a complete session without its commit."""
        sender = Sender(dict(model.state_dict()), bucket_bytes=1 << 20, timeout_s=PATIENCE_S, pause=pause)
        for message in sender.transfer():
            ack = self.receiver.apply(message)
            assert ack.ok, ack.error
        return sender

    def commit(self, sender: Sender) -> Future[Ack]:
        """Commits, and returns once the ranks have been asked to read back."""
        future = self._pool.submit(self.receiver.apply, sender.commit(proven=True))
        wait_until(lambda: self.ranks.arrived.is_set() or future.done(), "the read-back")
        assert not future.done(), future.result()
        return future

    def abort(self, sender: Sender) -> Future[Ack]:
        return self._pool.submit(self.receiver.apply, sender.abort("another engine failed"))

    def submit(self, tokens=4, prompt=PROMPT) -> Generation:
        self._number += 1
        request = GenerationRequest(
            request_id=str(self._number), prompt=tuple(prompt), max_tokens=tokens, temperature=0.0
        )
        return self.scheduler.submit(request)

    def begin(self, mode) -> Generation:
        """A request that runs when the engine is asked to pause."""
        self.ranks.only(2)
        request = self.submit(tokens=4 if mode == "wait" else 60, prompt=[7, 8, 9])
        wait_until(lambda: len(request.answer.tokens) == 2, "a running request")
        return request

    def flip(self, *, also_waiting=False) -> None:
        """Flips a bit of a live parameter, as faulty memory does; also of the version that waits beside it."""
        loader = self.worker._receiver.loader
        name = next(iter(loader.residents))
        for tensor in (
            (loader.staging.live(name), loader.staging.target(name)) if also_waiting else (loader.staging.live(name),)
        ):
            tensor.data.view(-1).view(torch.int32)[3] ^= 1

    def close(self):
        self.ranks.go.set()
        self.receiver.close()
        self.scheduler.close()
        self.ranks.close()
        self._pool.shutdown()


def has_generated(generation: Generation) -> bool:
    held = generation._held
    return held is not None and len(held.tokens) > 0


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return folder / "a", tiny_model(folder / "a"), tiny_model(folder / "b", seed=1)


@pytest.fixture
def served(models):
    served = Served(models[0])
    yield served
    served.close()


@pytest.mark.parametrize("mode", MODES)
def test_tokens_are_made_between_the_switch_and_the_end_of_the_proof(served, models, mode):
    _, _, new = models
    before = served.begin(mode)
    committing = served.commit(served.send(new, pause=mode))
    # The ranks have switched and the proof has not begun.
    during = served.submit()
    wait_until(lambda: len(during._held.tokens) == 4 if during._held else False, "four tokens of the new version")
    assert not committing.done()
    assert (during.answer.tokens, during.answer.finish_reason) == ([], None), "nothing is delivered before the proof"
    assert served.receiver.info().version == 0
    served.ranks.go.set()
    ack = committing.result(PATIENCE_S)
    assert (ack.ok, ack.version, ack.state) == (True, 1, "serving")
    answer = during.result(PATIENCE_S)
    assert (answer.tokens, answer.spans) == (greedy(new, PROMPT, 4), [(1, 4)])
    kinds = [type(message) for message in served.ranks.told][-2:]
    assert kinds == [Commit, Readback]
    if mode in ("abort", "wait"):
        assert {version for version, _ in before.result(PATIENCE_S).spans} == {0}
    else:
        assert [version for version, _ in before.result(PATIENCE_S).spans] == [0, 1]


@pytest.mark.parametrize("mode", MODES)
def test_a_bit_that_flips_after_the_switch_brings_the_old_version_back(served, models, mode):
    _, old, new = models
    before = served.begin(mode)
    committing = served.commit(served.send(new, pause=mode))
    during = served.submit(tokens=60)
    done = served.submit(tokens=1)
    wait_until(lambda: has_generated(during) and has_generated(done), "tokens of the new version")
    kept = mode in ("retract", "in_place")
    if kept:
        wait_until(lambda: has_generated(before), "tokens of the new version for the old request")
    delivered = list(before.answer.tokens)
    served.ranks.meanwhile = served.flip
    served.ranks.go.set()
    ack = committing.result(PATIENCE_S)
    assert not ack.ok
    assert "what is kept differs from what was sent: " in ack.error
    assert "the engine had gone on with version 1, and" in ack.error
    assert (ack.state, ack.version) == ("serving", 0)
    for ended in (during, done, *([before] if kept else [])):
        with pytest.raises(EngineFailure, match="version 1 was taken back: what is kept differs"):
            ended.result(PATIENCE_S)
        assert 1 not in dict(ended.answer.spans)
    if kept:
        assert before.answer.tokens == delivered
    after = served.submit().result(PATIENCE_S)
    assert (after.tokens, after.spans) == (greedy(old, PROMPT, 4), [(0, 4)])
    # The next update is as good as ever.
    served.ranks.meanwhile = lambda: None
    assert served.receiver.apply(served.send(new).commit(proven=True)).ok
    assert served.submit().result(PATIENCE_S).tokens == greedy(new, PROMPT, 4)


def test_a_request_that_had_not_run_keeps_its_place(served, models):
    _, old, new = models
    committing = served.commit(served.send(new))
    running = [served.submit(tokens=60, prompt=[9, number]) for number in range(4)]  # all slots
    wait_until(lambda: all(map(has_generated, running)), "tokens of the new version")
    waiting = served.submit()
    assert not has_generated(waiting)
    served.ranks.meanwhile = served.flip
    served.ranks.go.set()
    assert "and 4 requests ended with an error" in committing.result(PATIENCE_S).error
    answer = waiting.result(PATIENCE_S)
    assert (answer.tokens, answer.spans) == (greedy(old, PROMPT, 4), [(0, 4)])


def test_where_the_old_version_is_wrong_too_the_engine_is_quarantined(served, models):
    committing = served.commit(served.send(models[2]))
    during = served.submit(tokens=60)
    wait_until(lambda: has_generated(during), "tokens of the new version")
    served.ranks.meanwhile = lambda: served.flip(also_waiting=True)
    served.ranks.go.set()
    ack = committing.result(PATIENCE_S)
    assert (ack.ok, ack.state) == (False, "quarantined")
    assert "the undo did not restore these tensors" in served.receiver.info().message
    with pytest.raises(EngineFailure, match="version 1 was taken back"):
        during.result(PATIENCE_S)
    assert served.scheduler.paused


def test_a_rank_that_dies_over_the_read_back_quarantines_the_engine(served, models):
    committing = served.commit(served.send(models[2]))
    during = served.submit(tokens=60)
    wait_until(lambda: has_generated(during), "tokens of the new version")

    def die():
        served.ranks.dead = True

    served.ranks.meanwhile = die
    served.ranks.go.set()
    ack = committing.result(PATIENCE_S)
    assert (ack.ok, ack.state, ack.failed_ranks) == (False, "quarantined", (0,))
    assert "killed by signal 9" in served.receiver.info().message
    with pytest.raises(EngineFailure, match="could not be read back after the switch"):
        during.result(PATIENCE_S)


def test_an_abort_during_the_proof_comes_too_late(served, models):
    _, _, new = models
    sender = served.send(new)
    committing = served.commit(sender)
    during = served.submit()
    wait_until(lambda: has_generated(during), "tokens of the new version")
    aborting = served.abort(sender)
    wait_until(lambda: served.receiver._session is not None and served.receiver._session.ending != "", "the abort")
    served.ranks.go.set()
    assert committing.result(PATIENCE_S).ok
    ack = aborting.result(PATIENCE_S)
    assert (ack.ok, ack.state, ack.version) == (True, "serving", 1)
    assert during.result(PATIENCE_S).tokens == greedy(new, PROMPT, 4)


def test_unproven_weights_are_not_scored(served, models):
    committing = served.commit(served.send(models[2]))
    with pytest.raises(Exception, match="not proven yet"):
        served.engine.score([5, 9, 100])
    served.ranks.go.set()
    assert committing.result(PATIENCE_S).ok
    assert len(served.engine.score([5, 9, 100])) == 2


def test_without_a_proof_and_in_quarantine_nothing_waits(served, models):
    _, _, new = models
    served.ranks.go.set()
    assert served.receiver.apply(served.send(new).commit()).ok
    assert not any(isinstance(message, Readback) for message in served.ranks.told)
    served.receiver._engine.quarantine("half an update")
    assert served.receiver.apply(served.send(new).commit(proven=True)).ok
    assert not any(isinstance(message, Readback) for message in served.ranks.told)
    assert served.submit().result(PATIENCE_S).tokens == greedy(new, PROMPT, 4)


def test_an_engine_that_shuts_down_delivers_nothing_unproven(served, models):
    committing = served.commit(served.send(models[2]))
    during = served.submit(tokens=60)
    wait_until(lambda: has_generated(during), "tokens of the new version")
    served.scheduler.close()
    with pytest.raises(EngineFailure, match="before its new weights were proven"):
        during.result(PATIENCE_S)
    served.ranks.go.set()
    committing.result(PATIENCE_S)


def test_the_trainers_report_says_that_the_weights_were_taken_back(served, models):
    _, old, new = models
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(build_app(served.engine), log_level="error", access_log=False))
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    wait_until(lambda: server.started, "the server")
    try:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        with WeightUpdater.connect(new, url, transport="ipc", pause="in_place") as updater:
            running = served.begin("in_place")

            def damage() -> None:
                wait_until(lambda: has_generated(running), "tokens of the new version")
                served.flip()

            served.ranks.meanwhile = damage
            served.ranks.go.set()
            with pytest.raises(UpdateFailed) as failed:
                updater.update(version=1)
            [row] = failed.value.report.targets
            assert (row.status, row.version_after) == ("untouched", 0)
            assert "what is kept differs from what was sent: " in row.message
            assert "the engine had gone on with version 1, and 1 request ended with an error" in row.message
            with pytest.raises(EngineFailure, match="version 1 was taken back"):
                running.result(PATIENCE_S)
            assert served.submit().result(PATIENCE_S).tokens == greedy(old, PROMPT, 4)
            served.ranks.meanwhile = lambda: None
            assert updater.update(version=2).targets[0].proof == "resident"
            assert served.submit().result(PATIENCE_S).tokens == greedy(new, PROMPT, 4)
    finally:
        server.should_exit = True
        thread.join(PATIENCE_S)


def test_what_is_held_comes_in_order_and_once():
    generation = Generation(GenerationRequest(request_id="a", prompt=(1,)))
    generation.add(1, 0.0, [], version=0)
    generation.hold()
    generation.add(2, 0.0, [], version=1)
    generation.hold()
    generation.finish("stop", version=1)
    generation.finish("abort", version=1)
    assert (generation.answer.tokens, generation.answer.finish_reason) == ([1], None)
    generation.let_go()
    generation.let_go()
    assert (generation.answer.tokens, generation.answer.spans) == ([1, 2], [(0, 1), (1, 1)])
    assert generation.answer.finish_reason == "stop"


def test_a_request_that_its_client_ends_without_a_token_is_no_error():
    generation = Generation(GenerationRequest(request_id="a", prompt=(1,)))
    generation.hold()
    generation.finish("abort", version=1)
    assert not generation.drop("wrong weights")
    assert (generation.answer.finish_reason, generation.answer.error) == ("abort", None)
