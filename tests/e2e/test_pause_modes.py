"""Each pause mode keeps its promise to running and waiting requests at a switch, token by token.

Sixteen requests run and sixteen wait when the update arrives.  The tests check the version of each token: under greedy
decoding the token must be the likeliest continuation under the weights of that version.
"""

from __future__ import annotations

import json
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.helpers.clock import PATIENCE_S, wait_until
from tests.helpers.engines import Engine, completion, engines, push, shortfall, weightcast
from tests.helpers.harness import BeforeCommit
from tests.helpers.ranks import Ranks
from tests.helpers.server_events import lines_of
from tests.helpers.stolen import Inexcusable
from tests.helpers.tiny import greedy, tiny_model
from weightcast.errors import UpdateFailed
from weightcast.exporters.checkpoint import CheckpointExporter
from weightcast.lab.connect import connect as connect_in_lab
from weightcast.rollout.cache import cache_name

BATCH = 16
LONG = 400  # tokens of a request that must still run when the update arrives
ENDLESS = 1900  # tokens of one that is aborted
SHORT = 30
CLOSE = 1e-3  # nats; a smaller difference between two tokens may be rounding


@dataclass(slots=True, kw_only=True)
class Answered:
    """One request and its answer, streamed or whole."""

    prompt: list[int]
    count: int
    tokens: list[int] = field(default_factory=list)
    finish_reason: str = ""
    weight_version: int = -1
    spans: list[tuple[int, int]] = field(default_factory=list)


Load = tuple[list[Future[Answered]], list[Future[Answered]]]


class World:
    """An engine, and the model of each version that it serves."""

    def __init__(self, engine: Engine, models: list[Any], folders: list[Path]) -> None:
        self.engine = engine
        self.models = models
        self.folders = folders
        self.version = 0
        self.pool = ThreadPoolExecutor(max_workers=2 * BATCH + 2)

    def model(self, version: int) -> Any:
        return self.models[version % len(self.models)]

    def folder(self, version: int) -> Path:
        return self.folders[version % len(self.folders)]

    def ask(self, prompt: list[int], count: int, *, stream: bool) -> Answered:
        return (self._stream if stream else self._whole)(prompt, count)

    def _whole(self, prompt: list[int], count: int) -> Answered:
        body = self.engine.complete([prompt], count)
        [choice] = body["choices"]
        assert choice["weight_versions"] == body["weight_versions"]
        return Answered(
            prompt=prompt,
            count=count,
            tokens=choice["token_ids"],
            finish_reason=choice["finish_reason"],
            weight_version=body["weight_version"],
            spans=[(span["version"], span["tokens"]) for span in choice["weight_versions"]],
        )

    def _stream(self, prompt: list[int], count: int) -> Answered:
        found = Answered(prompt=prompt, count=count)
        body = completion([prompt], count) | {"stream": True}
        with self.engine.client.stream("POST", f"{self.engine.url}/v1/completions", json=body) as reply:
            assert reply.status_code == 200
            for line in lines_of(reply):
                if not line or line == "data: [DONE]":
                    continue
                event = json.loads(line.removeprefix("data: "))
                [choice] = event["choices"]
                assert not found.finish_reason, "nothing comes after the end"
                found.tokens += choice["token_ids"]
                assert event["weight_version"] >= found.weight_version
                found.weight_version = event["weight_version"]
                if choice["finish_reason"] is not None:
                    found.finish_reason = choice["finish_reason"]
                    found.spans = [(span["version"], span["tokens"]) for span in choice["weight_versions"]]
        return found

    def engine_metrics(self) -> list[str]:
        """The engine's own metrics, without those of its process: CPU time and memory change while nothing runs."""
        lines = self.engine.client.get(self.engine.url + "/metrics").text.splitlines()
        return [line for line in lines if not line.startswith(("#", "process_", "python_"))]

    def until(self, done: Callable[[dict[str, Any]], bool]) -> None:
        """Waits until the engine reports a state."""
        deadline = time.monotonic() + PATIENCE_S
        while not done(health := self.engine.get("/health")):
            assert time.monotonic() < deadline, health
            time.sleep(0.01)

    def load(self, count: int = LONG) -> Load:
        """Fills the batch with long requests and the queue with short ones; half of each streams."""
        self.until(lambda health: health["running"] == health["waiting"] == 0)
        running = [self.pool.submit(self.ask, prompt(), count, stream=i % 2 == 0) for i in range(BATCH)]
        self.until(lambda health: health["running"] == BATCH)
        waiting = [self.pool.submit(self.ask, prompt(), SHORT, stream=i % 2 == 0) for i in range(BATCH)]
        self.until(lambda health: health["waiting"] == BATCH and health["running"] == BATCH)
        return running, waiting

    def update_under_load(self, mode: str | None) -> Load:
        """Does so while requests run and wait."""
        loaded = BeforeCommit(self.load)
        self.update(mode, progress=loaded)
        assert loaded.result is not None
        return loaded.result

    def update(self, mode: str | None, **options: Any) -> None:
        """Updates to the next version, with a trainer in this process; with the default pause if none is named."""
        self.version += 1
        options = {"timeout_s": PATIENCE_S, "bucket_bytes": 1 << 20} | options | ({"pause": mode} if mode else {})
        with connect_in_lab(self.model(self.version), [self.engine.url], **options) as updater:
            report = updater.update(version=self.version)
        assert report.ok
        assert report.targets[0].proof == "resident"
        assert report.targets[0].stall_s > 0

    def check_spans(self, answer: Answered) -> None:
        """Checks that spans add up, that their versions rise, and that the last is the response's version."""
        assert sum(tokens for _, tokens in answer.spans) == len(answer.tokens)
        versions = [version for version, _ in answer.spans]
        assert versions == sorted(set(versions))
        if versions:
            assert answer.weight_version == versions[-1]

    def check_tokens(self, answer: Answered) -> None:
        """Checks that every token is the likeliest continuation under its span's version."""
        self.check_spans(answer)
        before = list(answer.prompt)
        rest = answer.tokens
        for version, count in answer.spans:
            if not shortfall(self.model(version), before, rest[:count]) < CLOSE:  # also if it is not a number
                raise Inexcusable(f"tokens of {answer} are not those of version {version}")
            before += rest[:count]
            rest = rest[count:]


