"""Real vLLM on this CPU serves LoRA adapters that a trainer sends from memory, against PEFT on the same weights."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import pytest

from tests.engines import torch_experts
from tests.engines.environment import ROOT
from tests.engines.expert_adapters import ExpertAdapters, train
from tests.engines.test_vllm_cpu import COUNT, SIZES
from tests.engines.vllm_server import vllm, vllm_command
from tests.helpers.engines import ENVIRONMENT, Engine, push, status
from tests.helpers.tiny import greedy, tiny_model, tiny_tokenizer
from weightcast import Target, WeightUpdater
from weightcast.errors import ConfigError
from weightcast.exporters.lora_adapter import AdapterExporter

pytestmark = [
    pytest.mark.engine,
    # PEFT uses deprecated parts of transformers.
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),
]

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# The second one is longer than a block of vLLM's prefix cache.
PROMPTS = [[5, 17, 200, 33], [(7 * index) % 500 + 2 for index in range(200)]]
EXPERTS: dict[str, Any] = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "moe_intermediate_size": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
OPTIONS = ["--enable-lora", "--max-lora-rank=8", "--max-loras=4"]
DOOMED = """
import os, signal, sys
import torch
from tests.engines.test_vllm_lora import adapted
from tests.helpers.tiny import tiny_model
from tests.engines.test_vllm_cpu import SIZES
from weightcast.lab.connect import connect
url, folder = sys.argv[1:]
model = adapted(tiny_model(folder, seed=0, **SIZES), seed=9)
count = 0
def progress(done, total):
    global count
    count += 1
    if count == 3:
        os.kill(os.getpid(), signal.SIGKILL)
connect(model, url, progress=progress, adapter="alice", bucket_bytes=4096, timeout_s=20.0).update()
"""


def adapted(base: Any, *, seed: int, name: str = "default", **options: Any) -> Any:
    """A copy of a model with a trained adapter."""
    config = peft.LoraConfig(**({"r": 4, "lora_alpha": 6, "target_modules": LINEAR} | options))
    model = peft.get_peft_model(copy.deepcopy(base), config, adapter_name=name)
    train(model, seed)
    return model.eval()


def says(engine: Engine, name: str) -> list[list[int]]:
    """Greedy tokens of the model or of an adapter."""
    body = {"model": name, "prompt": PROMPTS, "max_tokens": COUNT, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True}
    answer = engine.client.post(f"{engine.url}/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return [choice["token_ids"] for choice in sorted(answer.json()["choices"], key=lambda choice: choice["index"])]


def expected(model: Any) -> list[list[int]]:
    """Tokens that transformers generates, with PEFT's adapter if the model has one."""
    return [greedy(model, prompt, COUNT) for prompt in PROMPTS]


def offered(engine: Engine) -> set[str]:
    """Names of the models and adapters that vLLM offers."""
    return {card["id"] for card in cards(engine)}


def cards(engine: Engine) -> list[dict[str, Any]]:
    """The descriptions of all of them."""
    return engine.client.get(f"{engine.url}/v1/models").json()["data"]


def send(engine: Engine, model: Any, name: str, **options: Any) -> Any:
    """Updates one adapter; returns its row of the report."""
    with WeightUpdater.connect(
        model, [Target(engine.url)], adapter=name, bucket_bytes=1 << 14, timeout_s=60.0, **options
    ) as updater:
        (row,) = updater.update().targets
        return row


