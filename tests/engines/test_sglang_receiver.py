"""Our receiver inside the real SGLang server on a CPU, under load, at both loops; transformers says what is right."""

from __future__ import annotations

import copy
import itertools
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest
import torch
from transformers import DynamicCache

from tests.engines.overlays import HOST_WEB, NEWEST_WEB, NIXL
from tests.engines.sglang_load import Stream, wait_until_waiting
from tests.engines.sglang_server import checksum, generate, greedy_tokens, sglang
from tests.engines.test_sglang_cpu import COUNT, DENSE, MOE, PROMPTS, answers, nudge, version_of
from tests.engines.test_sglang_pauses import CONTEXT, LONG, ONE_AT_A_TIME, PROMPT, SEEN, SHORT, follows, switched_at
from tests.engines.trainer import update_directly
from tests.helpers.clock import PATIENCE_S
from tests.helpers.engines import Engine, weightcast
from tests.helpers.harness import BeforeCommit, wait_for
from tests.helpers.metrics import series
from tests.helpers.ranks import Ranks
from tests.helpers.tiny import tiny_model, tiny_tokenizer
from weightcast.errors import ConfigError, UpdateFailed
from weightcast.exporters.checkpoint import CheckpointExporter
from weightcast.lab.connect import connect as connect_in_lab
from weightcast.plugins.sglang.endpoints import ROUTES

pytestmark = pytest.mark.engine

OPTIONS: dict[str, Any] = {"bucket_bytes": 300_000, "timeout_s": PATIENCE_S}
MODES = ("retract", "in_place", "wait", "abort")


Started = TypeVar("Started")


class Served:
    """A server with our receiver, and the model whose weights it has."""

    def __init__(self, engine: Engine, model: Any) -> None:
        self.engine = engine
        self.model = model
        self.version = 0

    def step(self, pause: str, via: str = "broadcast") -> Any:
        """Updates to weights that are a step of training away; returns the model that was served before."""
        return self.step_under(lambda: None, pause, via)[0]

    def step_under(self, start: Callable[[], Started], pause: str, via: str = "broadcast") -> tuple[Any, Started]:
        """Does so under a load that starts before the commit, so that it lasts longer than the update."""
        before = copy.deepcopy(self.model)
        self.version += 1
        nudge(self.model, seed=self.version)
        started = BeforeCommit(start)
        options = OPTIONS | {"pause": pause, "transport": via, "progress": started}
        with connect_in_lab(self.model, [self.engine.url], **options) as updater:
            report = updater.update(version=self.version)
        [row] = report.targets
        assert (row.status, row.proof, row.version_after) == ("serving", "resident", self.version), report
        return before, started.result

    def info(self) -> dict[str, Any]:
        return self.engine.get("/weightcast/info")

    def until(self, state: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while (now := self.info())["state"] != state:
            assert time.monotonic() < deadline, now
            time.sleep(0.05)

    def new_requests_get_new_weights(self) -> None:
        """Also those whose prompt was answered before, by the old weights."""
        prompts = [PROMPT, PROMPT[:40], [*PROMPT, 9, 8, 7]]
        for prompt, tokens in zip(prompts, greedy_tokens(self.engine, prompts, SHORT), strict=True):
            assert follows(self.model, prompt, tokens)
        assert version_of(self.engine) == str(self.version)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {"dense": tmp_path_factory.mktemp("dense"), "moe": tmp_path_factory.mktemp("moe")}
    tiny_model(found["dense"], max_position_embeddings=CONTEXT, **DENSE)
    tiny_model(found["moe"], family="qwen3_moe", **MOE)
    for folder in found.values():
        tiny_tokenizer(folder)
    return found


@pytest.fixture(scope="module")
def servers(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Served]]:
    """A dense model on one rank with the overlap loop, and experts on two ranks with the normal one."""
    torch.set_num_threads(1)
    settings = [(folders["dense"], 1, ONE_AT_A_TIME), (folders["moe"], 2, ("--disable-overlap-schedule",))]
    with sglang(tmp_path_factory.mktemp("logs"), *settings, receiver=True) as (dense, moe):
        found = {
            "dense": Served(dense, tiny_model(folders["dense"], max_position_embeddings=CONTEXT, **DENSE)),
            "moe": Served(moe, tiny_model(folders["moe"], family="qwen3_moe", **MOE)),
        }
        found["dense"].step("in_place")  # a trainer's first update compiles kernels
        yield found


