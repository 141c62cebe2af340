"""Real vLLM in 8 and 4 bits on a GPU with our receiver: checkpoints, and bfloat16 that vLLM quantises itself.

Formats that our exporters make are also sent by a trainer in bfloat16.  After each update everything that layers and
kernels hold must equal, bit by bit, what a server holds that was started on the pushed weights, and answers must be the
same.  vLLM comes from where ``test_vllm_gpu`` has it from.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.servers import Record, Server
from tests.gpu.test_updates_gpu import PYTHONPATH
from tests.gpu.test_vllm_gpu import SITE, Vllm, vllm
from tests.gpu.test_vllm_gpu import pytestmark as needs_vllm
from tests.helpers.fp8_checkpoints import EXPORTED, exported_checkpoint, fp8_checkpoint
from tests.helpers.tiny import in_bfloat16, tiny_model, tiny_tokenizer
from weightcast import Target, WeightUpdater
from weightcast.exporters.module import ModuleExporter
from weightcast.exporters.quantise import Fp8Format

pytestmark = [*needs_vllm[:-1], pytest.mark.timeout(240)]

DENSE: dict[str, Any] = {
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 1024,
}
EXPERTS = DENSE | {
    "moe_intermediate_size": 256,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
MORE_EXPERTS = EXPERTS | {"num_experts": 16}  # vLLM's kernel for blocks computes no gate of 8, which it quantises too
AT_COMMIT = '--additional-config={"weightcast": {"derive_ahead": false}}'
CASES = [
    pytest.param("qwen3", DENSE, "blocks", [], id="blocks"),
    pytest.param("qwen3_moe", EXPERTS, "blocks", [], id="blocks, experts"),
    pytest.param("qwen3", DENSE, "tensors", [], id="tensors"),
    pytest.param("qwen3", DENSE, "static", [], id="tensors, static activations"),
    pytest.param("qwen3_moe", EXPERTS, "tensors", [], id="tensors, experts"),
    pytest.param("qwen3", DENSE, "exported-tensors", [], id="exported tensors"),
    pytest.param("qwen3_moe", EXPERTS, "exported-tensors", [], id="exported tensors, experts"),
    pytest.param("qwen3", DENSE, "exported-channels", [], id="exported channels"),
    pytest.param("qwen3_moe", EXPERTS, "exported-channels", [], id="exported channels, experts"),
    pytest.param("qwen3", DENSE, "exported-nvfp4", [], id="exported nvfp4"),
    pytest.param("qwen3_moe", EXPERTS, "exported-nvfp4", [], id="exported nvfp4, experts"),
    pytest.param("qwen3", DENSE, "exported-mxfp8", [], id="exported mxfp8"),
    pytest.param("qwen3_moe", EXPERTS, "exported-mxfp8", [], id="exported mxfp8, experts"),
    pytest.param("qwen3", DENSE, "", ["--quantization=fp8"], id="online"),
    pytest.param("qwen3_moe", EXPERTS, "", ["--quantization=fp8"], id="online, experts"),
    pytest.param("qwen3", DENSE, "", ["--quantization=fp8_per_block"], id="online blocks"),
    pytest.param("qwen3_moe", MORE_EXPERTS, "", ["--quantization=fp8_per_block"], id="online blocks, experts"),
    pytest.param("qwen3", DENSE, "", ["--quantization=fp8_per_channel"], id="online channels"),
    pytest.param("qwen3", DENSE, "", ["--quantization=fp8", AT_COMMIT], id="online, at the commit"),
    pytest.param("qwen3_moe", EXPERTS, "", ["--quantization=fp8", AT_COMMIT], id="online, experts, at the commit"),
]


def checkpoints(folder: Path, family: str, settings: dict[str, Any], kind: Any) -> list[Path]:
    """Two checkpoints of a family with other weights."""
    found: list[Path] = []
    for seed, name in enumerate("ab"):
        wide = folder / f"{name}-wide"
        tiny_model(wide, family=family, seed=seed, **settings)
        tiny_tokenizer(wide)
        in_bfloat16(wide)
        if kind in EXPORTED:
            exported_checkpoint(wide, folder / name, EXPORTED[kind])
        elif kind:
            fp8_checkpoint(wide, folder / name, kind)
        found.append(folder / name if kind else wide)
    return found


def push(model: Path, server: Server, version: int) -> dict[str, Any]:
    """``weightcast push`` by ``ipc``; the row of the report."""
    path = os.pathsep.join(part for part in (PYTHONPATH, SITE) if part)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "weightcast", "push", str(model), "--to", server.url),
            *("--version", str(version), "--via", "ipc", "--json"),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=os.environ | {"PYTHONPATH": path, "NO_COLOR": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    [row] = json.loads(done.stdout)["targets"]
    return row


def trained(folder: Path, server: Server, version: int, form: Fp8Format) -> dict[str, Any]:
    """An update by a trainer that holds a checkpoint in bfloat16 and quantises it on the way; the row of the report."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to("cuda:0")
    exporter = ModuleExporter(model, quantise=form)
    with WeightUpdater.connect(exporter, [Target(server.url)], transport="ipc", timeout_s=60.0) as updater:
        return json.loads(updater.update(version=version).to_json())["targets"][0]


