"""Our receiver inside vLLM on one GPU: times of updates, gaps that clients see, sleep, and proof by behaviour.

    WEIGHTCAST_VLLM_SITE=/tmp/site_vllm PYTHONPATH=src:. python3 benchmarks/gpu_vllm_receiver.py --json OUT.json

The trainer is this process: a transformers model with random weights on the same GPU, sent by ``ipc``.  Each case
starts one vLLM server on the trainer's first weights and runs these steps:

1. The trainer sends other weights; the second update compares log-probabilities (``verify="behaviour"``).
2. Updates while the engine is idle, with the pauses ``in_place`` and ``retract``.
3. The same with ``--streams`` streaming clients in a process of their own.  A gap is the time between two tokens that a
   client gets; gaps around updates stand beside the others of the same streams.
4. The first weights again: answers must equal those of the start, token for token.
5. ``/sleep`` with level 1 and 2, ``/wake_up?tags=weights``, an update, ``/wake_up?tags=kv_cache``.
6. The case ``dummy``: a server started with ``--load-format dummy`` gets the first weights.

vLLM runs at its defaults except for what ``--options`` says: its default budget leaves no room for a trainer on the
same GPU.  The file has versions, commands, the copy rate of the device in the same run, every step and every check.
The exit code is 1 if a check failed.  Everything ends within ``--limit-s``.  ``--tiny`` is a dry run on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from benchmarks.vllm_memory import QWEN3_8B, ROOT, Run, Server, asked, serving
from tests.tiny import tiny_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from weightcast import WeightUpdater
from weightcast.lab.bench.machine import facts

QWEN3_30B_A3B_16: dict[str, Any] = QWEN3_8B | {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {"8b": ("qwen3", QWEN3_8B), "moe": ("qwen3_moe", QWEN3_30B_A3B_16)}
TINY: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
}
TINY_EXPERTS = {"moe_intermediate_size": 96, "num_experts": 4, "num_experts_per_tok": 2}
PAUSES = ("in_place", "retract")
TOLERANCE = 1.0  # nats: bfloat16 in two implementations; other weights are several nats off
END_S = 25.0  # kept for ending the servers and for the file


class Trainer:
    """A transformers model whose weights are random, one set for each seed."""

    def __init__(self, family: str, sizes: dict[str, Any], device: str) -> None:
        self.device, self.std = device, 0.3 if device == "cpu" else 0.05
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes), dtype=dtype)
        self.model: Any = model.to_empty(device=device).eval()
        with torch.device(device):  # buffers are computed, not loaded
            self.model.model.rotary_emb = type(self.model.model.rotary_emb)(config=self.model.config)
        self.fill(0)
        self.bytes = sum(tensor.numel() * tensor.element_size() for tensor in self.model.parameters())

    def fill(self, seed: int) -> None:
        """Puts the weights of this seed into the model, the same ones each time."""
        with torch.no_grad():
            for number, (name, tensor) in enumerate(self.model.named_parameters()):
                generator = torch.Generator(self.device).manual_seed(1000 * seed + number)
                if name.endswith("norm.weight"):
                    tensor.uniform_(0.8, 1.2, generator=generator)
                else:
                    tensor.normal_(0.0, self.std, generator=generator)

    def save(self, folder: Path) -> None:
        """Writes a checkpoint that vLLM can start on."""
        self.model.save_pretrained(folder, max_shard_size="4GB")
        tiny_tokenizer(folder)


class Case:
    """One server and the trainer that updates it."""

    def __init__(self, run: Run, args: argparse.Namespace, trainer: Trainer, server: Server) -> None:
        self.run, self.args, self.trainer, self.server = run, args, trainer, server
        self.version = 0

    def update(self, updater: WeightUpdater, name: str, seed: int) -> tuple[float, float]:
        """One update to the weights of a seed; returns when it began and ended, in seconds of the monotonic clock."""
        self.trainer.fill(seed)
        if self.trainer.device != "cpu":
            torch.cuda.synchronize()
        self.version += 1
        with self.run.step(name, self.server) as kept:
            began = time.monotonic()
            report = updater.update(version=self.version)
            ended = time.monotonic()
            (row,) = report.targets
            kept |= {"update_s": round(ended - began, 4), "stall_s": round(row.stall_s, 5), "proof": row.proof}
            kept |= {"phases": {key: round(value, 5) for key, value in report.phases.items()}, "bytes": report.bytes}
            kept |= {"trainer_peak_bytes": report.peak_extra_bytes, "engine_peak_bytes": row.peak_extra_bytes}
        self.run.check(f"{name}: proven", row.proof in ("resident", "behaviour"), row)
        return began, ended

    @contextmanager
    def connected(self, **options: Any) -> Generator[WeightUpdater]:
        """A connection whose time is a step of its own."""
        with self.run.step(f"connect {options}"):
            updater = WeightUpdater.connect(
                self.trainer.model, [self.server.url], transport="ipc", timeout_s=60.0, **options
            )
        with updater:
            yield updater

    def answers(self, what: str, expected: object = None) -> list[list[int]]:
        """Greedy answers, compared with those that are expected."""
        with self.run.step(f"answers {what}"):
            found = self.server.answers()
        if expected is not None:
            self.run.check(f"answers {what} equal", found == expected, found)
        return found

    def behaviour(self) -> None:
        """Two updates; the second one compares log-probabilities with the trainer's own forward pass."""
        with self.connected(verify="behaviour", pause="in_place", behaviour_tolerance=TOLERANCE) as updater:
            for number in (1, 2):
                self.update(updater, f"update {number} with behaviour", number)
        last = next(step for step in reversed(self.run.steps) if "proof" in step)
        self.run.check("behaviour is proven after the second update", last["proof"] == "behaviour", last)

    def idle(self) -> None:
        """Updates without a request."""
        for pause in PAUSES:
            with self.connected(pause=pause) as updater:
                for number in range(self.args.repeats):
                    self.update(updater, f"idle, {pause}", 1 + number % 2)

    def under_load(self) -> None:
        """Updates while clients stream."""
        tokens = 150 if self.run.tiny else 12000
        command = [sys.executable, __file__, "--read", self.server.url, str(self.args.streams), str(tokens)]
        path = os.pathsep.join((str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")))
        reader = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path}
        )
        assert reader.stdin is not None
        assert reader.stdout is not None
        try:
            said = reader.stdout.readline()
            if said.strip() != "began":
                raise RuntimeError(f"the streams did not begin: {said!r}")
            windows: dict[str, list[tuple[float, float]]] = {pause: [] for pause in PAUSES}
            for pause in PAUSES:
                with self.connected(pause=pause) as updater:
                    for number in range(self.args.repeats):
                        time.sleep(0.2 if self.run.tiny else 1.0)
                        name = f"{self.args.streams} streams, {pause}"
                        windows[pause].append(self.update(updater, name, 1 + number % 2))
            time.sleep(0.2 if self.run.tiny else 1.0)
            reader.stdin.close()
            streams: list[list[float]] = json.loads(reader.stdout.readline())
        finally:
            reader.kill()
            reader.wait()
        self._gaps(streams, windows)

    def _gaps(self, streams: list[list[float]], windows: dict[str, list[tuple[float, float]]]) -> None:
        every = [pair for stream in streams for pair in pairwise(stream)]
        with self.run.step("gaps that clients saw") as kept:
            spans = [span for spans in windows.values() for span in spans]
            quiet = sorted(
                later - at for at, later in every if not any(at < end and later > begin for begin, end in spans)
            )
            kept["tokens"] = [len(stream) for stream in streams]
            if quiet:
                kept["outside_of_updates_s"] = {
                    "median": round(statistics.median(quiet), 5),
                    "p99": round(quiet[int(0.99 * (len(quiet) - 1))], 5),
                    "longest": round(quiet[-1], 5),
                }
            for pause, found in windows.items():
                longest = [
                    max((later - at for at, later in every if at < end and later > begin), default=0.0)
                    for begin, end in found
                ]
                kept[f"longest_around_each_update_s, {pause}"] = [round(gap, 5) for gap in longest]
        if not self.run.tiny:  # with a short context the streams end before
            begun = [bool(stream) and stream[-1] > spans[-1][1] for stream in streams]
            self.run.check("every stream went on after the last update", all(begun), begun)

    def sleeps(self, first: list[list[int]]) -> None:
        """Sleep and wake-up by tags, with an update between them, as colocated trainers do it."""
        with self.connected(pause="abort") as updater:
            self.update(updater, "other weights", 1)
            other = self.answers("on the other weights")
            self.run.check("they differ from the first ones", other != first)
            for level, seed, wanted in ((1, 0, first), (2, 1, other), (2, 0, first)):
                asked(self.run, self.server, f"/sleep?level={level}")
                asked(self.run, self.server, "/wake_up?tags=weights")
                self.update(updater, f"update between the tags, level {level}", seed)
                asked(self.run, self.server, "/wake_up?tags=kv_cache")
                self.answers(f"after level {level}", wanted)


