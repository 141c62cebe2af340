"""Our classes for miles and xtuner on the projects' own sources, which are read from checkouts.

Neither package is on an index in a version with these interfaces.  ``WEIGHTCAST_MILES`` and ``WEIGHTCAST_XTUNER`` name
folders with ``miles/`` and ``xtuner/`` in them.  The pages of the two integrations name the revisions that were run.
"""

from __future__ import annotations

import ast
import inspect
import os
from functools import partial
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.e2e.engines import engines
from tests.helpers.harness import Engine, next_version, serves_whole
from tests.helpers.ranks import Ranks
from tests.helpers.tiny import in_bfloat16, tiny_model, tiny_tokenizer
from tests.integrations.environment import trainer_python
from tests.integrations.script import run_script
from tests.integrations.standins import miles_from_sources
from tests.integrations.test_standins import NOWHERE, miles_job, miles_job_that_loses_its_engine
from weightcast.digest.definition import tensor_digest
from weightcast.integrations.xtuner import UpdateWeighter

MILES = os.environ.get("WEIGHTCAST_MILES", "")
XTUNER = os.environ.get("WEIGHTCAST_XTUNER", "")

needs_miles = pytest.mark.skipif(not MILES, reason="WEIGHTCAST_MILES names no folder with miles/ in it")
needs_xtuner = pytest.mark.skipif(not XTUNER, reason="WEIGHTCAST_XTUNER names no folder with xtuner/ in it")

# -- miles


@needs_miles
def test_miles_own_updater_syncs_again_and_again(ranks: Ranks, engine: Engine) -> None:
    before = engine.digests()
    seeds = [next_version(), next_version(), next_version()]
    said = ranks.run(partial(miles_job, miles_from_sources(MILES)), [engine.url], seeds, seeds[0])
    metrics = ["weightcast/bytes", "weightcast/seconds"]
    assert said[0] == [(version, metrics, True) for version in seeds]
    assert said[1] == [(version, [], False) for version in seeds]
    assert serves_whole(engine) == seeds[-1]
    assert not set(before.values()) & set(engine.digests().values())


@needs_miles
def test_miles_own_updater_fails_on_every_rank(ranks: Ranks) -> None:
    version = next_version()
    head, other = ranks.run(partial(miles_job, miles_from_sources(MILES)), [NOWHERE], [version], version)
    assert head[0].startswith("TargetUnreachable: http://127.0.0.1:9")
    assert other[0].startswith("TrainerRankFailed: rank 0 could not update the engines: TargetUnreachable")


@needs_miles
def test_miles_own_updater_goes_on_after_a_failed_update(ranks: Ranks, engine: Engine) -> None:
    version = next_version()
    assert next_version() == version + 1
    job = partial(miles_job_that_loses_its_engine, miles_from_sources(MILES))
    head, other = ranks.run(job, engine.url, version)
    assert "older" in head[0]
    assert other[0].startswith("TrainerRankFailed: rank 0 could not update the engines")
    assert head[1] == other[1] == f"version {version + 1}"
    assert serves_whole(engine) == version + 1


# -- xtuner


@needs_xtuner
def test_every_call_of_xtuners_updater_fits_our_class() -> None:
    found: set[str] = set()
    for file in Path(XTUNER, "xtuner", "v1").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func).removesuffix(".remote").split(".")[-1]
            name = {"WeightUpdater": "__init__", "UpdateWeighter": "__init__"}.get(called, called)
            if called not in ("WeightUpdater", "UpdateWeighter", "bind_rollout_weight_update", "weight_update"):
                continue
            if any(keyword.arg is None for keyword in node.keywords):
                continue  # it hands on what it got
            method = inspect.signature(getattr(UpdateWeighter, name))
            method.bind(None, *node.args, **{str(keyword.arg): None for keyword in node.keywords})
            found.add(f"{name}({', '.join(str(keyword.arg) for keyword in node.keywords)})")
    assert {
        "__init__(rank, logger, config, engine)",
        "bind_rollout_weight_update(targets, rollout_config)",
        "weight_update()",
        "weight_update(need_register, need_update)",
    } <= found


@needs_xtuner
@pytest.mark.engine_full
def test_weights_that_xtuner_shards_and_exports_arrive(tmp_path: Path) -> None:
    model, other = tmp_path / "model", tmp_path / "other"
    for folder, seed in ((model, 2), (other, 1)):  # the engine starts on other weights than the trainer's
        tiny_model(folder, family="qwen3", seed=seed)
        in_bfloat16(folder)
        tiny_tokenizer(folder)
    with engines(other, tmp_path, {"dtype": "bfloat16"}) as (started,):
        said = run_script(
            trainer_python("xtuner-sources"),
            "xtuner_run",
            tmp_path,
            started.url,
            folder=tmp_path,
            timeout_s=1800,
            PYTHONPATH=os.pathsep.join((str(Path(__file__).parents[2] / "src"), XTUNER)),
        )
        after = started.digests()
        version = started.info()["version"]
    assert said["sharded"]
    assert said["versions"] == [1, 2, 3]
    assert said["transports"] == ["ipc", "broadcast", "broadcast"]
    assert said["urls"] == [[started.url]] * 3
    assert said["proofs"] == [["resident"]] * 3
    assert said["refused"].startswith("need_register=False sends registered weights, and none are registered")
    assert version == 3
    saved = {
        name: tensor_digest(tensor)
        for file in (tmp_path / "3").glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
    assert after == saved
