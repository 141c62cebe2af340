"""Real engines with our receiver on one or two GPUs: times of updates, gaps that clients see, the engine's own sender.

    PYTHONPATH=src:. python3 -m benchmarks.engines --engine vllm --site SITE --parts 8b,moe --json OUT.json
    PYTHONPATH=src:. python3 -m benchmarks.engines --engine sglang --site SITE --parts 8b,moe --json OUT.json
    PYTHONPATH=src:. python3 -m benchmarks.engines --engine vllm --site SITE --parts tp2,ep2,apart --json OUT.json

SITE is a folder that holds the engine.  ``8b`` is Qwen3-8B (16 GB) and ``moe`` are 16 layers of Qwen3-30B-A3B (21 GB of
experts), both with random weights.  The parts:

- ``8b``, ``moe``: one engine, and a trainer of one rank on the same GPU.
- ``8b-online``, ``moe-online`` (vLLM with ``--quantization fp8``), ``8b-blocks`` (a checkpoint in fp8 blocks; the
  trainer quantises on the way): the same with quantised weights.
- ``8b-lora``: two LoRA adapters beside the model (``vllm_lora``).
- ``apart``, ``apart-moe``: the engine on another GPU than the trainer; each process sees only its own.
- ``tp2``, ``dp2`` (8b), ``ep2``, ``moe2`` (moe): one engine of two ranks, and a trainer of two ranks on the same GPUs.
- ``two``: 8b in an engine on each of two GPUs, from two trainer ranks in one session and from one.

Each part runs these steps:

1. The servers start, one with our receiver and one as the engine ships, and so does the trainer.
2. By each transport of ``--via``, with the pauses ``in_place`` and ``retract``: updates of the idle engine between two
   sets of weights.  Answers must differ between the sets, and be those of the first time, token for token, whenever a
   set is back; with experts half of the tokens, since an engine's own answers differ from one time to the next there.
3. The same while ``--streams`` clients in a process of their own stream, in each pause of ``--pauses`` by the first
   transport.  A gap is the time between two messages of one request, around each update and in windows of the same
   length without one.  With ``in_place`` no update may add more than 15 ms to a step (``engine_streams.compare``).
4. vLLM: two updates with ``verify="behaviour"``, which compares log-probabilities with the trainer's own forward pass.
   Others: that pass over the answers; they must be near its best tokens, far nearer than those on other weights.
5. With ``--sleep``: sleep, the weights awake, an update, the cache awake.
6. The engine's own sender, from the same trainer ranks, into the server as it ships, idle and with streams.

The file has versions, commands, the copy rate of the device in the same run, every step and every check.  It is written
anew after each group of steps.  A step that fails ends its part only if nothing can follow it.  Everything ends within
``--limit-s``, each part within ``--part-limit-s``; what was started is ended.  The exit code is 1 if a check failed.
``--tiny`` is a dry run with the engine on this CPU, whose Python is ``--python``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from benchmarks import engine_servers
from benchmarks.engine_servers import FLAGS, PROMPTS, Server
from benchmarks.engine_streams import compare, gaps, load
from benchmarks.engine_trainer import Trainer, checkpoint
from tests.helpers.answers import ALIKE, agreement
from tests.helpers.fp8_checkpoints import fp8_checkpoint

from weightcast.lab.bench.machine import facts

QWEN3_8B: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
QWEN3_30B_A3B_16: dict[str, Any] = QWEN3_8B | {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 16,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "8b": ("qwen3", QWEN3_8B),
    "moe": ("qwen3_moe", QWEN3_30B_A3B_16),
}
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
# Options for one GPU, and for two, where starts of several ranks are kept short.
_GRAPHS = '{"mode":0,"cudagraph_mode":"FULL_DECODE_ONLY","cudagraph_capture_sizes":[1,2,4,8,16,32,64]}'
OPTIONS = {
    "vllm": (
        "--max-model-len=8192 --max-num-seqs=64 --cudagraph-capture-sizes 1 2 4 8 16 32 --jit-monitor-verbose",
        f"--max-model-len=4096 --max-num-seqs=64 --disable-custom-all-reduce --compilation-config={_GRAPHS}",
    ),
    "sglang": (
        "",
        "--disable-custom-all-reduce --cuda-graph-backend-prefill=disabled --cuda-graph-bs-decode 1 2 4 8 16 32",
    ),
    "lmdeploy": ("", ""),
}
VIA = {"vllm": "direct,ipc", "sglang": "direct,ipc", "lmdeploy": "ipc"}
# Tokens of one request: a drain waits for all of them.
STREAM_TOKENS = {"in_place": 600, "retract": 600, "wait": 200, "abort": 600}
IDLE_PAUSES = ("in_place", "retract")
TOLERANCE = 1.0  # nats: bfloat16 in two implementations; other weights are several nats off
ALLOWED_S = 0.015  # an update may add so much to a step
END_S = 15.0  # kept for ending the servers and for the file
LOG_BYTES = 60_000


class TimeIsUp(BaseException):
    """The limit of a part or of the run has passed; no step may take it for a failure of its own."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part.

    Attributes:
        model: Name of a model.
        options: More of the engine's.
        tp: Tensor-parallel ranks of each engine.
        engines: Number of engines with our receiver.
        trainers: Numbers of trainer ranks, one after the other.
        gpus: Number of GPUs.
        apart: True if the engine is on another GPU than the trainer.
        in_blocks: True if the weights are quantised to fp8 in blocks.
        scores: False if no log-probabilities can be compared.
        not_with: Why there is no measurement with the engine's own sender; empty if there is one.
        refused: Words of the engine if it does not start with our receiver; empty if it does.
    """

    model: str = "8b"
    options: tuple[str, ...] = ()
    tp: int = 1
    engines: int = 1
    trainers: tuple[int, ...] = (1,)
    gpus: int = 1
    apart: bool = False
    in_blocks: bool = False
    scores: bool = True
    not_with: str = ""
    refused: str = ""


_ONE = {"8b": Part(), "moe": Part(model="moe")}
_ONLINE = ("--quantization=fp8",)
_TWICE = "the sender's figures for one engine are in the other parts"
_APART = {"apart": Part(gpus=2, apart=True), "apart-moe": Part(model="moe", gpus=2, apart=True)}
_PAIR: dict[str, Any] = {"trainers": (2,), "gpus": 2}
_TWO = Part(engines=2, trainers=(2, 1), gpus=2, not_with=_TWICE)
PARTS: dict[str, dict[str, Part]] = {
    "vllm": _ONE
    | {
        "8b-online": Part(options=_ONLINE, scores=False),
        "moe-online": Part(model="moe", options=_ONLINE, scores=False),
        "8b-blocks": Part(in_blocks=True, scores=False, not_with="it sends no quantised weights"),
        "8b-lora": Part(not_with="vLLM's own route for adapters is asked in the same server"),
        **_APART,
        "tp2": Part(tp=2, **_PAIR),
        "ep2": Part(model="moe", tp=2, options=("--enable-expert-parallel",), **_PAIR),
        "two": _TWO,
        "dp2": Part(options=("--data-parallel-size=2",), **_PAIR),
    },
    "sglang": _ONE
    | {
        **{name: replace(part, not_with="it is not measured") for name, part in _APART.items()},
        "tp2": Part(tp=2, **_PAIR),
        "moe2": Part(model="moe", tp=2, **_PAIR),
        "two": _TWO,
        "dp2": Part(
            options=("--dp-size=2",), not_with="SGLang: dp_size must be 1 for update weights from tensor", **_PAIR
        ),
        "ep2": Part(model="moe", tp=2, options=("--ep-size=2",), refused="expert parallelism (--ep-size)", **_PAIR),
    },
    "lmdeploy": {"8b": Part(not_with="it is not measured")},
}


class Run:
    """Record of a run: steps with their times, and checks."""

    def __init__(self, *, limit_s: float) -> None:
        self.limit_s = limit_s
        self.started = time.monotonic()
        self.steps: list[dict[str, Any]] = []
        self.failed: list[str] = []
        self.skipped: list[str] = []
        self.case = ""

    @property
    def left_s(self) -> float:
        """Seconds until ``limit_s``."""
        return self.limit_s - (time.monotonic() - self.started)

    @contextmanager
    def step(self, name: str) -> Generator[dict[str, Any]]:
        """Times a step and records the dictionary that its body fills."""
        begin = time.monotonic()
        kept: dict[str, Any] = {"case": self.case, "step": name}
        try:
            yield kept
        except BaseException as error:
            kept["error"] = f"{type(error).__name__}: {error}"[-4000:]
            self.failed.append(f"{self.case}: {name}: {kept['error'][:300]}")
            raise
        finally:
            kept["seconds"] = round(time.monotonic() - begin, 3)
            self.steps.append(kept)
            shown = {key: value for key, value in kept.items() if key not in ("case", "step")}
            print(f"[{self.limit_s - self.left_s:6.1f}] {self.case}: {name}: {json.dumps(shown)[:600]}", flush=True)

    def check(self, what: str, ok: bool, seen: object = None) -> None:
        """Records a check; the run continues, so that one failure does not hide the others."""
        if not ok:
            self.failed.append(f"{self.case}: {what}: {seen}"[:2000])
            print(f"FAILED {self.case}: {what}: {seen}"[:3000], flush=True)
        self.steps.append({"case": self.case, "check": what, "ok": ok, **({} if ok else {"seen": str(seen)[:2000]})})

    def attempt(self, what: str, step: Callable[[], object], *, failed: Callable[[], object] | None = None) -> None:
        """Runs a step whose failure need not end the part; the failure is kept."""
        try:
            step()
        except Exception:  # noqa: BLE001  what follows still tells something
            self.check(f"{what} ran to its end", ok=False, seen=traceback.format_exc()[-3000:])
            if failed is not None:
                failed()


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


@dataclass
class Started:
    """Servers that a part has started, which may not be ready yet, and its trainer."""

    ours: list[Server] = field(default_factory=list[Server])
    ships: Server | None = None
    trainer: Trainer | None = None
    began: float = field(default_factory=time.monotonic)

    def train(self, args: argparse.Namespace, part: Part, world: int) -> Trainer:
        """Ends the trainer that there was and starts one."""
        if self.trainer is not None:
            self.trainer.close()
        family, sizes = shape_of(args, part.model)
        seen = "0" if part.apart else os.environ.get("CUDA_VISIBLE_DEVICES")
        with environment(CUDA_VISIBLE_DEVICES=seen):
            self.trainer = Trainer(world, family, sizes, "cpu" if args.tiny else "cuda")
        return self.trainer

    def close(self, args: argparse.Namespace) -> None:
        """Ends everything and keeps the ends of the logs."""
        if self.trainer is not None:
            self.trainer.close()
        for server in [*self.ours, *filter(None, [self.ships])]:
            if args.logs is not None:
                args.logs.mkdir(parents=True, exist_ok=True)
                (args.logs / server.log.name).write_text(server.text()[-LOG_BYTES:])
            server.close()


def shape_of(args: argparse.Namespace, model: str) -> tuple[str, dict[str, Any]]:
    """Family and sizes of a model."""
    family, sizes = MODELS[model]
    sizes = sizes | (TINY if args.tiny else {}) | (TINY_EXPERTS if args.tiny and model == "moe" else {})
    # LMDeploy keeps the row of a padding token in its embeddings at zero.
    return family, sizes | ({"pad_token_id": None} if args.engine == "lmdeploy" else {})


def checkpoint_of(args: argparse.Namespace, part: Part) -> Path:
    """The folder that the servers of a part start on, which is written first if it is not there."""
    folder = args.folder / part.model
    if not folder.exists():
        family, sizes = shape_of(args, part.model)
        checkpoint(folder, family, sizes, torch.float32 if args.tiny else torch.bfloat16)
    if not part.in_blocks:
        return folder
    blocks = args.folder / f"{part.model}-blocks"
    if not blocks.exists():
        fp8_checkpoint(folder, blocks, "blocks", device="cpu" if args.tiny else "cuda:0")
        if not args.tiny:
            torch.cuda.empty_cache()
    return blocks


def start(args: argparse.Namespace, name: str) -> Started:
    """Starts the servers of a part and its trainer, and waits for none of them."""
    part = PARTS[args.engine][name]
    found = Started()
    folder = checkpoint_of(args, part)
    if name != "8b-lora":
        found.train(args, part, part.trainers[0])
    for number in range(part.engines if not part.refused else 0):
        found.ours.append(launch(args, name, folder, number, ours=True))
    # vLLM's own sender needs a GPU.
    if not part.not_with and not args.ours_alone and not (args.tiny and args.engine == "vllm"):
        found.ships = launch(args, name, folder, 0, ours=False)
    return found


def launch(args: argparse.Namespace, name: str, model: Path, gpu: int, *, ours: bool) -> Server:
    """Starts one server of a part on the GPUs from this one on."""
    part = PARTS[args.engine][name]
    options = [] if args.tiny and name == "ep2" else [*part.options]  # no engine has expert parallelism on a CPU
    more: dict[str, str] = {}
    if name == "8b-lora":
        from benchmarks import vllm_lora

        options, more = [*options, *vllm_lora.OPTIONS], dict(vllm_lora.ALLOWED)
    if not args.tiny:
        own = args.options if args.options is not None else OPTIONS[args.engine][part.gpus - 1]
        options += own.split()
        if part.apart:
            more["CUDA_VISIBLE_DEVICES"] = "1"
            options += [] if ours else ['--weight-transfer-config={"backend": "nccl"}']
        elif gpu and args.engine == "vllm":  # the other GPU stays visible: its memory is mapped
            more["CUDA_VISIBLE_DEVICES"] = "1,0"
        elif gpu:
            options.append(f"--base-gpu-id={gpu}")
    log = f"{name}-{gpu}" if ours else f"{name}-stock"
    return engine_servers.start(args, model, log, *options, ours=ours, tp=part.tp, more=more)


class Case:
    """The steps of one part."""

    def __init__(self, run: Run, args: argparse.Namespace, name: str, started: Started) -> None:
        self.run, self.args, self.part, self.started = run, args, PARTS[args.engine][name], started
        self.version = 0
        self.known: dict[int, list[list[list[int]]]] = {}
        self.alike = ALIKE if self.part.model == "moe" else 1.0
        self._training: list[tuple[float, float]] = []

    @property
    def trainer(self) -> Trainer:
        assert self.started.trainer is not None
        return self.started.trainer

    @property
    def server(self) -> Server:
        """The first engine with our receiver."""
        return self.started.ours[0]

    @property
    def via(self) -> list[str]:
        """Transports, the most important one first."""
        if self.part.apart:
            return ["broadcast"]
        # One trainer rank has no buffer on the other GPU.
        alone = self.part.engines > 1 and self.trainer.world == 1 and not self.args.tiny
        return ["direct"] if alone else self.args.via.split(",")

    def ready(self, limit_s: float) -> None:
        """Waits for the servers and the trainer."""
        with self.run.step("start") as kept:
            deadline = time.monotonic() + limit_s
            kept["servers"] = [server.wait_ready(deadline - time.monotonic()) for server in self.started.ours]
            if (ships := self.started.ships) is not None:
                self.run.attempt(
                    "start of the server as it ships",
                    lambda: ships.wait_ready(deadline - time.monotonic()),
                    failed=lambda: setattr(self.started, "ships", None),
                )
            if self.started.trainer is not None:
                self.trained()
            if self.started.ships is not None and self.started.trainer is not None:
                self.run.attempt("import", lambda: self.trainer.call(f"import_{self.args.engine}", self.args.site))
            kept["since_their_start_s"] = round(time.monotonic() - self.started.began, 1)

    def trained(self) -> None:
        """Waits for the trainer; its shards' bytes."""
        with self.run.step("trainer") as kept:
            kept["ranks"] = self.trainer.world
            kept["held_bytes"] = self.trainer.call("held_bytes")

    @contextmanager
    def connected(self, via: str, **options: Any) -> Generator[str]:
        """A connection of all trainer ranks to all engines; its key."""
        chosen: dict[str, Any] = options | {"transport": via}
        if via == "direct":  # ordinary memory of a CPU cannot be mapped, and what is quantised on the way is nowhere
            chosen["keep_mapped"] = not self.args.tiny and not self.part.in_blocks
        elif self.args.bucket_mib or self.args.tiny:
            chosen["bucket_bytes"] = (self.args.bucket_mib or 1) << 20
        with self.run.step(f"connect by {via} {options}") as kept:
            urls = [server.url for server in self.started.ours]
            kept |= self.trainer.call("connect", via, urls, chosen, self.part.in_blocks)[0]
        self.run.check(f"{via} was chosen", kept["transport"] == via, kept)
        try:
            yield via
        finally:
            self.trainer.call("disconnect", via)

    def update(self, key: str, name: str, seed: int) -> tuple[float, float]:
        """One update to the weights of a seed; when the first rank began and the last one ended."""
        self.version += 1
        compiled = sum(server.compiled() for server in self.started.ours)
        trace = None
        if self.args.traces is not None:  # the last update of each kind stays
            self.args.traces.mkdir(parents=True, exist_ok=True)
            trace = self.args.traces / f"{re.sub('[^a-z0-9]+', '-', f'{self.run.case} {name}')}.json"
        with self.run.step(name) as kept:
            found = self.trainer.call("update", key, self.version, seed, trace)
            began, ended = min(rank["began"] for rank in found), max(rank["ended"] for rank in found)
            kept |= {"update_s": round(ended - began, 4), "trainers": self.trainer.world}
            kept |= {key: found[0][key] for key in ("phases", "bytes", "transport", "targets")}
            kept["trainer_peak_bytes"] = [rank["trainer_peak_bytes"] for rank in found]
            kept["kernels_compiled"] = sum(server.compiled() for server in self.started.ours) - compiled
        self._training.append((min(rank["trains"] for rank in found), began))
        proofs = [row["proof"] for row in kept["targets"]]
        self.run.check(f"{name}: proven", all(proof in ("resident", "behaviour") for proof in proofs), proofs)
        return began, ended

    def answers(self, seed: int) -> None:
        """Answers on the weights of a seed, compared with those of the last time and of the other seeds."""
        with self.run.step(f"answers on weights {seed}") as kept:
            found = [server.answers() for server in self.started.ours]
            kept["first_tokens"] = [each[0][:6] for each in found]
        before = self.known.setdefault(seed, found)
        shares = [agreement(one, other) for one, other in zip(found, before, strict=True)]
        self.run.check(f"answers on weights {seed} are those of the first time", min(shares) >= self.alike, shares)
        others = [agreement(found[0], known[0]) for other, known in self.known.items() if other != seed]
        self.run.check(f"answers on weights {seed} are no others'", max(others, default=0.0) < self.alike, others)

    def seeds(self) -> list[int]:
        """The weights of each update of a row; the last one brings weights 1 back."""
        return [1 + (self.args.repeats - 1 - number) % 2 for number in range(self.args.repeats)]

    def first(self) -> None:
        """Both sets of weights once: the checkpoint was empty."""
        with self.connected(self.via[0], pause="retract") as key:
            for seed in (2, 1):
                self.update(key, f"first update to weights {seed}", seed)
                self.answers(seed)

    def idle(self, via: str, pause: str) -> None:
        """Updates without a request."""
        with self.connected(via, pause=pause) as key:
            for seed in self.seeds():
                self.update(key, f"{via}, idle, {pause}", seed)
        self.answers(1)

    def under_load(self, via: str, pause: str) -> None:
        """Updates while clients stream."""
        wait_s = 0.2 if self.args.tiny else 1.0
        windows: list[tuple[float, float]] = []
        self._training.clear()
        with self.connected(via, pause=pause) as key, self.streams(pause, self.started.ours) as clients:
            steady = time.monotonic()
            for number, seed in enumerate(self.seeds()):
                # All requests end and are sent anew together: that must not come in step with the updates.
                time.sleep(wait_s * (1 + 0.35 * (number % 3)))
                windows.append(self.update(key, f"{via}, {self.args.streams} streams, {pause}", seed))
            time.sleep(wait_s)
            stopped = time.monotonic()
            for each in clients:
                each.stop()
        for number, each in enumerate(clients):
            what = f"gaps, {via}, {pause}" + (f", engine {number}" if number else "")
            if self.args.tiny:  # on a busy CPU there may be no time without an update to compare with
                self.gaps(what, each.requests, windows)
                continue
            seen = self.gaps(what, each.requests, windows, (steady, stopped))["windows"]
            # The other modes read the tokens of all requests anew, or end them.
            self.run.check(f"{what}: none is an update's own", pause != "in_place" or not seen["ours"], seen)
        self.answers(1)

    @contextmanager
    def streams(self, pause: str, servers: Sequence[Server]) -> Generator[list[Any]]:
        """Streams of every server, all of which have got tokens."""
        tokens = 60 if self.args.tiny else STREAM_TOKENS[pause]
        with ExitStack() as stack:
            found = [
                stack.enter_context(load(each.url, streams=self.args.streams, tokens=tokens, engine=self.args.engine))
                for each in servers
            ]
            for each in found:
                each.wait_steady(60)
            yield found

    def gaps(
        self,
        what: str,
        requests: Any,
        windows: Sequence[tuple[float, float]],
        during: tuple[float, float] | None = None,
    ) -> dict[str, Any]:
        """Keeps what the clients saw around each update, and compared with the rest of the time in which all ran."""
        with self.run.step(what) as kept:
            kept["around_each_update"] = [gaps(requests, begin, end + 0.05) for begin, end in windows]
            kept["longest_s"] = [found["longest_s"] for found in kept["around_each_update"]]
            before = [(max(begin - 0.4, 2 * begin - end - 0.1), begin - 0.05) for begin, end in windows]
            kept["longest_without_an_update_s"] = [gaps(requests, *window)["longest_s"] for window in before]
            steps = [found["usual_s"] for found in kept["around_each_update"] if found["usual_s"]]
            kept["step_s"] = round(statistics.median(steps), 5) if steps else None
            if during is not None:
                kept["windows"] = compare(requests, windows, during, allowed_s=ALLOWED_S, busy=self._training)
        ended = {str(request.finish) for request in requests}
        self.run.check(f"{what}: no request failed", ended <= {"length", "stop", "abort"}, ended)
        if "abort" not in what:
            self.run.check(f"{what}: no request ended early", ended == {"length"}, ended)
        return kept

    def behaviour(self) -> None:
        """Two updates; the second one compares log-probabilities with the trainer's own forward pass."""
        with self.connected(
            self.via[-1], verify="behaviour", pause="retract", advanced={"behaviour_tolerance": TOLERANCE}
        ) as key:
            for seed in (2, 1):
                self.update(key, f"update with behaviour to weights {seed}", seed)
        last = next(step for step in reversed(self.run.steps) if "targets" in step)
        proofs = [row["proof"] for row in last["targets"]]
        self.run.check("behaviour is proven after the second update", set(proofs) == {"behaviour"}, proofs)

    def scored(self) -> None:
        """The trainer's own forward pass over both sets of answers, for engines that do not score."""
        with self.run.step("nats from the best tokens of weights 1") as kept:
            for seed in (1, 2):
                kept[f"answers on weights {seed}"] = self.trainer.call("score", PROMPTS, self.known[seed][0])[0]
        mine, others = (kept[f"answers on weights {seed}"] for seed in (1, 2))
        self.run.check("answers on weights 1 are of these weights", mine < 0.25 * others, kept)

    def sleeps(self) -> None:
        """Sleep and wake-up by tags, with an update between them, as colocated trainers do it."""
        with self.connected(self.via[-1], pause="abort") as key:
            for level, seed in ((1, 2),) if self.args.engine == "sglang" else ((1, 2), (2, 1), (2, 2)):
                free = [self._free_bytes()]
                with self.run.step(f"sleep, level {level}") as kept:
                    self.server.sleep(level)
                    free.append(self._free_bytes())
                    kept["freed_bytes"] = free[1] - free[0]
                held = self.trainer.call("held_bytes")[0]
                self.run.check("sleep frees both sets of weights", self.args.tiny or free[1] - free[0] > 2 * held, free)
                self.server.wake("weights")
                self.update(key, f"update between the tags, level {level}", seed)
                self.server.wake("kv_cache")
                self.answers(seed)

    def _free_bytes(self) -> int:
        return 0 if self.args.tiny else torch.cuda.mem_get_info()[0]

    def sender(self, ships: Server) -> None:
        """The engine's own sender into the server as it ships: idle, then with streams."""
        name = {"vllm": "vLLM", "sglang": "SGLang"}[self.args.engine]
        method = f"send_by_{self.args.engine}{'_nccl' if self.part.apart else ''}"
        for streams in (0,) if self.part.apart else (0, self.args.streams):
            what = f"{name}'s own sender, {f'{streams} streams' if streams else 'idle'}"
            with ExitStack() as stack:
                clients = stack.enter_context(self.streams("in_place", [ships])) if streams else []
                with self.run.step(what) as kept:
                    said = self.trainer.call(method, ships.url, self.seeds(), 0.5)[0]
                    kept["update_s"] = [round(each["ended"] - each["began"], 4) for each in said]
                    kept["paused_s"] = [round(each["sent"] - each["paused"], 4) for each in said]
                for each in clients:
                    time.sleep(0.5)
                    each.stop()
                windows = [(each["began"], each["ended"]) for each in said]
            for each in clients:
                self.gaps(f"gaps, {name}'s own sender", each.requests, windows)
            with self.run.step("tokens after its update, beside those after ours") as kept:
                kept["equal"] = agreement(ships.answers(), self.known[1][0]) if 1 in self.known else None

    def by_our_adapter(self, ships: Server) -> None:
        """Our adapter into the server as it ships."""
        with self.run.step("connect to the server as it ships"):
            self.trainer.call("connect", "adapter", [ships.url], {"transport": "ipc", "verify": "received"})
        try:
            for seed in self.seeds():
                self.version += 1
                with self.run.step("our adapter, the server as it ships, idle") as kept:
                    found = self.trainer.call("update", "adapter", self.version, seed)
                    ended = max(rank["ended"] for rank in found)
                    kept["update_s"] = round(ended - min(rank["began"] for rank in found), 4)
                    kept |= {key: found[0][key] for key in ("phases", "bytes", "transport", "targets")}
        finally:
            self.trainer.call("disconnect", "adapter")


