"""Our receiver inside LMDeploy's whole server on a CPU, under load; transformers says what is right."""

from __future__ import annotations

import copy
import itertools
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch

from tests.e2e.test_peer_copy import at_first_chunk
from tests.e2e.test_peer_copy import relay as passing_chunks
from tests.engines.lmdeploy_receiver_server import (
    CONTEXT,
    LmdeployStream,
    choices,
    command,
    end,
    expected,
    fresh,
    lmdeploy,
    lmdeploy_in_ray,
    question,
    start_in_ray,
)
from tests.engines.overlays import HOST_WEB, NEWEST_WEB
from tests.engines.test_sglang_cpu import nudge
from tests.helpers.clock import PATIENCE_S
from tests.helpers.engines import Engine, weightcast
from tests.helpers.harness import BeforeCommit, wait_for
from tests.helpers.metrics import series
from tests.helpers.raycluster import HEAD, HIGH, LOW
from tests.helpers.tiny import tiny_model, tiny_tokenizer
from weightcast import ConfigError, Target, UpdateFailed, copy_from_peer
from weightcast.comm.ports import quiet_port
from weightcast.lab.connect import connect as connect_in_lab

pytestmark = [pytest.mark.engine_full]

MODES = ("retract", "in_place", "wait", "abort")
PROMPTS = ([5, 6, 7, 8], [9, 8, 7, 6, 5, 4], [20 + number for number in range(100)])
COUNT, SEEN, LONG = 12, 6, 3900
GROUP = {"group_name": "update", "backend": "gloo"}
# What trainers send that speak LMDeploy's own protocol.
OWN: dict[str, dict[str, Any]] = {
    "/update_weights": {"serialized_named_tensors": [""], "load_format": "flattened_bucket", "finished": True},
    "/update_weights_from_ipc": {"zmq_handles": {}},
    "/init_weights_update_group": GROUP
    | {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2},
    "/update_weights_from_distributed": GROUP
    | {"names": ["model.norm.weight"], "dtypes": ["float32"], "shapes": [[64]]},
    "/destroy_weights_update_group": GROUP,
}


def model_in(folder: Path, *, seed: int = 0, **changes: Any) -> Any:
    """A model whose answers LMDeploy and transformers agree on: no row of its embeddings is padding."""
    settings: dict[str, Any] = {"max_position_embeddings": CONTEXT, "pad_token_id": None}
    return tiny_model(folder, seed=seed, **settings | changes)


def save(model: Any, folder: Path) -> Path:
    """Writes a checkpoint of a model; returns its folder."""
    model.save_pretrained(folder)
    return folder


