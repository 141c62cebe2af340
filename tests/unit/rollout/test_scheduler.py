"""Pause modes keep their promises, answers have the right weight versions, and nothing hangs."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest
import torch

from tests.helpers.clock import PATIENCE_S
from tests.helpers.tiny import VOCAB, greedy, tiny_model
from weightcast.errors import ConfigError, DeadlineExceeded, EngineFailure, Refused
from weightcast.receiver.executor import LocalExecutor
from weightcast.rollout import commands
from weightcast.rollout.batch import Limits
from weightcast.rollout.requests import GenerationRequest
from weightcast.rollout.scheduler import Scheduler
from weightcast.rollout.sleeping import Sleeper
from weightcast.rollout.worker import WorkerSettings, make_worker

PROMPTS = [[5, 6, 7], [100, 200, 300, 400, 17], [9], [33, 44], [55, 66, 77, 88]]
TOKENS = 20


class Gate:
    """A real executor whose prefill and decode steps wait for the test."""

    def __init__(self, executor):
        self._executor = executor
        self._allowed = threading.Semaphore(0)
        self._open = False
        self.failing = False
        self.tp_size = executor.tp_size
        self.prefilled = 0
        self.at_gate = threading.Event()

    def run(self, command):
        decoded = commands.decode_command(command)
        if isinstance(decoded, commands.Prefill | commands.Decode):
            if not self._open:
                self.at_gate.set()
                self._allowed.acquire()
            if self.failing:
                raise EngineFailure("rank 0 was killed by signal 9", ranks=[0])
        if isinstance(decoded, commands.Prefill):
            self.prefilled += sum(map(len, decoded.rows))
        return self._executor.run(command)

    def steps(self, count):
        """Lets `count` steps through and returns when the next one is at the gate."""
        for _ in range(count):
            assert self.at_gate.wait(PATIENCE_S)
            self.at_gate.clear()
            self._allowed.release()
        assert self.at_gate.wait(PATIENCE_S)

    def open(self):
        self._open = True
        self._allowed.release(1000)

    def __getattr__(self, name):
        return getattr(self._executor, name)


class Rig:
    def __init__(self, folder, *, max_batch=8, gated=True):
        settings = WorkerSettings(
            model_dir=str(folder), dtype="float32", device="cpu", max_batch=max_batch, max_len=64, threads=1
        )
        self.worker = make_worker(0, 1, "", settings=settings)
        self.gate = Gate(LocalExecutor(self.worker))
        if not gated:
            self.gate.open()
        self.scheduler = Scheduler(
            self.gate,
            limits=Limits(max_batch=max_batch, max_len=64),
            eos_token_ids=frozenset(),
            vocab_size=VOCAB,
        )
        self.sleeper = Sleeper(self.scheduler)

    def submit(self, prompts=PROMPTS, **changes):
        options = {"max_tokens": TOKENS, "temperature": 0.0} | changes
        return [
            self.scheduler.submit(GenerationRequest(request_id=f"{id(prompts)}-{i}", prompt=tuple(p), **options))
            for i, p in enumerate(prompts)
        ]

    def load(self, model):
        """Loads weights as an update does between pause and resume."""
        self.worker._model.load_weights(model.state_dict().items())

    @contextmanager
    def paused(self, mode, *, timeout_s=PATIENCE_S):
        """Pauses while a step is at the gate, so that the pause takes effect after the step."""
        pausing = threading.Thread(target=self.scheduler.pause, args=(mode, timeout_s))
        pausing.start()
        while pausing.is_alive():
            self.gate._allowed.release()
            pausing.join(0.01)
        while self.gate._allowed.acquire(blocking=False):
            pass
        self.gate.at_gate.clear()
        yield
        self.scheduler.resume()

    def close(self):
        self.gate.open()
        self.scheduler.close()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return folder / "a", tiny_model(folder / "a"), tiny_model(folder / "b", seed=1)


@pytest.fixture
def rig(models):
    rig = Rig(models[0])
    yield rig
    rig.close()


@pytest.fixture
def small(models):
    """Three slots for five requests."""
    rig = Rig(models[0], max_batch=3)
    yield rig
    rig.close()


@pytest.fixture
def free(models):
    """A rig without a gate, which runs at full speed."""
    rig = Rig(models[0], gated=False)
    yield rig
    rig.close()


def test_abort_ends_all_requests_and_new_ones_wait(small, models):
    _, old, new = models
    answers = small.submit()
    small.gate.steps(4)
    with small.paused("abort"):
        done = [answer.result(PATIENCE_S) for answer in answers]
        assert [answer.finish_reason for answer in done] == ["abort"] * 5
        assert all(len(answer.tokens) >= 4 for answer in done[:3])
        assert [answer.tokens for answer in done[3:]] == [[], []]
        for prompt, answer in zip(PROMPTS, done, strict=True):
            assert answer.tokens == greedy(old, prompt, TOKENS)[: len(answer.tokens)]
        late = small.submit([[1, 2, 3]])[0]
        small.load(new)
        small.scheduler.drop_caches()
        small.scheduler.set_version(7)
        assert late.answer.finish_reason is None
        assert small.scheduler.stats().state == "paused"
    small.gate.open()
    assert late.result(PATIENCE_S).tokens == greedy(new, [1, 2, 3], TOKENS)
    assert late.answer.spans == [(7, TOKENS)]


def test_retract_keeps_tokens_and_recomputes_their_cache(small, models):
    _, old, new = models
    answers = small.submit()
    small.gate.steps(4)
    with small.paused("retract"):
        kept = [len(answer.answer.tokens) for answer in answers]
        assert small.scheduler.stats().running == 0
        assert small.scheduler.stats().waiting == 5
        small.load(new)
        small.scheduler.drop_caches()
        small.scheduler.set_version(7)
    small.gate.open()
    for prompt, answer, count in zip(PROMPTS, answers, kept, strict=True):
        result = answer.result(PATIENCE_S)
        begun = greedy(old, prompt, TOKENS)[:count]
        # The new weights recompute the old tokens, so nothing of the old cache is left.
        assert result.tokens == begun + greedy(new, prompt + begun, TOKENS - count)
        assert result.finish_reason == "length"
        assert result.spans == ([(0, count)] if count else []) + [(7, TOKENS - count)]
        assert result.version == 7


def test_in_place_keeps_the_cache_too(rig, models):
    _, _, new = models
    answers = rig.submit()
    rig.gate.steps(4)
    with rig.paused("in_place"):
        kept = [len(answer.answer.tokens) for answer in answers]
        before = rig.gate.prefilled
        assert rig.scheduler.stats().running == 5
        rig.load(new)
        rig.scheduler.drop_caches()
        rig.scheduler.set_version(7)
    rig.gate.open()
    results = [answer.result(PATIENCE_S) for answer in answers]
    assert rig.gate.prefilled == before
    assert [answer.spans for answer in results] == [[(0, count), (7, TOKENS - count)] for count in kept]
    # The new weights with the old cache choose other tokens than alone.
    assert any(
        answer.tokens[count:] != greedy(new, prompt + answer.tokens[:count], TOKENS - count)
        for prompt, answer, count in zip(PROMPTS, results, kept, strict=True)
    )


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_pause_without_an_update_changes_nothing(rig, models, mode):
    answers = rig.submit()
    for _ in range(2):
        rig.gate.steps(3)
        with rig.paused(mode):
            rig.scheduler.drop_caches()
    rig.gate.open()
    assert [a.result(PATIENCE_S).tokens for a in answers] == [greedy(models[1], p, TOKENS) for p in PROMPTS]


def test_wait_lets_running_requests_finish_and_keeps_waiting_ones(small, models):
    _, old, new = models
    answers = small.submit()
    small.gate.steps(2)
    with small.paused("wait"):
        assert [a.answer.finish_reason for a in answers] == ["length"] * 3 + [None] * 2
        assert [a.answer.tokens for a in answers[3:]] == [[], []]
        small.load(new)
        small.scheduler.set_version(7)
    small.gate.open()
    results = [answer.result(PATIENCE_S) for answer in answers]
    expected = [greedy(old, p, TOKENS) for p in PROMPTS[:3]] + [greedy(new, p, TOKENS) for p in PROMPTS[3:]]
    assert [answer.tokens for answer in results] == expected
    assert [answer.version for answer in results] == [0, 0, 0, 7, 7]


def test_wait_that_times_out_counts_running_requests_and_does_not_pause(small, models):
    answers = small.submit()
    small.gate.steps(2)
    with pytest.raises(DeadlineExceeded, match="3 running requests to finish"):
        small.scheduler.pause("wait", 0.05)
    assert not small.scheduler.paused
    small.gate.open()
    assert [a.result(PATIENCE_S).tokens for a in answers] == [greedy(models[1], p, TOKENS) for p in PROMPTS]


def test_every_holder_of_a_pause_must_resume(free):
    free.scheduler.pause("abort", 20, holder="operator")
    free.scheduler.pause("abort", 20)
    free.scheduler.resume()
    free.scheduler.resume()
    assert free.scheduler.paused
    answer = free.submit([[1]])[0]
    with pytest.raises(DeadlineExceeded):
        answer.result(0.1)
    free.scheduler.resume(holder="operator")
    assert len(answer.result(PATIENCE_S).tokens) == TOKENS


def test_wait_is_refused_while_requests_are_paused_in_place(rig):
    rig.submit()
    rig.gate.steps(1)
    with rig.paused("in_place"), pytest.raises(Refused, match="5 requests are paused in place"):
        rig.scheduler.pause("wait", 20, holder="operator")


def test_aborting_one_request_does_not_affect_the_others(small, models):
    answers = small.submit()
    small.gate.steps(3)
    small.scheduler.abort(answers[0].request.request_id)
    small.scheduler.abort(answers[4].request.request_id)
    small.scheduler.abort("nobody")
    small.gate.open()
    results = [answer.result(PATIENCE_S) for answer in answers]
    assert [answer.finish_reason for answer in results] == ["abort", "length", "length", "length", "abort"]
    for prompt, answer in list(zip(PROMPTS, results, strict=True))[1:4]:
        assert answer.tokens == greedy(models[1], prompt, TOKENS)


def test_a_failed_rank_fails_every_request_and_every_later_one(small):
    answers = small.submit()
    small.gate.steps(2)
    small.gate.failing = True
    small.gate.open()
    for answer in answers:
        with pytest.raises(EngineFailure, match="killed by signal 9"):
            answer.result(PATIENCE_S)
    assert small.scheduler.stats().state == "failed"
    for call in (
        lambda: small.submit([[1]]),
        lambda: small.scheduler.pause("abort", 20),
        lambda: small.scheduler.score([1, 2]),
        lambda: small.scheduler.drop_caches(),
    ):
        with pytest.raises(EngineFailure, match="killed by signal 9"):
            call()


def test_seeded_tokens_do_not_depend_on_the_batch_or_on_being_retracted(rig, models):
    settings = {"temperature": 1.5, "top_p": 0.9, "seed": 11}
    answers = rig.submit(**settings)
    rig.gate.steps(5)
    with rig.paused("retract"):
        pass
    rig.gate.open()
    together = [answer.result(PATIENCE_S).tokens for answer in answers]
    alone = [rig.submit([prompt], **settings)[0].result(PATIENCE_S).tokens for prompt in PROMPTS]
    assert together == alone
    other = rig.submit([PROMPTS[0]], **(settings | {"seed": 12}))[0].result(PATIENCE_S).tokens
    assert other != alone[0]


def test_samples_of_one_prompt_are_computed_once(rig, models):
    rig.scheduler.pause("in_place", 20)  # so that all of them are in the first prefill
    answers = rig.submit([[7, 8, 9]] * 4 + [[3, 2]])
    rig.scheduler.resume()
    rig.gate.steps(1)
    assert rig.gate.prefilled == 5
    rig.gate.open()
    expected = [greedy(models[1], [7, 8, 9], TOKENS)] * 4 + [greedy(models[1], [3, 2], TOKENS)]
    assert [answer.result(PATIENCE_S).tokens for answer in answers] == expected


def test_sleep_frees_the_cache_and_wake_serves_the_same_weights(free, models):
    before = {name: p.clone() for name, p in free.worker._model.named_parameters()}
    free.sleeper.sleep()
    free.sleeper.sleep()
    assert free.scheduler.stats().state == "asleep"
    answer = free.submit()[0]
    with pytest.raises(Refused, match="asleep"):
        free.scheduler.pause("abort", 20)
    with pytest.raises(Refused, match="asleep"):
        free.scheduler.score([1, 2])
    free.sleeper.wake()
    assert answer.result(PATIENCE_S).tokens == greedy(models[1], PROMPTS[0], TOKENS)
    for name, parameter in free.worker._model.named_parameters():
        torch.testing.assert_close(parameter, before[name], rtol=0, atol=0)
    with pytest.raises(ConfigError, match="in_place"):
        free.sleeper.sleep("in_place")


def test_wake_during_sleep_cancels_the_sleep(free, models, monkeypatch):
    def woken_before_the_weights_move(*args, **settings):
        pause(*args, **settings)
        free.sleeper.wake()

    pause = free.scheduler.pause
    monkeypatch.setattr(free.scheduler, "pause", woken_before_the_weights_move)
    with pytest.raises(Refused, match="woken before its weights had moved"):
        free.sleeper.sleep()
    assert free.scheduler.stats().state == "serving"
    assert free.submit()[0].result(PATIENCE_S).tokens == greedy(models[1], PROMPTS[0], TOKENS)


def test_a_refused_sleep_ends_its_pause(free, models):
    begun = []

    @contextmanager
    def between_updates():
        if begun:
            raise Refused("an update has begun")
        begun.append(True)  # after the first look
        yield

    with pytest.raises(Refused, match="an update has begun"):
        Sleeper(free.scheduler, between_updates).sleep()
    assert free.scheduler.stats().state == "serving"
    assert free.submit()[0].result(PATIENCE_S).tokens == greedy(models[1], PROMPTS[0], TOKENS)


def test_an_error_of_a_rank_in_this_process_reaches_the_caller(free, monkeypatch):
    def full(command):
        raise ConfigError("there is no memory for it")

    monkeypatch.setattr(free.worker, "run", full)
    with pytest.raises(ConfigError, match="no memory for it"):
        free.scheduler.score([1, 2], timeout_s=PATIENCE_S)
    with pytest.raises(EngineFailure, match="no memory for it"):
        free.submit()[0].result(PATIENCE_S)


def test_tokens_are_stamped_with_the_version_that_made_them(rig):
    answer = rig.submit([PROMPTS[0]])[0]
    for version, step in ((7, 0), (8, 1)):  # the first prefills, the second decodes
        rig.gate.steps(step)
        assert rig.gate.at_gate.wait(PATIENCE_S)
        rig.scheduler.set_version(version)
    rig.gate.open()
    assert answer.result(PATIENCE_S).spans == [(0, 1), (7, 1), (8, TOKENS - 2)]


def test_score_equals_transformers_also_while_paused(free, models):
    tokens = [5, 9, 100, 200, 3, 44]
    with torch.no_grad():
        expected = models[1](torch.tensor([tokens])).logits[0].log_softmax(-1)
    expected = expected[torch.arange(5), torch.tensor(tokens[1:])].tolist()
    assert free.scheduler.score(tokens) == pytest.approx(expected, abs=1e-4)
    free.scheduler.pause("abort", 20)
    assert free.scheduler.score(tokens) == pytest.approx(expected, abs=1e-4)
    with pytest.raises(Refused, match="paused by an update"):
        free.scheduler.score(tokens, during_update=False)
    free.scheduler.pause("abort", 20, holder="operator")
    free.scheduler.resume()
    assert free.scheduler.score(tokens, during_update=False) == pytest.approx(expected, abs=1e-4)


def test_logprobs_are_those_of_the_chosen_tokens(free, models):
    answer = free.submit([PROMPTS[1]], temperature=0.7, seed=3, top_logprobs=2)[0].result(PATIENCE_S)
    scored = free.scheduler.score(PROMPTS[1] + answer.tokens)[len(PROMPTS[1]) - 1 :]
    assert answer.logprobs == pytest.approx(scored, abs=1e-4)
    assert [len(top) for top in answer.top] == [2] * TOKENS
    assert all(first[1] >= second[1] for first, second in answer.top)


def test_weights_that_are_not_finite_end_requests_and_not_the_engine(free, models):
    _, old, _ = models
    free.scheduler.pause("abort", 20)
    with torch.no_grad():
        free.worker._model.model.norm.weight.fill_(float("nan"))
        free.worker._model.model.layers[0].input_layernorm.weight.fill_(float("nan"))
    free.scheduler.set_version(3)
    free.scheduler.resume()
    with pytest.raises(EngineFailure, match="version 3 gives logits that are not finite"):
        free.submit([list(range(2, 40))])[0].result(PATIENCE_S)
    free.scheduler.pause("abort", 20)
    free.load(old)
    free.scheduler.resume()
    # The slot of the failed request keeps no trace, although the cache was not dropped.
    assert [a.result(PATIENCE_S).tokens for a in free.submit()] == [greedy(old, p, TOKENS) for p in PROMPTS]


def test_answers_end_at_stop_tokens_and_at_the_end_of_the_context(free, models):
    expected = greedy(models[1], PROMPTS[0], TOKENS)
    stop = expected[5]
    answer = free.submit([PROMPTS[0]], stop_token_ids=frozenset([stop]))[0].result(PATIENCE_S)
    assert answer.tokens == expected[: expected.index(stop) + 1]
    assert answer.finish_reason == "stop"
    long = free.submit([list(range(2, 52))], max_tokens=None)[0].result(PATIENCE_S)
    assert (len(long.tokens), long.finish_reason) == (14, "length")


@pytest.mark.parametrize(
    ("prompt", "settings", "message"),
    [
        ([], {}, "no tokens"),
        (list(range(64)), {}, "the context holds 64"),
        ([VOCAB], {}, "token ids go from 0 to 511"),
        ([-1], {}, "token ids go from 0 to 511"),
        ([1], {"max_tokens": 0}, "max_tokens is 0"),
    ],
)
def test_requests_that_cannot_be_served_are_refused_at_once(free, prompt, settings, message):
    with pytest.raises(ConfigError, match=message):
        free.submit([prompt], **settings)


def test_closing_ends_everything(small):
    answers = small.submit()
    small.gate.steps(1)
    small.gate.open()
    small.scheduler.close()
    small.scheduler.close()
    assert all(answer.result(PATIENCE_S).finish_reason in ("abort", "length") for answer in answers)
    with pytest.raises(EngineFailure, match="shutting down"):
        small.submit()
