"""Updates of the reference engine between real processes: afterwards it answers as transformers does.

Every engine starts on checkpoint A.  A greedy answer that equals transformers' on B token for token, and differs from
A's, leaves little room for a tensor that was forgotten, cut wrongly or copied to a wrong place.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoModelForCausalLM

from tests.helpers.engines import Engine, engines, push, shortfall, status, verify, weightcast
from tests.helpers.harness import on_every_rank
from tests.helpers.ranks import Ranks
from tests.helpers.tiny import greedy, tiny_model, tiny_tokenizer
from weightcast import UpdateReport, WeightUpdater
from weightcast.exporters.checkpoint import CheckpointExporter

COUNT = 24
PROMPTS = [[5], [17, 301, 44, 8], list(range(100, 140)), [2, 490, 2, 490, 2], list(range(400, 300, -1))]
BUCKET_BYTES = 96 << 10  # several buckets, and tensors that do not fit into one
OPTIONS: dict[str, Any] = {"bucket_bytes": BUCKET_BYTES, "timeout_s": 60.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A folder, its model in this process, and transformers' answers."""

    folder: Path
    model: Any
    answers: list[list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Several checkpoints of one random model."""

    a: Checkpoint
    b: Checkpoint
    c: Checkpoint
    names: set[str]


def make(root: Path, **settings: Any) -> Family:
    """Makes three checkpoints of one shape with different values."""
    found: list[Checkpoint] = []
    for seed, name in enumerate("abc", start=1):
        folder = root / name
        model = tiny_model(folder, seed=seed, **settings)
        tiny_tokenizer(folder)
        found.append(Checkpoint(folder=folder, model=model, answers=[greedy(model, p, COUNT) for p in PROMPTS]))
    a, b, c = found
    assert all(x != y for x, y in zip(a.answers, b.answers, strict=True))
    assert all(x != y for x, y in zip(b.answers, c.answers, strict=True))
    return Family(a=a, b=b, c=c, names={name for name, _ in a.model.named_parameters()})


@contextmanager
def serving(
    factory: pytest.TempPathFactory, name: str, model: dict[str, Any], *settings: dict[str, Any]
) -> Iterator[tuple[Family, list[Engine]]]:
    root = factory.mktemp(name)
    family = make(root, **model)
    with engines(family.a.folder, root, *settings) as found:
        yield family, found


def update(model: Any, targets: Sequence[Engine], version: int, **options: Any) -> UpdateReport:
    """Updates engines with a trainer in this process."""
    with WeightUpdater.connect(model, [engine.url for engine in targets], **(OPTIONS | options)) as updater:
        return updater.update(version=version)


def check_report(report: UpdateReport, targets: Sequence[Engine], *, transport: str, proof: str = "resident") -> None:
    assert report.transport == transport
    assert [row.url for row in report.targets] == [engine.url for engine in targets]
    for row, engine in zip(report.targets, targets, strict=True):
        assert (row.status, row.version_after, row.proof) == ("serving", report.version, proof)
        assert (row.ranks, row.digests_matched) == (engine.tp, engine.tp)
        assert row.not_updated == ()


def check_answers(engine: Engine, checkpoint: Checkpoint, version: int) -> None:
    answer = engine.complete(PROMPTS, COUNT)
    assert [choice["token_ids"] for choice in answer["choices"]] == checkpoint.answers
    assert answer["weight_version"] == version
    for choice in answer["choices"]:
        assert choice["weight_versions"] == [{"version": version, "tokens": COUNT}]


# -- Llama, untied, fp32: one engine without and one with tensor parallelism at once


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Family, list[Engine]]]:
    model = {"family": "llama", "num_key_value_heads": 12}
    with serving(tmp_path_factory, "pair", model, {"tp": 1}, {"tp": 4}) as found:
        yield found


def test_two_engines_of_different_tp_at_once(pair: tuple[Family, list[Engine]]) -> None:
    family, targets = pair
    for engine in targets:
        check_answers(engine, family.a, 0)
    with WeightUpdater.connect(family.b.model, [engine.url for engine in targets], **OPTIONS) as updater:
        assert updater.transport == "ipc"  # all on this host
        report = updater.update(version=1)
        check_report(report, targets, transport="ipc")
        for engine in targets:
            check_answers(engine, family.b, 1)
            info = engine.info()
            assert (info["version"], info["state"], info["tp_size"]) == (1, "serving", engine.tp)
        # The same weights give the same digests, independent of the ranks that hold them.
        again = updater.update(version=2)
    assert again.digest == report.digest
    assert {row.digest for row in (*report.targets, *again.targets)} == {report.digest}
    assert targets[0].digests() == targets[1].digests()
    for engine in targets:
        check_answers(engine, family.b, 2)


def test_push_broadcasts_to_both(pair: tuple[Family, list[Engine]]) -> None:
    family, targets = pair
    sharded = family.c.folder.parent / "c-sharded"
    family.c.model.save_pretrained(sharded, max_shard_size="100KB")
    assert len(list(sharded.glob("*.safetensors"))) > 3
    report = push(sharded, targets, 7, "--via", "broadcast", "--bucket-bytes", str(BUCKET_BYTES))
    assert (report["transport"], report["version"]) == ("broadcast", 7)
    assert [row["proof"] for row in report["targets"]] == ["resident", "resident"]
    for engine in targets:
        check_answers(engine, family.c, 7)
    assert [(row["version"], row["state"], row["tp"]) for row in status(*targets)] == [
        (7, "serving", 1),
        (7, "serving", 4),
    ]
    assert verify(family.c.folder, targets[1]) == (0, set())
    assert verify(family.b.folder, targets[1]) == (3, family.names)


def fsdp_update(start: str, urls: list[str], versions: dict[int, str], transport: str) -> list[str]:
    """Runs one rank of a sharded trainer, which updates to several versions with other weights each time."""
    model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    reports: list[str] = []
    with WeightUpdater.connect(model, urls, transport=transport, **OPTIONS) as updater:
        for version, folder in versions.items():
            whole = dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).named_parameters())
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    assert isinstance(parameter, DTensor)
                    parameter.copy_(distribute_tensor(whole[name], parameter.device_mesh, parameter.placements))
            reports.append(on_every_rank(updater.update(version=version)))
    return reports


@pytest.mark.parametrize("transport", ["ipc", "broadcast"])
def test_a_trainer_sharded_over_two_processes(pair: tuple[Family, list[Engine]], transport: str) -> None:
    family, targets = pair
    first = targets[0].info()["version"] + 1
    checkpoints = [family.a, family.b] if transport == "ipc" else [family.b, family.a]
    versions = {first + index: str(checkpoint.folder) for index, checkpoint in enumerate(checkpoints)}
    ranks = Ranks(2)
    try:
        answers = ranks.run(fsdp_update, str(family.c.folder), [e.url for e in targets], versions, transport)
    finally:
        ranks.close()
    assert answers[0] == answers[1]
    reports = [json.loads(answer) for answer in answers[0]]
    assert [report["version"] for report in reports] == list(versions)
    for report in reports:
        assert report["transport"] == transport
        assert [(row["proof"], row["digests_matched"]) for row in report["targets"]] == [
            ("resident", 1),
            ("resident", 4),
        ]
    for engine in targets:
        check_answers(engine, checkpoints[-1], first + 1)
    # A plain module of the same weights gives the same digests.
    plain = update(checkpoints[-1].model, targets, first + 2, transport=transport)
    assert plain.digest == reports[-1]["digest"]
    assert plain.digest != reports[0]["digest"]


def test_behaviour_is_proven_with_a_forward_pass(pair: tuple[Family, list[Engine]]) -> None:
    family, targets = pair
    version = targets[0].info()["version"] + 1
    report = update(family.c.model, targets, version, verify="behaviour", advanced={"behaviour_tolerance": 1e-3})
    check_report(report, targets, transport="ipc", proof="behaviour")
    for engine in targets:
        check_answers(engine, family.c, version)


# -- the other families, degrees and dtypes


def test_qwen3_tied_on_three_ranks(tmp_path_factory: pytest.TempPathFactory) -> None:
    model = {"family": "qwen3", "num_key_value_heads": 6, "tie_word_embeddings": True}
    with serving(tmp_path_factory, "qwen3", model, {"tp": 3}) as (family, [engine]):
        assert "lm_head.weight" not in family.names
        check_answers(engine, family.a, 0)
        report = update(family.b.model, [engine], 1, transport="broadcast")
        check_report(report, [engine], transport="broadcast")
        check_answers(engine, family.b, 1)
        with CheckpointExporter(family.c.folder) as exporter:
            report = update(exporter, [engine], 2, transport="ipc", verify="behaviour")
        check_report(report, [engine], transport="ipc")
        assert "no forward pass" in report.targets[0].message
        check_answers(engine, family.c, 2)
        assert verify(family.c.folder, engine) == (0, set())
        assert verify(family.a.folder, engine) == (3, family.names)


def test_bf16_engine_and_fp32_trainer(tmp_path_factory: pytest.TempPathFactory) -> None:
    model = {"family": "qwen2", "num_key_value_heads": 4, "num_attention_heads": 12}
    with serving(tmp_path_factory, "bf16", model, {"tp": 2, "dtype": "bfloat16"}) as (family, [engine]):
        assert {spec["dtype"] for spec in engine.info()["tables"][0]} == {"bfloat16"}
        for version, checkpoint, transport in ((1, family.b, "ipc"), (2, family.c, "broadcast")):
            before = engine.greedy(PROMPTS, COUNT)
            report = update(checkpoint.model, [engine], version, transport=transport)
            check_report(report, [engine], transport=transport)
            # Sums in bfloat16 break ties otherwise than transformers does, so the choice must be nearly as likely.
            rounded = AutoModelForCausalLM.from_pretrained(checkpoint.folder, dtype=torch.bfloat16).float()
            after = engine.greedy(PROMPTS, COUNT)
            assert max(shortfall(rounded, p, t) for p, t in zip(PROMPTS, after, strict=True)) < 1.0
            assert min(shortfall(rounded, p, t) for p, t in zip(PROMPTS, before, strict=True)) > 3.0
            assert verify(checkpoint.folder, engine) == (0, set())
        assert status(engine)[0]["version"] == 2
        assert verify(family.b.folder, engine) == (3, family.names)


def test_fp32_engine_and_bf16_trainer(tmp_path_factory: pytest.TempPathFactory) -> None:
    model = {
        "family": "llama",
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
    }
    with serving(tmp_path_factory, "fp32", model, {"tp": 2}, {"tp": 1, "staging": "none"}) as (family, targets):
        assert [engine.info()["staging"] for engine in targets] == ["device", "none"]
        assert "model.layers.1.mlp.down_proj.bias" in family.names
        half = AutoModelForCausalLM.from_pretrained(family.b.folder, dtype=torch.bfloat16)
        report = update(half, targets, 1, transport="broadcast")
        check_report(report, targets, transport="broadcast")
        expected = [greedy(half.float(), prompt, COUNT) for prompt in PROMPTS]
        for engine in targets:
            assert engine.greedy(PROMPTS, COUNT) == expected
        # fp32 weights that travel in bfloat16: the engine keeps the rounded values.
        report = update(family.c.model, targets, 2, transport="ipc", wire_dtype="bfloat16")
        check_report(report, targets, transport="ipc")
        half = AutoModelForCausalLM.from_pretrained(family.c.folder, dtype=torch.bfloat16).float()
        expected = [greedy(half, prompt, COUNT) for prompt in PROMPTS]
        for engine in targets:
            assert engine.greedy(PROMPTS, COUNT) == expected
            assert verify(family.c.folder, engine)[0] == 3
        done = weightcast("verify", family.c.folder, "--at", targets[0].url, "--dtype", "bfloat16")
        assert done.returncode == 0, done.stdout + done.stderr