def case_receiver(run: Run, args: argparse.Namespace, name: str) -> None:
    """Our receiver in a server that was started on the trainer's first weights."""
    trainer, folder = made(run, args, name)
    trainer.save(folder)
    sleep = [] if run.tiny else ["--enable-sleep-mode"]
    with serving(run, args, folder, "--no-enable-prefix-caching", *sleep, *args.options.split()) as server:
        case = Case(run, args, trainer, server)
        first = case.answers("at the start")
        case.behaviour()
        case.idle()
        case.under_load()
        with case.connected(pause="abort") as updater:
            case.update(updater, "the first weights again", 0)
        case.answers("on the first weights again", first)
        case.sleeps(first)


def case_dummy(run: Run, args: argparse.Namespace, name: str) -> None:
    """A server that was started with random weights of vLLM's own, with two layers."""
    trainer, folder = made(run, args, name, num_hidden_layers=2)
    trainer.save(folder)
    options = ["--load-format=dummy", "--enforce-eager", *args.options.split()]
    with serving(run, args, folder, *options) as server:
        case = Case(run, args, trainer, server)
        run.check("it serves nothing yet", server.info()["state"] == "quarantined", server.info())
        with case.connected(verify="behaviour", pause="retract", behaviour_tolerance=TOLERANCE) as updater:
            case.update(updater, "the first update", 1)
            case.update(updater, "the second update", 2)
        last = next(step for step in reversed(run.steps) if "proof" in step)
        run.check("behaviour is proven", last["proof"] == "behaviour", last)


