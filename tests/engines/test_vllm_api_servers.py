"""Real vLLM on this CPU with two API servers: requests, updates and pauses may reach either of them."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.engines.test_vllm_cpu import COUNT, DOOMED, PROMPTS, SIZES
from tests.engines.vllm_server import vllm
from tests.helpers.clock import PATIENCE_S
from tests.helpers.engines import ENVIRONMENT, Engine, push, shortfall, verify
from tests.helpers.tiny import greedy, tiny_model, tiny_tokenizer
from weightcast import Target, WeightUpdater
from weightcast.errors import WeightcastError
from weightcast.exporters.checkpoint import CheckpointExporter

pytestmark = [pytest.mark.engine]

# vLLM closes an idle connection after five seconds, and a test looks which server has it.
KEPT_OPEN = {"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600"}
STREAMS = 8
LONG = 48
TIE = 1e-3  # nats
MODES = ("abort", "wait", "retract", "abort", "retract")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer to one request.

    Attributes:
        server: Process of the API server that answered.
        parts: Weight version, first and last (exclusive) token of each part.
    """

    server: int
    prompt: list[int]
    tokens: list[int]
    parts: list[tuple[str, int, int]]
    reason: str


class Weights:
    """Two checkpoints, and what transformers says of them."""

    def __init__(self, root: Path) -> None:
        self.folders = {name: root / name for name in "AB"}
        self.models: dict[str, Any] = {}
        for seed, (name, folder) in enumerate(self.folders.items()):
            self.models[name] = tiny_model(folder, seed=seed, **SIZES)
            tiny_tokenizer(folder)

    def say(self, name: str, prompt: list[int], count: int = COUNT) -> list[int]:
        return greedy(self.models[name], prompt, count)


def body(prompt: list[int], count: int) -> dict[str, Any]:
    return {"token_ids": prompt, "sampling_params": {"max_tokens": count, "temperature": 0, "ignore_eos": True}}


def ports_of(process: psutil.Process) -> set[int]:
    """Ports at the other ends of a process's connections."""
    return {end.raddr.port for end in process.net_connections("tcp") if end.raddr}


def server_of(engine: Engine, answer: httpx.Response) -> int:
    """The process at the other end of the connection of an answer whose client is still open."""
    port = answer.extensions["network_stream"].get_extra_info("client_addr")[1]
    for process in engine.family():
        if port in ports_of(process):
            return process.pid
    raise AssertionError(f"no process of this vLLM has the connection from port {port}")


@contextmanager
def one_client_each(engine: Engine) -> Iterator[dict[int, httpx.Client]]:
    """A client with an open connection to each of the API servers."""
    with ExitStack() as stack:
        found: dict[int, httpx.Client] = {}
        deadline = time.monotonic() + PATIENCE_S
        while len(found) < 2:
            assert time.monotonic() < deadline, "one API server has taken all connections"
            client = stack.enter_context(httpx.Client(base_url=engine.url, timeout=300.0, trust_env=False))
            found.setdefault(server_of(engine, client.get("/weightcast/status")), client)
        yield found


def ask(engine: Engine, prompt: list[int], count: int = COUNT) -> Answer:
    """Sends one request over a connection of its own."""
    with httpx.Client(base_url=engine.url, timeout=300.0, trust_env=False) as client:
        said = client.post("/inference/v1/generate", json=body(prompt, count))
        assert said.status_code == 200, said.text
        (choice,) = said.json()["choices"]
        parts = [(part["version"], part["start"], part["end"]) for part in choice["weight_versions"] or ()]
        return Answer(
            server=server_of(engine, said),
            prompt=prompt,
            tokens=choice["token_ids"] or [],
            parts=parts,
            reason=choice["finish_reason"],
        )


def check(weights: Weights, versions: dict[str, str], answer: Answer) -> None:
    """Each token is the likeliest with the weights of the version that it is stamped with, after those before it."""
    assert len(answer.tokens) == LONG or answer.reason == "abort"
    assert sum(end - start for _, start, end in answer.parts) == len(answer.tokens)
    for version, start, end in answer.parts:
        model = weights.models[versions[version]]
        # Two tokens of these weights are 4e-5 nats apart, and a batch of another size may choose the other one.
        off = shortfall(model, answer.prompt + answer.tokens[:start], answer.tokens[start:end])
        assert off < TIE, (version, off, answer)