def play(run: Run, args: argparse.Namespace, name: str, started: Started, write: Callable[[], None]) -> None:
    """Every step of a part."""
    case = Case(run, args, name, started)
    part = case.part
    if part.refused:
        run.steps.append({"case": name, "not_run": f"our receiver refuses {part.refused}"})
    case.ready(min(args.start_limit_s, run.left_s - END_S))
    write()
    if name == "8b-lora":
        from benchmarks import vllm_lora

        vllm_lora.play(case, shape_of(args, part.model))
        return
    for world in part.trainers if started.ours else ():
        if world != case.trainer.world:
            started.train(args, part, world)
            case.known = {}
            case.trained()
        case.first()
        for number, via in enumerate(case.via):
            for pause in IDLE_PAUSES:
                run.attempt(f"{via}, idle, {pause}", lambda via=via, pause=pause: case.idle(via, pause))
            write()
            for pause in args.pauses.split(",") if number == 0 and part.gpus == 1 else IDLE_PAUSES[:1]:
                run.attempt(f"{via}, streams, {pause}", lambda via=via, pause=pause: case.under_load(via, pause))
                write()
        if part.scores and not (part.engines > 1 and world == 1):
            run.attempt("behaviour", case.behaviour if args.engine == "vllm" else case.scored)
            write()
    if args.sleep and started.ours:
        run.attempt("sleep", case.sleeps)
        write()
    if part.not_with:
        run.steps.append({"case": name, "not_run": f"{args.engine}'s own sender: {part.not_with}"})
    if (ships := started.ships) is not None:
        run.attempt(f"{args.engine}'s own sender", lambda: case.sender(ships))
        write()
        if args.engine == "sglang":
            run.attempt("our adapter", lambda: case.by_our_adapter(ships))
            write()


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


