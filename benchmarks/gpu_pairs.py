"""Real engines on two GPUs: several ranks behind one URL, or one engine on each GPU, and a trainer on both GPUs.

    PYTHONPATH=src:. python3 benchmarks/gpu_pairs.py --engine vllm --site SITE --json OUT.json
    PYTHONPATH=src:. python3 benchmarks/gpu_pairs.py --engine sglang --site SITE --parts tp2,dp2 --json OUT.json

SITE is a folder that holds the engine.  The parts are ``tp2`` and ``dp2`` (Qwen3-8B), ``ep2`` (16 layers of
Qwen3-30B-A3B; for SGLang, whose experts our receiver takes with tensor parallelism only, ``moe2`` too) and ``two``
(Qwen3-8B in an engine on each GPU, from two trainer ranks in one session and from one).  Each part runs these steps:

1. The servers start, one with our receiver and one as the engine ships, and so does the trainer (FSDP2 over both GPUs).
2. By each transport of ``--via``: updates of the idle engine between two sets of weights.  Answers must differ between
   the sets, and be those of the first time, token for token, whenever a set is back.
3. The same while ``--streams`` clients stream.  A gap is the longest time between two messages of one request, around
   each update and in a time of the same length before it, without an update.
4. vLLM: two updates with ``verify="behaviour"``, which compares log-probabilities with the trainer's own forward pass.
   SGLang: that pass over the answers; they must be near its best tokens, far nearer than those on the other weights.
5. The engine's own sender, from the same trainer ranks with the same shards, into the server as it ships.

The file is written anew after each group of steps.  A step that fails ends its part only if nothing can follow it.
Everything ends within ``--limit-s``, each part within ``--part-limit-s``; what was started is ended.  The exit code is
1 if a check failed.  ``--tiny`` is a dry run with the engine on this CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from benchmarks import sglang_servers
from benchmarks.engine_streams import gaps, load
from benchmarks.engine_trainer import Trainer, checkpoint
from benchmarks.gpu_vllm_receiver import MODELS, TINY, TINY_EXPERTS, TOLERANCE, TimeIsUp, copy_rate, time_is_up
from benchmarks.vllm_memory import PROMPTS, TOKENS, Run, launched

from weightcast.lab.bench.machine import facts

END_S = 12.0  # kept for ending the servers and for the file
# Graphs of decode steps without a compiler, so that a start is short and a step is as long as in use.
GRAPHS = '{"mode":0,"cudagraph_mode":"FULL_DECODE_ONLY","cudagraph_capture_sizes":[1,2,4,8,16,32,64]}'
OPTIONS = {
    "vllm": f"--max-model-len=4096 --max-num-seqs=64 --disable-custom-all-reduce --compilation-config={GRAPHS}",
    "sglang": "--disable-custom-all-reduce --cuda-graph-backend-prefill=disabled --cuda-graph-bs-decode 1 2 4 8 16 32",
}
FLAGS = {"vllm": "--attention-backend=TRITON_ATTN", "sglang": sglang_servers.BUILD_FLAGS}
LOG_BYTES = 60_000
STREAM_TOKENS = 400
PAUSES = ("in_place", "retract")


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part.

    Attributes:
        model: Name of a model.
        options: More of the engine's.
        tp: Tensor-parallel ranks of each engine.
        engines: Number of engines with our receiver.
        trainers: Numbers of trainer ranks, one after the other.
        not_with: Why there is no measurement with the engine's own sender; empty if there is one.
        receiver: Words of the engine if it does not start with our receiver; empty if it does.
    """

    model: str = "8b"
    options: tuple[str, ...] = ()
    tp: int = 1
    engines: int = 1
    trainers: tuple[int, ...] = (2,)
    not_with: str = ""
    receiver: str = ""


_TWICE = "the sender's figures for one engine are in the other parts"
PARTS: dict[str, dict[str, Part]] = {
    "vllm": {
        "tp2": Part(tp=2),
        "ep2": Part(model="moe", tp=2, options=("--enable-expert-parallel",)),
        "two": Part(engines=2, trainers=(2, 1), not_with=_TWICE),
        "dp2": Part(options=("--data-parallel-size=2",)),
    },
    "sglang": {
        "tp2": Part(tp=2),
        "moe2": Part(model="moe", tp=2),
        "two": Part(engines=2, trainers=(2, 1), not_with=_TWICE),
        "dp2": Part(options=("--dp-size=2",), not_with="SGLang: dp_size must be 1 for update weights from tensor"),
        "ep2": Part(model="moe", tp=2, options=("--ep-size=2",), receiver="expert parallelism (--ep-size)"),
    },
}