class Served:
    """A server with our receiver, and the model whose weights it has."""

    def __init__(self, engine: Engine, model: Any, *, key: str | None = None) -> None:
        self.engine, self.model, self.version = engine, model, 0
        self.target = Target(engine.url, api_key=key)

    def step(self, pause: Any, via: Any = "ipc", **more: Any) -> Any:
        """Updates to weights that are a step of training away; returns the model that was served before."""
        before, new = self.model, copy.deepcopy(self.model)
        nudge(new, seed=self.version + 1)
        options = {"transport": via, "bucket_bytes": 300_000, "timeout_s": PATIENCE_S} | more
        with connect_in_lab(new, [self.target], pause=pause, **options) as updater:
            report = updater.update(version=self.version + 1)
        self.version += 1
        self.model = new
        [row] = report.targets
        assert (row.status, row.proof, row.version_after) == ("serving", "resident", self.version), report
        assert row.not_updated == (), "the scales of a cache that has none are constants"
        return before

    def info(self) -> dict[str, Any]:
        return self.engine.client.get(self.engine.url + "/weightcast/info").json()

    def ask(self, path: str, **body: Any) -> Any:
        return self.engine.client.post(self.engine.url + path, json=body)

    def refused(self, path: str, words: str) -> None:
        answer = self.ask(path)
        assert (answer.status_code, words in answer.text) == (409, True), answer.text

    def answers_with_its_weights(self) -> None:
        assert fresh(self.engine, PROMPTS, COUNT) == expected(self.model, PROMPTS, COUNT)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server for all tests here."""
    folder = tmp_path_factory.mktemp("lmdeploy")
    model = model_in(folder)
    tiny_tokenizer(folder)
    with lmdeploy(folder, folder / "server.log") as engine:
        yield Served(engine, model)


def switched_at(old: Any, new: Any, stream: LmdeployStream) -> int:
    """After how many tokens the new weights took over; fails if the answer is not one of the old, then of the new."""
    by_old, by_new = (choices(model, stream.prompt, stream.tokens) for model in (old, new))
    pairs = zip(by_old, stream.tokens, strict=True)
    count = next((place for place, (old_one, came) in enumerate(pairs) if old_one != came), len(by_old))
    assert by_new[count:] == stream.tokens[count:], "neither the old weights nor the new ones say this"
    return count


def keeps_its_promise(served: Served, mode: str, via: str = "ipc", *, count: int = LONG) -> None:
    """Updates a server that is answering, and looks at what its clients got."""

    def load() -> list[LmdeployStream]:
        streams = [LmdeployStream(served.engine.url, prompt, 60 if mode == "wait" else count) for prompt in PROMPTS]
        for stream in streams:
            stream.wait_for(SEEN)
        return streams

    running = BeforeCommit(load)
    before = served.step(mode, via, progress=running)
    for stream in running.result or ():
        stream.cut_after(SEEN)
        if mode in ("abort", "wait"):
            assert (stream.finish, stream.failure) == ("abort" if mode == "abort" else "length", "")
            assert choices(before, stream.prompt, stream.tokens) == stream.tokens
            continue
        assert not stream.finish, "the answer was over before the switch"
        if mode == "retract":
            assert SEEN <= switched_at(before, served.model, stream) < len(stream.tokens)
        else:
            assert choices(before, stream.prompt, stream.tokens) != stream.tokens
    served.answers_with_its_weights()


def gives_up(served: Served) -> None:
    """An update whose trainer raises in the middle."""

    def fail(done: int, total: int) -> None:
        raise RuntimeError("the learner has failed")

    before = served.info()
    with pytest.raises(RuntimeError, match="the learner has failed"):
        served.step("retract", progress=fail)
    now = served.info()
    assert (now["state"], now["version"], now["digest"]) == ("serving", before["version"], before["digest"])
    served.answers_with_its_weights()


@pytest.mark.parametrize("mode", MODES)
def test_each_mode_keeps_its_promise_with_requests_running(served: Served, mode: str) -> None:
    served.answers_with_its_weights()
    keeps_its_promise(served, mode)


def test_a_late_server_copies_what_a_busy_one_serves(served: Served, tmp_path: Path) -> None:
    served.step("in_place")
    with lmdeploy(served.engine.folder, tmp_path / "late.log") as late:
        before = fresh(late, PROMPTS, COUNT)
        running = LmdeployStream(served.engine.url, PROMPTS[0], LONG)
        with passing_chunks(served.engine.url, at_first_chunk(lambda: running.wait_for(SEEN))) as url:
            done = copy_from_peer(Target(late.url), Target(url), timeout_s=PATIENCE_S)
        count = len(running.tokens)
        running.cut_after(SEEN)
        assert len(running.tokens) >= count + SEEN
        assert (done.version, done.digest, done.ranks) == (served.version, served.info()["digest"], 1)
        assert done.proven == len(late.digests())
        assert late.digests() == served.engine.digests()
        assert fresh(late, PROMPTS, COUNT) == expected(served.model, PROMPTS, COUNT) != before
    served.answers_with_its_weights()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--adapters", "/nowhere"), "LoRA adapters"),
        (("--quant-policy=8",), "a quantised KV cache"),
        (("--ep=2",), "expert parallelism"),
        (("--enable-eplb",), "experts that move between ranks"),
        (("--enable-microbatch",), "two batches side by side"),
        (("--role=Prefill",), "prefill and decode on servers of their own"),
        (("--model-format=fp8",), "quantised weights"),
        (("--device=ascend",), "another device than CUDA"),
        (("--dllm-block-length=4",), "diffusion language models"),
        (("--empty-init",), "a start without weights"),
        (("--enable-return-routed-experts",), "returned experts"),
        (("--speculative-algorithm=deepseek_mtp",), "a draft model"),
    ],
)
def test_what_was_not_shown_to_be_right_does_not_start(tmp_path: Path, options: tuple[str, ...], words: str) -> None:
    tiny_model(tmp_path)
    tiny_tokenizer(tmp_path)
    argv, environment = command(tmp_path, options, quiet_port())
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 1
    start = "weightcast cannot run in this LMDeploy: not shown to be right with weightcast's receiver: "
    [said] = [line for line in done.stderr.splitlines() if line.startswith(start)]
    assert words in said


def test_a_padding_row_is_proven_and_one_with_values_is_refused(tmp_path: Path) -> None:
    """LMDeploy sets the row of ``pad_token_id`` to 0 whenever it loads, so nothing else can be served there."""
    model = model_in(tmp_path, family="qwen3", pad_token_id=3)
    tiny_tokenizer(tmp_path)
    with lmdeploy(tmp_path, tmp_path / "server.log") as engine:
        served = Served(engine, model)
        new = copy.deepcopy(model)
        nudge(new, seed=1)
        with connect_in_lab(new, [served.target], bucket_bytes=300_000, timeout_s=PATIENCE_S) as updater:
            with pytest.raises(UpdateFailed, match=r"model\.embed_tokens\.weight"):
                updater.update(version=1)
            assert served.info()["version"] == 0
            served.answers_with_its_weights()
            with torch.no_grad():
                new.model.embed_tokens.weight[3] = 0
            [row] = updater.update(version=2).targets
        assert (row.proof, row.version_after) == ("resident", 2)
        served.model = new
        served.answers_with_its_weights()


def test_ranks_are_in_the_callers_bundles_in_the_callers_order(tmp_path: Path) -> None:
    model = model_in(tmp_path)
    tiny_tokenizer(tmp_path)
    bundles = (2, 0)
    with lmdeploy_in_ray(tmp_path, tmp_path / "server.log", bundles) as (engine, nodes):
        served = Served(engine, model)
        for rank, bundle in zip(served.info()["ranks"], bundles, strict=True):
            raylet = psutil.Process(rank["pid"]).parent()
            assert raylet is not None
            assert nodes[bundle] in " ".join(raylet.cmdline())
        for via in ("ipc", "broadcast"):
            served.step("retract", via)
            served.answers_with_its_weights()


def test_a_rank_on_another_host_ends_the_start_and_is_named(tmp_path: Path) -> None:
    model_in(tmp_path)
    tiny_tokenizer(tmp_path)
    log = tmp_path / "server.log"
    process = start_in_ray(tmp_path, log, quiet_port(), (0, 1), (HEAD, LOW, HIGH))
    try:
        assert process.wait(PATIENCE_S) != 0
        said = re.search(r"rank 1 at (127\S+): not on the host of the API server, (127\S+) \((.*)\)", log.read_text())
        assert said is not None
        assert len({HEAD, LOW, HIGH} & set(said.groups())) == 2
        assert said[3] == "give LMDeploy a placement group whose bundles are all on the host of its API server"
    finally:
        end(process)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server of two ranks, each in a Ray actor."""
    folder = tmp_path_factory.mktemp("lmdeploy-ray")
    model = model_in(folder)
    tiny_tokenizer(folder)
    with lmdeploy(folder, folder / "server.log", tp=2) as engine:
        yield Served(engine, model)