dice = random.Random(7)


def prompt() -> list[int]:
    return [dice.randrange(512) for _ in range(dice.randint(1, 40))]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    root = tmp_path_factory.mktemp("pause")
    folders = [root / "even", root / "odd"]
    models = [
        tiny_model(folder, seed=seed, max_position_embeddings=2048) for seed, folder in enumerate(folders, start=1)
    ]
    with engines(folders[0], root, {"tp": 2, "max_batch": BATCH}) as [engine]:
        found = World(engine, models, folders)
        yield found
        found.pool.shutdown(cancel_futures=True)


def results(futures: Sequence[Future[Answered]]) -> list[Answered]:
    return [future.result(PATIENCE_S) for future in futures]


def test_abort_ends_all_requests_and_new_ones_run(world: World) -> None:
    old = world.version
    running, waiting = world.update_under_load("abort")
    for answer in results(running):
        assert answer.finish_reason == "abort"
        assert 0 < len(answer.tokens) < LONG
        assert answer.spans == [(old, len(answer.tokens))]
        world.check_tokens(answer)
    for answer in results(waiting):
        assert (answer.finish_reason, answer.tokens, answer.spans) == ("abort", [], [])
        assert answer.weight_version == old
    fresh = world.ask(prompt(), SHORT, stream=True)
    assert fresh.spans == [(old + 1, SHORT)]
    world.check_tokens(fresh)


@pytest.mark.parametrize("mode", ["retract", None])
def test_retract_recomputes_the_cache_of_kept_requests_and_is_the_default(world: World, mode: str | None) -> None:
    old = world.version
    running, waiting = world.update_under_load(mode)
    for answer in results(running):
        assert (answer.finish_reason, len(answer.tokens)) == ("length", LONG)
        assert [version for version, _ in answer.spans] == [old, old + 1]
        world.check_tokens(answer)
    for answer in results(waiting):
        assert (answer.finish_reason, answer.spans) == ("length", [(old + 1, SHORT)])
        world.check_tokens(answer)


def test_in_place_keeps_the_cache(world: World) -> None:
    old = world.version
    running, waiting = world.update_under_load("in_place")
    recomputed: list[float] = []
    for answer in results(running):
        assert (answer.finish_reason, len(answer.tokens)) == ("length", LONG)
        assert [version for version, _ in answer.spans] == [old, old + 1]
        world.check_spans(answer)
        kept, after = answer.tokens[: answer.spans[0][1]], answer.tokens[answer.spans[0][1] :]
        assert shortfall(world.model(old), answer.prompt, kept) < CLOSE
        # The new weights continue with the old ones' keys and values; transformers agrees if it does the same.
        assert _crossed(world.model(old), world.model(old + 1), [*answer.prompt, *kept], after) < CLOSE
        recomputed.append(shortfall(world.model(old + 1), [*answer.prompt, *kept], after))
    assert max(recomputed) > 100 * CLOSE, "a cache that was computed anew would pass for one that was kept"
    for answer in results(waiting):
        assert (answer.finish_reason, answer.spans) == ("length", [(old + 1, SHORT)])
        world.check_tokens(answer)