@pytest.fixture
def dense(servers: dict[str, Served]) -> Served:
    return servers["dense"]


@pytest.fixture
def moe(servers: dict[str, Served]) -> Served:
    return servers["moe"]


def loaded(served: Served, count: int) -> tuple[Stream, list[Stream]]:
    """One request that runs and has answered a little, and two that wait for it."""
    url = served.engine.url
    for _ in range(5):  # on a loaded machine the answer may end before the others have come
        running = Stream(url, PROMPT, count)
        running.wait_for(SEEN)
        waiting = [Stream(url, PROMPT[:number], SHORT) for number in (63, 40)]
        if wait_until_waiting(url, len(waiting), running):
            return running, waiting
        for stream in (running, *waiting):
            stream.ended()
    raise AssertionError("no request has run long enough for others to wait")


def new_from(stream: Stream, version: int) -> int:
    """The first token of a version, as SGLang says it; all before it are of the version before."""
    old, new = stream.meta["weight_versions"]
    assert (old["version"], new["version"]) == (str(version - 1), str(version))
    assert (old["start"], old["end"], new["end"]) == (0, new["start"], len(stream.tokens))
    return new["start"]


@torch.no_grad()
def kept_in_place(old: Any, new: Any, stream: Stream, count: int) -> bool:
    """Whether the old weights chose the first tokens, and the new ones the others with the old weights' cache."""
    ids = torch.tensor([stream.prompt + stream.tokens[:-1]])
    place = len(stream.prompt) + count - 1
    cache = DynamicCache()
    first = old(ids[:, :place], cache=cache)
    rest = new(ids[:, place:], cache=cache)
    chosen = torch.cat([first.logits[0, len(stream.prompt) - 1 :], rest.logits[0]]).argmax(-1)
    return chosen.tolist() == stream.tokens


def stream_of(engine: Engine) -> Stream:
    """One request that runs and has answered a little."""
    running = Stream(engine.url, PROMPTS[0], 100)
    running.wait_for(SEEN)
    return running


def test_retract_keeps_tokens_and_computes_the_cache_anew_with_the_prefix_cache_on(dense: Served) -> None:
    old, (running, waiting) = dense.step_under(lambda: loaded(dense, LONG), "retract")
    assert (running.ended().finish, len(running.tokens)) == ("length", LONG), running.failure
    assert SEEN <= switched_at(old, dense.model, running) < LONG
    count = new_from(running, dense.version)
    assert follows(old, PROMPT, running.tokens[:count])
    assert follows(dense.model, [*PROMPT, *running.tokens[:count]], running.tokens[count:])
    for stream in waiting:
        assert (stream.ended().finish, len(stream.tokens)) == ("length", SHORT)
        assert follows(dense.model, stream.prompt, stream.tokens)
    dense.new_requests_get_new_weights()


def test_in_place_keeps_requests_and_their_cache_and_gives_it_to_no_new_request(dense: Served) -> None:
    before = generate(dense.engine, [PROMPT], 1)
    assert generate(dense.engine, [PROMPT], 1)[0]["meta_info"]["cached_tokens"] > 0, before
    old, (running, waiting) = dense.step_under(lambda: loaded(dense, LONG), "in_place")
    [fresh] = generate(dense.engine, [PROMPT], 1)
    assert (running.ended().finish, len(running.tokens)) == ("length", LONG), running.failure
    assert follows(old, PROMPT, running.tokens[:SEEN])
    assert not follows(old, PROMPT, running.tokens)
    assert kept_in_place(old, dense.model, running, new_from(running, dense.version))
    assert fresh["meta_info"]["cached_tokens"] == 0 or follows(dense.model, PROMPT, fresh["output_ids"])
    for stream in waiting:
        assert follows(dense.model, stream.prompt, stream.ended().tokens)
    dense.new_requests_get_new_weights()


