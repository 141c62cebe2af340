"""Our receiver inside SGLang on one GPU: a trainer on the same GPU pushes while SGLang answers, in every pause mode.

    export PYTHONPATH=src:.
    python -m benchmarks.gpu_sglang_receiver --site SITE --out benchmarks/results/gpu-sglang-h200.json
    python -m benchmarks.gpu_sglang_receiver --site SITE --models qwen3-8b --out OUT.json
    python -m benchmarks.gpu_sglang_receiver --tiny --python PYTHON

SITE is a folder that holds SGLang; PYTHON belongs to an environment with SGLang on a CPU.

For each model, with random weights of the real shapes, this process is the trainer. Two servers start side by side: one
with ``SGLANG_PLUGINS=weightcast``, one as it ships. The weights are others before each push. Measured are updates of an
idle server by ``ipc`` and by ``direct`` (which keeps the trainer's weights mapped), updates under ``--streams`` streams
in each pause mode by ``ipc`` and in the first one by ``direct``, with what the clients saw in each update and in
windows of the same length without one, and on the server as it ships our own adapter and SGLang's own sender
(``sglang_sender``). After each push the greedy tokens must be others than before, must be those of the same server once
more after ``/flush_cache``, and must be near the best ones of transformers' forward pass over the trainer's weights,
far nearer than the tokens from before.

The exit code is 0 only if all of it held.  Whatever was started is ended, at the latest after ``--limit`` seconds, and
the JSON has what was found until then.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import signal
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from benchmarks import sglang_servers
from benchmarks.engine_streams import compare, gaps, load
from benchmarks.sglang_servers import Late, Server

from weightcast import WeightUpdater
from weightcast.lab.bench.machine import facts
from weightcast.timeline.tracks import Timeline

QWEN3: dict[str, Any] = {
    "num_attention_heads": 32,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
DENSE_8B = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_key_value_heads": 8}
MOE_30B = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 16, "num_key_value_heads": 4}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-8b": ("qwen3", QWEN3 | DENSE_8B),
    "qwen3-30b-a3b-16-layers": ("qwen3_moe", QWEN3 | MOE_30B | EXPERTS),
}
TINY: dict[str, Any] = {
    "hidden_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "initializer_range": 0.3,
}
TINY_EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
MODES = ("in_place", "retract", "wait", "abort")
PROMPTS = [[5 + (7 * place + 13 * number) % 400 for place in range(16 + number)] for number in range(3)]
TOKENS = 16
# For the caches of the streams to be emptied, and their last messages to come.
SETTLE_S = 1.0
ALLOWED_S = 0.015  # what an update may add to a step of the clients


class Trainer:
    """The model that is pushed, on the device of the servers."""

    def __init__(self, name: str, folder: Path, *, tiny: bool) -> None:
        from tests.helpers.tiny import tiny_tokenizer
        from transformers import AutoConfig, AutoModelForCausalLM

        family, settings = MODELS[name]
        if tiny:
            settings = settings | TINY | (TINY_EXPERTS if "num_experts" in settings else {})
        self.device = torch.device("cpu" if tiny else "cuda:0")
        torch.manual_seed(1)
        with self.device:
            dtype = torch.float32 if tiny else torch.bfloat16
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings), dtype=dtype)
        self.model = model.eval()
        sizes = [parameter.nbytes for parameter in model.parameters()]
        self.bytes = sum(sizes)
        self._norms = [
            float(torch.linalg.vector_norm(parameter.detach(), dtype=torch.float32)) / parameter.numel() ** 0.5
            for parameter in model.parameters()
        ]
        self.version = 0
        self.model.save_pretrained(folder)
        tiny_tokenizer(folder)

    @torch.no_grad()
    def step(self) -> None:
        """Changes every weight; no optimizer would change them so much in a step.

        Each version is the first weights and noise of its own.  With noise on top of noise weights would grow, and
        with them what rounding does to a model of random weights.
        """
        self.version += 1
        versions = [(-1, self.version - 1)] if self.version > 1 else []
        versions.append((1, self.version))
        sources = [(sign, torch.Generator(self.device).manual_seed(version)) for sign, version in versions]
        for parameter, norm in zip(self.model.parameters(), self._norms, strict=True):
            for sign, source in sources:
                noise = torch.randn(parameter.shape, generator=source, device=self.device, dtype=parameter.dtype)
                parameter.add_(noise.mul_(sign * 0.3 * norm))

    @torch.no_grad()
    def score(self, tokens: Sequence[Sequence[int]]) -> dict[str, float]:
        """By how many nats answers are worse than the best tokens of this model, and the share that are the best."""
        gaps_: list[float] = []
        for prompt, answer in zip(PROMPTS, tokens, strict=True):
            ids = torch.tensor([[*prompt, *answer[:-1]]], device=self.device)
            logits = self.model(ids).logits[0, len(prompt) - 1 :].float().log_softmax(-1)
            chosen = logits.gather(1, torch.tensor(answer, device=self.device)[:, None])[:, 0]
            gaps_ += (logits.max(-1).values - chosen).tolist()
        same = sum(gap == 0 for gap in gaps_) / len(gaps_)
        return {"mean": statistics.mean(gaps_), "worst": max(gaps_), "best_tokens": round(same, 3)}


class Case:
    """The measurements of one server, and the checks that failed."""

    def __init__(self, trainer: Trainer, server: Server, args: argparse.Namespace) -> None:
        self.trainer, self.server, self.args = trainer, server, args
        self.found: dict[str, Any] = {}
        self.wrong: list[str] = []
        self._before = server.answers(PROMPTS, TOKENS)

    def must(self, held: bool, words: str) -> None:
        if not held:
            self.wrong.append(words)

    def push(
        self, pause: str, *, proof: str, rounds: int = 1, rest_s: float = 0.0, transport: str = "ipc", **options: Any
    ) -> list[dict[str, Any]]:
        """Pushes other weights each time, with a rest between; the reports, and what each rank did in the last."""
        found: list[dict[str, Any]] = self.found.setdefault("pushes", [])
        began = time.monotonic()
        with WeightUpdater.connect(
            self.trainer.model,
            [self.server.url],
            transport=transport,  # pyright: ignore[reportArgumentType]
            keep_mapped=transport == "direct",
            pause=pause,  # pyright: ignore[reportArgumentType]
            timeout_s=120.0,
            **options,
        ) as updater:
            connected = time.monotonic()
            for number in range(rounds):
                if number:
                    time.sleep(rest_s)
                trains = time.monotonic()
                self.trainer.step()
                self._sync()
                at = time.monotonic()
                report = updater.update(version=self.trainer.version)
                row = report.targets[0]
                self.must(report.ok and (proof == "none" or row.proof == proof), f"{pause}: {report}")
                found.append(
                    {
                        "pause": pause,
                        "seconds": round(report.seconds, 4),
                        "stall_s": round(row.stall_s, 4),
                        "phases": {name: round(took, 4) for name, took in report.phases.items()},
                        "bytes": report.bytes,
                        "buckets": report.buckets,
                        "bucket_bytes": report.bucket_bytes,
                        "peak_extra_bytes": [report.peak_extra_bytes, row.peak_extra_bytes],
                        "proof": f"{row.proof}, {row.proven} of {row.proven + row.unproven}",
                        "message": row.message,
                        "connect_s": round(connected - began, 3),
                        "connecting": (began, connected),
                        "training": (trains, at),
                        "span": (at, time.monotonic()),
                        "steps_ms": steps_of(report.timeline),
                    }
                )
        self.found["timeline_of_the_last"] = {
            f"{track.side}, {track.name}": [
                f"{span.name}{'' if span.bucket is None else f' {span.bucket}'}: {span.us} us from {span.start_us}"
                for span in track.spans
            ]
            for track in report.timeline.tracks
        }
        return found

    def compare(self) -> dict[str, Any]:
        """The server's greedy tokens against itself, transformers and those from before."""
        now = self.server.answers(PROMPTS, TOKENS)
        self.server.flush()
        again = self.server.answers(PROMPTS, TOKENS)
        mine, old = self.trainer.score(now), self.trainer.score(self._before)
        equal = sum(a == b for x, y in zip(now, again, strict=True) for a, b in zip(x, y, strict=True))
        self.must(now == again, f"tokens differ after a flush: {now} and {again}")
        self.must(now != self._before, "tokens are those from before the update")
        self.must(mine["mean"] < 0.25 * old["mean"], f"tokens are not of the pushed weights: {mine}, before {old}")
        self._before = now
        return {
            "equal_after_flush": f"{equal} of {TOKENS * len(PROMPTS)}",
            "nats_from_transformers": mine,
            "nats_of_the_tokens_before": old,
        }

    def idle(self, proof: str, **options: Any) -> None:
        """Pushes with nobody asking."""
        self.push("in_place" if self.server.receiver else "abort", proof=proof, rounds=self.args.rounds, **options)
        self.found |= self.compare()

    def streamed(self, pause: str, **options: Any) -> None:
        """Pushes while streams run."""
        with load(self.server.url, streams=self.args.streams, tokens=self.args.stream_tokens) as streams:
            streams.wait_steady(120)
            steady = time.monotonic()
            time.sleep(self.args.usual)
            pushes = self.push(pause, proof="resident", rounds=self.args.loaded_rounds, rest_s=SETTLE_S, **options)
            time.sleep(SETTLE_S)
            stopped = time.monotonic()
            streams.stop()
        self.found["clients"] = [gaps(streams.requests, at, until + SETTLE_S / 2) for at, until in spans(pushes)]
        connecting = pushes[0]["connecting"]
        self.found["windows"] = seen = compare(
            streams.requests,
            spans(pushes),
            (steady, stopped),
            allowed_s=ALLOWED_S,
            busy=[connecting, *(push["training"] for push in pushes)],
        )
        self.found["longest_gap_while_it_connects_s"] = gaps(streams.requests, *connecting)["longest_s"]
        # The other modes read the tokens of all requests anew, or end them.
        self.must(pause != "in_place" or self.args.tiny or not seen["ours"], f"gaps of updates {seen['ours']}: {seen}")
        begin, _ = pushes[0]["span"]
        ended = {how for around in self.found["clients"] for how in around["ended"]}
        self.must(ended <= ({"length", "abort"} if pause == "abort" else {"length"}), f"requests ended: {ended}")
        full = [request for request in streams.requests if request.finish == "length"]
        self.must(all(request.tokens == self.args.stream_tokens for request in full), "a full answer lacks tokens")
        self.must(any(request.sent < begin and request.times[-1:] > [begin] for request in streams.requests), "no load")
        self.found["switches"] = re.findall(r"weightcast: (version .* ms)", self.server.text())[-len(pushes) :]
        self.found |= self.compare()

    def sleep(self) -> None:
        """Sleep without a copy, weights awake, an update, the rest awake."""
        used = [self._free_bytes()]

        def ask(path: str, *tags: str) -> None:
            began = time.monotonic()
            answer = self.server.post(path, **({"tags": list(tags)} if tags else {}))
            self.must(answer.status_code == 200, f"{path} {tags}: {answer.status_code} {answer.text[:500]}")
            took.append(f"{path} {' '.join(tags)}: {time.monotonic() - began:.3f} s")
            used.append(self._free_bytes())

        took: list[str] = []
        ask("/release_memory_occupation")
        self.found["asleep"] = self.server.get("/weightcast/info")["message"]
        ask("/resume_memory_occupation", "weights")
        self.push("in_place", proof="resident")
        ask("/resume_memory_occupation")
        self.found |= {"took": took, "free_bytes": used}
        self.must(self.args.tiny or used[1] - used[0] > 2 * self.trainer.bytes, "sleep freed less than both sets")
        self.found |= self.compare()

    def _free_bytes(self) -> int:
        return torch.cuda.mem_get_info()[0] if self.trainer.device.type == "cuda" else 0

    def sender(self) -> None:
        """SGLang's own sender puts the checkpoint's weights back."""
        first = self.server.first_answers
        said = self.server.run_python(
            str(Path(__file__).with_name("sglang_sender.py")),
            str(self.server.folder),
            self.server.url,
            f"--device={self.trainer.device.type}",
            f"--rounds={self.args.rounds}",
        )
        self.found |= json.loads(said.strip().splitlines()[-1])
        now = self.server.answers(PROMPTS, TOKENS)
        self.must(now == first != self._before, f"tokens are not those of the checkpoint: {now}, at the start {first}")

    def _sync(self) -> None:
        if self.trainer.device.type == "cuda":
            torch.cuda.synchronize()