class TestRay:
    """Two ranks in actors of Ray, LMDeploy's executor for several."""

    @pytest.mark.parametrize(("mode", "via"), list(zip(MODES, ("broadcast", "ipc", "ipc", "broadcast"), strict=True)))
    def test_both_ranks_switch_between_the_same_two_forwards(self, two_ranks: Served, mode: str, via: str) -> None:
        ranks = two_ranks.info()["ranks"]
        assert len({rank["pid"] for rank in ranks}) == 2
        two_ranks.answers_with_its_weights()
        keeps_its_promise(two_ranks, mode, via)

    def test_a_trainer_that_gives_up_changes_nothing(self, two_ranks: Served) -> None:
        gives_up(two_ranks)

    @pytest.mark.parametrize("via", ["ipc", "broadcast"])
    def test_a_trainer_that_speaks_lmdeploys_own_protocol_is_served(self, two_ranks: Served, via: str) -> None:
        own_update(two_ranks, via)

    def test_own_requests_wait_for_no_update_of_ours(self, two_ranks: Served) -> None:
        def interfere(done: int, total: int) -> None:
            answer = two_ranks.ask("/update_weights", **OWN["/update_weights"])
            assert (answer.status_code, "being updated by process" in answer.text) == (409, True), answer.text

        two_ranks.step("retract", progress=interfere)
        two_ranks.answers_with_its_weights()

    def test_both_ranks_sleep_and_wake_up(self, two_ranks: Served) -> None:
        for level in (1, 2):
            assert two_ranks.ask(f"/sleep?level={level}").status_code == 200
            assert two_ranks.ask("/wakeup?tags=weights").status_code == 200
            two_ranks.step("retract")
            assert two_ranks.ask("/wakeup?tags=kv_cache").status_code == 200
            two_ranks.answers_with_its_weights()


