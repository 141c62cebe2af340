"""Every pause mode on the real SGLang server with a request running and others waiting: what it promises, it keeps."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines.sglang_load import Stream, wait_until_waiting
from tests.engines.sglang_server import greedy_tokens, sglang
from tests.engines.test_sglang_cpu import DENSE, nudge
from tests.helpers.engines import Engine
from tests.helpers.tiny import tiny_model, tiny_tokenizer
from weightcast import WeightUpdater
from weightcast.errors import ConfigError

pytestmark = pytest.mark.engine

# Long enough that the server keeps pages of it, and that a stale one would change what follows.
PROMPT = [5 + (7 * number) % 400 for number in range(64)]
LONG, SHORT, SEEN = 1200, 12, 8
# Two implementations round differently: among 1,200 tokens there may be two that are equally good.
TIE_NATS = 1e-3
CONTEXT = 4096
ONE_AT_A_TIME = ("--max-running-requests=1", f"--context-length={CONTEXT}", f"--max-total-tokens={2 * CONTEXT}")
# Minutes of generation on two cores: `make test` plays the server with a prefix cache, `make engine-test` both.
BARE = pytest.param("bare", marks=pytest.mark.engine_full)
OPTIONS: dict[str, Any] = {"bucket_bytes": 300_000, "timeout_s": 120.0, "transport": "broadcast"}


class Served:
    """A server and the model whose weights it has."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self.engine = engine
        self.model = tiny_model(folder, max_position_embeddings=CONTEXT, **DENSE)
        self.version = 0

    def step(self, pause: str, count: int) -> tuple[Any, Stream, list[Stream]]:
        """Updates to weights that are a step of training away, while a request of ``count`` tokens runs and two wait.

        They start when the trainer has connected: on a loaded machine they might have ended before.

        Returns:
            The model that it served before, the request that ran and those that waited.
        """
        before = copy.deepcopy(self.model)
        self.version += 1
        nudge(self.model, seed=self.version)
        with WeightUpdater.connect(self.model, [self.engine.url], pause=pause, **OPTIONS) as updater:
            running, waiting = loaded(self.engine.url, count)
            report = updater.update(version=self.version)
        assert report.ok, report
        return before, running, waiting


class Servers(dict[str, Served]):
    """One with a prefix cache and one without, started when it is asked for.

    A second request waits for the first in both.
    """

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        super().__init__()
        self._folder = folder
        self._stack = stack

    def __missing__(self, cache: str) -> Served:
        options = ONE_AT_A_TIME if cache == "cached" else (*ONE_AT_A_TIME, "--disable-radix-cache")
        logs = self._folder / cache
        logs.mkdir()
        [engine] = self._stack.enter_context(sglang(logs, (self._folder, 1, options)))
        self[cache] = Served(engine, self._folder)
        return self[cache]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    folder = tmp_path_factory.mktemp("model")
    tiny_model(folder, max_position_embeddings=CONTEXT, **DENSE)
    tiny_tokenizer(folder)
    torch.set_num_threads(1)
    with ExitStack() as stack:
        yield Servers(folder, stack)


@torch.no_grad()
def chosen(model: Any, prompt: list[int], tokens: list[int]) -> list[bool]:
    """For each token whether the model would have chosen it after those before, or one as good but for rounding."""
    if not tokens:
        return []
    scores = model(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :].log_softmax(-1)
    came = scores.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return (scores.max(-1).values - came <= TIE_NATS).tolist()


def follows(model: Any, prompt: list[int], tokens: list[int]) -> bool:
    """True if the model would have chosen each of the tokens, one after the other."""
    return all(chosen(model, prompt, tokens))


def switched_at(old: Any, new: Any, stream: Stream) -> int:
    """After how many tokens the new weights took over, computing everything before anew; -1 if they never did so."""
    by_old, by_new = (chosen(model, stream.prompt, stream.tokens) for model in (old, new))
    count = next(count for count in range(len(by_new) + 1) if all(by_new[count:]))
    return count if all(by_old[:count]) else -1


