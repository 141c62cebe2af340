"""Reference engines in processes of their own, the command line, and what transformers says about the same weights."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch

from tests.engines.forked import Forked
from tests.helpers.commands import COMMAND, Started, run
from tests.helpers.procs import end

# The package under test is found as this process found it, installed or not.
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith("WEIGHTCAST_")},
    "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    "OMP_NUM_THREADS": "1",
    "NO_COLOR": "1",
}
# A server ends an idle connection after some seconds, on a busy machine just when the next request is sent over it.
NO_KEEP_ALIVE = httpx.Limits(max_connections=None, max_keepalive_connections=0)
START_S = 600.0
ANSWER_S = 300.0
STOP_S = 100.0


@dataclass(slots=True, kw_only=True)
class Engine:
    """A running ``weightcast serve``.

    Attributes:
        process: Its process.
        url: Where it listens.
        folder: What it was started on.
        tp: How many ranks it has.
    """

    process: subprocess.Popen[Any] | Started | Forked
    url: str
    folder: Path
    tp: int
    client: httpx.Client = field(repr=False)

    @classmethod
    def start(
        cls, folder: Path, *, tp: int = 1, dtype: str = "float32", log: Path, program: str = COMMAND, **options: object
    ) -> Engine:
        """Start one; ``ready`` waits for it, so that several can start side by side.

        ``program`` is a module whose ``main`` is the command's, or calls it.
        """
        command = ["serve", str(folder), "--port=0", "--json", "--threads=1", f"--tp={tp}", f"--dtype={dtype}"]
        command += [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        with log.open("w") as stderr:
            process = Started(program, *command, stdout=subprocess.PIPE, stderr=stderr, env=ENVIRONMENT)
        client = httpx.Client(timeout=ANSWER_S, trust_env=False, limits=NO_KEEP_ALIVE)
        return cls(process=process, url="", folder=folder, tp=tp, client=client)

    def ready(self, log: Path) -> None:
        """Wait until it says where it is; fail with its own words if it does not."""
        said = _document(self.process, START_S)
        assert said is not None, f"the engine did not start:\n{log.read_text()}"
        self.url = said["url"]
        assert said["pid"] == self.process.pid

    def get(self, path: str) -> dict[str, Any]:
        return self.client.get(self.url + path).raise_for_status().json()

    def post(self, path: str, **body: object) -> dict[str, Any]:
        answer = self.client.post(self.url + path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def info(self) -> dict[str, Any]:
        return self.get("/weightcast/info")

    def digests(self) -> dict[str, str]:
        return self.get("/weightcast/digests")["resident"]

    def complete(self, prompts: Sequence[Sequence[int]], count: int, **options: object) -> dict[str, Any]:
        """Greedy, past end-of-sequence tokens, with token ids in the answer."""
        body = completion(prompts, count) | options
        return self.post("/v1/completions", **body)

    def greedy(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        """Token ids for each prompt."""
        return [choice["token_ids"] for choice in self.complete(prompts, count)["choices"]]

    def family(self) -> list[psutil.Process]:
        """The engine's process and everything that it started."""
        try:
            parent = psutil.Process(self.process.pid)
            return [parent, *parent.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def stop(self, number: signal.Signals = signal.SIGTERM, *, within_s: float = STOP_S) -> int:
        """Asks it to end; kills what is left after some seconds, and what outlives it.  Returns the exit code."""
        family = self.family()
        try:
            return end(self.process, within_s, number)
        finally:
            for member in family[1:]:
                _kill(member)
            self.client.close()
            if not isinstance(self.process, Forked) and self.process.stdout is not None:
                self.process.stdout.close()


@contextmanager
def engines(folder: Path, logs: Path, *settings: dict[str, Any]) -> Iterator[list[Engine]]:
    """Several engines, started side by side; ended on the way out, whatever happens."""
    with ExitStack() as stack:
        found: list[Engine] = []
        files: list[Path] = []
        stack.callback(stop_all, found)
        for setting in settings:
            files.append(logs / f"engine-{len(list(logs.glob('engine-*.log')))}.log")
            found.append(Engine.start(**{"folder": folder, "log": files[-1]} | setting))
        for engine, log in zip(found, files, strict=True):
            engine.ready(log)
        yield found


def stop_all(engines: Sequence[Engine], within_s: float = STOP_S) -> None:
    """Stops engines side by side: each takes seconds to end."""
    with ThreadPoolExecutor(max(1, len(engines))) as pool:
        list(pool.map(lambda engine: engine.stop(within_s=within_s), engines))


def completion(prompts: Sequence[Sequence[int]], count: int) -> dict[str, Any]:
    """The body of a greedy request for token ids."""
    return {
        "prompt": [list(prompt) for prompt in prompts],
        "max_tokens": count,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def weightcast(*arguments: object, timeout_s: float = 600.0) -> subprocess.CompletedProcess[str]:
    """The command line, in a process of its own."""
    return run(COMMAND, *map(str, arguments), env=ENVIRONMENT, timeout_s=timeout_s)


def push(checkpoint: Path, targets: Sequence[Engine], version: int, *options: str) -> dict[str, Any]:
    """``weightcast push``; its report."""
    to = [part for engine in targets for part in ("--to", engine.url)]
    done = weightcast("push", checkpoint, *to, "--version", version, "--json", *options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def status(*targets: Engine) -> list[dict[str, Any]]:
    """``weightcast status``; one entry for each engine."""
    done = weightcast("status", *(engine.url for engine in targets), "--json", "--timeout", ANSWER_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)["engines"]


def verify(checkpoint: Path, engine: Engine, *options: str) -> tuple[int, set[str]]:
    """``weightcast verify``: exit code and the names of the tensors that differ."""
    done = weightcast("verify", checkpoint, "--at", engine.url, "--json", *options)
    assert done.stdout, done.stderr
    return done.returncode, {found["name"] for found in json.loads(done.stdout)["differences"]}


def shortfall(model: Any, prompt: Sequence[int], tokens: Sequence[int]) -> float:
    """How much likelier, in nats and at most over the tokens, transformers' choice is than the one that was made."""
    ids = torch.tensor([[*prompt, *tokens]])
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    chosen = logits.gather(-1, ids[0, len(prompt) :, None])[:, 0]
    return float((logits.max(-1).values - chosen).max())


def _document(process: subprocess.Popen[str] | Started, timeout_s: float) -> dict[str, Any] | None:
    """The JSON document that a process prints first; None if it ends or takes too long."""
    assert process.stdout is not None
    read = ""
    deadline = time.monotonic() + timeout_s
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while time.monotonic() < deadline:
            if not selector.select(1.0):
                continue
            piece = os.read(process.stdout.fileno(), 4096).decode()
            if not piece:
                return None
            read += piece
            try:
                return json.loads(read)
            except ValueError:
                continue
    return None


def _kill(member: psutil.Process) -> None:
    try:
        if member.is_running():  # the same process, not another with its number
            member.kill()
    except psutil.NoSuchProcess:
        pass