class Engine:
    """One server of either kind."""

    def __init__(self, server: Any, *, kind: str, ours: bool) -> None:
        self.server, self.kind, self.ours = server, kind, ours
        self.url: str = server.url

    def text(self) -> str:
        """Its log."""
        return self.server.log.read_text(errors="replace")

    def wait_ready(self, limit_s: float) -> None:
        """Waits until it answers ``/health``."""
        self.server.wait_ready(limit_s if self.kind == "vllm" else time.monotonic() + limit_s)

    def answers(self) -> list[list[int]]:
        """Greedy tokens, one prompt after the other, so that batches are the same every time."""
        return self.server.answers() if self.kind == "vllm" else self.server.answers(PROMPTS, TOKENS)


@dataclass
class Started:
    """Servers that a part has started, which may not be ready yet, and its trainer."""

    stack: ExitStack
    ours: list[Engine] = field(default_factory=list[Engine])
    ships: Engine | None = None
    trainer: Trainer | None = None
    began: float = field(default_factory=time.monotonic)

    def train(self, args: argparse.Namespace, part: Part, world: int) -> Trainer:
        """Ends the trainer that there was and starts one."""
        if self.trainer is not None:
            self.trainer.close()
        family, sizes = shape_of(part.model, tiny=args.tiny)
        self.trainer = Trainer(world, family, sizes, "cpu" if args.tiny else "cuda")
        return self.trainer

    def close(self, args: argparse.Namespace) -> None:
        """Ends everything and keeps the ends of the logs."""
        if self.trainer is not None:
            self.trainer.close()
        for engine in [*self.ours, *filter(None, [self.ships])]:
            if args.logs is not None:
                args.logs.mkdir(parents=True, exist_ok=True)
                (args.logs / engine.server.log.name).write_text(engine.text()[-LOG_BYTES:])
        self.stack.close()


def shape_of(model: str, *, tiny: bool) -> tuple[str, dict[str, Any]]:
    """Family and sizes of a model."""
    family, sizes = MODELS[model]
    return family, sizes | (TINY if tiny else {}) | (TINY_EXPERTS if tiny and model == "moe" else {})


def start(args: argparse.Namespace, run: Run, name: str) -> Started:
    """Starts the servers of a part and its trainer, and waits for none of them."""
    part = PARTS[args.engine][name]
    found = Started(ExitStack())
    found.train(args, part, part.trainers[0])
    folder = args.folder / part.model
    if not folder.exists():
        family, sizes = shape_of(part.model, tiny=args.tiny)
        checkpoint(folder, family, sizes, torch.float32 if args.tiny else torch.bfloat16)
    for number in range(part.engines if not part.receiver else 0):
        found.ours.append(launch(args, run, found.stack, part, folder, f"{name}-{number}", number, ours=True))
    if not part.not_with and not (args.tiny and args.engine == "vllm"):  # vLLM's sender needs GPUs
        found.ships = launch(args, run, found.stack, part, folder, f"{name}-stock", 0, ours=False)
    return found


