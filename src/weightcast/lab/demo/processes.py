"""Starts the demo's engines and trainers: their commands, environments and shares of the cores."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from weightcast.lab.demo.children import Child, Children
from weightcast.lab.demo.placement import DemoPlacement, EngineGpus
from weightcast.lab.demo.settings import DemoConfig, Mode

# glibc returns large buffers to the kernel at every free, and each training step faults them in again. On a CPU that
# costs a fifth of a step.
_KEEP_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_TOP_PAD_": str(64 << 20),
}

TRANSPORTS = {"colocated": "ipc", "disaggregated": "broadcast"}


def start_engines(children: Children, model: Path, placement: DemoPlacement) -> list[Child]:
    """Starts each engine on a free port; it prints its URL as JSON when it serves."""
    threads = _threads(sum(engine.tp for engine in placement.engines))
    engines: list[Child] = []
    for number, engine in enumerate(placement.engines):
        command = [sys.executable, "-m", "weightcast", "serve", str(model), "--host", "127.0.0.1", "--port", "0"]
        command += ["--tp", str(engine.tp), "--device", placement.device, "--dtype", _engine_dtype(placement)]
        command += ["--threads", str(threads), "--json"]
        env = _environment(threads)
        if engine.gpus:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(_visible_gpus(engine.gpus))
        engines.append(children.start(f"engine-{number}", command, env=env, piped=True))
    return engines


def start_trainers(children: Children, job: Path, placement: DemoPlacement) -> list[Child]:
    """Starts the trainer processes; each waits for a line with the engines' URLs on stdin."""
    env = {**_environment(_threads(placement.trainers)), **_KEEP_MEMORY}
    command = [sys.executable, "-m", "weightcast.lab.demo.trainer", str(job)]
    ranks = range(placement.trainers)
    return [children.start(f"trainer-{rank}", [*command, str(rank)], env=env, piped=True) for rank in ranks]


def write_job(config: DemoConfig, mode: Mode, model: Path, placement: DemoPlacement, folder: Path) -> Path:
    """Writes the settings of the trainers in the format of ``trainer.TrainerJob``, and returns the file.

    It does not use that class, whose import would bring torch and FSDP into this process.
    """
    job = {
        "model": str(model),
        "transport": TRANSPORTS[mode],
        "world_size": placement.trainers,
        "gpus": list(placement.trainer_gpus),
        "rendezvous": str(folder / "rendezvous"),
        "wire_dtype": _engine_dtype(placement),
        "steps": config.steps,
        "seed": config.seed,
        "bucket_bytes": config.bucket_bytes,
        "step_timeout_s": config.step_timeout_s,
        "grpo": config.grpo,
    }
    path = folder / "job.json"
    path.write_bytes(msgspec.json.encode(job))
    return path


def describe(engine: EngineGpus) -> str:
    """Describes an engine's tensor-parallel degree and device."""
    return f"tp {engine.tp} " + (f"on GPU {', '.join(map(str, engine.gpus))}" if engine.gpus else "on the CPU")


def _engine_dtype(placement: DemoPlacement) -> str:
    return "bfloat16" if placement.device == "cuda" else "float32"


def _threads(num_processes: int) -> int:
    """Returns each process's share of the cores, for processes that compute at the same time."""
    return max(1, len(os.sched_getaffinity(0)) // num_processes)


def _environment(threads: int) -> dict[str, str]:
    offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TQDM_DISABLE": "1"}
    return {**os.environ, **offline, "OMP_NUM_THREADS": str(threads)}


def _visible_gpus(indices: Sequence[int]) -> list[str]:
    configured = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = configured.split(",") if configured else None
    return [names[index] if names else str(index) for index in indices]
