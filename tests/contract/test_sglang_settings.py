"""SGLang's real command line, in both versions: each setting that our plug-in refuses is known to it by that name."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.engines.environment import QUICK, engine_python, package_path
from tests.engines.overlays import overlay
from tests.engines.sglang_server import OVERLAYS, PLAYED, STANDINS

pytestmark = [pytest.mark.engine]

REFUSED: dict[str, tuple[str, ...]] = {
    "data-parallel attention": ("--enable-dp-attention",),
    "expert parallelism": ("--ep-size=2",),
    "ranks on several hosts": ("--nnodes=2",),
    "several tokenizer workers": ("--tokenizer-worker-num=2",),
    "SGLang's Ray executor": ("--use-ray",),
    "SGLang's gRPC server (--grpc-mode)": ("--grpc-mode",),
    "SGLang's gRPC server (--smg-grpc-mode)": ("--smg-grpc-mode",),
    "a gRPC server beside HTTP": ("--grpc-port=30001",),
    "prefill and decode side by side": ("--enable-pdmux",),
    "prefill and decode on servers of their own": ("--disaggregation-mode=prefill",),
    "a draft model": ("--speculative-algorithm=EAGLE",),
    "LoRA adapters": ("--enable-lora",),
    "quantised weights (--quantization)": ("--quantization=fp8",),
    "quantised weights (--torchao-config)": ("--torchao-config=int4wo-128",),
    "quantised weights (--modelopt-quant)": ("--modelopt-quant=fp8",),
    "quantised weights (--quantize-and-serve)": ("--quantize-and-serve",),
    "experts that move between ranks": ("--enable-eplb",),
    "redundant experts": ("--ep-num-redundant-experts=2",),
    "elastic expert parallelism": ("--elastic-ep-backend=mooncake",),
    "a backup of experts": ("--enable-elastic-expert-backup",),
    "experts that are paged in": ("--enable-paged-experts",),
    "experts of KTransformers": ("--kt-weight-path=nowhere",),
    "NVIDIA's megakernel": ("--enable-nvidia-megakernel",),
    "a weight cache that processes share": ("--weight-cache-mode=daemon",),
    "a KV cache on the host": ("--enable-hierarchical-cache",),
    "an external KV cache": ("--enable-lmcache",),
    "weights on the host (--cpu-offload-gb)": ("--cpu-offload-gb=1",),
    "weights on the host (--offload-group-size)": ("--offload-group-size=4",),
    "embeddings on the host": ("--ple-offload-embedding",),
    "diffusion language models": ("--dllm-algorithm=LowConfidence",),
}
# Options that a version does not have.
LACKING = {
    "0.5.17": ("experts that are paged in", "NVIDIA's megakernel", "embeddings on the host"),
    "0.5.23": ("quantised weights (--torchao-config)",),
}
TAKEN = ("--tp-size=2", "--pp-size=2", "--dp-size=2", "--enable-memory-saver", "--disable-radix-cache")
SCRIPT = """
import argparse, json, sys
from sglang.srt.server_args import ServerArgs
from weightcast.errors import ConfigError
from weightcast.plugins.sglang.settings import check_settings, ranks_of
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
said = {}
for name, options in json.loads(sys.argv[1]).items():
    try:
        parsed = parser.parse_args(["--model-path=nowhere", *options])
    except SystemExit:
        said[name] = "unknown"
        continue
    try:
        check_settings(parsed)
        said[name] = f"taken, {ranks_of(parsed)} ranks"
    except ConfigError as error:
        said[name] = str(error)
print(json.dumps(said))
"""


@pytest.mark.parametrize("version", PLAYED)
def test_every_refusal_is_about_a_setting_that_sglang_has(version: str, tmp_path: Path) -> None:
    python = engine_python("sglang-0.5.23-cpu")
    path = [str(overlay(python, *OVERLAYS[version]))] if version in OVERLAYS else []
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([*path, str(STANDINS), package_path(tmp_path, QUICK)]),
        "SGLANG_USE_CPU_ENGINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    asked = {**REFUSED, "no options": (), "what runs": TAKEN}
    done = subprocess.run(
        [str(python), "-c", SCRIPT, json.dumps(asked)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said.pop("no options") == "taken, 1 ranks"
    assert said.pop("what runs") == "taken, 8 ranks"
    unknown = [name for name, words in said.items() if words == "unknown"]
    assert tuple(unknown) == LACKING[version]
    for name, words in said.items():
        assert name in unknown or ("not shown to be right" in words and name in words), (name, words)