def test_abort_drops_what_runs_and_what_waits(dense: Served) -> None:
    old, (running, waiting) = dense.step_under(lambda: loaded(dense, LONG), "abort")
    for stream in (running, *waiting):
        assert stream.ended().finish == "abort" or stream.failure, stream.finish
    assert SEEN <= len(running.tokens) < LONG
    assert follows(old, PROMPT, running.tokens)
    dense.new_requests_get_new_weights()


def test_wait_lets_requests_finish(dense: Served) -> None:
    old, (running, waiting) = dense.step_under(lambda: loaded(dense, LONG), "wait")
    for stream in (running, *waiting):
        assert (stream.ended().finish, len(stream.tokens)) == ("length", stream.count)
        assert follows(old, stream.prompt, stream.tokens)
    dense.new_requests_get_new_weights()


def test_a_server_that_its_operator_paused_stays_paused(dense: Served) -> None:
    running = Stream(dense.engine.url, PROMPT, LONG)
    running.wait_for(SEEN)
    dense.engine.post("/pause_generation", mode="retract")
    old = dense.step("retract")
    dense.step("in_place")
    count = len(running.tokens)
    later = Stream(dense.engine.url, PROMPT[:20], SHORT)
    assert dense.info()["paused"]
    dense.engine.post("/continue_generation")
    assert (running.ended().finish, len(running.tokens)) == ("length", LONG), running.failure
    assert follows(old, PROMPT, running.tokens[:count])
    assert follows(dense.model, [*PROMPT, *running.tokens[:count]], running.tokens[count:])
    assert follows(dense.model, later.prompt, later.ended().tokens)


def push_and_hold(folder: str, url: str, version: int, mark: str) -> None:
    """A trainer that stands still after its first bucket, until the test kills it."""

    def hold(done: int, total: int) -> None:
        Path(mark).touch()
        threading.Event().wait()

    with (
        CheckpointExporter(folder) as exporter,
        connect_in_lab(exporter, [url], bucket_bytes=100_000, progress=hold, timeout_s=PATIENCE_S) as updater,
    ):
        updater.update(version=version)


def test_a_trainer_that_is_killed_half_way_changes_nothing(dense: Served, tmp_path: Path) -> None:
    tiny_model(tmp_path, seed=77, max_position_embeddings=CONTEXT, **DENSE)
    mark = tmp_path / "first bucket"
    trainer = Ranks(1)
    try:
        trainer.start(push_and_hold, str(tmp_path), dense.engine.url, dense.version + 1, str(mark))
        deadline = time.monotonic() + PATIENCE_S
        while not mark.exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert dense.info()["state"] == "updating"
        dense.new_requests_get_new_weights()  # while buckets wait
        trainer.processes[0].kill()
        dense.until("serving")
    finally:
        trainer.close()
    dense.new_requests_get_new_weights()
    dense.step("retract", "ipc")
    dense.new_requests_get_new_weights()


WAYS = ("ipc", "direct", "broadcast")
# Each mode once and each way at least once, or everything with everything.
PUSHES = [
    pytest.param(list(zip(MODES, (*WAYS, "ipc"), strict=True)), id="some"),
    pytest.param([(mode, way) for way in WAYS for mode in MODES], id="all", marks=pytest.mark.engine_full),
]


