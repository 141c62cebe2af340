"""Float32 masters of a trainer whose engines keep bfloat16: engine ranks read them in place and cast them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from transformers import AutoModelForCausalLM

from tests.helpers.clock import PATIENCE_S
from tests.helpers.engines import engines
from tests.helpers.harness import ToyTrainer, map_other_memory, next_version, on_every_rank, share_memory
from tests.helpers.ranks import Ranks, trainer_jobs
from tests.helpers.tiny import tiny_model
from tests.helpers.toy_engine import toy_dtypes, toy_weights
from weightcast import UpdateFailed
from weightcast.digest.definition import tensor_digest
from weightcast.errors import NotFinite, TrainerRankFailed
from weightcast.lab.connect import connect

ROWS = 97  # one rank has one row more than the other
ENGINE = ("--dtype", "bfloat16", "--rows", str(ROWS))
WAYS = pytest.mark.parametrize("transport", ["direct", "auto"])


@pytest.fixture(scope="module")
def jobs() -> Iterator[Callable[[int], Ranks]]:
    with trainer_jobs() as job:
        yield job


def masters(seed: int) -> ToyTrainer:
    """Float32 shards in memory that engines can map; none begins at a multiple of 8 bytes."""
    whole = {"odd": torch.zeros(3 * dist.get_world_size())} | toy_weights(seed=seed, rows=ROWS)
    model = ToyTrainer(whole)
    model.buffer = share_memory(model, init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)])
    del model.odd
    return model


def set_masters(model: nn.Module, seed: int) -> None:
    """Trains, as far as an engine can see: all shards have other values, in the memory where they lie."""
    for (_, parameter), (_, other) in zip(model.named_parameters(), masters(seed).named_parameters(), strict=True):
        parameter.to_local().data.copy_(other.to_local())


def update_masters(urls: list[str], versions: list[int], options: dict) -> list[str]:
    """The report of each update; the masters change before each."""
    model = masters(versions[0])
    told: list[str] = []
    chosen = {"keep_mapped": True, "bucket_bytes": 1 << 14, "timeout_s": PATIENCE_S} | options
    with connect(model, urls, **chosen) as updater:
        for version in versions:
            set_masters(model, version)
            told.append(on_every_rank(updater.update(version=version)))
    return told


def kept(seed: int, *, wide_norms: bool = False) -> dict[str, str]:
    """The digests of an engine that keeps what torch makes of the masters."""
    weights = toy_weights(seed=seed, rows=ROWS)
    dtypes = toy_dtypes(weights, "bfloat16", wide_norms=wide_norms)
    return {name: tensor_digest(tensor.to(dtypes[name])) for name, tensor in weights.items()}


@WAYS
def test_engines_cast_the_masters_that_they_map_and_prove_every_bit(fresh, jobs, transport):
    chosen = [
        fresh("--local", *ENGINE),
        fresh("--tp", "2", *ENGINE),
        fresh("--local", *ENGINE, "--staging", "none", "--computed"),
    ]
    before = [engine.digests() for engine in chosen]
    versions = [next_version(), next_version()]
    urls = [engine.url for engine in chosen]
    for told in jobs(2).run(update_masters, urls, versions, {"transport": transport}):
        for version, text in zip(versions, told, strict=True):
            report = json.loads(text)
            assert report["transport"] == "direct"
            assert report["cast"] == {"bfloat16": len(before[0])}
            assert report["buckets"] == 1  # there is nothing that was not mapped
            assert [row["version_after"] for row in report["targets"]] == [version] * 3
            assert [row["proof"] for row in report["targets"]] == ["resident"] * 3
            legs = [leg for row in report["targets"] for leg in row["legs"]]
            assert [leg["by"] for leg in legs] == ["mapped"] * 3
            assert legs[0]["bytes"] == sum(tensor.nbytes for tensor in toy_weights(seed=1, rows=ROWS).values())
    for engine, old in zip(chosen[:2], before, strict=False):
        assert engine.digests() == kept(versions[1]) != kept(versions[0])
        assert old != kept(versions[1])


def test_what_an_engine_keeps_in_float32_is_mapped_beside_what_it_casts(fresh, jobs):
    engine = fresh("--tp", "2", *ENGINE, "--wide-norms")
    versions = [next_version(), next_version()]
    for told in jobs(2).run(update_masters, [engine.url], versions, {"transport": "direct"}):
        report = json.loads(told[-1])
        assert (report["buckets"], report["cast"]) == (1, {"bfloat16": len(kept(1)) - 3})
        assert [row["proof"] for row in report["targets"]] == ["resident"]
    assert engine.digests() == kept(versions[1], wide_norms=True)


def test_a_dtype_that_the_caller_names_is_cast_in_place_too(fresh, jobs):
    engine = fresh("--tp", "2", *ENGINE)
    version = next_version()
    options = {"transport": "direct", "wire_dtype": "bfloat16"}
    for [text] in jobs(2).run(update_masters, [engine.url], [version], options):
        assert json.loads(text)["buckets"] == 1
    assert engine.digests() == kept(version)


def test_masters_of_an_engine_in_float16_go_by_bucket(fresh, jobs):
    """In a copy nobody would see a value that becomes infinite."""
    engine = fresh("--tp", "2", "--dtype", "float16", "--rows", str(ROWS))
    version = next_version()
    options = {"transport": "direct", "wire_dtype": "float16"}
    for [text] in jobs(2).run(update_masters, [engine.url], [version], options):
        report = json.loads(text)
        assert report["buckets"] > 1
        assert [leg["by"] for leg in report["targets"][0]["legs"]] == ["buffer"]
    weights = toy_weights(seed=version, rows=ROWS)
    assert engine.digests() == {name: tensor_digest(tensor.to(torch.float16)) for name, tensor in weights.items()}


def update_with_other_memory(url: str, version: int, byte: int) -> str:
    """Rank 1 lets engines map masters of which one bit is another than it sums."""
    undo = map_other_memory(lambda: dist.get_rank() == 1, byte=byte)
    try:
        update_masters([url], [version], {"transport": "direct"})
    except UpdateFailed as error:
        return str(error)
    finally:
        undo()
    return "updated"


def test_a_bit_of_the_masters_that_flips_after_they_were_summed_is_found(fresh, jobs):
    engine = fresh("--tp", "2", *ENGINE)
    before = engine.digests()
    first = 3 * 4  # behind what fills the first bytes
    for text in jobs(2).run(update_with_other_memory, engine.url, next_version(), first + 2):
        assert "embed.weight" in text
        assert "received something else than was sent" in text
        assert "(on any of 2 ranks)" in text
    assert engine.digests() == before


def update_not_finite(url: str, version: int, value: float, options: dict) -> str:
    model = masters(version)
    chosen = {"transport": "direct", "keep_mapped": True, "timeout_s": PATIENCE_S} | options
    with connect(model, [url], **chosen) as updater:
        if dist.get_rank() == 1:
            model.get_parameter("layers.1.up.weight").to_local().data[-1, -1] = value
        try:
            updater.update(version=version)
        except (NotFinite, TrainerRankFailed) as error:
            return str(error)
    return "updated"


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), 3.4e38], ids=["NaN", "infinite", "infinite once cast"])
def test_masters_that_are_not_finite_are_refused_by_name_or_sent_on_purpose(fresh, jobs, value):
    engine = fresh("--tp", "2", *ENGINE)
    before = engine.digests()
    for text in jobs(2).run(update_not_finite, engine.url, next_version(), value, {}):
        assert "layers.1.up.weight (1)" in text
    assert engine.digests() == before
    version = next_version()
    on_purpose = {"advanced": {"check_finite": False}}
    assert jobs(2).run(update_not_finite, engine.url, version, value, on_purpose) == ["updated"] * 2
    assert engine.info().version == version
    weights = toy_weights(seed=version, rows=ROWS)
    weights["layers.1.up.weight"][-1, -1] = value
    assert engine.digests() == {name: tensor_digest(tensor.to(torch.bfloat16)) for name, tensor in weights.items()}


def train_tied(folder: str, url: str, versions: list[int]) -> list[tuple[str, dict[str, str]]]:
    """The report of each update of a model with tied weights, and the digests of what torch makes of it then."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model.buffer = share_memory(model, mesh, [Shard(0)])
    model.lm_head.weight = model.model.embed_tokens.weight
    told: list[tuple[str, dict[str, str]]] = []
    with connect(model, [url], transport="direct", keep_mapped=True, timeout_s=PATIENCE_S) as updater:
        for version in versions:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.1)
            report = on_every_rank(updater.update(version=version))
            whole = {name: parameter.full_tensor().detach() for name, parameter in model.named_parameters()}
            told.append((report, {name: tensor_digest(tensor.to(torch.bfloat16)) for name, tensor in whole.items()}))
    return told


def test_a_language_model_with_tied_weights_casts_its_masters(tmp_path, jobs):
    tiny_model(tmp_path / "model", tie_word_embeddings=True)
    with engines(tmp_path / "model", tmp_path, {"tp": 2, "dtype": "bfloat16"}) as [engine]:
        before = engine.digests()
        for told in jobs(2).run(train_tied, str(tmp_path / "model"), engine.url, [1, 2]):
            for version, (text, digests) in enumerate(told, start=1):
                report = json.loads(text)
                [row] = report["targets"]
                assert (report["buckets"], report["cast"]) == (1, {"bfloat16": len(digests)})
                assert (row["version_after"], row["proof"]) == (version, "resident")
        assert engine.digests() == told[1][1] != before
        assert told[0][1] != told[1][1]
