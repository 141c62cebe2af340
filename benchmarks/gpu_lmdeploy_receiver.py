"""Pushes weights into LMDeploy with our receiver: in every pause mode, idle, under load and asleep; kills a trainer.

    export PYTHONPATH=src
    python -m benchmarks.gpu_lmdeploy_receiver --site SITE --out benchmarks/results/gpu-lmdeploy-receiver-h200.json
    python -m benchmarks.gpu_lmdeploy_receiver --device cpu --python PYTHON

SITE is a folder that holds LMDeploy; PYTHON belongs to an environment with LMDeploy on a CPU.

One server and the trainer share one GPU.  The weights of each version are random, from a seed, so version 0 can be sent
again.  For each push the file has the stall, the phases, the longest pause between two tokens of a stream, and whether
fresh greedy answers are those of the new weights: no token may be worse than the best one by more than ``--tolerance``
nats in the trainer's own forward pass.  With version 0 again, answers must equal the first ones, token for token.

The exit code is 0 only if all of it held.  Whatever was started is ended, at the latest after ``--limit`` seconds.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch

from weightcast import WeightUpdater
from weightcast.comm.ports import quiet_port
from weightcast.config import PauseMode
from weightcast.lab.bench.machine import facts

PROMPTS = [[5 + (7 * number) % 400 for number in range(size)] for size in (64, 40, 17)]
COUNT, STREAMED, WARM = 24, 256, 8
MODES: tuple[PauseMode, ...] = ("in_place", "retract", "wait", "abort")
QWEN3_8B: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
SMALL: dict[str, Any] = QWEN3_8B | {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 512,
}


def make_model(args: argparse.Namespace) -> Any:
    """Qwen3 of the asked size, with the weights of version 0."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = QWEN3_8B if args.device == "cuda" else SMALL
    config = AutoConfig.for_model("qwen3", **shape, num_hidden_layers=args.layers)
    with torch.device(args.device):
        dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    set_weights(model, 0)
    return model


@torch.no_grad()
def set_weights(model: Any, seed: int) -> None:
    """Random weights: the same for the same seed, far apart for others.

    Layers add little to what they are given, or bfloat16's rounding would grow to several nats in a random model.
    """
    for number, (name, parameter) in enumerate(model.named_parameters()):
        source = torch.Generator(parameter.device).manual_seed(1000 * seed + number)
        noise = torch.randn(parameter.shape, generator=source, device=parameter.device, dtype=parameter.dtype)
        if parameter.ndim == 1:
            parameter.copy_(1 + 0.1 * noise)
        else:
            deviation = (
                1.0 if "embed_tokens" in name else (3.0 if "lm_head" in name else 0.5) / parameter.shape[-1] ** 0.5
            )
            parameter.copy_(noise.mul_(deviation))


class Stream(threading.Thread):
    """One streamed answer: its tokens, and when each came."""

    def __init__(self, url: str, prompt: Sequence[int], count: int) -> None:
        super().__init__(daemon=True)
        self.url, self.prompt, self.count = url, list(prompt), count
        self.tokens: list[int] = []
        self.times: list[float] = []
        self.finish = self.failure = ""
        self.start()

    def run(self) -> None:
        body = question(self.prompt, self.count) | {"stream": True}
        try:
            with httpx.stream("POST", f"{self.url}/generate", json=body, timeout=300, trust_env=False) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: ") and "[DONE]" not in line:
                        part = json.loads(line.removeprefix("data: "))
                        came = part.get("output_ids") or []
                        self.tokens += came
                        self.times += [time.monotonic()] * len(came)
                        reason = part.get("meta_info", {}).get("finish_reason")
                        self.finish = reason["type"] if reason else self.finish
                    elif line and not line.startswith("data"):
                        self.failure += line
        except httpx.HTTPError as error:
            self.failure = f"{type(error).__name__}: {error}"

    def longest_pause_ms(self, since: float) -> float:
        """Longest time between two tokens, of which the later one came after a moment."""
        gaps = [late - early for early, late in zip(self.times, self.times[1:], strict=False) if late >= since]
        return round(1e3 * max(gaps, default=0.0), 1)


def question(prompt: Sequence[int], count: int) -> dict[str, Any]:
    return {"input_ids": list(prompt), "max_tokens": count, "temperature": 0.0, "top_k": 1, "ignore_eos": True}


