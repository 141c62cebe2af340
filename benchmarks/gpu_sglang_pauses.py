"""Tests every pause mode on a stock SGLang with requests running and waiting.

    export PYTHONPATH=src
    python -m benchmarks.gpu_sglang_pauses --site SITE --out benchmarks/results/gpu-sglang-pauses-h100.json
    python -m benchmarks.gpu_sglang_pauses --device cpu --python PYTHON

SITE is a folder that holds SGLang; PYTHON belongs to an environment with SGLang on a CPU.

Two servers run side by side on one GPU, with a prefix cache and without one; each takes one request at a time.  In
every mode that ``connect`` allows, one answer streams and others wait while new weights are pushed.  The server is
compared with itself: before the push it has answered the same prompts alone, after it it answers what came of them once
more, each time with an empty cache, and every token must be the one that its mode promises.  transformers judges short
answers: each token must be the best one of the new weights within ``--tolerance`` nats.  Modes that would give cache of
old weights to later requests must be refused before anything moves.  The file has the machine, the versions, the
commands, what every mode did, and the copy rate of the device in the same run.

The exit code is 0 only if all of it held.  Whatever was started is ended, at the latest after ``--limit`` seconds.
"""

from __future__ import annotations

import argparse
import copy
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
from tests.engines.sglang_load import Stream, wait_until_waiting
from tests.helpers.tiny import tiny_model, tiny_tokenizer

from weightcast import ConfigError, WeightUpdater
from weightcast.comm.ports import quiet_port
from weightcast.lab.bench.machine import facts

PROMPT = [5 + (7 * number) % 400 for number in range(64)]
# No prompt begins like another one, so that none is computed from another one's cache, in another order of sums.
WAITING = [[number, *PROMPT[:length]] for number, length in ((401, 62), (402, 39), (403, 19))]
LATER = [[number, *PROMPT[:length]] for number, length in ((411, 49), (412, 59))]
SEEN, SHORT, CONTEXT = 8, 12, 4096
SHAPE: dict[str, Any] = {
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "max_position_embeddings": CONTEXT,
}
MODES = ("abort", "retract", "in_place", "wait")
CACHES: dict[str, tuple[str, ...]] = {"prefix cache": (), "no prefix cache": ("--disable-radix-cache",)}


class Judge:
    """transformers' own forward pass over the weights that an engine was sent."""

    def __init__(self, model: Any, *, device: str, tolerance: float) -> None:
        self.model = copy.deepcopy(model).to(device, torch.float32)
        self.device = device
        self.tolerance = tolerance

    def gaps(self, prompt: Sequence[int], tokens: Sequence[int]) -> list[float]:
        """By how many nats each token is worse than the best one in its place."""
        if not tokens:
            return []
        ids = torch.tensor([[*prompt, *tokens[:-1]]], device=self.device)
        with torch.no_grad():
            scores = self.model(ids).logits[0, len(prompt) - 1 :].log_softmax(-1)
        chosen = scores.gather(1, torch.tensor(list(tokens), device=self.device)[:, None])[:, 0]
        return (scores.max(-1).values - chosen).tolist()

    def agrees(self, prompt: Sequence[int], tokens: Sequence[int]) -> bool:
        return max(self.gaps(prompt, tokens), default=0.0) <= self.tolerance