def _crossed(old: Any, new: Any, tokens: list[int], after: list[int]) -> float:
    """The same as ``shortfall``, if only the old weights have seen all but the last of ``tokens``."""
    with torch.no_grad():
        cache = old(torch.tensor([tokens[:-1]]), use_cache=True)[cache_name(old)]
        fed = torch.tensor([[tokens[-1], *after[:-1]]])
        logits = new(fed, use_cache=True, **{cache_name(new): cache}).logits[0]
    chosen = logits.gather(-1, torch.tensor(after)[:, None])[:, 0]
    return float((logits.max(-1).values - chosen).max())


def test_wait_lets_running_requests_finish(world: World) -> None:
    old = world.version
    running, waiting = world.update_under_load("wait")
    for answer in results(running):
        assert (answer.finish_reason, answer.spans) == ("length", [(old, LONG)])
        world.check_tokens(answer)
    for answer in results(waiting):
        assert (answer.finish_reason, answer.spans) == ("length", [(old + 1, SHORT)])
        world.check_tokens(answer)


@pytest.mark.parametrize("mode", ["abort", "retract", "wait"])
def test_push_under_load_reports_every_mixture_of_versions(world: World, mode: str) -> None:
    """Thirty-two clients send requests all the time while the command line pushes."""
    stop, served = threading.Event(), threading.Semaphore(0)
    old = world.version
    world.version += 1

    def client(number: int) -> list[Answered]:
        found: list[Answered] = []
        while not stop.is_set() or (found and found[-1].weight_version == old):
            found.append(world.ask(prompt(), SHORT + number, stream=number % 2 == 0))
            served.release()
        return found

    clients = [world.pool.submit(client, number) for number in range(2 * BATCH)]
    try:
        for _ in clients:
            assert served.acquire(timeout=PATIENCE_S)
        report = push(world.folder(world.version), [world.engine], world.version, "--pause", mode)
    finally:
        stop.set()
    assert report["targets"][0]["proof"] == "resident"
    answers = [answer for future in clients for answer in future.result(PATIENCE_S)]
    assert {answer.weight_version for answer in answers} == {old, world.version}
    for answer in answers:
        assert mode == "retract" or len(answer.spans) <= 1
        assert (len(answer.tokens) == answer.count) or (mode == "abort" and answer.finish_reason == "abort")
        world.check_spans(answer)
    for answer in random.Random(0).sample(answers, 40) + [answer for answer in answers if len(answer.spans) > 1]:
        world.check_tokens(answer)


@pytest.mark.deadlines
def test_wait_that_takes_too_long_leaves_the_old_version(world: World) -> None:
    before = world.engine.digests()
    loaded = BeforeCommit(lambda: world.load(3 * LONG))
    with (
        connect_in_lab(
            world.model(world.version + 1), [world.engine.url], pause="wait", timeout_s=1.0, progress=loaded
        ) as updater,
        pytest.raises(UpdateFailed, match="running requests to finish") as failed,
    ):
        updater.update(version=world.version + 1)
    assert failed.value.report.targets[0].status == "untouched"
    if world.engine.digests() != before:
        raise Inexcusable("an update that failed has changed the weights")
    assert loaded.result is not None
    running, waiting = loaded.result
    for answer in results([*running, *waiting]):
        assert (answer.finish_reason, answer.spans) == ("length", [(world.version, answer.count)])
        world.check_tokens(answer)


def push_and_wait(folder: str, url: str, version: int, sent: Path, go: Path) -> None:
    """Sends all buckets, and commits once there is a file ``go``, until the test kills this trainer."""

    def hold() -> None:
        sent.touch()
        wait_until(go.exists, "the load")

    options: dict[str, Any] = {"pause": "wait", "timeout_s": PATIENCE_S, "progress": BeforeCommit(hold)}
    with CheckpointExporter(folder) as exporter, connect_in_lab(exporter, [url], **options) as updater:
        updater.update(version=version)