@pytest.mark.parametrize("pushes", PUSHES)
def test_pushes_in_every_mode_under_eight_streams(moe: Served, pushes: list[tuple[str, str]]) -> None:
    stop, streams = threading.Event(), []

    def ask(number: int) -> None:
        while not stop.is_set():
            stream = Stream(moe.engine.url, [5 + number, 6, 7, 8], 20 + 7 * number)
            streams.append(stream)
            stream.ended()

    clients = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    before = copy.deepcopy(moe.model)
    for client in clients:
        client.start()
    try:
        for mode, way in pushes:
            moe.step(mode, way)
    finally:
        stop.set()
        for client in clients:
            client.join(PATIENCE_S)
    cut = [stream for stream in streams if stream.finish == "abort"]
    assert len(cut) < len(streams)
    for stream in streams:
        assert not stream.failure
        assert stream in cut or (stream.finish, len(stream.tokens)) == ("length", stream.count)
    assert greedy_tokens(moe.engine, PROMPTS, COUNT) == answers(moe.model) != answers(before)
    assert version_of(moe.engine) == str(moe.version)


def test_the_command_line_sees_an_engine_with_our_receiver(moe: Served, tmp_path: Path) -> None:
    moe.version += 1
    moe.model = tiny_model(tmp_path, family="qwen3_moe", seed=5, **MOE)
    done = weightcast("push", tmp_path, "--to", moe.engine.url, "--version", str(moe.version), "--pause", "in_place")
    assert done.returncode == 0, done.stderr
    assert "proof resident" in done.stdout + done.stderr
    assert greedy_tokens(moe.engine, PROMPTS, COUNT) == answers(moe.model)
    same = weightcast("verify", tmp_path, "--at", moe.engine.url)
    assert same.returncode == 0, same.stdout + same.stderr
    tiny_model(tmp_path, family="qwen3_moe", seed=6, **MOE)
    assert weightcast("verify", tmp_path, "--at", moe.engine.url).returncode != 0


def test_weights_of_another_shape_are_refused_and_nothing_moves(moe: Served, tmp_path: Path) -> None:
    before = greedy_tokens(moe.engine, PROMPTS, COUNT)
    other = tiny_model(tmp_path, family="qwen3_moe", **MOE | {"num_experts": 4})
    with pytest.raises(ConfigError, match=r"do not fit.*experts\.4"):
        connect_in_lab(other, [moe.engine.url], **OPTIONS)
    assert moe.info()["state"] == "serving"
    assert greedy_tokens(moe.engine, PROMPTS, COUNT) == before


def test_sglangs_own_updates_are_refused_and_change_nothing(moe: Served) -> None:
    moe.step("retract", "ipc")
    before, sums = moe.info(), checksum(moe.engine)
    asked = {path: {"model_path": "elsewhere"} for path in ROUTES}
    # SGLang's test tool, which fills all weights with random numbers.
    for path, body in {**asked, "/weights_checker": {"action": "reset_tensors"}}.items():
        answer = moe.engine.client.post(moe.engine.url + path, json=body)
        assert (answer.status_code, "/weightcast" in answer.text) == (409, True), (path, answer.text)
    assert moe.info() == before
    assert before["digest"]
    assert checksum(moe.engine) == sums
    assert greedy_tokens(moe.engine, PROMPTS, COUNT) == answers(moe.model)


def test_a_rank_that_is_killed_is_named_and_sglang_ends(moe: Served) -> None:
    """The last test of this server."""
    [_, rank] = moe.info()["ranks"]
    family = moe.engine.family()

    def kill(done: int, total: int) -> None:
        if psutil.pid_exists(rank["pid"]):
            os.kill(rank["pid"], signal.SIGKILL)

    with (
        connect_in_lab(moe.model, [moe.engine.url], progress=kill, **OPTIONS) as updater,
        pytest.raises(UpdateFailed, match=rf"rank 1 \(pid {rank['pid']}\) is gone|the connection broke"),
    ):
        updater.update(version=moe.version + 1)
    assert moe.engine.process.wait(PATIENCE_S) != 0
    _, alive = psutil.wait_procs(family, timeout=PATIENCE_S)
    assert not alive


