"""vLLM with our receiver at vLLM's default memory budget: staging, sleep, and an update in place, on one GPU.

    WEIGHTCAST_VLLM_SITE=/tmp/site_vllm PYTHONPATH=src:. python3 benchmarks.vllm_memory.py --json OUT.json

Servers are started one after the other, without ``--gpu-memory-utilization`` and without ``--kv-cache-memory-bytes``.
Each is the reference of another: one is started on the weights that the other gets by an update.  Every step is kept
with what the GPU holds after it; the exit code is 1 if a check failed.  ``--tiny`` is a dry run with vLLM on a CPU,
whose sleep frees nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import psutil
from tests.engines.environment import QUICK, package_path

from weightcast.comm.ports import quiet_port

ROOT = Path(__file__).parents[1]
QWEN3_8B = {
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
    "initializer_range": 0.05,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
PROMPTS = [[5, 6, 7, 8], [40, 30, 20, 10, 99], [200]]
TOKENS = 24
GIB = 1 << 30
MAKE = """
import json, sys, torch
from transformers import AutoConfig, AutoModelForCausalLM
from tests.helpers.tiny import tiny_tokenizer
settings, device = json.loads(sys.argv[1]), sys.argv[2]
for seed, folder in enumerate(sys.argv[3:]):
    torch.manual_seed(seed)
    with torch.device(device):
        dtype = torch.bfloat16 if device != "cpu" else torch.float32
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **settings), dtype=dtype)
    model.save_pretrained(folder)
    tiny_tokenizer(folder)
    del model