def held(server: Server) -> dict[str, str]:
    """Digests of what the layers and kernels hold."""
    [found] = server.post("/collective_rpc", {"method": "held_digests"})["results"]
    return found


def unlike(one: dict[str, str], other: dict[str, str]) -> list[str]:
    return [
        f"{path}: {one.get(path)}, not {other.get(path)}"
        for path in sorted(one.keys() | other.keys())
        if one.get(path) != other.get(path)
    ]


@pytest.mark.parametrize(("family", "settings", "kind", "options"), CASES)
def test_an_update_is_what_vllm_makes_of_the_same_weights(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    record: Record,
    family: str,
    settings: dict[str, Any],
    kind: str,
    options: list[str],
) -> None:
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    a, b = checkpoints(tmp_path, family, settings, kind)
    words = ["--dtype=bfloat16", "--worker-extension-cls=tests.helpers.vllm_held.Held", *options]
    eager = family != "qwen3"  # the dense ones with graphs
    common: dict[str, Any] = {"backend": "weightcast", "gpus": [0], "eager": eager, "options": words}
    with (
        vllm(a, tmp_path / "updated.log", **common) as server,
        vllm(b, tmp_path / "other.log", **common) as other,
    ):
        server.wait_ready()
        other.wait_ready()
        answers, wanted = [Vllm().answers(server), Vllm().answers(other)], [held(server), held(other)]
        assert all(old != new for old, new in zip(*answers, strict=True))
        assert unlike(*wanted)
        rows: list[dict[str, Any]] = []
        for version, index in ((1, 1), (2, 0), (3, 1), *([(4, 0)] if kind in EXPORTED else [])):
            if version < 4:
                rows.append(push([a, b][index], server, version))
            else:
                rows.append(trained(tmp_path / "a-wide", server, version, EXPORTED[kind]))
            assert (rows[-1]["proof"], rows[-1]["not_updated"]) == ("resident", []), rows[-1]
            found = unlike(held(server), wanted[index])
            assert not found, f"version {version}: {len(found)} differ: {found[:6]}"
            assert Vllm().answers(server) == answers[index], f"version {version}"
        log = server.log.read_text(errors="replace")
        said = re.search(r"recorded how (\d+) of (\d+) quantised layers are derived, (ahead of|at) the commit", log)
        assert (said is None) == (kind == "blocks"), said  # which vLLM serves as they are loaded
        if said is not None:
            assert (AT_COMMIT not in options and said[1] == said[2]) == (said[3] == "ahead of"), said[0]
            record("layers recorded, and all", [int(said[1]), int(said[2])])
            record("derived", f"{said[3]} the commit")
        record("held", len(wanted[0]))
        record("stall_s", [row["stall_s"] for row in rows])


def test_formats_that_vllm_quantises_to_with_shared_exponents_are_refused_by_name(tmp_path: Path) -> None:
    a, _ = checkpoints(tmp_path, "qwen3", DENSE, "")
    words = ["--dtype=bfloat16", "--quantization=mxfp8"]
    with vllm(a, tmp_path / "mxfp8.log", backend="weightcast", gpus=[0], eager=True, options=words) as server:
        with pytest.raises(AssertionError, match="did not start"):
            server.wait_ready()
        said = server.log.read_text(errors="replace")
    assert "weightcast cannot update this model" in said, said[-3000:]
    assert "Mxfp8OnlineLinearMethod" in said