def made(run: Run, args: argparse.Namespace, name: str, **changes: Any) -> tuple[Trainer, Path]:
    """The trainer of a model and an empty folder for its checkpoint."""
    family, sizes = MODELS[name]
    sizes = sizes | (TINY if run.tiny else {}) | (TINY_EXPERTS if run.tiny and name == "moe" else {}) | changes
    folder = args.folder / run.case
    folder.mkdir(parents=True)
    with run.step("make the model") as kept:
        trainer = Trainer(family, sizes, "cpu" if run.tiny else "cuda:0")
        kept |= {"bytes": trainer.bytes, "parameters": sum(1 for _ in trainer.model.parameters())}
    return trainer, folder


def read(url: str, count: int, tokens: int) -> None:
    """The clients: prints ``began``, then reads until standard input ends, then prints the times of all tokens."""
    server = Server.__new__(Server)
    import httpx

    limits = httpx.Limits(max_connections=count, max_keepalive_connections=count)
    server.url, server.client = url, httpx.Client(timeout=180, trust_env=False, limits=limits)
    seen: list[list[tuple[float, int]]] = [[] for _ in range(count)]
    began = [threading.Event() for _ in seen]
    enough = threading.Event()
    readers = [
        threading.Thread(target=server.stream, args=([7 + number, 8, 9], tokens, times, begin, enough), daemon=True)
        for number, (times, begin) in enumerate(zip(seen, began, strict=True))
    ]
    for reader in readers:
        reader.start()
    for begin in began:
        begin.wait(120)
    print("began", flush=True)
    sys.stdin.read()
    enough.set()
    for reader in readers:
        reader.join(5)
    print(json.dumps([[at for at, _ in times] for times in seen]), flush=True)