EXPERTS: dict[str, Any] = {
    "family": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
}


@pytest.mark.parametrize(("tp", "executor"), [(1, "uni"), (2, "mp")])
def test_experts_are_updated_in_the_layout_of_their_kernel(tmp_path: Path, tp: int, executor: str) -> None:
    model = model_in(tmp_path, **EXPERTS)
    tiny_tokenizer(tmp_path)
    with lmdeploy(tmp_path, tmp_path / "server.log", tp=tp, executor=executor) as engine:
        served = Served(engine, model)
        first = fresh(engine, PROMPTS, COUNT)
        assert first == expected(model, PROMPTS, COUNT)
        for mode, via in zip(MODES, ("ipc", "broadcast", "ipc", "ipc"), strict=True):
            keeps_its_promise(served, mode, via)
        assert fresh(engine, PROMPTS, COUNT) != first
        told = weightcast("verify", str(save(served.model, tmp_path / "sent")), "--at", engine.url)
        assert told.returncode == 0, told.stdout + told.stderr
        if tp == 1:
            for level in (1, 2):
                assert served.ask(f"/sleep?level={level}").status_code == 200
                assert served.ask("/wakeup?tags=weights").status_code == 200
                served.step("retract")
                assert served.ask("/wakeup?tags=kv_cache").status_code == 200
                served.answers_with_its_weights()


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server of two ranks, processes of LMDeploy's executor mp."""
    folder = tmp_path_factory.mktemp("lmdeploy-mp")
    model = model_in(folder)
    tiny_tokenizer(folder)
    with lmdeploy(folder, folder / "server.log", tp=2, executor="mp") as engine:
        yield Served(engine, model)


def ended(served: Served, rank: int, pid: int) -> None:
    """Waits until the server says that it is out of use because of a rank, to us and in LMDeploy's own health."""
    wait_for(lambda: served.info()["state"] == "quarantined", "the end of the engine", timeout_s=PATIENCE_S)
    wait_for(
        lambda: served.engine.client.get(served.engine.url + "/health").status_code == 503,
        "LMDeploy's health",
        timeout_s=PATIENCE_S,
    )
    words = served.info()["message"]
    assert re.search(rf"rank {rank} \(pid {pid}\) (is gone|was killed by signal 9)", words), words