@dataclass(frozen=True, slots=True)
class Served:
    engine: Engine
    folders: dict[str, Path]
    models: dict[str, Any]


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.engine_full), 2], ids=["tp1", "tp2"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("lora")
    folders = {name: root / name for name in "AB"}
    models: dict[str, Any] = {}
    for seed, (name, folder) in enumerate(folders.items()):
        models[name] = tiny_model(folder, seed=seed, **SIZES)
        tiny_tokenizer(folder)
    extra = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    with vllm(folders["A"], root, *OPTIONS, tp=request.param, extra=extra) as engine:
        yield Served(engine, folders, models)


def test_adapters_come_from_memory(served: Served, tmp_path: Path) -> None:
    engine, base = served.engine, served.models["A"]
    plain = expected(base)
    assert says(engine, "tiny") == plain
    alice, bob = (
        adapted(base, seed=1),
        adapted(base, seed=2, name="bob", r=8, lora_alpha=12, target_modules=["q_proj", "v_proj"]),
    )
    carol = adapted(base, seed=3)
    carol.save_pretrained(tmp_path / "carol")
    body = {"lora_name": "carol", "lora_path": str(tmp_path / "carol")}
    assert engine.client.post(f"{engine.url}/v1/load_lora_adapter", json=body).status_code == 200
    want = {"tiny": plain, "alice": expected(alice), "bob": expected(bob), "carol": expected(carol)}
    assert len({str(tokens) for tokens in want.values()}) == 4
    assert offered(engine) == {"tiny", "carol"}
    with WeightUpdater.connect(
        alice, [Target(engine.url)], adapter="alice", bucket_bytes=1 << 14, timeout_s=60.0, transport="ipc"
    ) as updater:
        # A slot is no adapter yet: nobody is answered with zeros.
        assert offered(engine) == {"tiny", "carol"}
        refused = engine.client.post(f"{engine.url}/v1/completions", json={"model": "alice", "prompt": [5, 6]})
        assert refused.status_code == 404
        (row,) = updater.update().targets
        assert (row.proof, row.version_after, row.digests_matched) == ("resident", 1, engine.tp)
        assert offered(engine) == {"tiny", "carol", "alice"}
        assert says(engine, "alice") == want["alice"]
        # The next step, to prompts whose cache the old adapter has filled.
        train(alice, 4)
        want["alice"], before = expected(alice), want["alice"]
        assert want["alice"] != before
        (row,) = updater.update().targets
        assert (row.proof, row.version_before, row.version_after) == ("resident", 1, 2)
        assert says(engine, "alice") == want["alice"]
    row = send(engine, bob, "bob", transport="broadcast", pause="retract")
    assert (row.proof, row.version_after) == ("resident", 1)
    assert {name: says(engine, name) for name in want} == want
    # Each has a version of its own, and the model has kept its own.
    assert engine.info()["version"] == 0
    rows = engine.client.get(f"{engine.url}/weightcast/adapters").json()
    assert {row["name"]: row["version"] for row in rows} == {"alice": 2, "bob": 1}
    there = engine.client.get(f"{engine.url}/weightcast/adapters/alice/weightcast/status").json()
    assert (there["version"], there["state"]) == (2, "serving")
    # What the slots hold now is read back, and that nothing else is in them.
    for name, count in (("alice", 28), ("bob", 8)):
        held = engine.client.get(f"{engine.url}/weightcast/adapters/{name}/weightcast/digests")
        assert (held.status_code, len(held.json()["resident"])) == (200, count), held.text


def test_another_trainer_goes_on(served: Served) -> None:
    base = served.models["A"]
    alice = adapted(base, seed=5)
    assert says(served.engine, "alice") != expected(alice)
    row = send(served.engine, alice, "alice")
    assert (row.version_before, row.version_after) == (2, 3)
    assert says(served.engine, "alice") == expected(alice)


def test_adapters_outlive_an_update_of_the_model(served: Served) -> None:
    engine = served.engine
    bob = says(engine, "bob")
    alice = adapted(served.models["A"], seed=5)
    for version, name in ((1, "B"), (2, "A")):
        (row,) = push(served.folders[name], [engine], version, "--bucket-bytes", "64KiB")["targets"]
        assert row["proof"] == "resident"
        assert says(engine, "tiny") == expected(served.models[name])
        assert says(engine, "alice") == expected(adapted(served.models[name], seed=5))
        (row,) = status(engine)
        assert row["version"] == version
    assert says(engine, "bob") == bob
    alice = adapted(served.models["A"], seed=6)
    assert send(engine, alice, "alice").proof == "resident"
    assert says(engine, "alice") == expected(alice)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"r": 16}, "rank 16 is greater than max_lora_rank 8"),
        ({"target_modules": ["lm_head"]}, "lm_head"),
        ({"use_dora": True}, "cannot be sent by itself"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"target_modules": ["q_proj"]}, "with other tensors"),
    ],
    ids=["rank", "head", "dora", "pissa", "others"],
)
def test_what_does_not_fit_is_refused_by_name(served: Served, options: dict[str, Any], words: str) -> None:
    engine = served.engine
    before = {name: says(engine, name) for name in ("tiny", "alice", "bob")}
    name = "alice" if "other tensors" in words else "dave"
    with pytest.raises(ConfigError, match=words):
        send(engine, adapted(served.models["A"], seed=7, **options), name)
    assert {name: says(engine, name) for name in before} == before


def test_an_adapter_of_another_model_is_refused(served: Served, tmp_path: Path) -> None:
    other = adapted(tiny_model(tmp_path, **(SIZES | {"hidden_size": 64, "num_attention_heads": 2})), seed=1)
    with pytest.raises(ConfigError, match=r"has shape .*inputs"):
        send(served.engine, other, "dave")
    deeper = adapted(tiny_model(tmp_path, num_hidden_layers=3, **SIZES), seed=1)
    with pytest.raises(ConfigError, match=r"no layer for 14 tensors of the adapter dave: .*layers.2"):
        send(served.engine, deeper, "dave")
    with pytest.raises(ConfigError, match="the name of the model"):
        send(served.engine, adapted(served.models["A"], seed=1), "tiny")
    with pytest.raises(ConfigError, match="from a folder"):
        send(served.engine, adapted(served.models["A"], seed=1), "carol")


def test_a_killed_trainer_leaves_the_old_adapter(served: Served, tmp_path: Path) -> None:
    engine = served.engine
    before = {name: says(engine, name) for name in ("tiny", "alice", "bob")}
    command = [sys.executable, "-c", DOOMED, engine.url, str(tmp_path / "m")]
    trainer = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=600, check=False)
    assert trainer.returncode == -signal.SIGKILL, trainer.stderr
    assert {name: says(engine, name) for name in before} == before
    alice = adapted(served.models["A"], seed=8)
    row = send(engine, alice, "alice")
    assert row.version_after == row.version_before + 1
    assert says(engine, "alice") == expected(alice)