@pytest.mark.engine_full
class TestKilledRank:
    """One of two ranks is killed while weights arrive; SGLang then ends itself."""

    @pytest.mark.parametrize("share", [0.1, 1.0], ids=["after the first bucket", "after the last bucket"])
    @pytest.mark.parametrize("transport", ["ipc", "broadcast"])
    def test_the_rank_is_named_and_the_other_engine_goes_on(
        self, folders: dict[str, Path], tmp_path: Path, transport: str, share: float
    ) -> None:
        settings = [(folders["dense"], 2, ()), (folders["dense"], 1, ())]
        with sglang(tmp_path, *settings, receiver=True) as (victim, other):
            model = tiny_model(folders["dense"], max_position_embeddings=CONTEXT, **DENSE)
            old = answers(model)
            assert greedy_tokens(other, PROMPTS, COUNT) == old
            nudge(model, seed=1)
            [_, rank] = victim.get("/weightcast/info")["ranks"]
            family = victim.family()

            def kill(done: int, total: int) -> None:
                if done >= share * total and psutil.pid_exists(rank["pid"]):
                    os.kill(rank["pid"], signal.SIGKILL)

            urls = [victim.url, other.url]
            options: dict[str, Any] = OPTIONS | {"transport": transport, "progress": kill, "on_failure": "quarantine"}
            with connect_in_lab(model, urls, **options) as updater:
                began = time.monotonic()
                report = updater.update(version=1)
                assert time.monotonic() - began < PATIENCE_S / 2
                rows = {row.url: row for row in report.targets}
                assert rows[victim.url].status in ("quarantined", "unknown"), report
                # SGLang ends its server when a rank dies, now and then before the rank could be named.
                assert re.search(rf"rank 1 \(pid {rank['pid']}\) is gone|the connection broke", str(report)), report
                assert (rows[other.url].status, rows[other.url].proof) == ("serving", "resident"), report
                assert greedy_tokens(other, PROMPTS, COUNT) == answers(model) != old
                assert victim.process.wait(PATIENCE_S) != 0
                _, alive = psutil.wait_procs(family, timeout=PATIENCE_S)
                assert not alive
                nudge(model, seed=2)
                assert updater.update(version=2).targets[-1].status == "serving"
                assert greedy_tokens(other, PROMPTS, COUNT) == answers(model)


def tags(*names: str) -> dict[str, list[str]]:
    return {"tags": list(names)}