class Server:
    """LMDeploy with our receiver, in a process group of its own."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        port = quiet_port()
        self.url = f"http://127.0.0.1:{port}"
        self.log = folder / "server.log"
        self.command = ["-m", "weightcast.plugins.lmdeploy", "serve", "api_server", str(folder / "model")]
        self.command += ["--backend", "pytorch", "--server-name", "127.0.0.1", "--server-port", str(port)]
        self.command += ["--max-batch-size", "32", "--log-level", "INFO"]
        root = Path(__file__).parents[1]
        path = [args.site, str(root / "src"), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "NCCL_CUMEM_ENABLE": "0"}
        if args.device == "cpu":
            path.insert(0, str(root / "tests" / "engines" / "lmdeploy_cpu"))
            environment |= {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
            self.command += ["--eager-mode", "--session-len", "512", "--num-gpu-blocks", "256"]
        else:
            self.command += ["--session-len", "2048", "--cache-max-entry-count", "0.2"]
        if args.device == "cpu" or importlib.util.find_spec("prometheus_client") is None:
            self.command += ["--disable-metrics"]
        self.command += args.option
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [args.python, *self.command],
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_ready(self, deadline: float) -> None:
        while True:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"LMDeploy did not start:\n{self.tail()}")
            try:
                if httpx.get(f"{self.url}/weightcast/status", timeout=20, trust_env=False).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.5)

    def answers(self) -> list[list[int]]:
        """Greedy answers, one request at a time, so that nothing depends on the batch."""
        found: list[list[int]] = []
        for prompt in PROMPTS:
            body = question(prompt, COUNT)
            answer = httpx.post(f"{self.url}/generate", json=body, timeout=120, trust_env=False)
            answer.raise_for_status()
            found.append(answer.json()["output_ids"])
        return found

    def ask(self, path: str) -> None:
        answer = httpx.post(f"{self.url}{path}", json={}, timeout=120, trust_env=False)
        if answer.status_code != 200:
            raise RuntimeError(f"POST {path}: {answer.status_code} {answer.text[:300]}")

    def info(self) -> dict[str, Any]:
        answer = httpx.get(f"{self.url}/weightcast/info", timeout=60, trust_env=False).json()
        return {name: answer[name] for name in ("state", "version", "message", "staging", "staging_bytes")}

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-6000:]

    def close(self) -> None:
        for number, patience_s in ((signal.SIGTERM, 15.0), (signal.SIGKILL, 15.0)):
            try:
                os.killpg(self.process.pid, number)
            except ProcessLookupError:
                return
            try:
                self.process.wait(patience_s)
            except subprocess.TimeoutExpired:
                continue


@contextmanager
def load(url: str, count: int) -> Iterator[list[Stream]]:
    """So many streams at a time, without end, while the body runs; all streams so far."""
    streams: list[Stream] = []
    stop = threading.Event()

    def run(number: int) -> None:
        while not stop.is_set():
            stream = Stream(url, PROMPTS[0][number:], STREAMED)
            streams.append(stream)
            stream.join()

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    try:
        deadline = time.monotonic() + 120
        while count and sum(len(stream.tokens) >= WARM for stream in streams) < count:
            if time.monotonic() > deadline or any(stream.failure for stream in streams):
                raise RuntimeError(f"the streams did not begin: {[stream.failure for stream in streams][:2]}")
            time.sleep(0.02)
        yield streams
    finally:
        stop.set()
        for thread in threads:
            thread.join(120)


class Run:
    """All pushes to one server."""

    def __init__(self, args: argparse.Namespace, server: Server, model: Any, result: dict[str, Any]) -> None:
        self.args, self.server, self.model, self.result = args, server, model, result
        self.version = 0
        self.first = server.answers()
        result["cases"] = {}

    def connect(self, pause: PauseMode) -> WeightUpdater:
        return WeightUpdater.connect(
            self.model, [self.server.url], transport="ipc", pause=pause, timeout_s=60.0, allow_older=True
        )

    def push(self, pause: PauseMode, streams: int, *, seed: int | None = None) -> dict[str, Any]:
        """One push; returns what was seen, with all that was wrong."""
        wrong: list[str] = []
        self.version += 1
        old_gap_of = self.server.answers()
        set_weights(self.model, self.version if seed is None else seed)
        with self.connect(pause) as updater, load(self.server.url, streams) as running:
            began = time.monotonic()
            report = updater.update(version=self.version)
            ended = time.monotonic()
            time.sleep(0.3)
        row = report.targets[0]
        found: dict[str, Any] = {
            "seed": self.version if seed is None else seed,
            "bytes": report.bytes,
            "seconds": round(ended - began, 4),
            "stall_s": round(row.stall_s, 4),
            "report": json.loads(report.to_json()),
        }
        if not report.ok or row.status != "serving":
            wrong.append(f"the update failed: {report}")
        if "resident" not in str(found["report"]["targets"][0]):
            wrong.append("it was not proven resident")
        if streams:
            done = [stream for stream in running if stream.finish or stream.failure]
            found["streams"] = {
                "ended": len(done),
                "cut": sum(stream.finish == "abort" for stream in done),
                "longest_pause_ms": max((stream.longest_pause_ms(began) for stream in running), default=0.0),
            }
            for stream in done:
                whole = stream.finish == "length" and len(stream.tokens) == STREAMED
                if stream.failure or not (whole or (pause == "abort" and stream.finish == "abort")):
                    wrong.append(f"a stream ended with {stream.finish or stream.failure}, {len(stream.tokens)} tokens")
        answers = self.server.answers()
        found["worst_gap_nats"] = round(max(self.gaps(answers)), 4)
        found["worst_gap_of_old_answers_nats"] = round(max(self.gaps(old_gap_of)), 4)
        if found["worst_gap_nats"] > self.args.tolerance:
            wrong.append("fresh answers are not those of the new weights")
        if found["worst_gap_of_old_answers_nats"] <= self.args.tolerance:
            wrong.append("answers of the old weights would have passed too")
        if seed == 0:
            found["equals_first_answers"] = answers == self.first
            if answers != self.first:
                wrong.append("with the first weights again, answers differ from the first ones")
        return found | {"wrong": wrong[:8]}

    def slept(self, level: int) -> dict[str, Any]:
        """Sleeps, wakes the weights, updates them and wakes the cache; how much memory that gave back."""
        wrong: list[str] = []
        free_before = _free_bytes(self.args.device)
        self.server.ask(f"/sleep?level={level}")
        given_back = _free_bytes(self.args.device) - free_before
        self.server.ask("/wakeup?tags=weights")
        self.version += 1
        set_weights(self.model, self.version)
        with self.connect("abort") as updater:
            report = updater.update(version=self.version)
        self.server.ask("/wakeup?tags=kv_cache")
        found = {"seconds": report.seconds, "bytes": report.bytes, "memory_given_back_bytes": given_back}
        if report.targets[0].proof != "resident":
            wrong.append(f"it was not proven resident: {report}")
        if self.args.device == "cuda" and given_back < 2 * report.bytes:
            wrong.append("sleep did not give both sets of weights back")
        found["worst_gap_nats"] = round(max(self.gaps(self.server.answers())), 4)
        if found["worst_gap_nats"] > self.args.tolerance:
            wrong.append("fresh answers are not those of the new weights")
        return found | {"wrong": wrong}

    @torch.no_grad()
    def gaps(self, answers: Sequence[Sequence[int]]) -> list[float]:
        """By how many nats each token is worse than the trainer's best one in its place."""
        found: list[float] = []
        for prompt, tokens in zip(PROMPTS, answers, strict=True):
            ids = torch.tensor([[*prompt, *tokens[:-1]]], device=self.args.device)
            scores = self.model(ids).logits[0, len(prompt) - 1 :].float().log_softmax(-1)
            chosen = scores.gather(1, torch.tensor(list(tokens), device=self.args.device)[:, None])[:, 0]
            found += (scores.max(-1).values - chosen).tolist()
        return found

    def killed(self, folder: Path) -> dict[str, Any]:
        """A trainer of its own process that is killed after its first bucket."""
        wrong: list[str] = []
        before, mark = self.server.answers(), folder / "first bucket"
        words = [sys.executable, "-m", "benchmarks.gpu_lmdeploy_receiver", "--stall-at", self.server.url]
        words += ["--mark", str(mark), "--device", self.args.device, "--layers", str(self.args.layers)]
        words += ["--version", str(self.version + 1)]
        child = subprocess.Popen(words, env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
        try:
            deadline = time.monotonic() + 120
            while not mark.exists():
                if child.poll() is not None or time.monotonic() > deadline:
                    return {"wrong": ["the trainer to be killed did not send"]}
                time.sleep(0.05)
            state = self.server.info()["state"]
            if self.server.answers() != before:
                wrong.append("answers changed while buckets waited")
        finally:
            child.kill()
            child.wait()
        killed_at = time.monotonic()
        while self.server.info()["state"] != "serving":
            if time.monotonic() > killed_at + 90:
                return {"wrong": [f"the engine is still {self.server.info()}"]}
            time.sleep(0.1)
        found = {"state_before_the_kill": state, "serving_after_s": round(time.monotonic() - killed_at, 2)}
        if state != "updating":
            wrong.append(f"the engine was {state} before the kill")
        if self.server.answers() != before or self.server.info()["version"] != self.version:
            wrong.append("the killed trainer changed the engine")
        return found | {"wrong": wrong}


def stall(args: argparse.Namespace) -> None:
    """The trainer that is killed: it stands still after its first bucket."""

    def hold(done: int, total: int) -> None:
        Path(args.mark).touch()
        threading.Event().wait()

    model = make_model(args)
    set_weights(model, 77)
    with WeightUpdater.connect(
        model, [args.stall_at], transport="ipc", bucket_bytes=64 << 20, progress=hold, timeout_s=60.0
    ) as updater:
        updater.update(version=args.version)


def _free_bytes(device: str) -> int:
    if device == "cpu":
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


class Late(BaseException):
    """The time is over.  No case may take it for a failure of its own."""


def run(args: argparse.Namespace, result: dict[str, Any], folder: Path) -> None:
    deadline = time.monotonic() + args.limit
    model = make_model(args)
    started = time.monotonic()
    model.save_pretrained(folder / "model", max_shard_size="4GB")
    save_tokenizer(folder / "model", model.config.vocab_size)
    result["seconds_to_save"] = round(time.monotonic() - started, 1)
    with ExitStack() as stack:
        server = Server(args, folder)
        stack.callback(server.close)
        result["server_command"] = " ".join(server.command)
        started = time.monotonic()
        server.wait_ready(deadline - 0.35 * args.limit)
        result["seconds_until_ready"] = round(time.monotonic() - started, 1)
        result["info"] = server.info()
        try:
            runs = Run(args, server, model, result)
            cases: list[tuple[str, Any]] = []
            for streams in (0, args.streams):
                for mode in MODES:
                    for turn in ("first", "again") if streams == 0 and mode == "in_place" else ("",):
                        name = " ".join(filter(None, (mode, "idle" if not streams else f"{streams} streams", turn)))
                        cases.append((name, lambda mode=mode, streams=streams: runs.push(mode, streams)))
            cases.append(("version 0 again", lambda: runs.push("retract", 0, seed=0)))
            cases.append(("killed trainer", lambda: runs.killed(folder)))
            cases.append(("after the killed trainer", lambda: runs.push("in_place", 0)))
            for level in (1, 2):
                cases.append((f"update between sleep {level} and the cache", lambda level=level: runs.slept(level)))
            cases.append(("after sleep", lambda: runs.push("in_place", 0)))
            for name, do in cases:
                begun = time.monotonic()
                try:
                    found = do()
                except Exception as error:  # noqa: BLE001  the other cases are worth knowing too
                    traceback.print_exc()
                    found = {"wrong": [f"{type(error).__name__}: {error}"]}
                result["cases"][name] = found | {"took_s": round(time.monotonic() - begun, 1)}
                print(f"{name}: {found['wrong'] or 'ok'}, stall {found.get('stall_s')} s", file=sys.stderr, flush=True)
                if server.process.poll() is not None:
                    raise RuntimeError("the server ended")
        finally:
            result["info_at_the_end"] = "gone" if server.process.poll() is not None else server.info()
            log = server.log.read_text(errors="replace")
            result["log_of_switches"] = [line[-200:] for line in log.splitlines() if "weightcast:" in line][-60:]
            if any(case["wrong"] for case in result["cases"].values()) or server.process.poll() is not None:
                result["log"] = log[-8000:]


def save_tokenizer(folder: Path, vocab_size: int) -> None:
    """A byte-level tokenizer whose ids are all valid; prompts are token ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {"<s>": 0, "</s>": 1} | {letter: 2 + number for number, letter in enumerate(letters)}
    words |= {f"<{number}>": number for number in range(len(words), vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--site", default=os.environ.get("WEIGHTCAST_LMDEPLOY_SITE", ""), help="folder with LMDeploy")
    parser.add_argument("--python", default=sys.executable, help="the Python that runs LMDeploy")
    parser.add_argument("--layers", type=int, help="layers of the model; 36 on a GPU, 2 on a CPU without it")
    parser.add_argument("--streams", type=int, default=16, help="streams at a time under load")
    parser.add_argument("--option", action="append", default=[], help="one more word for LMDeploy's command line")
    parser.add_argument("--tolerance", type=float, default=1.0, help="nats that a token may be worse than the best one")
    parser.add_argument("--limit", type=float, default=480.0, help="seconds after which everything is ended")
    parser.add_argument("--out", type=Path, help="JSON file; stdout without it")
    for name in ("--stall-at", "--mark"):
        parser.add_argument(name, default="", help=argparse.SUPPRESS)
    parser.add_argument("--version", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.layers = args.layers or (36 if args.device == "cuda" else 2)
    if args.stall_at:
        stall(args)
        return 1
    result: dict[str, Any] = {"what": "LMDeploy with weightcast's receiver", "machine": facts(), "layers": args.layers}

    def late(*_: object) -> None:
        raise Late(f"not done after {args.limit:g} s")

    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, args.limit)
    try:
        with tempfile.TemporaryDirectory() as folder:
            run(args, result, Path(folder))
    except BaseException as error:  # noqa: BLE001  what was found so far is written all the same
        traceback.print_exc()
        result["failure"] = f"{type(error).__name__}: {error}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    cases = result.get("cases", {})
    result["ok"] = not result.get("failure") and len(cases) == 15 and not any(case["wrong"] for case in cases.values())
    text = json.dumps(result, indent=1)
    if args.out is None:
        print(text)
    else:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text + "\n")
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