class TestMp:
    """Two ranks of LMDeploy's executor mp."""

    def test_requests_that_break_off_leave_no_rank_behind(self, two_processes: Served) -> None:
        """Without our repair, LMDeploy stands still within the first 20 rounds."""
        for _ in range(80):
            streams = [LmdeployStream(two_processes.engine.url, prompt, LONG) for prompt in PROMPTS]
            for stream in streams:
                stream.wait_for(SEEN)
            for stream in streams:
                stream.cut_after(SEEN)
                assert len(stream.tokens) >= 2 * SEEN
        two_processes.answers_with_its_weights()

    @pytest.mark.parametrize(("mode", "via"), list(zip(MODES, ("broadcast", "ipc", "ipc", "broadcast"), strict=True)))
    def test_both_ranks_switch_between_the_same_two_forwards(self, two_processes: Served, mode: str, via: str) -> None:
        ranks = [psutil.Process(rank["pid"]) for rank in two_processes.info()["ranks"]]
        [engine_process] = {rank.ppid() for rank in ranks}
        assert engine_process not in (ranks[0].pid, ranks[1].pid, two_processes.engine.process.pid)
        two_processes.answers_with_its_weights()
        keeps_its_promise(two_processes, mode, via)

    def test_a_trainer_that_gives_up_changes_nothing(self, two_processes: Served) -> None:
        gives_up(two_processes)

    def test_sleep_is_refused_because_the_wake_up_would_take_an_output(self, two_processes: Served) -> None:
        two_processes.step("retract")
        for level in (1, 2):
            two_processes.refused(f"/sleep?level={level}", "takes the next output of the model for the answer")
        assert two_processes.ask("/wakeup").status_code == 200  # nothing sleeps
        two_processes.answers_with_its_weights()

    @pytest.mark.parametrize("path", OWN)
    def test_own_requests_change_nothing(self, two_processes: Served, path: str) -> None:
        before = two_processes.info()
        assert two_processes.ask(path, **OWN[path]).status_code in (400, 500)
        assert two_processes.info() == before
        two_processes.answers_with_its_weights()

    def test_a_lost_rank_is_named(self, tmp_path: Path) -> None:
        model = model_in(tmp_path)
        tiny_tokenizer(tmp_path)
        with lmdeploy(tmp_path, tmp_path / "server.log", tp=2, executor="mp") as engine:
            served = Served(engine, model)
            rank = psutil.Process(served.info()["ranks"][1]["pid"])

            def kill(done: int, total: int) -> None:
                if 0 < done < total and rank.is_running():
                    rank.kill()

            with pytest.raises(UpdateFailed, match=rf"rank 1 \(pid {rank.pid}\) (is gone|was killed by signal 9)"):
                served.step("retract", progress=kill)
            ended(served, 1, rank.pid)

    def test_rank_that_a_signal_kills_between_updates_ends_its_requests(self, tmp_path: Path) -> None:
        """LMDeploy's own engine process would wait for the rank, and clients for their answers."""
        model = model_in(tmp_path)
        tiny_tokenizer(tmp_path)
        with lmdeploy(tmp_path, tmp_path / "server.log", tp=2, executor="mp") as engine:
            served = Served(engine, model)
            ranks = [psutil.Process(rank["pid"]) for rank in served.info()["ranks"]]
            streams = [LmdeployStream(engine.url, prompt, LONG) for prompt in PROMPTS]
            for stream in streams:
                stream.wait_for(SEEN)
            ranks[0].kill()
            for stream in streams:
                assert stream.ended().finish != "length"
                assert "Timeout" not in stream.failure
            ended(served, 0, ranks[0].pid)
            with pytest.raises(UpdateFailed, match=rf"rank 0 \(pid {ranks[0].pid}\) was killed by signal 9"):
                served.step("retract")
            psutil.wait_procs(ranks, timeout=PATIENCE_S)
            assert not any(rank.is_running() for rank in ranks)