def copy_rate(tiny: bool) -> float:
    """Returns the bytes per second of a copy on the device, counting each byte once: the limit of an update by ipc."""
    device, size = ("cpu", 1 << 26) if tiny else ("cuda:0", 1 << 30)
    source, target = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    best = 0.0
    for _ in range(10):
        begin = time.monotonic()
        target.copy_(source)
        if not tiny:
            torch.cuda.synchronize()
        best = max(best, size / (time.monotonic() - begin))
    return best


def main() -> int:
    """Runs the cases and prints what was seen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where the results go")
    parser.add_argument("--cases", default="8b,moe,dummy", help="of 8b, moe, dummy")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=4, help="updates of each kind")
    parser.add_argument("--tiny", action="store_true", help="tiny models, vLLM on this CPU")
    parser.add_argument("--python", default=sys.executable, help="the Python that runs vLLM")
    parser.add_argument("--flags", default="--attention-backend=TRITON_ATTN", help="flags that the build of vLLM needs")
    parser.add_argument(
        "--options", default="--gpu-memory-utilization=0.7 --max-model-len=16384", help="more of vLLM's; OPTIONS with ="
    )
    parser.add_argument("--limit-s", type=float, default=560.0)
    parser.add_argument("--folder", type=Path, help="for models, logs and caches")
    parser.add_argument("--read", nargs=3, metavar=("URL", "COUNT", "TOKENS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.read:
        read(args.read[0], int(args.read[1]), int(args.read[2]))
        return 0
    run = Run(tiny=args.tiny, limit_s=args.limit_s)
    result: dict[str, Any] = facts() | {"flags": args.flags, "options": args.options, "streams": args.streams}
    result["limit_s"] = args.limit_s
    signal.signal(signal.SIGALRM, _time_is_up)
    with tempfile.TemporaryDirectory(prefix="gpu-vllm-receiver-") as folder:
        args.folder = args.folder or Path(folder)
        try:
            result["copy_bytes_per_s"] = copy_rate(args.tiny)
            for case in args.cases.split(","):
                run.case = case
                if run.left_s < (20 if run.tiny else 100) + END_S:
                    run.skipped.append(case)
                    continue
                signal.alarm(max(1, int(run.left_s - END_S)))
                try:
                    case_dummy(run, args, "moe") if case == "dummy" else case_receiver(run, args, case)
                except Exception as error:  # noqa: BLE001  the other cases still tell something
                    print(f"FAILED {case}:\n{traceback.format_exc()[-3000:]}", flush=True)
                    run.failed.append(f"{case}: {type(error).__name__}: {str(error)[-2000:]}")
                signal.alarm(0)
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
        finally:
            result |= {"seconds": round(run.limit_s - run.left_s, 1), "failed": run.failed, "skipped": run.skipped}
            result["steps"] = run.steps
            if args.json is not None:
                args.json.parent.mkdir(parents=True, exist_ok=True)
                args.json.write_text(json.dumps(result, indent=1) + "\n")
            print(json.dumps({key: result[key] for key in ("seconds", "failed", "skipped")}))
    return 1 if run.failed else 0


def _time_is_up(*_: object) -> None:
    raise TimeoutError("the limit of this run has passed")


if __name__ == "__main__":
    sys.exit(main())
