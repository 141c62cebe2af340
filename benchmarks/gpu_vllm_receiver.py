"""Our receiver inside vLLM on one GPU: times of updates, gaps that clients see, and vLLM's own sender beside it.

    WEIGHTCAST_VLLM_SITE=/tmp/site_vllm PYTHONPATH=src:. python3 benchmarks/gpu_vllm_receiver.py --json OUT.json

The trainer is this process: a transformers model with random weights on the same GPU.  Two servers start side by side
on its first weights: one with our receiver, one as vLLM ships.  Each case runs these steps:

1. Answers at the start.
2. Updates while the engine is idle, by each transport of ``--via``, with the pauses ``in_place`` and ``retract``.
   ``direct`` keeps the trainer's weights mapped.
3. Updates in every pause mode of ``--pauses``, by the first transport of ``--via``, while ``--streams`` clients in a
   process of their own stream; by the other transports ``in_place`` and ``retract`` only.  A gap is the time between
   two messages that one request gets.  With ``in_place``, one that is longer than a step and 12 ms must not be an
   update's own (``engine_streams.compare``).
4. The first weights again: answers must equal those of the start, token for token; with experts half of the tokens,
   since vLLM's own answers differ from one time to the next there.
5. Two more updates; the second compares log-probabilities (``verify="behaviour"``).
6. With ``--sleep``: levels 1 and 2, ``/wake_up?tags=weights``, an update, ``/wake_up?tags=kv_cache``.
7. vLLM's own sender into the server as it ships, idle and with the same streams, once our server has ended.

The cases ``8b-online`` and ``moe-online`` start vLLM with ``--quantization fp8``; ``8b-blocks`` starts it on a
checkpoint in fp8 blocks, and the trainer quantises on the way.  They compare no log-probabilities.

The case ``dummy`` starts a server with ``--load-format dummy`` and sends it the first weights.

The case ``8b-lora`` updates one and two LoRA adapters of rank 32 on all linear layers, idle and under load, and loads
the same ones from folders by vLLM's own route.  By default one server does both, so that the case is short: it starts
on random weights and gets the model's by an update.  With ``--stock-peer`` a server as vLLM ships loads the folders.

vLLM runs with what ``--flags``, ``--options`` and each case add.  The file has versions, commands, the copy rate of the
device in the same run, every step and every check, and for each update how many kernels vLLM compiled meanwhile.  It is
written anew after each case.  A step that fails ends its case only if nothing can follow it.  The exit code is 1 if a
check failed.  Everything ends within ``--limit-s``, each case within ``--case-limit-s``; ``--logs`` keeps the end of
each server's log.  ``--tiny`` is a dry run on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from benchmarks.engine_streams import compare, gaps, load
from benchmarks.vllm_lora import ALLOWED, Adapters, measure, save_headers
from benchmarks.vllm_lora import OPTIONS as LORA_OPTIONS
from benchmarks.vllm_memory import QWEN3_8B, ROOT, Run, Server, asked, await_start, launched
from tests.helpers.answers import ALIKE, agreement
from tests.helpers.fp8_checkpoints import fp8_checkpoint
from tests.helpers.tiny import tiny_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from weightcast import WeightUpdater
from weightcast.exporters.module import ModuleExporter
from weightcast.exporters.quantise import Fp8Blocks
from weightcast.lab.bench.machine import facts
from weightcast.timeline.tracks import MESSAGES, Timeline

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
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "8b": ("qwen3", QWEN3_8B),
    "8b-online": ("qwen3", QWEN3_8B),
    "8b-blocks": ("qwen3", QWEN3_8B),
    "8b-lora": ("qwen3", QWEN3_8B),
    "moe": ("qwen3_moe", QWEN3_30B_A3B_16),
    "moe-online": ("qwen3_moe", QWEN3_30B_A3B_16),
}
# vLLM quantises what it gets; a checkpoint in blocks says so itself.
ONLINE = ["--quantization=fp8"]
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
# A KV cache of a fixed size, since two servers and a trainer share the GPU.
CACHE_BYTES = {"8b": 12 << 30, "8b-online": 8 << 30, "8b-blocks": 12 << 30}
FEWER_BYTES = 4 << 30
# Tokens of one request: a drain waits for all of them.
TOKENS = {"in_place": 600, "retract": 600, "wait": 200, "abort": 600}
IDLE_PAUSES = ("in_place", "retract")
TOLERANCE = 1.0  # nats: bfloat16 in two implementations; other weights are several nats off
ALLOWED_S = 0.012  # an update may add so much to a step
WAITS = ("open", "send", "commit", "stall")  # phases in which a row waits for what other rows do
END_S = 25.0  # kept for ending the servers and for the file
START_S = 230.0
# vLLM says when it compiles a kernel while it serves: a step then takes up to a second, and an update waits for it.
OPTIONS = "--max-model-len=8192 --max-num-seqs=64 --cudagraph-capture-sizes 1 2 4 8 16 32 --jit-monitor-verbose"
COMPILED = b"compilation during inference"
LOG_BYTES = 200_000


class TimeIsUp(BaseException):
    """The limit of a case or of the run has passed; no step may take it for a failure of its own."""


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

    def free(self) -> None:
        """Frees the model; the trainer sends nothing any more."""
        self.model = None
        if self.device != "cpu":
            torch.cuda.empty_cache()

    def save(self, folder: Path) -> None:
        """Writes a checkpoint that vLLM can start on."""
        self.model.save_pretrained(folder, max_shard_size="4GB")
        tiny_tokenizer(folder)


def where(timeline: Timeline) -> dict[str, Any]:
    """Where the time of an update went, so that a slow one can be compared with others.

    Returns:
        ``spans_ms``: milliseconds of each phase in each row of the timeline, from 1 ms on.  ``between_ms``: the longest
        times in which no row did anything but wait for others, with the phases before and after.
    """
    total: dict[str, float] = {}
    spans: list[tuple[int, int, str]] = []
    for track in timeline.tracks:
        if track.name.startswith(MESSAGES):
            continue
        for span in track.spans:
            name = f"{track.side} {track.name}: {span.name}"
            total[name] = total.get(name, 0.0) + span.us / 1e3
            if span.name not in WAITS:
                spans.append((span.start_us, span.end_us, name))
    between: list[tuple[float, str, str]] = []
    end, last = 0, "the begin"
    for start, stop, name in [*sorted(spans), (timeline.end_us, timeline.end_us, "the end")]:
        if start > end:
            between.append(((start - end) / 1e3, last, name))
        if stop > end:
            end, last = stop, name
    return {
        "spans_ms": {name: round(ms, 2) for name, ms in total.items() if ms >= 1},
        "between_ms": [(round(ms, 2), before, after) for ms, before, after in sorted(between, reverse=True)[:5]],
    }


class Case:
    """One server and the trainer that updates it."""

    def __init__(
        self,
        run: Run,
        args: argparse.Namespace,
        trainer: Trainer,
        server: Server,
        *,
        blocks: bool = False,
        alike: float = 1.0,
    ) -> None:
        """``alike`` is the share of tokens in which answers of the same weights must agree, at least."""
        self.run, self.args, self.trainer, self.server = run, args, trainer, server
        self.blocks, self.alike = blocks, alike
        self.version = 0
        self.training: list[tuple[float, float]] = []  # beginning and end

    def update(self, updater: WeightUpdater, name: str, seed: int) -> tuple[float, float]:
        """One update to the weights of a seed; returns when it began and ended, in seconds of the monotonic clock."""
        trains = time.monotonic()
        self.trainer.fill(seed)
        if self.trainer.device != "cpu":
            torch.cuda.synchronize()
        self.training.append((trains, time.monotonic()))
        self.version += 1
        compiled = self.compiled()
        with self.run.step(name) as kept:  # without nvidia-smi, which could disturb the streams
            began = time.monotonic()
            report = updater.update(version=self.version)
            ended = time.monotonic()
            (row,) = report.targets
            kept |= {"update_s": round(ended - began, 4), "stall_s": round(row.stall_s, 5), "proof": row.proof}
            kept |= {"phases": {key: round(value, 5) for key, value in report.phases.items()}, "bytes": report.bytes}
            kept |= {"trainer_peak_bytes": report.peak_extra_bytes, "engine_peak_bytes": row.peak_extra_bytes}
            kept |= {"kernels_compiled": self.compiled() - compiled} | where(report.timeline)
        if self.args.traces is not None:  # the last update of each kind stays
            self.args.traces.mkdir(parents=True, exist_ok=True)
            report.to_perfetto(self.args.traces / f"{re.sub('[^a-z0-9]+', '-', f'{self.run.case} {name}')}.json")
        self.run.check(f"{name}: proven", row.proof in ("resident", "behaviour"), row)
        return began, ended

    def compiled(self) -> int:
        """How many kernels vLLM has compiled while it served."""
        return self.server.log.read_bytes().count(COMPILED)

    @contextmanager
    def connected(self, via: str = "ipc", **options: Any) -> Generator[WeightUpdater]:
        """A connection whose time is a step of its own."""
        with self.run.step(f"connect by {via} {options}"):
            model = self.trainer.model
            sent = ModuleExporter(model, quantise=Fp8Blocks()) if self.blocks else model
            if via == "direct":
                mapped = self.trainer.device != "cpu" and not self.blocks  # ordinary memory of a CPU cannot be mapped
                options |= {"direct_by": "shards", "keep_mapped": True} if mapped else {"direct_by": "memory"}
            elif self.args.bucket_mib:
                options |= {"bucket_bytes": self.args.bucket_mib << 20}
            updater = WeightUpdater.connect(sent, [self.server.url], transport=via, timeout_s=60.0, **options)
        with updater:
            yield updater

    def answers(self, what: str, expected: list[list[int]] | None = None) -> list[list[int]]:
        """Greedy answers, compared with those that are expected."""
        with self.run.step(f"answers {what}"):
            found = self.server.answers()
        if expected is not None:
            share = agreement(found, expected)
            seen = {"share": share, "found": found, "expected": expected}
            self.run.check(f"answers {what} equal", share >= self.alike, seen)
        return found

    def differ(self, found: list[list[int]], first: list[list[int]]) -> None:
        """Checks that answers of other weights are other answers."""
        share = agreement(found, first)
        self.run.check("they differ from the first ones", share < self.alike, share)

    def attempt(self, what: str, step: Callable[[], object]) -> None:
        """Runs a step whose failure need not end the case; the failure is kept."""
        try:
            step()
        except Exception:  # noqa: BLE001  what follows still tells something
            print(f"FAILED {self.run.case}: {what}:\n{traceback.format_exc()[-3000:]}", flush=True)
            self.run.check(f"{what} ran to its end", ok=False, seen=traceback.format_exc()[-1500:])

    def behaviour(self) -> None:
        """Two updates; the second one compares log-probabilities with the trainer's own forward pass."""
        with self.connected(verify="behaviour", pause="in_place", behaviour_tolerance=TOLERANCE) as updater:
            for number in (1, 2):
                self.update(updater, f"update {number} with behaviour", number)
        last = next(step for step in reversed(self.run.steps) if "proof" in step)
        self.run.check("behaviour is proven after the second update", last["proof"] == "behaviour", last)

    def idle(self) -> None:
        """Updates without a request."""
        for via in self.args.via.split(","):
            for pause in IDLE_PAUSES:
                with self.connected(via, pause=pause) as updater:
                    for number in range(self.args.repeats):
                        self.update(updater, f"{via}, idle, {pause}", 1 + number % 2)

    def under_load(self, pause: str, via: str) -> None:
        """Updates while clients stream."""
        wait_s = 0.2 if self.run.tiny else 1.0
        tokens = 40 if self.run.tiny else TOKENS[pause]
        windows: list[tuple[float, float]] = []
        with (
            self.connected(via, pause=pause) as updater,
            load(self.server.url, streams=self.args.streams, tokens=tokens, engine="vllm") as clients,
        ):
            clients.wait_steady(60)
            steady = time.monotonic()
            for number in range(self.args.repeats):
                # All requests end and are sent anew together: that must not come in step with the updates.
                time.sleep(wait_s * (1 + 0.35 * (number % 3)))
                windows.append(self.update(updater, f"{via}, {self.args.streams} streams, {pause}", 1 + number % 2))
            time.sleep(wait_s)
            stopped = time.monotonic()
            clients.stop()
        what = f"gaps, {via}, {pause}"
        seen = self.gaps(what, clients.requests, windows, (steady, stopped))["windows"]
        # The other modes read the tokens of all requests anew, or end them.
        ours = seen["ours"] if pause == "in_place" and not self.run.tiny else []
        self.run.check(f"{what}: none is an update's own", not ours, seen)

    def gaps(
        self,
        what: str,
        requests: Any,
        windows: list[tuple[float, float]],
        during: tuple[float, float] | None = None,
    ) -> dict[str, Any]:
        """Keeps what the clients saw around each update, and compared with the rest of the time in which all ran."""
        with self.run.step(what) as kept:
            kept["around_each_update"] = [gaps(requests, begin, end + 0.1) for begin, end in windows]
            kept["longest_s"] = [found["longest_s"] for found in kept["around_each_update"]]
            if during is not None:
                kept["windows"] = compare(requests, windows, during, allowed_s=ALLOWED_S, busy=self.training)
        ended = {str(request.finish) for request in requests}
        self.run.check(f"{what}: no request failed", ended <= {"length", "stop", "abort"}, ended)
        if "abort" not in what:
            self.run.check(f"{what}: no request ended early", ended == {"length"}, ended)
        return kept

    def stock(self, server: Server, folder: Path, first: list[list[int]]) -> None:
        """vLLM's own sender into a server as it ships: idle, then with streams."""
        command = [sys.executable, str(ROOT / "benchmarks/vllm_sender.py"), str(folder), server.url]
        path = [os.environ.get("WEIGHTCAST_VLLM_SITE", ""), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "VLLM_NO_USAGE_STATS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(part for part in path if part)
        for streams in (0, self.args.streams):
            name = f"vLLM's own sender, {streams} streams" if streams else "vLLM's own sender, idle"
            with ExitStack() as stack:
                clients = None
                if streams:
                    clients = stack.enter_context(load(server.url, streams=streams, tokens=3000, engine="vllm"))
                    clients.wait_steady(60)
                with self.run.step(name, server) as kept:
                    sent = subprocess.run(
                        [*command, f"--rounds={self.args.repeats + self.args.repeats % 2}", "--gap-s=1"],
                        capture_output=True,
                        text=True,
                        check=False,
                        env=environment,
                        timeout=150,
                    )
                    if sent.returncode:
                        raise RuntimeError(sent.stderr[-3000:])
                    said = json.loads(sent.stdout.splitlines()[-1])
                    kept["bytes"] = said["bytes"]
                    kept["update_s"] = [round(each["ended"] - each["began"], 4) for each in said["rounds"]]
                    kept["paused_s"] = [round(each["finished"] - each["paused"], 4) for each in said["rounds"]]
                if clients is not None:
                    clients.stop()
                    windows = [(each["began"], each["ended"]) for each in said["rounds"]]
                    self.gaps("gaps, vLLM's own sender", clients.requests, windows)
            with self.run.step("answers of vLLM as it ships"):
                found = server.answers()
            share = agreement(found, first)
            seen = {"share": share, "found": found, "expected": first}
            self.run.check("after an even number of rounds they equal those of the start", share >= self.alike, seen)

    def sleeps(self, first: list[list[int]]) -> None:
        """Sleep and wake-up by tags, with an update between them, as colocated trainers do it."""
        with self.connected(pause="abort") as updater:
            self.update(updater, "other weights", 1)
            other = self.answers("on the other weights")
            self.differ(other, first)
            for level, seed, wanted in ((1, 0, first), (2, 1, other), (2, 0, first)):
                asked(self.run, self.server, f"/sleep?level={level}")
                asked(self.run, self.server, "/wake_up?tags=weights")
                self.update(updater, f"update between the tags, level {level}", seed)
                asked(self.run, self.server, "/wake_up?tags=kv_cache")
                self.answers(f"after level {level}", wanted)


def case_receiver(run: Run, args: argparse.Namespace, name: str) -> None:
    """Our receiver in a server that was started on the trainer's first weights, and vLLM as it ships beside it."""
    trainer, folder = made(run, args, name)
    with run.step("save the checkpoint"):
        trainer.save(folder)
        blocks = name.endswith("-blocks")
        if blocks:
            wide = folder.rename(folder.with_name(f"{name}-wide"))
            fp8_checkpoint(wide, folder, "blocks", device=trainer.device)
            shutil.rmtree(wide)
    options = ["--no-enable-prefix-caching", *cache_options(args, name), *args.options.split()]
    options += ONLINE if name.endswith("-online") else []
    options += [f"--tensor-parallel-size={args.tp}"] if args.tp > 1 else []
    sleep = ["--enable-sleep-mode"] if args.sleep and not run.tiny else []
    with ExitStack() as stack:
        ships: Server | None = None
        with launched(run, args, folder, *options, *sleep) as server:
            if not run.tiny and not args.ours_alone:
                ships = stack.enter_context(launched(run, args, folder, *options, backend="ipc"))
            alike = ALIKE if name.startswith("moe") else 1.0
            case = Case(run, args, trainer, server, blocks=blocks, alike=alike)
            try:
                await_start(run, server, START_S)
                first = case.answers("at the start")
                reference: list[list[list[int]]] = []
                if ships is not None:  # measured later; but its start would disturb what is measured now
                    case.attempt("start of vLLM as it ships", lambda: reference.append(ready(run, ships)))
                measure_ours(case, first, behaviour=name in ("8b", "moe"))
            finally:
                keep_logs(args, server)
        if ships is None:
            return
        trainer.free()
        try:
            if reference:
                case.attempt("vLLM's own sender", lambda: case.stock(ships, folder, reference[0]))
        finally:
            keep_logs(args, ships)


def ready(run: Run, ships: Server) -> list[list[int]]:
    """Waits for the server as it ships; returns its answers."""
    await_start(run, ships, START_S, ours=False)
    return ships.answers()


def measure_ours(case: Case, first: list[list[int]], *, behaviour: bool) -> None:
    """Every step with our receiver; ``first`` are the answers on the first weights."""
    args = case.args
    case.attempt("idle", case.idle)
    for number, via in enumerate(args.via.split(",")):
        for pause in args.pauses.split(",") if number == 0 else IDLE_PAUSES:
            case.attempt(f"under load, {pause}", lambda pause=pause, via=via: case.under_load(pause, via))

    def first_again() -> None:
        with case.connected(pause="abort") as updater:
            case.update(updater, "other weights", 1)
            other = case.answers("on other weights")
            case.differ(other, first)
            case.update(updater, "the first weights again", 0)
        case.answers("on the first weights again", first)

    case.attempt("the first weights again", first_again)
    if behaviour:
        case.attempt("behaviour", case.behaviour)
    if args.sleep:
        case.attempt("sleep", lambda: case.sleeps(first))


def case_dummy(run: Run, args: argparse.Namespace, name: str) -> None:
    """A server that was started with random weights of vLLM's own, with two layers."""
    trainer, folder = made(run, args, name, num_hidden_layers=2)
    trainer.save(folder)
    options = ["--load-format=dummy", "--enforce-eager", *cache_options(args, "dummy"), *args.options.split()]
    with launched(run, args, folder, *options) as server:
        try:
            await_start(run, server, START_S)
            case = Case(run, args, trainer, server)
            run.check("it serves nothing yet", server.info()["state"] == "quarantined", server.info())

            def updates() -> None:
                with case.connected(verify="behaviour", pause="retract", behaviour_tolerance=TOLERANCE) as updater:
                    case.update(updater, "the first update", 1)
                    case.update(updater, "the second update", 2)
                last = next(step for step in reversed(run.steps) if "proof" in step)
                run.check("behaviour is proven", last["proof"] == "behaviour", last)

            case.attempt("two updates", updates)
            if server.info()["state"] != "serving":  # the comparison of log-probabilities alone may have failed
                with case.connected(pause="retract") as updater:
                    case.update(updater, "an update without the comparison", 1)
            run.check("it serves", server.info()["state"] == "serving", server.info())
        finally:
            keep_logs(args, server)


def case_lora(run: Run, args: argparse.Namespace, name: str) -> None:
    """LoRA adapters beside the model, from memory and from folders."""
    trainer, folder = made(run, args, name)
    with run.step("save the checkpoint"):
        trainer.save(folder) if args.stock_peer else save_headers(trainer, folder)
    adapters = Adapters(trainer.model, trainer.std)
    options = ["--no-enable-prefix-caching", *cache_options(args, name), *args.options.split(), *LORA_OPTIONS]
    with ExitStack() as stack:
        dummy = [] if args.stock_peer else ["--load-format=dummy"]
        server = stack.enter_context(launched(run, args, folder, *options, *dummy, more=ALLOWED))
        peer = server
        if args.stock_peer:
            trainer.free()
            peer = stack.enter_context(launched(run, args, folder, *options, backend="ipc", more=ALLOWED))
        case = Case(run, args, trainer, server)
        try:
            await_start(run, server, START_S)
            if args.stock_peer:
                await_start(run, peer, START_S, ours=False)
            else:
                with case.connected(pause="retract") as updater:
                    case.update(updater, "the model's weights", 0)
                trainer.free()
            first = case.answers("at the start")
            measure(case, adapters, peer, args.folder / f"{name}-adapters", first)
        finally:
            keep_logs(args, *{id(each): each for each in (server, peer)}.values())


def cache_options(args: argparse.Namespace, name: str) -> list[str]:
    """vLLM's options for a KV cache of a fixed size; none on a CPU."""
    if args.tiny:
        return []
    return [f"--kv-cache-memory-bytes={CACHE_BYTES.get(name, FEWER_BYTES)}", "--gpu-memory-utilization=0.05"]


def keep_logs(args: argparse.Namespace, *servers: Server) -> None:
    """Copies the end of each server's log to where it outlives the run."""
    if args.logs is None:
        return
    args.logs.mkdir(parents=True, exist_ok=True)
    for server in servers:
        (args.logs / f"{server.log.stem}.log").write_bytes(server.log.read_bytes()[-LOG_BYTES:])


def made(run: Run, args: argparse.Namespace, name: str, **changes: Any) -> tuple[Trainer, Path]:
    """The trainer of a model and an empty folder for its checkpoint."""
    family, sizes = MODELS[name]
    sizes = sizes | (TINY if run.tiny else {}) | (TINY_EXPERTS if run.tiny and name.startswith("moe") else {}) | changes
    folder = args.folder / run.case
    folder.mkdir(parents=True)
    with run.step("make the model") as kept:
        trainer = Trainer(family, sizes, "cpu" if run.tiny else "cuda:0")
        kept |= {"bytes": trainer.bytes, "parameters": sum(1 for _ in trainer.model.parameters())}
    return trainer, folder


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


def room(tiny: bool) -> Path | None:
    """Returns the memory file system if it has room for models: a disk takes half a minute for one of them."""
    shared = Path("/dev/shm")
    roomy = not tiny and shared.is_dir() and shutil.disk_usage(shared).free > 45 << 30
    return shared if roomy else None


def main() -> int:
    """Runs the cases and prints what was seen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where the results go")
    parser.add_argument("--logs", type=Path, help="where the ends of the servers' logs go")
    parser.add_argument("--traces", type=Path, help="where the trace of the last update of each kind goes")
    parser.add_argument("--cases", default="8b,moe,dummy", help=f"of {', '.join((*MODELS, 'dummy'))}")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=4, help="updates of each kind")
    parser.add_argument("--via", default="direct,ipc", help="transports; the first in every pause mode under load")
    parser.add_argument("--pauses", default=",".join(TOKENS), help="pause modes under load")
    parser.add_argument("--bucket-mib", type=int, default=0, help="size of ipc's buckets; weightcast's default if 0")
    parser.add_argument("--tp", type=int, default=1, help="ranks of the engine; the trainer stays on the first GPU")
    parser.add_argument("--ours-alone", action="store_true", help="no server as vLLM ships")
    parser.add_argument(
        "--stock-peer", action="store_true", help="8b-lora: folders are loaded by a server as vLLM ships"
    )
    parser.add_argument("--sleep", action="store_true", help="vLLM's sleep levels too")
    parser.add_argument("--tiny", action="store_true", help="tiny models, vLLM on this CPU")
    parser.add_argument("--python", default=sys.executable, help="the Python that runs vLLM")
    parser.add_argument("--flags", default="--attention-backend=TRITON_ATTN", help="flags that the build of vLLM needs")
    parser.add_argument(
        "--options",
        help=f"more of vLLM's; OPTIONS with =; on a GPU {OPTIONS}",
    )
    parser.add_argument("--limit-s", type=float, default=540.0)
    parser.add_argument("--case-limit-s", type=float, default=260.0)
    parser.add_argument("--folder", type=Path, help="for models, logs and caches")
    args = parser.parse_args()
    args.options = ("" if args.tiny else OPTIONS) if args.options is None else args.options
    run = Run(tiny=args.tiny, limit_s=args.limit_s)
    result: dict[str, Any] = facts() | {"flags": args.flags, "options": args.options, "streams": args.streams}
    result["limit_s"] = args.limit_s

    def write() -> None:
        result.update(seconds=round(run.limit_s - run.left_s, 1), failed=run.failed, skipped=run.skipped)
        result["steps"] = run.steps
        if args.json is not None:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps(result, indent=1) + "\n")

    signal.signal(signal.SIGALRM, time_is_up)
    with tempfile.TemporaryDirectory(prefix="gpu-vllm-receiver-", dir=room(args.tiny)) as folder:
        args.folder = args.folder or Path(folder)
        args.folder.mkdir(parents=True, exist_ok=True)
        try:
            result["copy_bytes_per_s"] = copy_rate(args.tiny)
            for case in args.cases.split(","):
                run.case = case
                if run.left_s < (20 if run.tiny else 70) + END_S:
                    run.skipped.append(case)
                    continue
                signal.alarm(max(1, int(min(run.left_s - END_S, args.case_limit_s))))
                try:
                    if case == "dummy":
                        case_dummy(run, args, "moe")
                    else:
                        (case_lora if case == "8b-lora" else case_receiver)(run, args, case)
                except (Exception, TimeIsUp) as error:  # noqa: BLE001  the other cases still tell something
                    print(f"FAILED {case}:\n{traceback.format_exc()[-3000:]}", flush=True)
                    run.failed.append(f"{case}: {type(error).__name__}: {str(error)[-2000:]}")
                signal.alarm(0)
                shutil.rmtree(args.folder / case, ignore_errors=True)
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
                write()
        finally:
            write()
            print(json.dumps({key: result[key] for key in ("seconds", "failed", "skipped")}))
    return 1 if run.failed else 0


def time_is_up(*_: object) -> None:
    """Handles the signal of a timer."""
    raise TimeIsUp("the limit of this case, or of the run, has passed")


if __name__ == "__main__":
    sys.exit(main())