class TestSleep:
    """LMDeploy's own sleep, of the same server."""

    def test_level_1_brings_the_same_weights_back_and_a_colocated_update_comes_between(self, served: Served) -> None:
        running = [LmdeployStream(served.engine.url, prompt, LONG) for prompt in PROMPTS]
        for stream in running:
            stream.wait_for(SEEN)
        assert served.ask("/sleep?level=1").status_code == 200
        assert [stream.ended().finish for stream in running] == ["abort"] * len(PROMPTS)
        info = served.info()
        assert (info["state"], info["version"], info["paused"]) == ("serving", served.version, True)
        assert "asleep: kv_cache, weights" in info["message"]
        told = weightcast("status", served.engine.url)
        assert "asleep: kv_cache, weights" in told.stdout + told.stderr
        with pytest.raises(UpdateFailed, match=r"the engine is asleep.*/wakeup\?tags=weights"):
            served.step("retract")
        served.refused("/sleep?level=1", "sleeps already: weights")
        served.refused("/wakeup?tags=all", "no memory of LMDeploy is called all")
        served.refused("/wakeup?tags=kv_cache", "the KV cache cannot wake before the weights")
        assert served.ask("/wakeup").status_code == 200
        assert served.info()["message"] == ""
        served.answers_with_its_weights()

        assert served.ask("/sleep?level=1").status_code == 200
        assert served.ask("/wakeup?tags=weights").status_code == 200
        for mode in MODES:
            served.step(mode, "broadcast" if mode == "wait" else "ipc")
            info = served.info()
            assert (info["state"], info["paused"], info["message"]) == ("serving", True, "asleep: kv_cache"), mode
            assert served.ask("/generate", **question(PROMPTS[0], 1)).status_code == 503
        assert served.ask("/wakeup?tags=kv_cache").status_code == 200
        served.answers_with_its_weights()
        for mode in MODES:
            served.step(mode)
            served.answers_with_its_weights()

    def test_weights_that_level_2_discarded_come_back_by_an_update(self, served: Served) -> None:
        for tags in ("tags=weights", "tags=weights&tags=kv_cache"):
            assert served.ask("/sleep?level=2").status_code == 200
            info = served.info()
            assert (info["state"], info["version"], info["digest"]) == ("quarantined", None, None)
            assert "sleep level 2 discarded the weights" in info["message"]
            assert served.ask(f"/wakeup?{tags}").status_code == 200
            waiting = None
            if "kv_cache" in tags:  # awake, and nobody may be answered from what came back
                waiting = LmdeployStream(served.engine.url, PROMPTS[0], COUNT)
                assert served.info()["paused"]
            served.step("retract")
            # LMDeploy itself would wake nothing, because the weights are awake.
            assert served.ask("/wakeup?tags=weights&tags=kv_cache").status_code == 200
            if waiting is not None:
                assert expected(served.model, PROMPTS[:1], COUNT) == [waiting.ended().tokens]
            info = served.info()
            assert (info["state"], info["version"], info["paused"]) == ("serving", served.version, False)
            served.answers_with_its_weights()
            served.step("in_place")
            served.answers_with_its_weights()

    def test_sleep_and_wake_up_are_refused_during_an_update(self, served: Served) -> None:
        def interfere(done: int, total: int) -> None:
            served.refused("/sleep?level=2", "being updated by process")
            served.refused("/wakeup", "being updated by process")

        served.step("retract", progress=interfere)
        served.answers_with_its_weights()


@pytest.mark.parametrize("path", OWN)
def test_an_own_request_that_lmdeploy_refuses_changes_nothing(served: Served, path: str) -> None:
    served.step("retract")
    before = served.info()
    assert served.ask(path, **OWN[path]).status_code in (400, 500)
    assert served.info() == before
    assert before["digest"]
    served.answers_with_its_weights()


def test_a_trainer_that_speaks_lmdeploys_own_protocol_is_served(served: Served) -> None:
    own_update(served, "checkpoint-engine")