def loaded(url: str, count: int) -> tuple[Stream, list[Stream]]:
    """One request that runs and has answered a little, and two that wait for it."""
    for _ in range(5):  # on a loaded machine the answer may end before the others have come
        running = Stream(url, PROMPT, count)
        running.wait_for(SEEN)
        waiting = [Stream(url, PROMPT[:number], SHORT) for number in (63, 40)]
        if wait_until_waiting(url, len(waiting), running):
            return running, waiting
        for stream in (running, *waiting):
            stream.ended()
    raise AssertionError("no request has run long enough for others to wait")


def new_requests_get_new_weights(served: Served) -> None:
    """Also those whose prompt was answered before, by the old weights."""
    prompts = [PROMPT, PROMPT[:40], [*PROMPT, 9, 8, 7]]
    for prompt, tokens in zip(prompts, greedy_tokens(served.engine, prompts, SHORT), strict=True):
        assert follows(served.model, prompt, tokens)


@pytest.mark.parametrize("cache", ["cached", BARE])
def test_abort_drops_what_runs_and_what_waits(servers: Servers, cache: str) -> None:
    served = servers[cache]
    old, running, waiting = served.step("abort", LONG)
    for stream in (running, *waiting):
        assert stream.ended().finish == "abort" or stream.failure, stream.finish
    assert follows(old, PROMPT, running.tokens)
    new_requests_get_new_weights(served)


@pytest.mark.parametrize("cache", ["cached", BARE])
def test_retract_keeps_requests_and_tokens_and_computes_their_cache_anew(servers: Servers, cache: str) -> None:
    served = servers[cache]
    old, running, waiting = served.step("retract", LONG)
    assert (running.ended().finish, len(running.tokens)) == ("length", LONG)
    assert SEEN <= switched_at(old, served.model, running) < LONG
    for stream in waiting:
        assert (stream.ended().finish, len(stream.tokens)) == ("length", SHORT)
        assert follows(served.model, stream.prompt, stream.tokens)
    new_requests_get_new_weights(served)


@pytest.mark.engine_full
def test_in_place_keeps_requests_tokens_and_cache_where_nothing_is_reused(servers: Servers) -> None:
    served = servers["bare"]
    old, running, waiting = served.step("in_place", LONG)
    assert (running.ended().finish, len(running.tokens)) == ("length", LONG)
    assert follows(old, PROMPT, running.tokens[:SEEN])
    assert not follows(old, PROMPT, running.tokens)
    for stream in waiting:
        assert follows(served.model, stream.prompt, stream.ended().tokens)
    new_requests_get_new_weights(served)


def test_in_place_is_refused_by_name_where_a_prefix_of_old_weights_would_be_reused(servers: Servers) -> None:
    served = servers["cached"]
    before = served.engine.post("/weights_checker", action="checksum")["per_engine_checksum"]
    with pytest.raises(ConfigError, match=r"pause='in_place'.*retract.*--disable-radix-cache"):
        WeightUpdater.connect(served.model, [served.engine.url], pause="in_place", **OPTIONS)
    assert served.engine.post("/weights_checker", action="checksum")["per_engine_checksum"] == before


class Steady:
    """Short requests without end, two at a time, while its body runs."""

    def __init__(self, url: str) -> None:
        self.streams: list[Stream] = []
        self._url = url
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,), daemon=True) for number in (50, 60)]

    def __enter__(self) -> Steady:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self, number: int) -> None:
        while not self._stop.is_set():
            self.streams.append(Stream(self._url, PROMPT[:number], SHORT))
            self.streams[-1].ended()


@pytest.mark.engine_full
@pytest.mark.parametrize("cache", ["cached", "bare"])
def test_wait_lets_requests_finish_although_there_is_never_a_moment_without_one(servers: Servers, cache: str) -> None:
    served = servers[cache]
    with Steady(served.engine.url) as steady:
        old, running, waiting = served.step("wait", LONG // 4)
    for stream in (running, *waiting):
        assert (stream.ended().finish, len(stream.tokens)) == ("length", stream.count)
        assert follows(old, stream.prompt, stream.tokens)
    for stream in steady.streams:
        assert (stream.finish, len(stream.tokens)) == ("length", stream.count), stream.failure
        assert switched_at(old, served.model, stream) >= 0
    new_requests_get_new_weights(served)
