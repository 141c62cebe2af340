"""SGLang's real command line, in both versions: each setting that our plug-in refuses is known to it by that name."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.engines.environment import engine_python
from tests.engines.forked import run
from tests.engines.overlays import overlay, receiver_path
from tests.engines.sglang_server import IMPORTED, OVERLAYS, PLAYED, STANDINS, sglang_command
from tests.helpers.tiny import tiny_model, tiny_tokenizer
from weightcast.comm.ports import quiet_port

pytestmark = [pytest.mark.engine]

REFUSED: dict[str, tuple[str, ...]] = {
    "data-parallel attention": ("--enable-dp-attention", "--dp-size=2", "--tp-size=2"),
    "expert parallelism": ("--ep-size=2",),
    "ranks on several hosts": ("--nnodes=2",),
    "several tokenizer workers": ("--tokenizer-worker-num=2",),
    "SGLang's Ray executor": ("--use-ray",),
    "SGLang's gRPC server (--grpc-mode)": ("--grpc-mode",),
    "SGLang's gRPC server (--smg-grpc-mode)": ("--smg-grpc-mode",),
    "a gRPC server beside HTTP": ("--grpc-port=30001",),
    "prefill and decode side by side": ("--enable-pdmux",),
    "prefill and decode on servers of their own (--disaggregation-mode)": ("--disaggregation-mode=prefill",),
    "a draft model": ("--speculative-algorithm=EAGLE",),
    "LoRA adapters": ("--enable-lora",),
    "quantised weights (--quantization)": ("--quantization=fp8",),
    "quantised weights (--torchao-config)": ("--torchao-config=int4wo-128",),
    "quantised weights (--modelopt-quant)": ("--modelopt-quant=fp8",),
    "quantised weights (--quantize-and-serve)": ("--quantize-and-serve", "--quantization=modelopt_fp8"),
    "experts that move between ranks": ("--enable-eplb", "--ep-size=2", "--tp-size=2"),
    "redundant experts": ("--ep-num-redundant-experts=2",),
    "elastic expert parallelism": ("--elastic-ep-backend=mooncake",),
    "a backup of experts": ("--enable-elastic-expert-backup",),
    "experts that are paged in": ("--enable-paged-experts",),
    "experts of KTransformers": ("--kt-weight-path=nowhere",),
    "NVIDIA's megakernel": ("--enable-nvidia-megakernel",),
    "a weight cache that processes share": ("--weight-cache-mode=daemon",),
    "a KV cache on the host": ("--enable-hierarchical-cache",),
    "an external KV cache (--enable-lmcache)": ("--enable-lmcache",),
    "an external KV cache (--enable-flexkv)": ("--enable-flexkv",),
    "an external KV cache (--enable-unified-cache-external-linker)": ("--enable-unified-cache-external-linker",),
    "a prefix cache of another make": ("--radix-cache-backend=other",),
    "a sparse KV cache on the host": ("--enable-hisparse",),
    "sessions that keep their KV cache": ("--enable-streaming-session",),
    "a start that waits for checkpoint-engine": ("--checkpoint-engine-wait-weights-before-ready",),
    "weights that load while graphs are captured": ("--startup-weight-load-mode=overlap",),
    "context parallelism (--attn-cp-size)": ("--attn-cp-size=2", "--tp-size=2"),
    "context parallelism (--dcp-size)": ("--dcp-size=2", "--tp-size=2"),
    "data parallelism of experts": ("--moe-dp-size=2", "--attn-cp-size=2", "--tp-size=2"),
    "experts whose weights are fetched": ("--dwdp-size=2", "--tp-size=2"),
    "an HTTP/2 server": ("--enable-http2",),
    "weights on the host (--cpu-offload-gb)": ("--cpu-offload-gb=1",),
    "weights on the host (--offload-group-size)": ("--offload-group-size=4",),
    "embeddings on the host": ("--ple-offload-embedding",),
    "diffusion language models": ("--dllm-algorithm=LowConfidence",),
}
# Options that a version does not have.
LACKING = {
    "0.5.17": (
        "experts that are paged in",
        "NVIDIA's megakernel",
        "an external KV cache (--enable-unified-cache-external-linker)",
        "weights that load while graphs are captured",
        "embeddings on the host",
    ),
    "0.5.23": ("quantised weights (--torchao-config)",),
}
# Ended at a real start by SGLang itself, before it comes to ours: it lacks a package here, or this model is not for it.
ENDED_BY_SGLANG = {
    "SGLang's Ray executor": "Ray is required",
    "SGLang's gRPC server (--grpc-mode)": "gRPC mode requires the smg-grpc-servicer package",
    "SGLang's gRPC server (--smg-grpc-mode)": "gRPC mode requires the smg-grpc-servicer package",
    "quantised weights (--quantize-and-serve)": "quantize_and_serve functionality is currently disabled",
    "NVIDIA's megakernel": "plugin is not installed",
    "diffusion language models": "Unknown diffusion LLM",
    "an HTTP/2 server": "sglang[http2]",
}
# Settings that SGLang makes of others, or reads from its environment.
OTHERS: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "LoRA adapters (--lora-paths)": (("--lora-paths=a=/nowhere",), {}),
    "SGLang's Rust front end (SGLANG_RUST_SERVER)": ((), {"SGLANG_RUST_SERVER": "1"}),
    "a gRPC server beside HTTP (SGLANG_GRPC_PORT)": ((), {"SGLANG_GRPC_PORT": "30001"}),
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

# Each start is a fork of a process that has imported SGLang, and does what its command line does.
STARTS = """
import json, os, signal, sys
import sglang.srt.entrypoints.http_server, sglang.srt.managers.scheduler
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.launch_server import run_server
from sglang.srt.server_args import prepare_server_args
asked = json.loads(sys.argv[2])
said = []
for options, environment in asked:
    there, here = os.pipe()
    if not os.fork():
        os.setsid()
        os.environ.update(environment)
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)
        words = "it ended"
        try:
            run_server(prepare_server_args(json.loads(sys.argv[1]) + options))
        except BaseException as error:
            words = f"{type(error).__name__}: {error}"
        os.write(here, words.encode()[:2000])
        os.killpg(0, signal.SIGKILL)
    os.close(here)
    said.append(os.read(there, 2000).decode())
    os.close(there)
    os.wait()