@pytest.mark.engine_full
class TestSleep:
    """SGLang's own sleep, with a stand-in for torch_memory_saver that loses what it does not keep."""

    def refused(self, engine: Engine, path: str, words: str, **body: Any) -> None:
        answer = engine.client.post(engine.url + path, json=body)
        assert answer.status_code == 400, answer.text
        assert words in answer.text

    @pytest.mark.parametrize("version", ["0.5.23", "0.5.17"])
    def test_weights_that_sleep_discarded_come_back_by_an_update(
        self, folders: dict[str, Path], tmp_path: Path, version: str
    ) -> None:
        settings = (folders["dense"], 2, ("--enable-memory-saver", f"--context-length={CONTEXT}"))
        with sglang(tmp_path, settings, receiver=True, version=version) as (engine,):
            served = Served(engine, tiny_model(folders["dense"], max_position_embeddings=CONTEXT, **DENSE))
            running = Stream(engine.url, PROMPT, 400)
            running.wait_for(SEEN)
            self.refused(engine, "/release_memory_occupation", "requests are running")
            assert running.ended().finish == "length"
            served.step("in_place")

            engine.post("/release_memory_occupation")
            info = served.info()
            assert (info["state"], info["version"], info["paused"]) == ("quarantined", None, True)
            assert "asleep: cuda_graph, kv_cache, weights" in info["message"]
            self.refused(engine, "/release_memory_occupation", "sleeps already: weights", **tags("weights"))
            waiting = Stream(engine.url, PROMPT, SHORT)
            with pytest.raises(UpdateFailed, match=r"the engine is asleep.*resume_memory_occupation"):
                served.step("retract")

            engine.post("/resume_memory_occupation", **tags("weights"))
            self.refused(engine, "/resume_memory_occupation", "is awake: weights", **tags("weights"))
            served.step("retract")
            info = served.info()
            assert (info["state"], info["paused"], len(waiting.tokens)) == ("serving", True, 0), info
            engine.post("/resume_memory_occupation")
            assert follows(served.model, PROMPT, waiting.ended().tokens)
            assert (waiting.finish, served.info()["message"]) == ("length", "")
            served.new_requests_get_new_weights()

            engine.post("/release_memory_occupation")
            engine.post("/resume_memory_occupation")
            waiting = Stream(engine.url, PROMPT, SHORT)
            assert served.info()["paused"]  # nobody may be answered from what came back
            served.step("in_place")
            assert follows(served.model, PROMPT, waiting.ended().tokens)
            served.new_requests_get_new_weights()

    def test_weights_with_a_copy_on_the_host_serve_again_by_themselves(
        self, folders: dict[str, Path], tmp_path: Path
    ) -> None:
        options = ("--enable-memory-saver", "--enable-weights-cpu-backup")
        with sglang(tmp_path, (folders["dense"], 1, options), receiver=True) as (engine,):
            served = Served(engine, tiny_model(folders["dense"], max_position_embeddings=CONTEXT, **DENSE))
            served.step("abort")

            def sleep(done: int, total: int) -> None:
                self.refused(engine, "/release_memory_occupation", "being updated by process")

            nudge(served.model, seed=99)
            served.version += 1
            with connect_in_lab(served.model, [engine.url], progress=sleep, **OPTIONS) as updater:
                updater.update(version=served.version)
            engine.post("/release_memory_occupation")
            assert (served.info()["state"], served.info()["version"]) == ("serving", served.version)
            engine.post("/resume_memory_occupation")
            served.new_requests_get_new_weights()
            served.step("retract")
            served.new_requests_get_new_weights()


