"""The command line that the examples share."""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path
from typing import Any

from weightcast.ray import lmdeploy_engine, reference_engine, sglang_engine, vllm_engine

from .task import JUDGES

HERE = Path(__file__).parents[1]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
SMOLLM2 = CACHE / "weightcast/SmolLM2-135M-Instruct"  # made by `weightcast demo`
ENGINES = ("reference", "vllm", "sglang", "lmdeploy")
TRANSPORTS = ("auto", "ipc", "broadcast", "disk", "checkpoint-engine")
LEVELS = ("none", "received", "resident", "behaviour")
PAUSES = ("abort", "retract", "in_place", "wait")


def parser(description: str, *, out: str, via: str, pause: str) -> argparse.ArgumentParser:
    """Makes the parser; the defaults are those of a run on two CPU cores.

    Args:
        description: First line of the help.
        out: Default of ``--out``.
        via: Default of ``--via``.
        pause: Default of ``--pause``.
    """
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    task = made.add_argument_group("task")
    task.add_argument("--model", default=str(SMOLLM2), help="Hugging Face model folder")
    task.add_argument("--problems", default=str(HERE / "arithmetic.jsonl"), help="problems in the format of GSM8K")
    task.add_argument("--reward", choices=tuple(JUDGES), default="arithmetic", help="what is rewarded")
    task.add_argument("--steps", type=int, default=14, help="training steps")
    task.add_argument("--prompts", type=int, default=4, help="prompts in one step")
    task.add_argument("--group", type=int, default=8, help="completions of each prompt")
    task.add_argument("--max-tokens", type=int, default=18, help="most tokens of a completion")
    task.add_argument("--eval-every", type=int, default=0, help="steps between evaluations; 0 makes none")
    task.add_argument("--eval-problems", type=int, default=16, help="problems held out, from the end of the file")
    task.add_argument("--seed", type=int, default=0, help="seed of prompts, samples and torch")
    training = made.add_argument_group("training")
    training.add_argument("--lr", type=float, default=2e-5, help="learning rate")
    training.add_argument("--clip", type=float, default=0.2, help="how far a ratio may fall below 1")
    training.add_argument("--clip-high", type=float, default=0.28, help="how far a ratio may rise above 1")
    training.add_argument("--kl", type=float, default=0.0, help="weight of the KL divergence from the first model")
    training.add_argument("--trainers", type=int, default=2, help="training ranks")
    training.add_argument("--gpus", type=int, default=0, help="GPUs of this machine to use; 0 runs on CPUs")
    engines = made.add_argument_group("engines")
    engines.add_argument("--engine", choices=ENGINES, default="reference", help="kind of the engines")
    engines.add_argument("--engines", type=int, default=1, help="number of engines")
    engines.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks of each engine")
    engines.add_argument(
        "--engine-program", default="", help="command that starts an engine, if it has an environment of its own"
    )
    engines.add_argument("--engine-args", default="", help="further arguments of the engine's command line")
    engines.add_argument("--start-timeout", type=float, default=600.0, help="seconds for an engine to start")
    engines.add_argument("--dtype", default="", help="dtype of the engines; empty: bfloat16 on GPUs, float32 on CPUs")
    updates = made.add_argument_group("weight updates")
    updates.add_argument("--via", choices=TRANSPORTS, default=via, help="transport")
    updates.add_argument("--verify", choices=LEVELS, default="resident", help="highest level of proof to reach")
    updates.add_argument("--pause", choices=PAUSES, default=pause, help="fate of requests that run at the switch")
    updates.add_argument("--bucket-bytes", help="size of one bucket; by default, connect chooses it")
    keeping = made.add_argument_group("results")
    keeping.add_argument("--out", default=out, help="folder for metrics, checkpoints and logs")
    keeping.add_argument("--save-every", type=int, default=7, help="steps between checkpoints; 0 saves none")
    keeping.add_argument("--keep-last", type=int, default=2, help="checkpoints to keep; 0 keeps all")
    keeping.add_argument("--resume", action="store_true", help="continue from the last checkpoint in --out")
    keeping.add_argument("--export", default="", help="Hugging Face folder for the model at the end; empty: none")
    keeping.add_argument(
        "--tracker", action="append", default=[], metavar="MODULE:FUNCTION", help="called with (step, record)"
    )
    keeping.add_argument("--ray-address", default="", help="address of a Ray cluster; empty starts one here")
    return made


def checked(
    made: argparse.ArgumentParser, argv: list[str] | None = None, *, sleeps: bool = False
) -> argparse.Namespace:
    """Parses the command line, fills in what depends on the machine, and refuses what cannot work.

    Args:
        made: The parser.
        argv: Arguments; None takes the program's.
        sleeps: Whether the engine is to sleep while trainers use its device.
    """
    args = made.parse_args(argv)
    args.dtype = args.dtype or ("bfloat16" if args.gpus else "float32")
    if not (Path(args.model) / "config.json").is_file():
        made.error(f"--model {args.model} is no Hugging Face folder (`weightcast demo` makes the one of SmolLM2)")
    if args.engine == "lmdeploy" and not args.gpus and not args.engine_program:
        made.error("--engine lmdeploy: LMDeploy does not serve on a CPU; pass --gpus, or an --engine-program that does")
    if args.engine == "vllm" and sleeps and not args.gpus:
        made.error("--engine vllm: vLLM cannot sleep on a CPU; pass --gpus, or run rl_disaggregated.py")
    return args


def engine_kind(args: argparse.Namespace, *, sleeps: bool) -> Any:
    """Returns the engine to start.

    Args:
        args: The command line.
        sleeps: Whether the engine is to sleep while trainers use its device.
    """
    more = shlex.split(args.engine_args)
    program = {"program": tuple(shlex.split(args.engine_program))} if args.engine_program else {}
    dtype = ("--dtype", args.dtype)
    if args.engine == "vllm":
        return vllm_engine(args.model, *dtype, *(["--enable-sleep-mode"] if sleeps else []), *more, **program)
    if args.engine == "sglang":
        return sglang_engine(args.model, *dtype, *(["--enable-memory-saver"] if sleeps else []), *more, **program)
    if args.engine == "lmdeploy":
        # LMDeploy's command line knows no float32; with `auto` it takes the dtype from the checkpoint.
        dtype = ("--dtype", "auto" if args.dtype == "float32" else args.dtype)
        return lmdeploy_engine(args.model, *dtype, "--logprobs-mode", "raw_logprobs", *more, **program)
    return reference_engine(args.model, *dtype, "--device", "cuda" if args.gpus else "cpu", *more)
