"""Real engines on one GPU and a trainer on another, where no process sees the other's: as Ray starts everybody.

    PYTHONPATH=src:. python3 -m benchmarks.gpu_apart --sglang-site SITE --vllm-site SITE --json OUT.json
    PYTHONPATH=src:. python3 -m benchmarks.gpu_apart ... --model-shape 8b
    python -m benchmarks.gpu_apart --tiny

SITE is a folder that holds SGLang or vLLM.  Each server runs with our receiver under ``CUDA_VISIBLE_DEVICES=1``, with
NCCL as the engine sets it; the trainer is another process under ``CUDA_VISIBLE_DEVICES=0``, with random weights.  The
steps for each engine:

1. The start, and what the engine says of its GPUs and of NCCL.
2. SGLang: a trainer that sets nothing connects.  It must be refused with both values of ``NCCL_CUMEM_ENABLE``.  The
   trainer of all other steps has SGLang's value.
3. ``transport="ipc"`` must be refused at ``connect``.
4. For each pause of ``--pauses``: ``transport="auto"`` must choose ``broadcast`` at ``connect`` without a warning.
   Then the first update and ``--repeats`` more, each proven ``resident``.  The answers must differ between two sets of
   weights, and be the same each time for one set.

The file has versions, cards, commands, times, what was chosen and every check.  The exit code is 1 if a check failed.
Everything ends within ``--limit-s``.  ``--tiny`` is a dry run on this CPU with ``weightcast serve`` in the engine's
place, whose ``auto`` chooses ``ipc``, so it asks for ``broadcast``.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from benchmarks import sglang_servers
from benchmarks.engine_trainer import Trainer, checkpoint
from benchmarks.gpu_pairs import END_S, FLAGS, LOG_BYTES, OPTIONS, Engine
from benchmarks.gpu_vllm_receiver import TINY, TimeIsUp, time_is_up
from benchmarks.vllm_memory import QWEN3_8B, Run, Server, launched

from weightcast.comm.ports import quiet_port
from weightcast.lab.bench.machine import facts

SMOLLM2: dict[str, Any] = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {"small": ("llama", SMOLLM2), "8b": ("qwen3", QWEN3_8B)}
CUMEM = "NCCL_CUMEM_ENABLE"
TRAINER_GPU, ENGINE_GPU = "0", "1"


@contextmanager
def environment(**variables: str | None) -> Generator[None]:
    """Environment of the processes that are started within; None takes a variable away."""
    before = {name: os.environ.get(name) for name in variables}
    try:
        _set(variables)
        yield
    finally:
        _set(before)


def _set(variables: dict[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


class Case:
    """One engine and the trainers that connect to it."""

    def __init__(self, run: Run, args: argparse.Namespace, kind: str, stack: ExitStack) -> None:
        """Starts the server and the trainers, and waits for none of them."""
        self.run, self.args, self.kind, self.stack = run, args, kind, stack
        self.version = 0
        self.known: dict[int, list[list[int]]] = {}
        with environment(CUDA_VISIBLE_DEVICES=ENGINE_GPU, NCCL_CUMEM_ENABLE=None):
            self.engine = self._launch()
        self.at_defaults = self._train(None) if kind == "sglang" and not args.tiny else None
        self.trainer = self._train("0" if kind == "sglang" else None)

    def _train(self, cumem: str | None) -> Trainer:
        with environment(CUDA_VISIBLE_DEVICES=TRAINER_GPU, NCCL_CUMEM_ENABLE=cumem):
            family, sizes = self.args.shape
            trainer = Trainer(1, family, sizes, "cpu" if self.args.tiny else "cuda")
        self.stack.callback(trainer.close)
        return trainer

    def _launch(self) -> Engine:
        args, model = self.args, self.args.folder / "model"
        if args.tiny:
            return Engine(self.stack.enter_context(_stand_in(model, args.folder)), kind="vllm", ours=True)
        if self.kind == "vllm":
            os.environ["WEIGHTCAST_VLLM_SITE"] = args.vllm_site
            own = argparse.Namespace(folder=args.folder, flags=FLAGS["vllm"], python=args.python)
            options = [*OPTIONS["vllm"].split(), f"--kv-cache-memory-bytes={args.cache_gib << 30}"]
            options += ["--gpu-memory-utilization=0.05"]
            server: Any = self.stack.enter_context(launched(self.run, own, model, *options, name="vllm"))
        else:
            own = argparse.Namespace(tiny=False, python=args.python, site=args.sglang_site, sleep=False)
            own.flags, own.cache_tokens = FLAGS["sglang"], args.cache_tokens
            options = OPTIONS["sglang"].split()
            server = sglang_servers.start(own, model, args.folder, *options, receiver=True, name="sglang")
            self.stack.callback(server.close)
        return Engine(server, kind=self.kind, ours=True)

    def play(self) -> None:
        """Every step."""
        self.run.case = self.kind
        with self.run.step("start") as kept:
            command = self.engine.server.command
            kept["command"] = command if isinstance(command, str) else " ".join(command)
            self.engine.wait_ready(max(10.0, min(self.args.start_limit_s, self.run.left_s - END_S)))
            info = _info(self.engine.url)
            kept |= {"engine": info["engine"], "ranks": info["ranks"], "message": info.get("message", "")}
            kept["trainer_bytes"] = self.trainer.call("held_bytes")
        if self.at_defaults is not None:
            self.refused(
                self.at_defaults,
                "a trainer that sets nothing is refused with both values",
                [f"{CUMEM} is not set in trainer rank 0", "0 in rank 0", f"set {CUMEM}=0"],
                transport="auto",
            )
            self.at_defaults.close()
        if not self.args.tiny:
            hidden = ["cannot map the trainer's memory", "sees only", "CUDA_VISIBLE_DEVICES"]
            self.refused(self.trainer, "ipc is refused at connect", hidden, transport="ipc")
        for pause in self.args.pauses.split(","):
            self.updates(pause)

    def refused(self, trainer: Trainer, what: str, words: list[str], **options: Any) -> None:
        """A connect that must fail with these words, which are kept."""
        with self.run.step(f"{what}: {options}") as kept:
            try:
                found = trainer.call("connect", "refused", [self.engine.url], options)[0]
            except RuntimeError as error:
                said = str(error)
                kept["error"] = said[said.rfind("weightcast.errors.") :][:2000]
            else:
                trainer.call("disconnect", "refused")
                said = kept["connected"] = str(found)
        self.run.check(what, all(word in said for word in words), said[-2000:])

    def updates(self, pause: str) -> None:
        """The first update after a connect, and more."""
        transport = "broadcast" if self.args.tiny else "auto"
        with self.run.step(f"connect with transport={transport!r}, pause={pause!r}") as kept:
            kept |= self.trainer.call("connect", pause, [self.engine.url], {"transport": transport, "pause": pause})[0]
            kept["warnings"] = said = self.trainer.call("warnings")[0]
        self.run.check(f"{pause}: broadcast was chosen at connect", kept["transport"] == "broadcast", kept)
        self.run.check(f"{pause}: connect warned of nothing", not said, said)
        try:
            for number in range(1 + self.args.repeats):
                self.update(pause, 1 + number % 2, "first update" if number == 0 else f"update {number + 1}")
        finally:
            self.trainer.call("disconnect", pause)

    def update(self, pause: str, seed: int, name: str) -> None:
        """One update to the weights of a seed, and answers."""
        self.version += 1
        with self.run.step(f"{pause}: {name}") as kept:
            found = self.trainer.call("update", pause, self.version, seed)[0]
            kept["update_s"] = round(found["ended"] - found["began"], 4)
            kept |= {key: found[key] for key in ("phases", "bytes", "transport", "targets")}
            kept["warnings"] = said = self.trainer.call("warnings")[0]
        proofs = [row["proof"] for row in kept["targets"]]
        self.run.check(f"{pause}: {name}: proven resident", proofs == ["resident"], proofs)
        self.run.check(f"{pause}: {name}: by broadcast, as chosen", kept["transport"] == "broadcast", kept["transport"])
        self.run.check(f"{pause}: {name}: no warning", not said, said)
        with self.run.step(f"{pause}: answers on weights {seed}") as answered:
            now = self.engine.answers()
            answered["first_tokens"] = now[0][:6]
        same = self.known.setdefault(seed, now) == now
        self.run.check(f"{pause}: answers on weights {seed} are those of the first time", same, now)
        others = [answers for other, answers in self.known.items() if other != seed]
        self.run.check(f"{pause}: answers on weights {seed} are no others'", now not in others, now)


def _info(url: str) -> dict[str, Any]:
    import httpx

    return httpx.get(f"{url}/weightcast/info", timeout=60, trust_env=False).json()


@contextmanager
def _stand_in(model: Path, folder: Path) -> Generator[Server]:
    """``weightcast serve`` on this CPU."""
    port = quiet_port()
    command = [sys.executable, "-m", "weightcast", "serve", str(model), f"--port={port}", "--name=m", "--device=cpu"]
    log = folder / "stand-in.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    server = Server(process, f"http://127.0.0.1:{port}", log, tiny=True)
    server.command = " ".join(command[1:])
    try:
        yield server
    finally:
        server.client.close()
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _cards() -> list[str]:
    asked = ["nvidia-smi", "--query-gpu=index,name,uuid,driver_version", "--format=csv,noheader"]
    return subprocess.check_output(asked, text=True).strip().splitlines()


def play_all(run: Run, args: argparse.Namespace, write: Callable[[], None]) -> None:
    """Every engine, side by side or one after the other."""
    engines = args.engines.split(",")
    for group in [[kind] for kind in engines] if args.one_at_a_time else [engines]:
        with ExitStack() as stack:
            cases: list[Case] = []
            for kind in group:
                run.case = kind
                cases.append(Case(run, args, kind, stack))
            for case in cases:
                try:
                    case.play()
                except Exception:  # noqa: BLE001  the other engine still tells something
                    run.failed.append(f"{case.kind}: {traceback.format_exc()[-3000:]}")
                finally:
                    run.steps.append({"case": case.kind, "log_tail": case.engine.text()[-6000:]})
                    if args.logs is not None:
                        args.logs.mkdir(parents=True, exist_ok=True)
                        (args.logs / case.engine.server.log.name).write_text(case.engine.text()[-LOG_BYTES:])
                    write()


def main() -> int:
    """Plays the engines and writes what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default="sglang,vllm", help="in this order")
    parser.add_argument("--model-shape", choices=sorted(SHAPES), default="small")
    parser.add_argument("--pauses", default="auto", help="pauses of connect, one after the other")
    parser.add_argument("--repeats", type=int, default=5, help="updates after the first one of each connect")
    parser.add_argument("--sglang-site", default="", help="folder that holds SGLang")
    parser.add_argument("--vllm-site", default="", help="folder that holds vLLM")
    parser.add_argument("--python", default=sys.executable, help="the Python that runs the engines")
    parser.add_argument("--cache-gib", type=int, default=4, help="KV cache of vLLM")
    parser.add_argument("--cache-tokens", type=int, default=32768, help="KV cache of SGLang")
    parser.add_argument("--one-at-a-time", action="store_true", help="the engines do not share their GPU; so with 8b")
    parser.add_argument("--tiny", action="store_true", help="a dry run on this CPU")
    parser.add_argument("--limit-s", type=float, default=440.0)
    parser.add_argument("--start-limit-s", type=float, default=240.0)
    parser.add_argument("--folder", type=Path, help="for the model, logs and caches")
    parser.add_argument("--json", type=Path, help="where the results go")
    parser.add_argument("--logs", type=Path, help="where the ends of the servers' logs go")
    args = parser.parse_args()
    args.one_at_a_time = args.one_at_a_time or args.model_shape == "8b"
    family, sizes = SHAPES[args.model_shape]
    args.shape = family, sizes | (TINY if args.tiny else {})
    run = Run(tiny=args.tiny, limit_s=args.limit_s)
    result: dict[str, Any] = {"what": "engines and a trainer on GPUs that are hidden from each other"}
    result |= {"machine": facts(), "shape": args.shape, "pauses": args.pauses}
    result["cards"] = [] if args.tiny else _cards()

    def write() -> None:
        result.update(seconds=round(run.limit_s - run.left_s, 1), failed=run.failed, steps=run.steps)
        if args.json is not None:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps(result, indent=1) + "\n")

    for number in (signal.SIGALRM, signal.SIGTERM):
        signal.signal(number, time_is_up)
    signal.setitimer(signal.ITIMER_REAL, max(1.0, args.limit_s - END_S))
    with tempfile.TemporaryDirectory(prefix="gpu-apart-") as folder:
        args.folder = args.folder or Path(folder)
        args.folder.mkdir(parents=True, exist_ok=True)
        try:
            checkpoint(args.folder / "model", *args.shape, torch.float32 if args.tiny else torch.bfloat16)
            play_all(run, args, write)
        except TimeIsUp:
            run.failed.append("the run was ended: its time is up")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            sglang_servers.kill_all()
            write()
    print(json.dumps({"failed": run.failed, "seconds": result["seconds"]}, indent=1), flush=True)
    return 1 if run.failed else 0


if __name__ == "__main__":
    sys.exit(main())
