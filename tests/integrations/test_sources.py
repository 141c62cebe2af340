"""Our class for xtuner on the project's own sources, which are read from a checkout.

The package is on no index in a version with these interfaces.  ``WEIGHTCAST_XTUNER`` names a folder with ``xtuner/`` in
it.  The page of the integration names the revision that was run.
"""

from __future__ import annotations

import ast
import inspect
import os
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.helpers.engines import engines
from tests.helpers.tiny import in_bfloat16, tiny_model, tiny_tokenizer
from tests.integrations.environment import trainer_python
from tests.integrations.script import run_script
from weightcast.digest.definition import tensor_digest
from weightcast.integrations.xtuner import UpdateWeighter

XTUNER = os.environ.get("WEIGHTCAST_XTUNER", "")

needs_xtuner = pytest.mark.skipif(not XTUNER, reason="WEIGHTCAST_XTUNER names no folder with xtuner/ in it")


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
