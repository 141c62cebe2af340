"""Real SGLang in fp8 on a GPU: a checkpoint in blocks that our exporter made, updated through a folder.

After each update answers and SGLang's own checksum of its weights must equal those of a server that was started on the
pushed weights.  Our receiver refuses the model by name.  SGLang comes from where ``test_sglang_gpu`` has it from.
"""

from __future__ import annotations

import json
import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines.environment import package_path
from tests.gpu.servers import PROMPTS, TOKENS, Record, Server, started
from tests.gpu.test_sglang_gpu import SITE, Sglang
from tests.gpu.test_sglang_gpu import pytestmark as needs_sglang
from tests.helpers.fp8_checkpoints import EXPORTED, exported_checkpoint
from tests.helpers.tiny import in_bfloat16, tiny_model, tiny_tokenizer
from weightcast import Target, WeightUpdater
from weightcast.errors import WeightcastError
from weightcast.exporters.module import ModuleExporter

pytestmark = [*needs_sglang[:-1], pytest.mark.timeout(400)]

DENSE: dict[str, Any] = {
    "max_position_embeddings": 1024,
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


def checkpoints(folder: Path, family: str, settings: dict[str, Any], kind: str) -> tuple[list[Path], list[Path]]:
    """Two checkpoints with other weights: in bfloat16, and as our exporter quantises them."""
    wide: list[Path] = []
    for seed, name in enumerate("ab"):
        wide.append(folder / f"{name}-wide")
        tiny_model(wide[-1], family=family, seed=seed, **settings)
        tiny_tokenizer(wide[-1])
        in_bfloat16(wide[-1])
        exported_checkpoint(wide[-1], folder / name, EXPORTED[kind])
    return wide, [folder / name for name in "ab"]


def sglang(model: Path, log: Path, *, receiver: bool = False) -> AbstractContextManager[Server]:
    """A server on the first GPU, without DeepGEMM, whose scales would have another form on some GPUs."""

    def command(port: int) -> list[str]:
        words = ["-m", "sglang.launch_server", f"--model-path={model}", "--host=127.0.0.1", f"--port={port}"]
        words += ["--skip-tokenizer-init", "--attention-backend=triton", "--sampling-backend=pytorch"]
        words += ["--grammar-backend=none", "--disable-cuda-graph", "--mem-fraction-static=0.3"]
        words += ["--context-length=512", "--max-total-tokens=8192", "--max-running-requests=8"]
        return [*words, "--disable-radix-cache"]

    plug_in = package_path(log.parent / "metadata") if receiver else ""
    environment = {
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(part for part in (SITE, plug_in, os.environ.get("PYTHONPATH", "")) if part),
        "SGLANG_ENABLE_JIT_DEEPGEMM": "0",
        "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",  # others may be on this GPU
        "SGLANG_IS_FLASHINFER_AVAILABLE": "0",
        **({"SGLANG_PLUGINS": "weightcast"} if receiver else {}),
    }
    return started(command, gpus=(0,), log=log, environment=environment)


def trainer(folder: Path, kind: str) -> ModuleExporter:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return ModuleExporter(model.to("cuda:0"), quantise=EXPORTED[kind])


@pytest.mark.parametrize(("family", "settings"), [("qwen3", DENSE), ("qwen3_moe", EXPERTS)], ids=["dense", "experts"])
def test_an_update_of_blocks_answers_as_a_server_that_was_started_on_the_weights(
    tmp_path: Path, record: Record, family: str, settings: dict[str, Any]
) -> None:
    wide, narrow = checkpoints(tmp_path, family, settings, "exported-blocks")
    engine = Sglang()
    with sglang(narrow[0], tmp_path / "updated.log") as server, sglang(narrow[1], tmp_path / "other.log") as other:
        server.wait_ready()
        other.wait_ready()
        answers = [engine.answers(server), engine.answers(other)]
        sums = [engine.checksum(server), engine.checksum(other)]
        assert all(old != new for old, new in zip(*answers, strict=True))
        assert sums[0] != sums[1]
        rows: list[Any] = []
        ways = [("disk", 1), ("disk", 0), ("ipc", 1), ("ipc", 0), ("disk", 1)]
        for version, (transport, index) in enumerate(ways, 1):
            options: dict[str, Any] = {"transport": transport, "verify": "none", "timeout_s": 60.0}
            with WeightUpdater.connect(trainer(wide[index], "exported-blocks"), [server.url], **options) as updater:
                [row] = updater.update(version=version).targets
            assert (row.status, row.version_after) == ("serving", version), row
            assert engine.answers(server) == answers[index], f"version {version}"
            assert engine.checksum(server) == sums[index], f"version {version}"
            rows.append(row)
        record("engine", rows[-1].engine)
        record("case", {"family": family, "prompts": len(PROMPTS), "tokens": TOKENS})
        record("stall_s", [row.stall_s for row in rows])


@pytest.mark.parametrize("kind", ["exported-tensors", "exported-channels"])
def test_scales_that_sglang_joins_or_turns_are_refused_and_it_serves_on(tmp_path: Path, kind: str) -> None:
    wide, narrow = checkpoints(tmp_path, "qwen3", DENSE, kind)
    engine = Sglang()
    with sglang(narrow[0], tmp_path / "server.log") as server:
        server.wait_ready()
        before = engine.answers(server)
        with pytest.raises(WeightcastError, match="one scale for a tensor, channel or group"):
            WeightUpdater.connect(trainer(wide[1], kind), [Target(server.url, engine="sglang")], transport="ipc")
        assert engine.answers(server) == before


def test_our_receiver_refuses_a_quantised_model_by_name(tmp_path: Path) -> None:
    _, narrow = checkpoints(tmp_path, "qwen3", DENSE, "exported-blocks")
    with sglang(narrow[0], tmp_path / "receiver.log", receiver=True) as server:
        with pytest.raises(AssertionError, match="did not start"):
            server.wait_ready()
        said = server.log.read_text(errors="replace")
    method = json.loads((narrow[0] / "config.json").read_text())["quantization_config"]["quant_method"]
    assert f"the model is quantised ({method})" in said, said[-3000:]