def test_an_adapter_can_be_taken_out(served: Served) -> None:
    engine = served.engine
    assert engine.client.delete(f"{engine.url}/weightcast/adapters/bob").status_code == 204
    assert "bob" not in offered(engine)
    assert engine.client.get(f"{engine.url}/weightcast/adapters/bob/weightcast/info").status_code == 404
    bob = adapted(served.models["A"], seed=2)
    row = send(engine, bob, "bob")
    assert (row.version_before, row.version_after, row.proof) == (None, 1, "resident")
    assert says(engine, "bob") == expected(bob)
    assert send(engine, bob, "eve").proof == "resident"
    # One slot is left for the adapter that vLLM loads from its folder, or vLLM would end at a request for it.
    with pytest.raises(ConfigError, match="4 slots for adapters; 3 are taken and one slot is left"):
        send(engine, bob, "fay")
    folder = next(card["root"] for card in cards(engine) if card["id"] == "carol")
    body = {"lora_name": "carol", "lora_path": folder}
    assert engine.client.post(f"{engine.url}/v1/unload_lora_adapter", json=body).status_code == 200
    assert send(engine, bob, "fay").proof == "resident"
    assert engine.client.post(f"{engine.url}/v1/load_lora_adapter", json=body).status_code >= 400
    names = ("bob", "eve", "fay")
    assert {name: says(engine, name) for name in names} == dict.fromkeys(names, expected(bob))


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.engine_full), 2])
def test_adapters_of_experts_come_from_memory(tmp_path: Path, ranks: int) -> None:
    """vLLM's kernels for experts with adapters are none for CPUs; PyTorch computes in their place."""
    folders = {name: tmp_path / name for name in "AB"}
    models: dict[str, Any] = {}
    for seed, (name, folder) in enumerate(folders.items()):
        models[name] = tiny_model(folder, family="qwen3_moe", seed=seed, **EXPERTS)
        tiny_tokenizer(folder)
    base = models["A"]
    alice = adapted(base, seed=1, target_modules=LINEAR[:4])
    stacked = {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
    bob = adapted(base, seed=2, **stacked)
    carol = ExpertAdapters(base, seed=3)
    carol.save(tmp_path / "dora")
    want = {
        "tiny": expected(base),
        "alice": expected(alice),
        "bob": expected(bob),
        "carol": expected(carol.merged(base)),
    }
    assert len({str(tokens) for tokens in want.values()}) == 4
    parts = (
        vllm_command(folders["A"], tmp_path, 1)[1]["PYTHONPATH"],
        ROOT,
        torch_experts.metadata(tmp_path / "plug-in"),
    )
    extra = {"PYTHONPATH": os.pathsep.join(map(str, parts)), "VLLM_PLUGINS": f"weightcast,{torch_experts.ENTRY}"}
    extra["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    with vllm(folders["A"], tmp_path, *OPTIONS, tp=ranks, extra=extra) as engine:
        assert says(engine, "tiny") == want["tiny"]
        body = {"lora_name": "dora", "lora_path": str(tmp_path / "dora")}
        assert engine.client.post(f"{engine.url}/v1/load_lora_adapter", json=body).status_code == 200
        with pytest.raises(ConfigError, match=r"more or less: .*experts\.base_layer"):
            send(engine, adapted(base, seed=2, target_modules=[], target_parameters=["experts.down_proj"]), "bob")
        for name, model, transport in (("alice", alice, "ipc"), ("bob", bob, "ipc")):
            row = send(engine, model, name, transport=transport)
            assert (row.proof, row.version_after, row.digests_matched) == ("resident", 1, ranks)
        exporter = AdapterExporter(carol, scaled=True)
        with WeightUpdater.connect(
            exporter, [Target(engine.url)], adapter="carol", bucket_bytes=1 << 14, timeout_s=60.0, transport="broadcast"
        ) as updater:
            train(carol, 4)  # other values first
            updater.update()
            other = says(engine, "carol")
            assert other == expected(carol.merged(base)) != want["carol"]
            train(carol, 3)
            (row,) = updater.update().targets
            assert (row.proof, row.version_after, row.digests_matched) == ("resident", 2, ranks)
        # The same adapter from a folder is the judge, too.
        assert {name: says(engine, name) for name in (*want, "dora")} == want | {"dora": want["carol"]}
        held = engine.client.get(f"{engine.url}/weightcast/adapters/carol/weightcast/digests")
        assert (held.status_code, len(held.json()["resident"])) == (200, 48), held.text
        # The model's own experts are updated below their wrappers, and the adapters stay.
        for version, name in ((1, "B"), (2, "A")):
            (row,) = push(folders[name], [engine], version, "--bucket-bytes", "64KiB")["targets"]
            assert (row["proof"], row["not_updated"]) == ("resident", [])
            assert says(engine, "tiny") == expected(models[name])
            assert says(engine, "carol") == expected(carol.merged(models[name]))
            assert says(engine, "bob") == expected(adapted(models[name], seed=2, **stacked))
