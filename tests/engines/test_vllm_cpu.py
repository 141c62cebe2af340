"""Real vLLM servers on the CPU, updated through our receiver inside them, against transformers on the same weights."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engines.vllm_server import greedy_tokens, vllm
from tests.helpers.clock import PATIENCE_S
from tests.helpers.engines import ENVIRONMENT, Engine, push, verify, weightcast
from tests.helpers.tiny import greedy, tiny_model, tiny_tokenizer
from weightcast import Target, WeightUpdater
from weightcast.cli.options import DIFFERS, USAGE
from weightcast.exporters.checkpoint import CheckpointExporter

pytestmark = [pytest.mark.engine_full]

PROMPTS = [[5, 17, 200, 33], [7, 7, 90, 311, 12, 4], [1, 400, 22]]
COUNT = 12
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 160,
}
EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 96,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
PAUSES = ("abort", "retract", "in_place", "wait")
DOOMED = """
import sys
from weightcast import Target, WeightUpdater
from weightcast.exporters.checkpoint import CheckpointExporter
url, folder, via, version = sys.argv[1:]
updater = WeightUpdater.connect(
    CheckpointExporter(folder), targets=[Target(url)], transport=via, bucket_bytes=16384, timeout_s=100.0
)
print("go", flush=True)
for number in range(int(version), int(version) + 1000):
    updater.update(version=number)