def launch(
    args: argparse.Namespace, run: Run, stack: ExitStack, part: Part, model: Path, log: str, gpu: int, *, ours: bool
) -> Engine:
    """Starts one server on the GPUs from this one on."""
    own = [] if args.tiny and "ep" in log.partition("-")[0] else [*part.options]  # no engine has them on a CPU
    if args.engine == "vllm":
        options = ["--no-enable-prefix-caching", f"--tensor-parallel-size={part.tp}", *own, *args.options.split()]
        more = {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0"}  # no NVLink multicast
        if not args.tiny:
            options += [f"--kv-cache-memory-bytes={args.cache_gib << 30}", "--gpu-memory-utilization=0.05"]
            if gpu:  # the other GPU stays visible: its memory is mapped
                more["CUDA_VISIBLE_DEVICES"] = "1,0"
        backend = "weightcast" if ours else "ipc"
        server: Any = stack.enter_context(launched(run, args, model, *options, backend=backend, name=log, more=more))
    else:
        options = [*own, *([] if args.tiny else [f"--base-gpu-id={gpu}", *args.options.split()])]
        server = sglang_servers.start(args, model, args.folder, *options, receiver=ours, tp=part.tp, name=log)
        stack.callback(server.close)
    return Engine(server, kind=args.engine, ours=ours)


class Case:
    """The steps of one part."""

    def __init__(self, run: Run, args: argparse.Namespace, part: Part, started: Started) -> None:
        assert started.trainer is not None
        self.run, self.args, self.part, self.started = run, args, part, started
        self.trainer = started.trainer
        self.version = 0
        self.known: dict[int, list[list[list[int]]]] = {}

    @property
    def urls(self) -> list[str]:
        """Engines with our receiver."""
        return [engine.url for engine in self.started.ours]

    def ready(self, limit_s: float) -> None:
        """Waits for the servers and the trainer."""
        engines = [*self.started.ours, *filter(None, [self.started.ships])]
        with self.run.step("start") as kept:
            kept["commands"] = [
                command if isinstance(command, str) else " ".join(command)
                for command in (engine.server.command for engine in engines)
            ]
            deadline = time.monotonic() + limit_s
            for engine in self.started.ours:
                engine.wait_ready(deadline - time.monotonic())
            if self.started.ships is not None:
                self.attempt(
                    "start of the server as it ships",
                    lambda ships=self.started.ships: ships.wait_ready(deadline - time.monotonic()),
                    failed=lambda: setattr(self.started, "ships", None),
                )
            self.trained()
            if self.started.ships is not None:
                self.attempt("import", lambda: self.trainer.call(f"import_{self.args.engine}", self.args.site))
            kept["since_their_start_s"] = round(time.monotonic() - self.started.began, 1)

    def trained(self) -> None:
        """Waits for the trainer; its shards' bytes."""
        with self.run.step("trainer") as kept:
            kept["ranks"] = self.trainer.world
            kept["held_bytes"] = self.trainer.call("held_bytes")

    def attempt(self, what: str, step: Callable[[], object], *, failed: Callable[[], object] | None = None) -> None:
        """Runs a step whose failure need not end the part; the failure is kept."""
        try:
            step()
        except Exception:  # noqa: BLE001  what follows still tells something
            self.run.check(f"{what} ran to its end", ok=False, seen=traceback.format_exc()[-3000:])
            if failed is not None:
                failed()

    @contextmanager
    def connected(self, via: str, **options: Any) -> Generator[str]:
        """A connection of all trainer ranks to all engines; its key."""
        with self.run.step(f"connect by {via} {options}"):
            chosen: dict[str, Any] = options | {"transport": via}
            if via == "direct":  # ordinary memory of a CPU cannot be mapped
                mapped = {"direct_by": "shards", "keep_mapped": True}
                chosen |= {"direct_by": "memory"} if self.args.tiny else mapped
            else:
                chosen["bucket_bytes"] = (1 if self.args.tiny else 1024) << 20
            self.trainer.call("connect", via, self.urls, chosen)
        try:
            yield via
        finally:
            self.trainer.call("disconnect", via)

    def update(self, key: str, name: str, seed: int) -> tuple[float, float]:
        """One update to the weights of a seed; when the first rank began and the last one ended."""
        self.version += 1
        with self.run.step(name) as kept:
            found = self.trainer.call("update", key, self.version, seed)
            began, ended = min(rank["began"] for rank in found), max(rank["ended"] for rank in found)
            kept |= {"update_s": round(ended - began, 4), "trainers": self.trainer.world}
            kept |= {key: found[0][key] for key in ("phases", "bytes", "transport", "targets")}
            kept["trainer_peak_bytes"] = [rank["trainer_peak_bytes"] for rank in found]
        proofs = [row["proof"] for row in kept["targets"]]
        self.run.check(f"{name}: proven", all(proof in ("resident", "behaviour") for proof in proofs), proofs)
        return began, ended

    def answers(self, seed: int, engines: Sequence[Engine] | None = None) -> list[list[list[int]]]:
        """Answers on the weights of a seed, compared with those of the last time and of the other seeds."""
        with self.run.step(f"answers on weights {seed}") as kept:
            found = [engine.answers() for engine in (self.started.ours if engines is None else engines)]
            kept["first_tokens"] = [each[0][:6] for each in found]
        if engines is None:
            before = self.known.setdefault(seed, found)
            self.run.check(f"answers on weights {seed} are those of the first time", found == before, found)
            others = [answers for other, answers in self.known.items() if other != seed]
            self.run.check(f"answers on weights {seed} are no others'", found not in others, found)
        return found

    def first(self) -> None:
        """Both sets of weights once: the checkpoint was empty."""
        with self.connected(self.args.via.split(",")[0], pause="retract") as key:
            for seed in (2, 1):
                self.update(key, f"first update to weights {seed}", seed)
                self.answers(seed)

    def idle(self, via: str, pause: str) -> None:
        """Updates without a request; the last one brings weights 1 back."""
        with self.connected(via, pause=pause) as key:
            for number in range(self.args.repeats):
                self.update(key, f"{via}, idle, {pause}", 1 + (self.args.repeats - 1 - number) % 2)
        self.answers(1)

    def streamed(self, via: str, pause: str) -> None:
        """Updates while clients stream."""
        windows: list[tuple[float, float]] = []
        wait_s = 0.5
        with self.connected(via, pause=pause) as key, self.streams() as clients:
            for number in range(self.args.repeats):
                time.sleep(wait_s)
                name = f"{via}, {self.args.streams} streams, {pause}"
                windows.append(self.update(key, name, 1 + (self.args.repeats - 1 - number) % 2))
            time.sleep(wait_s)
            for each in clients:
                each.stop()
        for number, each in enumerate(clients):
            self.gaps(f"gaps, {via}, {pause}, engine {number}", each.requests, windows)
        self.answers(1)

    @contextmanager
    def streams(self, engines: Sequence[Engine] | None = None) -> Generator[list[Any]]:
        """Streams of every engine, all of which have got tokens."""
        tokens = 60 if self.args.tiny else STREAM_TOKENS
        with ExitStack() as stack:
            found = [
                stack.enter_context(load(engine.url, streams=self.args.streams, tokens=tokens, engine=self.args.engine))
                for engine in (self.started.ours if engines is None else engines)
            ]
            for each in found:
                each.wait_steady(60)
            yield found

    def gaps(self, what: str, requests: Any, windows: Sequence[tuple[float, float]]) -> None:
        """Keeps what the clients saw around each update, and in as long a time before it."""
        with self.run.step(what) as kept:
            kept["around_each_update"] = [gaps(requests, begin, end + 0.05) for begin, end in windows]
            kept["longest_s"] = [found["longest_s"] for found in kept["around_each_update"]]
            before = [(max(begin - 0.4, 2 * begin - end - 0.1), begin - 0.05) for begin, end in windows]
            kept["longest_without_an_update_s"] = [gaps(requests, *window)["longest_s"] for window in before]
            steps = [found["usual_s"] for found in kept["around_each_update"] if found["usual_s"]]
            kept["step_s"] = round(statistics.median(steps), 5) if steps else None
        ended = {str(request.finish) for request in requests}
        self.run.check(f"{what}: no request failed or ended early", ended == {"length"}, ended)

    def behaviour(self) -> None:
        """Two updates; the second one compares log-probabilities with the trainer's own forward pass."""
        with self.connected("ipc", verify="behaviour", pause="retract", behaviour_tolerance=TOLERANCE) as key:
            for seed in (2, 1):
                self.update(key, f"update with behaviour to weights {seed}", seed)
        last = next(step for step in reversed(self.run.steps) if "targets" in step)
        proofs = [row["proof"] for row in last["targets"]]
        self.run.check("behaviour is proven after the second update", set(proofs) == {"behaviour"}, proofs)

    def scored(self) -> None:
        """The trainer's own forward pass over both sets of answers: SGLang with our receiver does not score."""
        with self.run.step("nats from the best tokens of weights 1") as kept:
            for seed in (1, 2):
                kept[f"answers on weights {seed}"] = self.trainer.call("score", PROMPTS, self.known[seed][0])[0]
        mine, others = (kept[f"answers on weights {seed}"] for seed in (1, 2))
        self.run.check("answers on weights 1 are of these weights", mine < 0.25 * others, kept)

    def sender(self, ships: Engine) -> None:
        """The engine's own sender into the server as it ships: idle, then with streams."""
        method = f"send_by_{self.args.engine}"
        rounds = [1 + (self.args.repeats - 1 - number) % 2 for number in range(self.args.repeats)]
        for streams in (False, True):
            name = f"{self.args.engine}'s own sender, {f'{self.args.streams} streams' if streams else 'idle'}"
            with ExitStack() as stack:
                clients = stack.enter_context(self.streams([ships])) if streams else []
                with self.run.step(name) as kept:
                    said = self.trainer.call(method, ships.url, rounds, 0.5)[0]
                    kept["update_s"] = [round(each["ended"] - each["began"], 4) for each in said]
                    kept["paused_s"] = [round(each["sent"] - each["paused"], 4) for each in said]
                for each in clients:
                    time.sleep(0.5)
                    each.stop()
                windows = [(each["began"], each["ended"]) for each in said]
            for each in clients:
                self.gaps(f"gaps, {self.args.engine}'s own sender", each.requests, windows)
            (found,) = self.answers(1, [ships])
            if 1 in self.known:
                mine, theirs = ([token for answer in each for token in answer] for each in (self.known[1][0], found))
                with self.run.step("tokens after its update, beside those after ours") as kept:
                    same = sum(one == other for one, other in zip(mine, theirs, strict=True))
                    kept |= {"equal": same, "of": len(mine)}

    def by_our_adapter(self, ships: Engine) -> None:
        """Our adapter into the server as it ships."""
        with self.run.step("connect to the server as it ships"):
            options = {"transport": "ipc", "bucket_bytes": (1 if self.args.tiny else 1024) << 20}
            self.trainer.call("connect", "adapter", [ships.url], options | {"verify": "received"})
        try:
            for number in range(self.args.repeats):
                self.version += 1
                with self.run.step("our adapter, the server as it ships, idle") as kept:
                    found = self.trainer.call("update", "adapter", self.version, 1 + number % 2)
                    kept["update_s"] = round(
                        max(rank["ended"] for rank in found) - min(rank["began"] for rank in found), 4
                    )
                    kept |= {key: found[0][key] for key in ("phases", "bytes", "transport", "targets")}
        finally:
            self.trainer.call("disconnect", "adapter")


def play(run: Run, args: argparse.Namespace, name: str, started: Started, write: Callable[[], None]) -> None:
    """Every step of a part."""
    part = PARTS[args.engine][name]
    case = Case(run, args, part, started)
    if part.receiver:
        run.steps.append({"case": name, "not_run": f"our receiver refuses {part.receiver}"})
    case.ready(min(args.start_limit_s, run.left_s - END_S))
    write()
    for world in part.trainers if started.ours else ():
        if world != case.trainer.world:
            case.trainer = started.train(args, part, world)
            case.known, case.trainer = {}, started.trainer or case.trainer
            case.trained()
        case.first()
        # One trainer rank has no buffer on the other GPU.
        for via in args.via.split(",") if world > 1 or args.tiny else ("direct",):
            for pause in PAUSES if via == "direct" else PAUSES[:1]:
                case.attempt(f"{via}, idle, {pause}", lambda via=via, pause=pause: case.idle(via, pause))
                write()
            case.attempt(f"{via}, streams", lambda via=via: case.streamed(via, PAUSES[0]))
            write()
        if world > 1:
            by_engine = {"vllm": case.behaviour, "sglang": case.scored}
            case.attempt("behaviour", by_engine[args.engine])
            write()
    if part.not_with:
        run.steps.append({"case": name, "not_run": f"{args.engine}'s own sender: {part.not_with}"})
    ships = started.ships
    if ships is not None:
        case.attempt(f"{args.engine}'s own sender", lambda: case.sender(ships))
        write()
        if args.engine == "sglang":
            case.attempt("our adapter", lambda: case.by_our_adapter(ships))
            write()


def main() -> int:
    """Plays the parts and writes what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=sorted(PARTS), required=True)
    parser.add_argument("--parts", help="some of the engine's, in this order; all if not")
    parser.add_argument("--json", type=Path, help="where the results go")
    parser.add_argument("--logs", type=Path, help="where the ends of the servers' logs go")
    parser.add_argument("--via", default="direct,ipc", help="transports; the first one also with retract")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=4, help="updates of each kind, an even number")
    parser.add_argument("--cache-gib", type=int, default=4, help="KV cache of each of vLLM's ranks")
    parser.add_argument("--cache-tokens", type=int, default=32768, help="KV cache of each of SGLang's engines")
    parser.add_argument("--site", default="", help="folder that holds the engine")
    parser.add_argument("--python", default=sys.executable, help="the Python that runs the engine")
    parser.add_argument("--flags", help="flags that the build of the engine needs")
    parser.add_argument("--options", help="more of the engine's, instead of those for short starts")
    parser.add_argument("--tiny", action="store_true", help="tiny models, the engine on this CPU")
    parser.add_argument("--version", default="0.5.23", help="of SGLang, with --tiny")
    parser.add_argument("--limit-s", type=float, default=400.0)
    parser.add_argument("--part-limit-s", type=float, default=200.0)
    parser.add_argument("--start-limit-s", type=float, default=150.0)
    parser.add_argument("--folder", type=Path, help="for models, logs and caches")
    args = parser.parse_args()
    args.sleep = False  # for the servers' command lines
    args.flags = FLAGS[args.engine] if args.flags is None else args.flags
    args.options = ("" if args.tiny else OPTIONS[args.engine]) if args.options is None else args.options
    if args.engine == "vllm":
        os.environ["WEIGHTCAST_VLLM_SITE"] = args.site
    os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")
    os.environ.setdefault("SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK", "0")  # the trainer's ranks need not be equal
    names = args.parts.split(",") if args.parts else [*PARTS[args.engine]]
    run = Run(tiny=args.tiny, limit_s=args.limit_s)
    result: dict[str, Any] = {"what": f"{args.engine} on two GPUs", "machine": facts()}
    result |= {"flags": args.flags, "options": args.options, "streams": args.streams, "limit_s": args.limit_s}

    def write() -> None:
        result.update(seconds=round(run.limit_s - run.left_s, 1), failed=run.failed, skipped=run.skipped)
        result["steps"] = run.steps
        if args.json is not None:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps(result, indent=1) + "\n")

    for number in (signal.SIGALRM, signal.SIGTERM):
        signal.signal(number, time_is_up)
    started: Started | None = None
    with tempfile.TemporaryDirectory(prefix="gpu-pairs-") as folder:
        args.folder = args.folder or Path(folder)
        args.folder.mkdir(parents=True, exist_ok=True)
        try:
            run.case = names[0]
            started = start(args, run, names[0])
            result["copy_bytes_per_s"] = copy_rate(args.tiny)
            if not args.tiny:
                torch.cuda.empty_cache()
            for number, name in enumerate(names):
                run.case = name
                if started is None or run.left_s < 40 + END_S:
                    run.skipped.append(name)
                    continue
                signal.setitimer(signal.ITIMER_REAL, max(1.0, min(run.left_s - END_S, args.part_limit_s)))
                try:
                    play(run, args, name, started, write)
                except (Exception, TimeIsUp) as error:  # noqa: BLE001  the other parts still tell something
                    print(f"FAILED {name}:\n{traceback.format_exc()[-3000:]}", flush=True)
                    run.failed.append(f"{name}: {type(error).__name__}: {str(error)[-3000:]}")
                    tails = {engine.server.log.name: engine.text()[-6000:] for engine in started.ours}
                    run.steps.append({"case": name, "log_tails": tails})
                signal.setitimer(signal.ITIMER_REAL, 0)
                write()
                ending, started = started, None
                try:
                    if number + 1 < len(names) and run.left_s > 80 + END_S:
                        started = start(args, run, names[number + 1])  # it imports while the last one ends
                finally:
                    ending.close(args)
        except TimeIsUp:
            run.failed.append("the run was ended from outside")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            write()
            if started is not None:
                started.close(args)
            sglang_servers.kill_all()
            if not args.tiny:
                shutil.rmtree(args.folder, ignore_errors=True)
            print(json.dumps({key: result[key] for key in ("seconds", "failed", "skipped")}))
    return 1 if run.failed else 0


if __name__ == "__main__":
    sys.exit(main())