print(json.dumps(said))
"""


@pytest.mark.parametrize("version", PLAYED)
def test_every_refusal_ends_a_real_start_before_a_model_is_loaded(version: str, tmp_path: Path) -> None:
    tiny_model(tmp_path / "model")
    tiny_tokenizer(tmp_path / "model")
    python = engine_python("sglang-0.5.23-cpu")
    path = [str(overlay(python, *OVERLAYS[version]))] if version in OVERLAYS else []
    (tmp_path / "metadata").mkdir()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SGLANG_")} | {
        "PYTHONPATH": os.pathsep.join([*path, str(STANDINS), receiver_path(python, tmp_path / "metadata")]),
        "SGLANG_PLUGINS": "weightcast",
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": "0",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    options = [f"--model-path={tmp_path / 'model'}", "--device=cpu", "--attention-backend=torch_native"]
    options += ["--dtype=float32", "--disable-cuda-graph", "--mem-fraction-static=0.3", f"--port={quiet_port()}"]
    asked = [(name, wanted, {}) for name, wanted in REFUSED.items() if name not in LACKING[version]]
    asked += [(name, wanted, more) for name, (wanted, more) in OTHERS.items()]
    command = [str(python), "-c", STARTS, json.dumps(options), json.dumps([one[1:] for one in asked])]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    ours = "ConfigError: not shown to be right with weightcast's receiver: "
    wrong = [
        (name, words)
        for (name, _, _), words in zip(asked, found, strict=True)
        if not (ENDED_BY_SGLANG[name] in words if name in ENDED_BY_SGLANG else words.startswith(ours) and name in words)
    ]
    assert wrong == []


@pytest.mark.parametrize("version", PLAYED)
def test_every_refusal_is_about_a_setting_that_sglang_has(version: str) -> None:
    (python, *_), environment = sglang_command(Path("/nowhere"), 1, (), 0, receiver=True, version=version)
    asked = {**REFUSED, "no options": (), "what runs": TAKEN}
    done = run(Path(python), ["-c", SCRIPT, json.dumps(asked)], modules=IMPORTED, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said.pop("no options") == "taken, 1 ranks"
    assert said.pop("what runs") == "taken, 8 ranks"
    unknown = [name for name, words in said.items() if words == "unknown"]
    assert tuple(unknown) == LACKING[version]
    for name, words in said.items():
        assert name in unknown or ("not shown to be right" in words and name in words), (name, words)