def own_update(served: Served, via: Any) -> None:
    """An update through LMDeploy's own routes, and one of ours after it."""
    served.step("retract")
    served.model = copy.deepcopy(served.model)
    nudge(served.model, seed=1000 + served.version)
    target = Target(served.engine.url, engine="lmdeploy", devices=("cpu",) * served.engine.tp)

    states: list[tuple[str, int | None]] = []

    def look(done: int, total: int) -> None:
        info = served.info()
        states.append((info["state"], info["version"]))

    options: dict[str, Any] = {"bucket_bytes": 300_000, "timeout_s": PATIENCE_S, "progress": look}
    with connect_in_lab(served.model, [target], transport=via, **options) as updater:
        report = updater.update(version=served.version + 1)
    assert [row.status for row in report.targets] == ["serving"], report
    if via != "checkpoint-engine":  # one request, after which the engine says what it left
        assert states[-1] == ("quarantined", None)
    info = served.info()
    assert (info["state"], info["version"], info["digest"], info["paused"]) == ("serving", None, None, False)
    assert "came through LMDeploy's own routes" in info["message"]
    served.answers_with_its_weights()
    served.step("in_place", "ipc")
    served.answers_with_its_weights()
    assert served.ask("/sleep?level=1").status_code == 200  # what LMDeploy moves must be what the receiver knows
    assert served.ask("/wakeup").status_code == 200
    served.step("retract", "broadcast")
    served.answers_with_its_weights()


class TestPrefixes:
    """A server that keeps prefixes for other requests, and asks for a key."""

    def cached(self, engine: Engine) -> int:
        """Tokens of a long question that LMDeploy has kept."""
        [model] = engine.client.get(f"{engine.url}/v1/models").json()["data"]
        body = {"model": model["id"], "max_tokens": 1, "messages": [{"role": "user", "content": "same words " * 60}]}
        return engine.post("/v1/chat/completions", **body)["usage"]["prompt_tokens_details"]["cached_tokens"]

    def test_no_prefix_of_old_weights_is_found_after_an_update(self, tmp_path: Path) -> None:
        model, key = model_in(tmp_path), "secret"
        tiny_tokenizer(tmp_path)
        prompts = [[20 + number % 400 for number in range(300)]]
        options = ("--enable-prefix-caching", "--api-keys", key)
        with lmdeploy(tmp_path, tmp_path / "log", *options, key=key, wheels=HOST_WEB) as engine:
            # This Starlette, and LMDeploy with it, take the second for a question about its health.
            for host, path in itertools.product(("engine", "x/health?"), ("/weightcast/apply", "/update_weights")):
                body = {"serialized_named_tensors": "", "finished": True}
                answer = httpx.post(engine.url + path, json=body, headers={"host": host}, trust_env=False)
                assert (host, path, answer.status_code) == (host, path, 401)
            served = Served(engine, model, key=key)
            for mode in ("retract", "wait", "abort"):
                self.cached(engine)
                assert self.cached(engine) > 0
                assert fresh(engine, prompts, COUNT) == expected(served.model, prompts, COUNT)
                served.step(mode)
                assert fresh(engine, prompts, COUNT) == expected(served.model, prompts, COUNT)
                assert self.cached(engine) == 0, mode
            with pytest.raises(ConfigError, match=r"pause='in_place': .* would leave prefixes of the old weights"):
                served.step("in_place")
            # The KV cache of the prefixes is gone with sleep; what LMDeploy knows of them must be gone too.
            assert self.cached(engine) > 0
            assert served.ask("/sleep?level=1").status_code == 200
            assert served.ask("/wakeup").status_code == 200
            assert self.cached(engine) == 0
            assert fresh(engine, prompts, COUNT) == expected(served.model, prompts, COUNT)


def test_metrics_are_on_lmdeploys_own_page(tmp_path: Path) -> None:
    served_model = model_in(tmp_path)
    tiny_tokenizer(tmp_path)
    with lmdeploy(tmp_path, tmp_path / "log", metrics=True, wheels=NEWEST_WEB) as engine:  # as a fresh install has it
        served = Served(engine, served_model)
        for mode in ("abort", "retract"):
            served.step(mode)
        served.answers_with_its_weights()
        page = engine.client.get(f"{engine.url}/metrics").text
        assert re.search(r"^lmdeploy:\w+\{.*model_name=", page, re.MULTILINE)
        found = series(page)
        [(_, name)] = [labels for labels in found if labels[0] == "weightcast_engine_version"]
        assert found["weightcast_engine_version", name] == served.version
        assert found["weightcast_engine_state", name, "serving"] == 1
        assert found["weightcast_engine_updates_finished_total", name, "committed"] == 2