class Server:
    """One SGLang of its own process group."""

    def __init__(self, args: argparse.Namespace, folder: Path, options: Sequence[str], log: Path) -> None:
        self.port = quiet_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        self.command = ["-m", "sglang.launch_server", f"--model-path={folder}", "--host=127.0.0.1"]
        self.command += [f"--port={self.port}", "--skip-tokenizer-init", f"--context-length={CONTEXT}"]
        self.command += [f"--max-total-tokens={2 * CONTEXT}", "--max-running-requests=1", "--disable-cuda-graph"]
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        if args.device == "cpu":
            self.command += ["--device=cpu", "--dtype=float32", "--attention-backend=torch_native"]
            self.command += ["--mem-fraction-static=0.3", "--disable-overlap-schedule", "--skip-server-warmup"]
            self.command += ["--sleep-on-idle"]
            tests = Path(__file__).parents[1] / "tests" / "engines"
            environment |= {"PYTHONPATH": f"{tests / 'standins'}{os.pathsep}{tests / 'quick'}"}
            environment |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
            environment |= {"SGLANG_CPU_OMP_THREADS_BIND": "0"}
        else:
            # SGLang's kernels take no float32; in bfloat16 a random model amplifies rounding to several nats.
            self.command += ["--dtype=float16", "--attention-backend=triton", "--sampling-backend=pytorch"]
            self.command += ["--grammar-backend=none", "--mem-fraction-static=0.3"]
            environment |= {"SGLANG_ENABLE_JIT_DEEPGEMM": "0", "SGLANG_IS_FLASHINFER_AVAILABLE": "0"}
            environment |= {"NCCL_CUMEM_ENABLE": "0", "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0"}
            environment |= {"PYTHONPATH": os.pathsep.join(filter(None, (args.site, os.environ.get("PYTHONPATH"))))}
        self.command += options
        with log.open("wb") as output:
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
                raise RuntimeError(f"SGLang did not start:\n{self.log.read_text(errors='replace')[-5000:]}")
            try:
                # /health answers once a warm-up request has compiled the kernels that all later ones need.
                if httpx.get(self.url + "/health", timeout=60, trust_env=False).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.5)

    def ask(self, path: str, **body: object) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=120, trust_env=False)

    def fresh(self, prompt: Sequence[int], count: int) -> list[int]:
        sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
        answer = self.ask("/generate", input_ids=list(prompt), sampling_params=sampling)
        answer.raise_for_status()
        return answer.json()["output_ids"]

    def alone(self, prompt: Sequence[int], count: int) -> list[int]:
        """The answer to a prompt of which nothing is in the cache."""
        self.ask("/flush_cache").raise_for_status()
        return self.fresh(prompt, count)

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
def steady(url: str) -> Iterator[list[Stream]]:
    """Two short requests at a time, without end, while the body runs; the streams so far."""
    streams: list[Stream] = []
    stop = threading.Event()

    def run(prompt: Sequence[int]) -> None:
        while not stop.is_set():
            stream = Stream(url, prompt, SHORT)
            streams.append(stream)
            stream.ended()

    threads = [threading.Thread(target=run, args=(prompt,), daemon=True) for prompt in LATER]
    for thread in threads:
        thread.start()
    try:
        yield streams
    finally:
        stop.set()
        for thread in threads:
            thread.join(120)


def switched_at(server: Server, stream: Stream, old: Sequence[int]) -> int:
    """After how many tokens the weights that the server has now took over; -1 if they never give the rest.

    Args:
        server: Idle, with the new weights.
        stream: An answer that has ended.
        old: What the server answered to the same prompt with the old weights.
    """
    pairs = zip(stream.tokens, old, strict=False)
    same = next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(stream.tokens), len(old)))
    # The new weights may give a few of the same tokens.
    for count in range(same, max(-1, same - 4), -1):
        rest = stream.tokens[count:]
        if not rest or server.alone([*stream.prompt, *stream.tokens[:count]], len(rest)) == rest:
            return count
    return -1