def time_is_up(*_: object) -> None:
    """Handles the signal of a timer."""
    raise TimeIsUp("the limit of this part, or of the run, has passed")


def parsed() -> argparse.Namespace:
    """The arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=sorted(PARTS), required=True)
    parser.add_argument("--parts", default="8b", help="of the engine's, in this order")
    parser.add_argument("--json", type=Path, help="where the results go")
    parser.add_argument("--logs", type=Path, help="where the ends of the servers' logs go")
    parser.add_argument("--traces", type=Path, help="where the trace of the last update of each kind goes")
    parser.add_argument("--via", help="transports; the first one in every pause mode under load")
    parser.add_argument("--pauses", default=",".join(STREAM_TOKENS), help="pause modes under load")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=4, help="updates of each kind, an even number")
    parser.add_argument("--bucket-mib", type=int, default=0, help="size of buckets; weightcast's default if 0")
    parser.add_argument("--cache-gib", type=int, default=4, help="KV cache of each of vLLM's ranks")
    parser.add_argument("--cache-tokens", type=int, default=65536, help="KV cache of each of SGLang's engines")
    parser.add_argument("--ours-alone", action="store_true", help="no server as the engine ships")
    parser.add_argument("--sleep", action="store_true", help="sleep and wake-up too")
    parser.add_argument("--site", default="", help="folder that holds the engine")
    parser.add_argument("--python", default=sys.executable, help="the Python that runs the engine")
    parser.add_argument("--flags", help="flags that the build of the engine needs")
    parser.add_argument("--options", help="more of the engine's, instead of those of this script")
    parser.add_argument("--tiny", action="store_true", help="tiny models, the engine on this CPU")
    parser.add_argument("--version", default="0.5.23", help="of SGLang, with --tiny")
    parser.add_argument("--limit-s", type=float, default=540.0)
    parser.add_argument("--part-limit-s", type=float, default=260.0)
    parser.add_argument("--start-limit-s", type=float, default=230.0)
    parser.add_argument("--folder", type=Path, help="for models, logs and caches")
    args = parser.parse_args()
    args.flags = FLAGS[args.engine] if args.flags is None else args.flags
    args.via = VIA[args.engine] if args.via is None else args.via
    if unknown := set(args.parts.split(",")) - PARTS[args.engine].keys():
        parser.error(f"{args.engine} has no part {', '.join(unknown)}: choose of {', '.join(PARTS[args.engine])}")
    return args


def main() -> int:
    """Plays the parts and writes what was found."""
    args = parsed()
    names = args.parts.split(",")
    parts = [PARTS[args.engine][name] for name in names]
    if args.engine == "sglang" or not any(part.apart for part in parts):  # as SGLang sets it in its own processes
        os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")
    os.environ.setdefault("SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK", "0")  # the trainer's ranks need not be equal
    run = Run(limit_s=args.limit_s)
    gpus = max(part.gpus for part in parts)
    result: dict[str, Any] = {"what": f"{args.engine} on {('one GPU', 'two GPUs')[gpus - 1]}", "machine": facts()}
    options = OPTIONS[args.engine][gpus - 1] if args.options is None else args.options
    result |= {"flags": args.flags, "options": options, "streams": args.streams, "limit_s": args.limit_s}

    def write() -> None:
        result.update(seconds=round(run.limit_s - run.left_s, 1), failed=run.failed, skipped=run.skipped)
        result["steps"] = run.steps
        if args.json is not None:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps(result, indent=1) + "\n")

    for number in (signal.SIGALRM, signal.SIGTERM):
        signal.signal(number, time_is_up)
    started: Started | None = None
    with tempfile.TemporaryDirectory(prefix="engines-") as folder:
        args.folder = args.folder or Path(folder)
        args.folder.mkdir(parents=True, exist_ok=True)
        try:
            run.case = names[0]
            started = start(args, names[0])
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
                    tails = {server.log.name: server.text()[-6000:] for server in started.ours}
                    run.steps.append({"case": name, "log_tails": tails})
                signal.setitimer(signal.ITIMER_REAL, 0)
                write()
                started.close(args)
                started = None
                if number + 1 < len(names) and run.left_s > 80 + END_S:
                    started = start(args, names[number + 1])
        except TimeIsUp:
            run.failed.append("the run was ended from outside")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            write()
            if started is not None:
                started.close(args)
            engine_servers.kill_all()
            if not args.tiny:
                shutil.rmtree(args.folder, ignore_errors=True)
            print(json.dumps({key: result[key] for key in ("seconds", "failed", "skipped")}))
    return 1 if run.failed else 0


if __name__ == "__main__":
    sys.exit(main())