def spans(pushes: Sequence[dict[str, Any]]) -> list[tuple[float, float]]:
    """Beginning and end of each push."""
    return [push["span"] for push in pushes]


def steps_of(timeline: Timeline) -> dict[str, dict[str, float]]:
    """Milliseconds of each phase on each row of a timeline, all buckets together; phases of a row may overlap."""
    found: dict[str, dict[str, float]] = {}
    for track in timeline.tracks:
        row = found.setdefault(f"{track.side}, {track.name}", {})
        for span in track.spans:
            row[span.name] = round(row.get(span.name, 0.0) + span.us / 1e3, 3)
    return found


def copy_rate(device: torch.device) -> float:
    """Bytes a second that the device copies, read and written counted once each."""
    on_gpu = device.type == "cuda"
    source = torch.ones((1 << 30) if on_gpu else (64 << 20), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times: list[float] = []
    for _ in range(6):
        if on_gpu:
            torch.cuda.synchronize()
        started = time.perf_counter()
        target.copy_(source)
        if on_gpu:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return 2 * source.nbytes / min(times)


def play(args: argparse.Namespace, name: str, result: dict[str, Any], deadline: float) -> None:
    """All cases of one model."""
    cases: dict[str, Any] = result.setdefault("cases", {})

    def said(what: str, found: object) -> None:
        print(
            f"[{args.limit - (deadline - time.monotonic()):6.1f}] {name}: {what}: {found}", file=sys.stderr, flush=True
        )

    def one(what: str, server: Server, *calls: Any, **options: Any) -> None:
        if deadline - time.monotonic() < 20:
            cases[what] = {"wrong": ["no time was left"]}
            return
        began = time.monotonic()
        case: Case | None = None
        try:
            case = Case(trainer, server, args)
            method, *rest = calls
            getattr(case, method)(*rest, **options)
            found = case.found | {"wrong": case.wrong}
        except BaseException as error:  # what was found is kept, and the other cases are worth knowing too
            traceback.print_exc()
            found = (case.found if case else {}) | {"wrong": [f"{type(error).__name__}: {error}"[:3000]]}
            if not isinstance(error, Exception):
                cases[what] = found | {"took_s": round(time.monotonic() - began, 1), "log_tail": server.text()[-6000:]}
                raise
        cases[what] = found | {"took_s": round(time.monotonic() - began, 1)}
        if found["wrong"]:
            cases[what]["log_tail"] = server.text()[-6000:]
        said(what, json.dumps({key: value for key, value in cases[what].items() if key != "log_tail"})[:900])

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sglang-", dir=args.folder)))
        began = time.monotonic()
        trainer = Trainer(name, folder / "model", tiny=args.tiny)
        result |= {"bytes": trainer.bytes, "make_model_s": round(time.monotonic() - began, 1)}
        rate = copy_rate(trainer.device)
        result["limits"] = {"device_copy_bytes_per_s": round(rate), "copy_of_the_weights_s": 2 * trainer.bytes / rate}
        said("made", result)
        names = [kind for kind in ("receiver", "stock") if kind in args.servers]
        servers: dict[str, Server] = {}
        for group in [[kind] for kind in names] if args.one_at_a_time else [names]:
            with ExitStack() as running:
                for kind in group:
                    server = sglang_servers.start(args, folder / "model", folder, receiver=kind == "receiver")
                    running.callback(server.close)
                    servers[kind] = server
                    result.setdefault("commands", {})[kind] = " ".join(server.command)
                for kind in group:
                    try:
                        result.setdefault("starts", {})[kind] = servers[kind].wait_ready(deadline - 60)
                        servers[kind].first_answers = servers[kind].answers(PROMPTS, TOKENS)
                    except RuntimeError as error:
                        result.setdefault("failures", {})[kind] = str(error)
                        said(f"{kind} did not start", str(error)[-3000:])
                        servers[kind].close()
                        del servers[kind]
                    else:
                        said(f"{kind} started", result["starts"][kind])
                if not args.tiny:
                    result["gpu_free_bytes"] = torch.cuda.mem_get_info()[0]
                if "receiver" in group and "receiver" in servers:
                    if args.rounds:
                        one("receiver, idle", servers["receiver"], "idle", "resident")
                        for mib in filter(None, args.more_buckets.split(",")):
                            what = f"receiver, idle, buckets of {mib} MiB"
                            one(what, servers["receiver"], "idle", "resident", bucket_bytes=int(mib) << 20)
                        one("receiver, direct, idle", servers["receiver"], "idle", "resident", transport="direct")
                        one("receiver, idle, without proof", servers["receiver"], "idle", "none", verify="none")
                    for mode in filter(None, args.modes.split(",")):
                        one(f"receiver, {mode}, streams", servers["receiver"], "streamed", mode)
                    for mode in args.modes.split(",")[:1]:
                        one(
                            f"receiver, direct, {mode}, streams",
                            servers["receiver"],
                            "streamed",
                            mode,
                            transport="direct",
                        )
                    if args.sleep:
                        one("receiver, sleep and wake-up", servers["receiver"], "sleep")
                if "stock" in group and "stock" in servers:
                    one("stock, our adapter, idle", servers["stock"], "idle", "none")
                    one("stock, SGLang's own sender, idle", servers["stock"], "sender")


def main() -> int:
    """Plays the models and writes what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--site", default=os.environ.get("WEIGHTCAST_SGLANG_SITE", ""), help="folder that holds SGLang")
    parser.add_argument("--python", default=sys.executable, help="the Python that runs SGLang")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--servers", default="receiver,stock")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--sleep", action="store_true", help="start with --enable-memory-saver, and play sleep")
    parser.add_argument("--flags", default=sglang_servers.BUILD_FLAGS, help="flags that the build of SGLang needs")
    parser.add_argument("--cache-tokens", type=int, default=65536, help="size of each server's KV cache")
    parser.add_argument("--one-at-a-time", action="store_true", help="the servers of a model do not fit side by side")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--stream-tokens", type=int, default=256)
    parser.add_argument("--usual", type=float, default=2.0, help="seconds of streams before an update")
    parser.add_argument("--rounds", type=int, default=4, help="pushes of an idle server; 0 for streams alone")
    parser.add_argument("--loaded-rounds", type=int, default=3, help="pushes while streams run, in each mode")
    parser.add_argument("--more-buckets", default="512", help="further sizes of buckets for an idle server, in MiB")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, SGLang on this CPU")
    parser.add_argument("--version", default="0.5.23", help="of SGLang, with --tiny")
    parser.add_argument("--folder", type=Path, help="for models and logs")
    parser.add_argument("--limit", type=float, default=570.0, help="seconds after which everything is ended")
    parser.add_argument("--out", type=Path, help="JSON file; stdout without it")
    args = parser.parse_args()
    os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")
    deadline = time.monotonic() + args.limit
    result: dict[str, Any] = {"what": "our receiver inside SGLang", "machine": facts(), "models": {}}

    def write() -> None:
        result["seconds"] = round(args.limit - (deadline - time.monotonic()), 1)
        text = json.dumps(result, indent=1, default=str)
        if args.out is None:
            print(text)
        else:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(text + "\n")

    def late(*_: object) -> None:
        raise Late(f"not done after {args.limit:g} s")

    def hard_end() -> None:
        result["failure"] = "the end did not come by itself"
        result["log_tails"] = sglang_servers.log_tails()
        result["stack"] = "".join(traceback.format_stack(sys._current_frames()[threading.main_thread().ident or 0]))
        sglang_servers.kill_all()
        write()
        os._exit(3)

    signal.signal(signal.SIGALRM, late)
    signal.signal(signal.SIGTERM, late)
    signal.setitimer(signal.ITIMER_REAL, args.limit - 12)
    watchdog = threading.Timer(args.limit - 2, hard_end)
    watchdog.daemon = True
    watchdog.start()
    try:
        for name in args.models.split(","):
            play(args, name, result["models"].setdefault(name, {}), deadline)
            gc.collect()
            torch.cuda.empty_cache()
    except BaseException as error:  # noqa: BLE001  what was found so far is written all the same
        traceback.print_exc()
        result["failure"] = f"{type(error).__name__}: {error}"[:3000]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        sglang_servers.kill_all()
        watchdog.cancel()
    found = [case for model in result["models"].values() for case in model.get("cases", {}).values()]
    failed = bool(result.get("failure")) or any(model.get("failures") for model in result["models"].values())
    result["ok"] = bool(found) and not failed and not any(case["wrong"] for case in found)
    write()
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