"""


class Run:
    """Record of a run: steps with their times and the memory after them, and checks."""

    def __init__(self, *, tiny: bool, limit_s: float) -> None:
        self.tiny, self.limit_s = tiny, limit_s
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
    def step(self, name: str, server: Server | None = None) -> Generator[dict[str, Any]]:
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
            if server is not None:
                kept["used_bytes"] = server.used_bytes()
            self.steps.append(kept)
            shown = {key: value for key, value in kept.items() if key not in ("case", "step")}
            print(f"[{self.limit_s - self.left_s:6.1f}] {self.case}: {name}: {json.dumps(shown)[:600]}", flush=True)

    def check(self, what: str, ok: bool, seen: object = None) -> None:
        """Records a check; the run continues, so that one failure does not hide the others."""
        if not ok:
            self.failed.append(f"{self.case}: {what}: {seen}")
            print(f"FAILED {self.case}: {what}: {seen}", flush=True)
        self.steps.append({"case": self.case, "check": what, "ok": ok, **({} if ok else {"seen": str(seen)[:2000]})})


class Server:
    """One vLLM server."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log: Path, *, tiny: bool) -> None:
        self.process, self.url, self.log, self.tiny = process, url, log, tiny
        self.command = ""
        self.client = httpx.Client(timeout=180, trust_env=False)

    def used_bytes(self) -> int:
        """Returns the memory in use on the GPU, or on a CPU that of the server's processes."""
        if self.process.poll() is not None:
            return 0
        if self.tiny:
            family = [psutil.Process(self.process.pid)]
            family += family[0].children(recursive=True)
            return sum(member.memory_info().rss for member in family)
        asked = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
        return int(subprocess.check_output(asked, text=True).split()[0]) << 20

    def wait_ready(self, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while True:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended: {self.log.read_text(errors='replace')[-3500:]}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"not ready after {limit_s:g} s: {self.log.read_text(errors='replace')[-3500:]}")
            try:
                if self.client.get(f"{self.url}/health").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.3)

    def post(self, path: str) -> tuple[int, str]:
        answer = self.client.post(self.url + path)
        return answer.status_code, answer.text

    def get(self, path: str) -> Any:
        return self.client.get(self.url + path).json()

    def info(self) -> dict[str, Any]:
        found = self.get("/weightcast/info")
        return {
            key: found[key] for key in ("state", "version", "digest", "staging", "staging_bytes", "paused", "message")
        }

    def answers(self, model: str = "m") -> list[list[int]]:
        """Greedy, one prompt after the other, so that batches are the same every time."""
        body: dict[str, Any] = {"model": model, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        body["return_token_ids"] = True
        found: list[list[int]] = []
        for prompt in PROMPTS:
            answer = self.client.post(f"{self.url}/v1/completions", json=body | {"prompt": prompt})
            answer.raise_for_status()
            found.append(answer.json()["choices"][0]["token_ids"])
        return found

    def stream(
        self,
        prompt: list[int],
        tokens: int,
        seen: list[tuple[float, int]],
        began: threading.Event,
        enough: threading.Event,
    ) -> None:
        """Reads a stream until it ends or it is enough, and keeps when how many tokens came."""
        body: dict[str, Any] = {"model": "m", "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        body |= {"ignore_eos": True, "stream": True, "return_token_ids": True}
        with self.client.stream("POST", f"{self.url}/v1/completions", json=body) as answer:
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                for choice in json.loads(line[6:])["choices"]:
                    seen.append((time.monotonic(), len(choice.get("token_ids") or ())))
                    began.set()
                if enough.is_set():
                    return


@contextmanager
def launched(
    run: Run,
    args: argparse.Namespace,
    model: Path,
    *options: str,
    backend: str = "weightcast",
    name: str = "",
    more: Mapping[str, str] | None = None,
) -> Generator[Server]:
    """A server that was started and is not ready; all of its processes end with the block.

    Args:
        run: The run, whose case names the log.
        args: Options of the command line: ``folder``, ``flags`` and ``python``.
        model: The checkpoint.
        options: More of vLLM's.
        backend: Its weight transfer: ``weightcast`` is ours, others are vLLM's own.
        name: Name of its log; that of the case if empty.
        more: More of its environment.
    """
    port = quiet_port()
    folder = args.folder
    ours = package_path(folder / "metadata", *([QUICK] if run.tiny else []))
    path = [ours, "" if run.tiny else os.environ.get("WEIGHTCAST_VLLM_SITE", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(part for part in (*path, os.environ.get("PYTHONPATH", "")) if part),
        "VLLM_PLUGINS": "weightcast" if backend == "weightcast" else "",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CACHE_ROOT": str(folder / f"cache-{backend}"),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "HF_HUB_OFFLINE": "1",
        **(more or {}),
    }
    if backend != "weightcast":
        environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # its handles are pickles
    flags = args.flags.split()
    if run.tiny:
        environment |= {"VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        flags = ["--enforce-eager", "--dtype=float32", "--max-num-seqs=8"]
    command = [args.python, "-m", "vllm.entrypoints.openai.api_server", f"--model={model}", f"--port={port}"]
    command += ["--host=127.0.0.1", "--served-model-name=m", *flags]
    command += ["--weight-transfer-config", json.dumps({"backend": backend}), *options]
    log = folder / f"{name or run.case}{'' if backend == 'weightcast' else '-stock'}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    server = Server(process, f"http://127.0.0.1:{port}", log, tiny=run.tiny)
    server.command = " ".join(command[1:])
    try:
        yield server
    finally:
        server.client.close()
        family = _family(process.pid)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for member in family:
            if member.is_running():
                member.kill()
        psutil.wait_procs(family, timeout=20)


def await_start(run: Run, server: Server, limit_s: float, *, ours: bool = True) -> None:
    """Waits until a server is ready, and keeps what it said about its memory."""
    with run.step("start" if ours else "start of vLLM as it ships", server) as kept:
        kept["command"] = server.command
        server.wait_ready(limit_s)
        text = server.log.read_text(errors="replace")
        kept["said"] = re.findall(r"rank \d+ stages updates on.*", text)
        kept["cache"] = re.findall(r"Available KV cache memory.*|GPU KV cache size.*|CPU KV cache size.*", text)
        if ours:
            kept["info"] = server.info()
        kept["vllm"] = server.get("/version")["version"]


@contextmanager
def serving(run: Run, args: argparse.Namespace, model: Path, *options: str) -> Generator[Server]:
    """A server at vLLM's defaults, with our receiver; all of its processes end with the block."""
    with launched(run, args, model, *options) as server:
        await_start(run, server, max(30.0, run.left_s))
        yield server


def _family(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def push(model: Path, server: Server, version: int, *options: str) -> tuple[int, dict[str, Any], str]:
    """``weightcast push`` by ``ipc``: exit code, report, errors."""
    command = [sys.executable, "-m", "weightcast", "push", str(model), "--to", server.url, "--version", str(version)]
    path = os.pathsep.join(
        part
        for part in (str(ROOT / "src"), os.environ.get("PYTHONPATH", ""), os.environ.get("WEIGHTCAST_VLLM_SITE", ""))
        if part
    )
    done = subprocess.run(
        [*command, "--via", "ipc", "--json", *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
        env=os.environ | {"PYTHONPATH": path, "NO_COLOR": "1"},
    )
    report = json.loads(done.stdout) if done.returncode == 0 else {}
    return done.returncode, report, done.stderr.strip()[-1500:]


def pushed(run: Run, name: str, model: Path, server: Server, version: int, *options: str) -> None:
    """A push that must be proven resident."""
    with run.step(name, server) as kept:
        code, report, words = push(model, server, version, *options)
        if code:
            raise RuntimeError(words)
        (row,) = report["targets"]
        kept |= {key: report[key] for key in ("bytes", "seconds", "phases", "digest")}
        kept |= {"proof": row["proof"], "stall_s": row["stall_s"]}
    run.check(f"{name}: resident", row["proof"] == "resident", row)


def asked(run: Run, server: Server, path: str) -> None:
    """One of vLLM's own routes."""
    with run.step(path, server) as kept:
        kept["status"], kept["said"] = server.post(path)
        kept["info"] = server.info()
    run.check(f"{path} is answered", kept["status"] == 200, kept)


def used(run: Run) -> int:
    """Returns the memory in use after the last step."""
    return next(step["used_bytes"] for step in reversed(run.steps) if "used_bytes" in step)


def refused(run: Run, server: Server, model: Path, version: int, words: str, *options: str) -> None:
    """A push that must be refused with these words, before anything moves."""
    with run.step(f"push refused: {words}", server) as kept:
        code, _, said = push(model, server, version, *options)
        kept |= {"exit": code, "said": said}
    run.check(f"push is refused: {words}", code != 0 and words in said, said)


def case_auto(run: Run, args: argparse.Namespace, models: list[Path], said: dict[str, Any]) -> None:
    """Everything at vLLM's defaults, with its sleep."""
    a, b = models
    sleep = [] if run.tiny else ["--enable-sleep-mode"]
    with serving(run, args, a, *sleep) as server:
        staged = server.info()
        run.check("staging is on the device", staged["staging"] == "device", staged)
        with run.step("answers on a", server):
            said["a"] = server.answers()
        awake = used(run)
        pushed(run, "push b", b, server, 1)
        with run.step("answers on b", server):
            said["b"] = server.answers()
        run.check("a and b answer otherwise", said["a"] != said["b"])
        refused(run, server, a, 2, "prefix caching", "--pause", "in_place")

        asked(run, server, "/sleep?level=1")
        run.check("level 1 frees weights, staging and cache", run.tiny or used(run) < 0.15 * awake, (used(run), awake))
        refused(run, server, a, 2, "the engine is asleep")
        with run.step("read-back refused", server) as kept:
            answer = server.client.get(f"{server.url}/weightcast/digests")
            kept |= {"status": answer.status_code, "said": answer.text[:500]}
        run.check("a read-back is refused", "the engine is asleep" in answer.text, answer.text[:500])
        asked(run, server, "/wake_up?tags=weights")
        pushed(run, "push a, half awake", a, server, 2)
        run.check("it is still paused", server.get("/is_paused")["is_paused"])
        asked(run, server, "/wake_up?tags=kv_cache")
        with run.step("answers on a again", server):
            again = server.answers()
        run.check("they equal those of the start", again == said["a"], again)
        run.check("memory is as it was", used(run) < awake + 2 * GIB, (used(run), awake))

        asked(run, server, "/sleep?level=2")
        run.check("level 2 frees weights, staging and cache", run.tiny or used(run) < 0.15 * awake, (used(run), awake))
        info = server.info()
        run.check("no version is known", (info["state"], info["version"]) == ("quarantined", None), info)
        asked(run, server, "/wake_up?tags=weights")
        pushed(run, "push b after level 2", b, server, 3)
        asked(run, server, "/wake_up?tags=kv_cache")
        with run.step("answers on b again", server):
            again = server.answers()
        run.check("they equal those of b", again == said["b"], again)

        asked(run, server, "/sleep?level=2")
        asked(run, server, "/wake_up")
        run.check("woken at once it is paused", server.get("/is_paused")["is_paused"])
        pushed(run, "push a after level 2", a, server, 4)
        with run.step("answers on a, last", server):
            again = server.answers()
        run.check("they equal those of a", again == said["a"], again)


def in_place(run: Run, server: Server, model: Path, version: int) -> None:
    """An update in place while eight streams run: none of them ends early."""
    tokens = 200 if run.tiny else 30000
    streams: list[list[tuple[float, int]]] = [[] for _ in range(8)]
    began = [threading.Event() for _ in streams]
    enough = threading.Event()
    readers = [
        threading.Thread(target=server.stream, args=([7 + index, 8, 9], tokens, seen, begin, enough))
        for index, (seen, begin) in enumerate(zip(streams, began, strict=True))
    ]
    for reader in readers:
        reader.start()
    for begin in began:
        begin.wait(60)
    running = time.monotonic()
    try:
        pushed(run, f"push {model.name} in place, 8 streams", model, server, version, "--pause", "in_place")
        over = time.monotonic()
        with run.step("streams go on", server) as kept:
            time.sleep(0 if run.tiny else 2)
    finally:
        enough.set()
        for reader in readers:
            reader.join(120)
    kept["tokens"] = counts = [sum(count for _, count in seen) for seen in streams]
    kept["tokens_after_the_push"] = after = [sum(count for at, count in seen if at > over) for seen in streams]
    gaps = [later - at for seen in streams for (at, _), (later, _) in pairwise(seen) if later > running]
    kept["longest_gap_s"] = round(max(gaps, default=0.0), 4)
    if run.tiny:  # with a short context they may end before
        run.check("no stream lost a token", counts == [tokens] * len(streams), counts)
    else:
        run.check("every stream went on", min(after) > 0, (counts, after))


def equal(run: Run, server: Server, said: dict[str, Any], name: str) -> None:
    """Answers equal those that another server gave on these weights."""
    with run.step(f"answers on {name}", server):
        found = server.answers()
    run.check(f"they equal the other server's on {name}", found == said.setdefault(name, found), found)


def case_host(run: Run, args: argparse.Namespace, models: list[Path], said: dict[str, Any]) -> None:
    """Staging on the host, by its setting; started on the other weights, so each server proves the other."""
    a, b = models
    options = ["--no-enable-prefix-caching", "--additional-config", '{"weightcast": {"staging": "host"}}']
    with serving(run, args, b, *options) as server:
        info = server.info()
        run.check("staging is on the host", info["staging"] == "host", info)
        equal(run, server, said, "b")
        pushed(run, "push a", a, server, 1)
        equal(run, server, said, "a")
        in_place(run, server, b, 2)
        equal(run, server, said, "b")


def case_device(run: Run, args: argparse.Namespace, models: list[Path], said: dict[str, Any]) -> None:
    """Staging on the device, by its setting."""
    a, b = models
    options = ["--no-enable-prefix-caching", "--additional-config", '{"weightcast": {"staging": "device"}}']
    with serving(run, args, a, *options) as server:
        info = server.info()
        run.check("staging is on the device", info["staging"] == "device", info)
        in_place(run, server, b, 1)
        equal(run, server, said, "b")


CASES = {"auto": case_auto, "host": case_host, "device": case_device}


def machine(args: argparse.Namespace) -> dict[str, Any]:
    """Versions and devices; asked in a process of its own, so that this one holds no memory on the GPU."""
    ask = (
        "import json, torch, transformers; print(json.dumps({'torch': torch.__version__, "
        "'transformers': transformers.__version__, "
        "'gpus': [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())], "
        "'gpu_bytes': [torch.cuda.mem_get_info(i)[1] for i in range(torch.cuda.device_count())]}))"
    )
    said = subprocess.check_output([sys.executable, "-c", ask], text=True).strip().splitlines()[-1]
    return {"python": platform.python_version(), **json.loads(said), "flags": args.flags}


def main() -> int:
    """Runs the cases and prints what was seen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where the results go")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--tiny", action="store_true", help="a tiny model, vLLM on this CPU")
    parser.add_argument("--python", default=sys.executable, help="the Python that runs vLLM")
    parser.add_argument("--flags", default="--attention-backend=TRITON_ATTN", help="flags that the build of vLLM needs")
    parser.add_argument("--limit-s", type=float, default=440.0, help="no case begins in the last 90 seconds")
    parser.add_argument("--folder", type=Path, help="for models, logs and caches")
    args = parser.parse_args()
    run = Run(tiny=args.tiny, limit_s=args.limit_s)
    with tempfile.TemporaryDirectory(prefix="vllm-memory-") as folder:
        args.folder = args.folder or Path(folder)
        args.folder.mkdir(parents=True, exist_ok=True)
        models = [args.folder / name for name in "ab"]
        said: dict[str, Any] = {}
        result: dict[str, Any] = {"command": " ".join(sys.argv), "machine": machine(args), "limit_s": args.limit_s}
        with run.step("make models"):
            sizes = QWEN3_8B
            if run.tiny:
                sizes = QWEN3_8B | {"hidden_size": 128, "intermediate_size": 160, "num_hidden_layers": 2}
                sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
                sizes |= {"vocab_size": 512, "max_position_embeddings": 256, "initializer_range": 0.3}
            made = [sys.executable, "-c", MAKE, json.dumps(sizes), "cpu" if run.tiny else "cuda:0", *map(str, models)]
            subprocess.run(made, check=True, env=os.environ | {"PYTHONPATH": _import_path()}, cwd=ROOT)
        result["checkpoint_bytes"] = sum(file.stat().st_size for file in models[0].glob("*.safetensors"))
        for name in args.cases.split(","):
            if run.left_s < 90:
                run.skipped.append(name)
                continue
            run.case = name
            try:
                CASES[name](run, args, models, said)
            except Exception as error:  # noqa: BLE001  the other cases still tell something
                print(f"FAILED {name}: {type(error).__name__}: {str(error)[-3000:]}", flush=True)
                if not any(failure.startswith(f"{name}:") for failure in run.failed):
                    run.failed.append(f"{name}: {type(error).__name__}: {error}"[:2000])
        result |= {"seconds": round(run.limit_s - run.left_s, 1), "failed": run.failed, "skipped": run.skipped}
        result["steps"] = run.steps
        if args.json is not None:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: result[key] for key in ("seconds", "failed", "skipped")}))
    return 1 if run.failed else 0


def _import_path() -> str:
    return os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])


if __name__ == "__main__":
    sys.exit(main())