def test_a_trainer_killed_while_its_commit_waits_does_not_block_the_next(world: World, tmp_path: Path) -> None:
    trainer = Ranks(1)
    sent, go = tmp_path / "sent", tmp_path / "go"
    try:
        new = world.version + 1
        trainer.start(push_and_wait, str(world.folder(new)), world.engine.url, new, sent, go)
        wait_until(sent.exists, "all buckets")
        assert world.engine.get("/health")["state"] == "updating"
        running, waiting = world.load(ENDLESS)
        go.touch()
        time.sleep(0.5)  # now it most likely waits for the running requests
        trainer.processes[0].kill()
        old = world.version
        world.until(lambda health: health["state"] == "serving")
        assert world.engine.get("/health") == {
            "status": "ok",
            "state": "serving",
            "version": old,
            "running": BATCH,
            "waiting": BATCH,
        }
        world.update("abort")
    finally:
        trainer.close()
    for answer in results([*running, *waiting]):
        assert (answer.finish_reason, answer.weight_version) == ("abort", old)
        world.check_tokens(answer)


def test_pause_and_continue(world: World) -> None:
    running, waiting = world.load()
    health = world.engine.post("/pause", mode="in_place")
    assert (health["state"], health["running"], health["waiting"]) == ("paused", BATCH, BATCH)
    assert not any(future.done() for future in (*running, *waiting))
    assert world.engine.info()["paused"]
    metrics = world.engine_metrics()
    time.sleep(0.2)
    assert world.engine_metrics() == metrics, "nothing is generated"
    # An update does not end an operator's pause.
    world.update("in_place")
    assert world.engine.get("/health")["state"] == "paused"
    world.engine.post("/continue")
    for answer in results([*running, *waiting]):
        assert (answer.finish_reason, len(answer.tokens)) == ("length", answer.count)
        world.check_spans(answer)
        assert answer.weight_version == world.version


def test_sleep_and_wake(world: World) -> None:
    before = world.engine.digests()
    expected = greedy(world.model(world.version), [3, 1, 4], SHORT)
    assert world.engine.post("/sleep")["state"] == "asleep"
    pending = world.pool.submit(world.ask, [3, 1, 4], SHORT, stream=False)
    world.until(lambda health: health["waiting"] == 1)
    with (
        connect_in_lab(world.model(world.version + 1), [world.engine.url], timeout_s=PATIENCE_S) as updater,
        pytest.raises(UpdateFailed, match=r"asleep.*wake"),
    ):
        updater.update(version=world.version + 1)
    assert world.engine.get("/health")["state"] == "asleep"
    assert not pending.done()
    asleep = weightcast("status", world.engine.url, "--json")
    assert (asleep.returncode, json.loads(asleep.stdout)["engines"][0]["state"]) == (1, "paused")
    assert world.engine.post("/wake")["state"] == "serving"
    assert not world.engine.info()["paused"]
    answer = pending.result(PATIENCE_S)
    assert (answer.tokens, answer.spans) == (expected, [(world.version, SHORT)])
    assert world.engine.digests() == before
    world.update("abort")
    assert world.engine.digests() != before


def test_sigterm_in_the_middle_of_an_update_leaves_no_process(world: World) -> None:
    family = world.engine.family()
    assert len(family) >= 3, "the engine and its ranks"
    sent = threading.Event()

    def load() -> Load:
        loaded = world.load(ENDLESS)
        sent.set()
        return loaded

    loaded = BeforeCommit(load)
    with connect_in_lab(
        world.model(world.version + 1), [world.engine.url], pause="wait", timeout_s=PATIENCE_S, progress=loaded
    ) as updater:
        update = world.pool.submit(updater.update, version=world.version + 1)
        assert sent.wait(PATIENCE_S)
        time.sleep(0.5)  # now it most likely waits for the running requests
        sleep = world.engine.client.post(world.engine.url + "/sleep")
        assert sleep.status_code == 409, "sleep and a commit both move the weights"
        assert "being updated by process" in sleep.text
        world.engine.process.send_signal(signal.SIGTERM)
        assert world.engine.process.wait(PATIENCE_S) == 0
        with pytest.raises(UpdateFailed, match=world.engine.url):
            update.result(PATIENCE_S)
    _, alive = psutil.wait_procs(family[1:], timeout=PATIENCE_S)
    assert not alive
    assert loaded.result is not None
    running, waiting = loaded.result
    for answer in results(running):  # clients get the tokens generated so far
        assert answer.finish_reason == "abort"
        assert answer.spans == [(world.version, len(answer.tokens))]
        world.check_tokens(answer)
    assert {answer.finish_reason for answer in results(waiting)} == {"abort"}