@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.engine_full), 2])
def test_eight_streams_through_two_servers_get_tokens_of_the_version_that_they_are_stamped_with(
    tmp_path: Path, replicas: int
) -> None:
    weights = Weights(tmp_path)
    versions = {"default": "A"} | {str(number): "AB"[number % 2] for number in range(1, 6)}
    over = threading.Event()
    options = [f"--data-parallel-size={replicas}" if replicas > 1 else "--api-server-count=2", "--enable-scale-out"]

    def stream(number: int) -> list[Answer]:
        found: list[Answer] = []
        while not over.is_set() or not found:
            found.append(ask(engine, [5 + number, 17, 200 + len(found) % 7, 33], LONG))
        return found

    with (
        vllm(weights.folders["A"], tmp_path, *options, serve=True, extra=KEPT_OPEN) as engine,
        ThreadPoolExecutor(STREAMS) as pool,
    ):
        running = [pool.submit(stream, number) for number in range(STREAMS)]
        with ExitStack() as stack:
            stack.callback(over.set)
            updaters: dict[tuple[str, str], WeightUpdater] = {}
            for version, mode in enumerate(MODES, 1):
                name = versions[str(version)]
                if (name, mode) not in updaters:
                    exporter = stack.enter_context(CheckpointExporter(weights.folders[name]))
                    updaters[name, mode] = stack.enter_context(
                        WeightUpdater.connect(
                            exporter, [Target(engine.url)], pause=mode, bucket_bytes=1 << 16, timeout_s=PATIENCE_S
                        )
                    )
                (row,) = updaters[name, mode].update(version=version).targets
                assert (row.proof, row.digests_matched, row.version_after) == ("resident", replicas, version)
        answers = [answer for future in running for answer in future.result()]
        assert len({answer.server for answer in answers}) == 2
        assert len({version for answer in answers for version, *_ in answer.parts}) > 2
        for answer in answers:
            check(weights, versions, answer)
        # Both servers say the same of the state, and both have the last version's prefixes and weights.
        with one_client_each(engine) as clients:
            infos = [client.get("/weightcast/info").json() for client in clients.values()]
            assert infos[0] == infos[1]
            assert (infos[0]["state"], infos[0]["version"]) == ("serving", 5)
            for client in clients.values():
                assert client.get("/weightcast/digests").json()["resident"] == engine.digests()
                for prompt in PROMPTS:
                    (choice,) = client.post("/inference/v1/generate", json=body(prompt, COUNT)).json()["choices"]
                    assert choice["token_ids"] == weights.say("B", prompt)
                    assert [part["version"] for part in choice["weight_versions"]] == ["5"]
        assert verify(weights.folders["B"], engine) == (0, set())


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    return Weights(tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="module")
def engine(weights: Weights, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    logs = tmp_path_factory.mktemp("logs")
    with vllm(
        weights.folders["A"],
        logs,
        "--api-server-count=2",
        "--enable-scale-out",
        serve=True,
        extra=KEPT_OPEN | {"VLLM_SERVER_DEV_MODE": "1"},
    ) as engine:
        yield engine


@pytest.mark.engine_full
def test_a_trainer_that_is_killed_leaves_one_whole_version_whichever_server_it_spoke_to(
    engine: Engine, weights: Weights
) -> None:
    spoke_to: set[int] = set()
    deadline = time.monotonic() + PATIENCE_S
    while len(spoke_to) < 2:  # which server takes a connection is chance
        assert time.monotonic() < deadline
        start = engine.info()["version"] + 1
        command = [sys.executable, "-c", DOOMED, engine.url, str(weights.folders["B"]), "ipc", str(start)]
        trainer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "go\n"
        while engine.info()["state"] != "updating":
            assert trainer.poll() is None
        trainer.send_signal(signal.SIGSTOP)
        ports = {end.laddr.port for end in psutil.Process(trainer.pid).net_connections("tcp")}
        spoke_to |= {process.pid for process in engine.family() if ports & ports_of(process)}
        trainer.kill()
        trainer.wait()
        trainer.stdout.close()
        while (info := engine.info())["state"] == "updating":
            assert time.monotonic() < deadline
        name = "A" if info["version"] < start else "B"
        assert info["state"] == "serving"
        assert verify(weights.folders[name], engine) == (0, set())
        assert [ask(engine, prompt).tokens for prompt in PROMPTS] == [weights.say(name, prompt) for prompt in PROMPTS]
        push(weights.folders["A"], [engine], info["version"] + 1)


@pytest.mark.engine_full
def test_a_pause_and_sleep_at_one_server_hold_at_the_other(engine: Engine, weights: Weights) -> None:
    with one_client_each(engine) as clients, ThreadPoolExecutor(2) as pool:
        one, other = clients.values()

        def waits(client: httpx.Client, name: str, do: Callable[[], object]) -> None:
            """A request over this client gets no answer before ``do``, and then one of these weights."""
            waiting = pool.submit(client.post, "/inference/v1/generate", json=body(PROMPTS[0], COUNT))
            with pytest.raises(TimeoutError):
                waiting.result(1.0)
            do()
            (choice,) = waiting.result(PATIENCE_S).json()["choices"]
            assert choice["token_ids"] == weights.say(name, PROMPTS[0])

        version = engine.info()["version"]
        name = "A"
        for first, second in ((one, other), (other, one)):
            first.post("/pause?mode=keep").raise_for_status()
            waits(second, name, lambda second=second: second.post("/resume").raise_for_status())
            # An operator's pause outlasts an update, at both.
            second.post("/pause?mode=keep").raise_for_status()
            name, version = "AB"[name == "A"], version + 1
            push(weights.folders[name], [engine], version, "--pause", "retract")
            waits(second, name, lambda first=first: first.post("/resume").raise_for_status())

            first.post("/sleep?level=2").raise_for_status()
            for client in clients.values():
                info = client.get("/weightcast/info").json()
                assert (info["state"], info["version"]) == ("quarantined", None)
            second.post("/wake_up").raise_for_status()
            name, version = "AB"[name == "A"], version + 1
            waits(first, name, lambda: push(weights.folders[name], [engine], version, "--pause=retract"))  # noqa: B023


@pytest.mark.engine_full
@pytest.mark.parametrize("which", [0, 1])
def test_vllm_and_the_update_end_if_an_api_server_is_killed(weights: Weights, tmp_path: Path, which: int) -> None:
    with vllm(weights.folders["A"], tmp_path, "--api-server-count=2", serve=True) as engine:
        log = (tmp_path / "vllm.log").read_text()
        (pid,) = set(re.findall(rf"ApiServer_{which} pid=(\d+)", log))
        family = engine.family()
        updating = threading.Event()

        def train() -> None:
            with (
                CheckpointExporter(weights.folders["B"]) as exporter,
                WeightUpdater.connect(
                    exporter, [Target(engine.url)], bucket_bytes=1 << 16, timeout_s=PATIENCE_S
                ) as updater,
            ):
                for version in itertools.count(1):
                    updater.update(version=version)
                    updating.set()

        with ThreadPoolExecutor(1) as pool:
            training = pool.submit(train)
            assert updating.wait(PATIENCE_S)
            os.kill(int(pid), signal.SIGKILL)
            with pytest.raises(WeightcastError, match=engine.url):
                training.result(PATIENCE_S)
        assert engine.process.wait(PATIENCE_S) != 0
        _, alive = psutil.wait_procs(family, PATIENCE_S)
        assert not alive


@pytest.mark.engine_full
def test_random_weights_answer_nobody_at_either_server(
    weights: Weights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINE_STARTS", "python")  # a fork counts nothing for the page of all servers' metrics
    options = ["--api-server-count=2", "--load-format=dummy", "--enable-scale-out"]
    with (
        vllm(
            weights.folders["A"],
            tmp_path,
            *options,
            serve=True,
            key="secret",
            extra=KEPT_OPEN | {"VLLM_SERVER_DEV_MODE": "1"},
        ) as engine,
        one_client_each(engine) as clients,
        ThreadPoolExecutor(2) as pool,
    ):
        early = []
        for client in clients.values():
            assert client.get("/weightcast/info").status_code == 401
            client.headers["Authorization"] = "Bearer secret"
            info = client.get("/weightcast/info").json()
            assert (info["state"], info["version"], info["paused"]) == ("quarantined", None, True)
            resumed = client.post("/resume")
            assert resumed.status_code >= 400
            assert "this engine is quarantined and stays paused" in resumed.text
            early.append(pool.submit(client.post, "/inference/v1/generate", json=body(PROMPTS[0], COUNT)))
        push(weights.folders["B"], [engine], 1, "--pause", "retract", "--api-key", "secret")
        for waiting in early:
            (choice,) = waiting.result(PATIENCE_S).json()["choices"]
            assert choice["token_ids"] == weights.say("B", PROMPTS[0])
            assert {part["version"] for part in choice["weight_versions"]} == {"1"}
        for client in clients.values():
            lines = client.get("/metrics").text.splitlines()
            assert [line for line in lines if line.startswith("weightcast_engine_version")] == [
                'weightcast_engine_version{model_name="tiny"} 1.0'
            ]