class Case:
    """One mode on one server."""

    def __init__(self, args: argparse.Namespace, server: Server, model: Any, version: int) -> None:
        self.args, self.server, self.model, self.version = args, server, model, version
        self.found: dict[str, Any] = {}
        self.wrong: list[str] = []

    def updater(self, pause: str) -> WeightUpdater:
        on_gpu = self.args.device == "cuda"
        return WeightUpdater.connect(
            self.model,
            [self.server.url],
            transport="ipc" if on_gpu else "broadcast",
            pause=pause,
            timeout_s=90.0,
        )

    def must(self, held: bool, words: str) -> None:
        if not held:
            self.wrong.append(words)

    def refused(self, pause: str) -> None:
        """``connect`` names what to do instead, and the server goes on."""
        try:
            self.updater(pause).close()
        except ConfigError as error:
            self.found["refusal"] = str(error)
            self.must("abort" in str(error) and "--disable-radix-cache" in str(error), "the refusal names no remedy")
        else:
            self.must(False, "it was not refused")
        self.must(len(self.server.fresh(PROMPT, SHORT)) == SHORT, "it does not answer after the refusal")

    def flush_while_retracted(self) -> None:
        """Shows why the mode is refused: SGLang's own answer to a flush with a retracted request."""
        running = Stream(self.server.url, PROMPT, 400)
        running.wait_for(SEEN)
        self.server.ask("/pause_generation", mode="retract").raise_for_status()
        answer = self.server.ask("/flush_cache")
        self.found["flush_cache"] = [answer.status_code, answer.text[:200]]
        self.server.ask("/continue_generation").raise_for_status()
        self.must(running.ended().finish == "length", "a retracted answer did not end")

    def pushed(self, pause: str) -> None:
        """New weights while one answer streams and others wait."""
        old = self._judge()
        count = 300 if pause == "wait" else self.args.tokens
        before = [
            self.server.alone(PROMPT, count),
            *(self.server.alone(prompt, SHORT) for prompt in (*WAITING, *LATER)),
        ]
        self.server.ask("/flush_cache").raise_for_status()
        with torch.no_grad():
            source = torch.Generator().manual_seed(self.version)
            for parameter in self.model.parameters():
                noise = torch.randn(parameter.shape, generator=source).to(parameter.device, parameter.dtype)
                parameter.add_(noise * parameter.float().std().nan_to_num(0.1) * 0.3)
        new = self._judge()
        url = self.server.url
        with ExitStack() as stack:
            updater = stack.enter_context(self.updater(pause))
            running = Stream(url, PROMPT, count)
            running.wait_for(SEEN)
            waiting = [Stream(url, prompt, SHORT) for prompt in WAITING]
            wait_until_waiting(url, len(waiting))
            others = stack.enter_context(steady(url)) if pause == "wait" else []
            report = updater.update(version=self.version)
            at_return = len(running.tokens)
            self.must(report.ok, f"the update failed: {report}")
        row = report.targets[0]
        self.found |= {
            "engine": row.engine,
            "bytes": report.bytes,
            "seconds": round(report.seconds, 4),
            "stall_s": round(row.stall_s, 4),
            "message": row.message,
        }
        for stream in (running, *waiting):
            stream.ended()
        self.found["streams"] = [
            {"asked": stream.count, "came": len(stream.tokens), "finish": stream.finish or stream.failure}
            for stream in (running, *waiting)
        ]
        prompts = [PROMPT, PROMPT[:40], [*PROMPT, 9, 8, 7]]
        answers = [(prompt, self.server.fresh(prompt, SHORT)) for prompt in prompts]
        self.found["worst_gap_of_fresh_answers_nats"] = round(max(max(new.gaps(*answer)) for answer in answers), 4)
        self.found["worst_gap_by_old_weights_nats"] = round(max(max(old.gaps(*answer)) for answer in answers), 4)
        self.must(all(new.agrees(*answer) for answer in answers), "a fresh answer is not one of the new weights")
        self.must(not all(old.agrees(*answer) for answer in answers), "fresh answers are those of the old weights too")
        again = [self.server.alone(prompt, SHORT) for prompt in prompts]
        equal = [first == second for (_, first), second in zip(answers, again, strict=True)]
        self.found["fresh_answers_equal_after_another_flush"] = f"{sum(equal)} of {len(equal)}"
        self.must(equal[0], "the first answer after the update differs from that after another flush")
        self._check(pause, before, [running, *waiting], at_return)
        for stream in others:
            at = switched_at(self.server, stream, before[1 + len(WAITING) + LATER.index(stream.prompt)])
            self.must(len(stream.tokens) == SHORT and at >= 0, f"a later request got {stream.tokens}")
        self.found["later_requests"] = len(others)

    def _check(self, pause: str, before: Sequence[Sequence[int]], streams: Sequence[Stream], at_return: int) -> None:
        """Checks the promises of the mode.

        Args:
            pause: The mode.
            before: What the server answered to the streams' prompts with the old weights.
            streams: The one that ran at the update and those that waited.
            at_return: How many tokens of the first had come when the update was over.
        """
        running, *waiting = streams
        if pause == "abort":
            for stream in streams:
                self.must(stream.finish != "length", "a request that was to be dropped was answered in full")
            came = list(before[0][: len(running.tokens)])
            self.must(running.tokens == came, "tokens before the abort are not of the old weights")
            return
        for stream in streams:
            self.must(
                (stream.finish, len(stream.tokens)) == ("length", stream.count), "a kept request was not answered"
            )
        if pause == "wait":
            for stream, tokens in zip(streams, before, strict=False):
                self.must(stream.tokens == tokens, "a request did not finish on the old weights")
            return
        if pause == "retract":
            count = switched_at(self.server, running, before[0])
            self.found["switched_after_tokens"] = count
            self.must(SEEN <= count < running.count, f"the running answer is not of old, then new weights ({count})")
            self.must(count <= at_return, f"old weights answered after the update: {count} > {at_return}")
        else:
            self.must(
                running.tokens[:SEEN] == before[0][:SEEN], "the running answer did not begin with the old weights"
            )
            self.must(running.tokens != before[0], "the running answer never changed")
        for stream, tokens in zip(waiting, before[1:], strict=False):
            count = switched_at(self.server, stream, tokens)
            self.must(count == 0, f"a waiting request was not answered by the new weights ({count})")

    def _judge(self) -> Judge:
        model = copy.deepcopy(self.model)
        if self.args.device == "cuda":
            model = model.to(torch.float16).to(torch.float32)  # the values that the engine keeps
        return Judge(model, device=self.args.device, tolerance=self.args.tolerance)