@pytest.mark.engine_full
class TestMore:
    """Tests for which `make test` has no time."""

    @pytest.mark.parametrize("version", ["0.5.17", "0.5.23"])
    @pytest.mark.parametrize("loop", ["normal", "overlap"])
    def test_two_ranks_of_both_versions(
        self, folders: dict[str, Path], tmp_path: Path, version: str, loop: str
    ) -> None:
        options = ("--disable-overlap-schedule",) if loop == "normal" else ()
        with sglang(tmp_path, (folders["dense"], 2, options), receiver=True, version=version) as (engine,):
            served = Served(engine, tiny_model(folders["dense"], max_position_embeddings=CONTEXT, **DENSE))
            for mode in MODES:
                _, running = served.step_under(lambda: stream_of(engine), mode, "ipc")
                assert running.ended().finish in ("length", "abort"), running.failure
                assert greedy_tokens(engine, PROMPTS, COUNT) == answers(served.model)

    @pytest.mark.parametrize("version", ["0.5.17", "0.5.23"])
    def test_each_rank_takes_its_share_from_two_trainer_ranks(
        self, folders: dict[str, Path], tmp_path: Path, version: str
    ) -> None:
        models = [tiny_model(folders["moe"], family="qwen3_moe", **MOE) for _ in range(2)]
        nudge(models[1], seed=1)
        checkpoints = [folders["moe"], tmp_path / "other"]
        models[1].save_pretrained(checkpoints[1])
        expected = [answers(model) for model in models]
        assert expected[0] != expected[1]
        ways = [{"direct_by": "memory"}, {"direct_by": "messages"}, {"direct_by": "shards", "keep_mapped": True}]
        ways += [{"transport": "rdma"}]
        settings = (folders["moe"], 2, ("--disable-overlap-schedule",))
        started = sglang(tmp_path, settings, receiver=True, version=version, wheels=[NIXL])
        with started as (engine,), closing(Ranks(2)) as ranks:
            for number, way in enumerate(ways, start=1):
                weights = str(checkpoints[number % 2])
                said = ranks.run(update_directly, weights, engine.url, number, way)
                (row,) = json.loads(said[0])["targets"]
                assert (row["proof"], row["version_after"]) == ("resident", number)
                assert row["transport"] == way.get("transport", "direct")
                assert greedy_tokens(engine, PROMPTS, COUNT) == expected[number % 2]

    @pytest.mark.parametrize("version", ["0.5.17", "0.5.23"])
    def test_data_parallel_engines_switch_in_one_session(
        self, folders: dict[str, Path], tmp_path: Path, version: str
    ) -> None:
        settings = (folders["dense"], 1, ("--dp-size=2",))
        with sglang(tmp_path, settings, receiver=True, version=version) as (engine,):
            served = Served(engine, tiny_model(folders["dense"], max_position_embeddings=CONTEXT, **DENSE))
            assert len({rank["pid"] for rank in served.info()["ranks"]}) == 2
            sampling = {"temperature": 0, "max_new_tokens": SHORT, "ignore_eos": True}
            for mode in MODES:
                # SGLang gives requests to its engines in turn.
                _, running = served.step_under(lambda: [stream_of(engine), stream_of(engine)], mode, "ipc")
                for stream in running:
                    assert stream.ended().finish in ("length", "abort"), stream.failure
                for number in range(2):
                    answer = engine.post(
                        "/generate", input_ids=PROMPTS[0], sampling_params=sampling, routed_dp_rank=number
                    )
                    assert answer["meta_info"]["dp_rank"] == number
                    assert follows(served.model, PROMPTS[0], answer["output_ids"])
                    assert answer["meta_info"]["weight_version"] == str(served.version)

    @pytest.mark.parametrize("family", ["qwen3", "llama"])
    def test_a_tied_head_over_a_padded_vocabulary(self, tmp_path: Path, family: str) -> None:
        settings = DENSE | {"vocab_size": 500, "tie_word_embeddings": True}
        model = tiny_model(tmp_path, family=family, **settings)
        tiny_tokenizer(tmp_path)
        with sglang(tmp_path, (tmp_path, 2, ()), receiver=True) as (engine,):
            served = Served(engine, model)
            for mode in ("in_place", "retract"):
                old = served.step(mode, "ipc")
                assert greedy_tokens(engine, PROMPTS, COUNT) == answers(served.model) != answers(old)

    def test_two_stages_switch_in_place_and_refuse_to_retract(self, folders: dict[str, Path], tmp_path: Path) -> None:
        options = ("--pp-size=2", "--disable-overlap-schedule")
        with sglang(tmp_path, (folders["dense"], 1, options), receiver=True) as (engine,):
            served = Served(engine, tiny_model(folders["dense"], max_position_embeddings=CONTEXT, **DENSE))
            _, running = served.step_under(lambda: stream_of(engine), "in_place")
            assert running.ended().finish == "length"
            assert greedy_tokens(engine, PROMPTS, COUNT) == answers(served.model)
            for mode in ("retract", "wait", "abort"):
                with pytest.raises(ConfigError, match=rf"pause='{mode}'.*pipeline parallelism.*in_place"):
                    served.step(mode)
                served.version -= 1
            assert served.info()["state"] == "serving"

    def test_metrics_are_on_sglangs_own_page(self, folders: dict[str, Path], tmp_path: Path) -> None:
        with sglang(tmp_path, (folders["dense"], 2, ("--enable-metrics",)), receiver=True) as (engine,):
            served = Served(engine, tiny_model(folders["dense"], max_position_embeddings=CONTEXT, **DENSE))
            for transport in ("ipc", "broadcast"):
                served.step("abort", transport)
            generate(engine, [PROMPT], 1)
            page = engine.client.get(f"{engine.url}/metrics").text
            assert re.search(r"^sglang:\w+\{.*model_name=", page, re.MULTILINE)
            assert not [line for line in page.splitlines() if line.startswith("weightcast_") and "pid=" in line]
            found = series(page)
            name = "tiny"
            assert found["weightcast_engine_version", name] == served.version
            assert found["weightcast_engine_state", name, "serving"] == 1
            assert found["weightcast_engine_updates_finished_total", name, "committed"] == 2
            for phase in ("wire", "load", "verify", "pause", "switch", "resume", "total"):
                for transport in ("ipc", "broadcast"):
                    assert found["weightcast_engine_update_seconds_count", name, phase, transport] == 1
            log = tmp_path / "sglang-0.log"
            wait_for(lambda: "version 2 serves; stall" in log.read_text(), "the engine's line of the update")

    def test_a_server_with_an_admin_key_asks_for_it(self, folders: dict[str, Path], tmp_path: Path) -> None:
        options = ("--admin-api-key=admin",)
        with sglang(tmp_path, (folders["dense"], 1, options), receiver=True) as (engine,):

            def status(**headers: str) -> int:
                return engine.client.get(f"{engine.url}/weightcast/info", headers=headers).status_code

            assert status() == 401
            assert status(Authorization="Bearer wrong") == 401
            assert status(Authorization="Bearer admin") == 200
            assert engine.get("/server_info")["admin_api_key"] == "admin"  # docs/security.md warns of it

    # A fresh install of SGLang gets the newest FastAPI.  The other has the last Starlette that reads a path from the
    # Host header.
    @pytest.mark.parametrize("web", [NEWEST_WEB, HOST_WEB], ids=lambda web: web[0])
    def test_weights_are_pushed_with_the_admin_key_and_no_other(
        self, folders: dict[str, Path], tmp_path: Path, web: tuple[str, ...]
    ) -> None:
        tiny_model(tmp_path / "other", seed=1, max_position_embeddings=CONTEXT, **DENSE)
        options = ("--admin-api-key=admin", "--api-key=user")
        with sglang(tmp_path, (folders["dense"], 1, options), receiver=True, wheels=web) as (engine,):
            for host, key in itertools.product(("", "x/health?"), ("", "user")):
                headers = {"host": host or "engine", **({"authorization": f"Bearer {key}"} if key else {})}
                for method, path in (("GET", "info"), ("GET", "digests"), ("POST", "open"), ("POST", "apply")):
                    answer = engine.client.request(method, f"{engine.url}/weightcast/{path}", headers=headers)
                    assert (host, key, path, answer.status_code) == (host, key, path, 401)
            before = engine.client.get(f"{engine.url}/weightcast/digests", headers={"authorization": "Bearer admin"})
            arguments = ("push", tmp_path / "other", "--to", engine.url, "--version", 1, "--via", "ipc")
            assert weightcast(*arguments, "--api-key", "user").returncode == 1
            pushed = weightcast(*arguments, "--api-key", "admin")
            assert pushed.returncode == 0, pushed.stderr
            after = engine.client.get(f"{engine.url}/weightcast/digests", headers={"authorization": "Bearer admin"})
            assert (before.status_code, after.status_code) == (200, 200)
            assert before.json() != after.json()

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            (("--enable-lora", "--max-lora-rank=8", "--lora-target-modules=q_proj"), "LoRA adapters"),
            (("--tokenizer-worker-num=2",), "several tokenizer workers"),
            (("--load-format=dummy",), "has no checkpoint to read"),
            # Its own way to new weights would leave our version and digest as they were.
            (("--grpc-port=30001",), "a gRPC server beside HTTP"),
        ],
    )
    def test_what_was_not_shown_to_be_right_does_not_start(
        self, folders: dict[str, Path], tmp_path: Path, options: tuple[str, ...], words: str
    ) -> None:
        with (
            pytest.raises(AssertionError, match=rf"(?s)did not start.*{words}"),
            sglang(tmp_path, (folders["dense"], 1, options), receiver=True),
        ):
            pass