"""


@dataclass(frozen=True, slots=True)
class Served:
    """A server and three sets of weights for it; it was started on the first."""

    engine: Engine
    folders: dict[str, Path]
    models: dict[str, Any]
    said: dict[tuple[str, tuple[int, ...], int], list[int]] = field(default_factory=dict)

    def says(self, name: str, prompt: list[int], count: int) -> list[int]:
        """Returns the tokens that transformers generates greedily with these weights."""
        asked = name, tuple(prompt), count
        if asked not in self.said:
            self.said[asked] = greedy(self.models[name], prompt, count)
        return self.said[asked]

    def serves(self, name: str) -> bool:
        """Does it answer as transformers does with these weights, token for token?"""
        expected = [self.says(name, prompt, COUNT) for prompt in PROMPTS]
        return greedy_tokens(self.engine, PROMPTS, COUNT) == expected

    def version(self) -> int:
        return self.engine.info()["version"]


def send(served: Served, name: str, **options: Any) -> None:
    """The next version, from this process."""
    config = {"bucket_bytes": 1 << 16, "timeout_s": 60.0} | options
    with (
        CheckpointExporter(served.folders[name]) as exporter,
        WeightUpdater.connect(exporter, [Target(served.engine.url)], **config) as updater,
    ):
        updater.update(version=served.version() + 1)


def check_pause(served: Served, pause: str) -> None:
    """Requests that run while new weights come get the old ones, the new ones or an end, as the mode promises."""
    send(served, "A")
    prompts = [[5 + index, 17, 200, 33] for index in range(4)]
    count = 200
    found: list[list[int]] = []
    requests = threading.Thread(target=lambda: found.extend(greedy_tokens(served.engine, prompts, count)))
    requests.start()
    time.sleep(0.3)
    send(served, "B", pause=pause)
    requests.join()
    for prompt, tokens in zip(prompts, found, strict=True):
        old = served.says("A", prompt, count)
        kept = next((at for at, pair in enumerate(zip(tokens, old, strict=False)) if pair[0] != pair[1]), len(tokens))
        if pause == "wait":
            assert tokens == old
        elif pause == "abort":
            assert kept == len(tokens)  # some or all of the old version's, none of the new one's
        else:
            assert len(tokens) == count
            if pause == "retract" and kept < count:
                assert tokens[kept:] == served.says("B", prompt + tokens[:kept], count - kept)
    assert served.serves("B")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("llama", 2, SIZES | {"tie_word_embeddings": True}), id="llama-tied-tp2"),
        pytest.param(("qwen3_moe", 1, SIZES | EXPERTS), id="qwen3-moe"),
        pytest.param(("qwen2", 2, SIZES | {"vocab_size": 500}), id="qwen2-padded-tp2"),
    ],
)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    family, tp, settings = request.param
    folder = tmp_path_factory.mktemp(family)
    folders = {name: folder / name for name in "ABC"}
    models: dict[str, Any] = {}
    for seed, (name, place) in enumerate(folders.items()):
        models[name] = tiny_model(place, family=family, seed=seed, **settings)
        tiny_tokenizer(place)
    with vllm(folders["A"], folder, tp=tp) as engine:
        yield Served(engine, folders, models)


def test_an_update_changes_what_is_generated_and_what_is_kept(served: Served) -> None:
    assert served.serves("A")
    assert verify(served.folders["A"], served.engine) == (0, set())
    for version, name, before, via in ((7, "B", "A", "ipc"), (8, "C", "B", "broadcast"), (9, "A", "C", "ipc")):
        report = push(served.folders[name], [served.engine], version, "--via", via, "--bucket-bytes", "64KiB")
        target = report["targets"][0]
        assert (target["status"], target["proof"], target["version_after"]) == ("serving", "resident", version)
        assert target["digests_matched"] == served.engine.tp
        assert target["not_updated"] == []
        assert served.serves(name)
        assert not served.serves(before)
        assert verify(served.folders[name], served.engine) == (0, set())
        code, names = verify(served.folders[before], served.engine)
        assert code == DIFFERS
        assert "model.norm.weight" in names


def test_behaviour_is_proven_after_every_update_of_a_live_module(served: Served) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(served.folders["B"], dtype=torch.float32).eval()
    with WeightUpdater.connect(
        model, targets=[Target(served.engine.url)], transport="broadcast", verify="behaviour", timeout_s=60.0
    ) as updater:
        for name in "BAB":
            trained = AutoModelForCausalLM.from_pretrained(served.folders[name], dtype=torch.float32)
            model.load_state_dict(trained.state_dict())
            report = updater.update(version=served.version() + 1)
            assert report.targets[0].proof == "behaviour"
            assert served.serves(name)


def test_weights_that_do_not_fit_are_refused(served: Served, tmp_path: Path) -> None:
    tiny_model(tmp_path / "other", num_hidden_layers=3)
    before, version = served.engine.digests(), served.version()
    done = weightcast("push", tmp_path / "other", "--to", served.engine.url, "--version", version + 1)
    assert done.returncode == USAGE
    assert "do not fit" in done.stderr
    older = weightcast("push", served.folders["C"], "--to", served.engine.url, "--version", 0)
    assert older.returncode == USAGE
    assert "older" in older.stderr
    assert served.engine.digests() == before
    assert served.version() == version


@pytest.mark.parametrize("pause", PAUSES)
def test_a_pause_does_what_its_mode_says(served: Served, pause: str) -> None:
    check_pause(served, pause)


def test_a_killed_trainer_leaves_one_whole_version(served: Served) -> None:
    start = served.version() + 1
    push(served.folders["A"], [served.engine], start)
    for delay_s in (0.0, 0.05, 0.15):
        trainer = subprocess.Popen(
            [
                sys.executable,
                "-c",
                DOOMED,
                served.engine.url,
                str(served.folders["C"]),
                "ipc",
                str(served.version() + 1),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=ENVIRONMENT,
        )
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "go\n"
        time.sleep(delay_s)
        trainer.send_signal(signal.SIGKILL)
        trainer.wait()
        trainer.stdout.close()
        deadline = time.monotonic() + PATIENCE_S
        while served.engine.info()["state"] == "updating":
            assert time.monotonic() < deadline
            time.sleep(0.05)
        info = served.engine.info()
        name = "A" if info["version"] == start else "C"
        assert info["state"] == "serving"
        assert verify(served.folders[name], served.engine) == (0, set())
        assert served.serves(name)
        start = info["version"] + 1
        push(served.folders["A"], [served.engine], start, "--via", "ipc")


def test_a_trainer_that_dies_while_running_requests_end_holds_nothing_up(served: Served) -> None:
    start = served.version() + 1
    push(served.folders["A"], [served.engine], start)
    prompts, count = [[5 + index, 17, 200, 33] for index in range(8)], 240
    found: list[list[int]] = []
    requests = threading.Thread(target=lambda: found.extend(greedy_tokens(served.engine, prompts, count)))
    requests.start()
    time.sleep(0.2)
    command = [sys.executable, "-m", "weightcast", "push", str(served.folders["B"]), "--to", served.engine.url]
    trainer = subprocess.Popen([*command, "--version", str(start + 1), "--pause", "wait"], env=ENVIRONMENT)
    deadline = time.monotonic() + PATIENCE_S
    while not served.engine.info()["paused"] and requests.is_alive():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    trainer.kill()
    trainer.wait()
    requests.join()
    assert found == [served.says("A", prompt, count) for prompt in prompts]
    while served.engine.info()["state"] == "updating":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert served.engine.info()["paused"] is False
    assert served.serves("A" if served.version() == start else "B")


def test_a_key_is_needed_and_a_lost_rank_is_named(tmp_path: Path) -> None:
    tiny_model(tmp_path / "A", seed=0, **SIZES)
    tiny_model(tmp_path / "B", seed=1, **SIZES)
    tiny_tokenizer(tmp_path / "A")
    with vllm(tmp_path / "A", tmp_path, key="secret") as engine:
        for path in ("/weightcast/info", "/weightcast/status", "/weightcast/digests"):
            assert engine.client.get(engine.url + path).status_code == 401
            wrong = engine.client.get(engine.url + path, headers={"Authorization": "Bearer other"})
            assert wrong.status_code == 401
        to = ("push", tmp_path / "B", "--to", engine.url, "--version", 1)
        assert weightcast(*to).returncode == 1
        assert weightcast(*to, "--api-key", "secret", "--pause", "retract").returncode == 0
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "B", dtype=torch.float32).eval()
        tokens = greedy_tokens(engine, PROMPTS, COUNT, Authorization="Bearer secret")
        assert tokens == [greedy(model, prompt, COUNT) for prompt in PROMPTS]
        # A rank that is lost is named.
        rank = engine.client.get(engine.url + "/weightcast/info", headers={"Authorization": "Bearer secret"}).json()
        subprocess.run(["kill", "-9", str(rank["ranks"][0]["pid"])], check=True)
        lost = weightcast("push", tmp_path / "A", "--to", engine.url, "--version", 2, "--api-key", "secret")
        assert lost.returncode == 1


def test_ranks_of_a_pipeline_prove_their_layers(tmp_path: Path) -> None:
    """Each holds some of them.  What they generate is not asked: vLLM 0.32 fails at that, on a CPU, by itself."""
    folders = {name: tmp_path / name for name in "AB"}
    for seed, folder in enumerate(folders.values()):
        tiny_model(folder, seed=seed, num_hidden_layers=4, **SIZES)
        tiny_tokenizer(folder)
    with vllm(folders["A"], tmp_path, "--pipeline-parallel-size=2") as engine:
        for version, name, via in ((1, "B", "ipc"), (2, "A", "broadcast"), (3, "B", "broadcast")):
            (row,) = push(folders[name], [engine], version, "--via", via, "--bucket-bytes", "64KiB")["targets"]
            assert (row["proof"], row["digests_matched"], row["ranks"]) == ("resident", 2, 2)
        assert verify(folders["B"], engine) == (0, set())
        assert verify(folders["A"], engine)[0] == 3