def copy_rate(device: str) -> float:
    """Bytes a second that the device copies, read and written counted once each; the limit beside every figure."""
    size = (1 << 30) if device == "cuda" else (64 << 20)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times: list[float] = []
    for _ in range(6):
        if device == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        target.copy_(source)
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return 2 * size / min(times)


class Late(BaseException):
    """The time is over.  No case may take it for a failure of its own."""


def run(args: argparse.Namespace, result: dict[str, Any], folder: Path) -> None:
    deadline = time.monotonic() + args.limit
    tiny_model(folder, **SHAPE)
    tiny_tokenizer(folder)
    with ExitStack() as stack:
        servers: dict[str, Server] = {}
        for name, options in CACHES.items():
            if args.cache not in ("both", name):
                continue
            servers[name] = Server(args, folder, options, folder / f"{len(servers)}.log")
            stack.callback(servers[name].close)
        started = time.monotonic()
        for server in servers.values():
            server.wait_ready(min(deadline, started + args.limit * 0.6))
        result["seconds_until_ready"] = round(time.monotonic() - started, 1)
        result["server_commands"] = {name: " ".join(server.command) for name, server in servers.items()}
        result["limits"] = {"device_copy_bytes_per_s": round(copy_rate(args.device))}
        result["cases"] = {}
        for name, server in servers.items():
            from transformers import AutoModelForCausalLM

            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            model.to(args.device)
            version = server_version(server)
            result["sglang"] = ".".join(map(str, version))
            refused = set[str]()
            if name == "prefix cache":
                refused = {"in_place"} if version >= (0, 5, 21) else {"in_place", "retract", "wait"}
            for number, mode in enumerate(MODES, 1):
                case = Case(args, server, model, number)
                begun = time.monotonic()
                try:
                    if mode in refused:
                        case.refused(mode)
                    else:
                        case.pushed(mode)
                    if mode == "retract" and name == "prefix cache":
                        case.flush_while_retracted()
                except Exception as error:  # noqa: BLE001  the other cases are worth knowing too
                    traceback.print_exc()
                    case.wrong.append(f"{type(error).__name__}: {error}")
                took = round(time.monotonic() - begun, 1)
                result["cases"][f"{mode}, {name}"] = case.found | {"wrong": case.wrong, "took_s": took}
                print(
                    f"{mode}, {name}: {'ok' if not case.wrong else case.wrong} ({took} s)", file=sys.stderr, flush=True
                )


def server_version(server: Server) -> tuple[int, ...]:
    """Returns the version that the server reports."""
    said = httpx.get(server.url + "/server_info", timeout=60, trust_env=False).json()
    return tuple(int(part) for part in str(said["version"]).split("+")[0].split(".")[:3] if part.isdigit())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--site", default=os.environ.get("WEIGHTCAST_SGLANG_SITE", ""), help="folder that holds SGLang")
    parser.add_argument("--python", default=sys.executable, help="the Python that runs SGLang")
    parser.add_argument("--cache", choices=("both", *CACHES), default="both", help="the servers that are played")
    parser.add_argument("--tokens", type=int, default=1500, help="length of the answer that runs")
    parser.add_argument("--tolerance", type=float, default=1.0, help="nats that a token may be worse than the best one")
    parser.add_argument("--limit", type=float, default=340.0, help="seconds after which everything is ended")
    parser.add_argument("--out", type=Path, help="JSON file; stdout without it")
    args = parser.parse_args()
    os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")
    result: dict[str, Any] = {"what": "pause modes of a stock SGLang under load", "machine": facts()}

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
    result["ok"] = not result.get("failure") and bool(cases) and not any(case["wrong"] for case in cases.values())
    text = json.dumps(result, indent=1)
    if args.out is None:
        print(text)
    else:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text + "\n")
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
