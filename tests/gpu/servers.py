"""Real inference servers in processes of their own, and what is asked of all of them after an update.

Servers are started side by side and waited for afterwards; memory is counted by process: tests of several engines can
run at the same time on the same GPUs.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx
import pytest
import torch

from tests.gpu.memory import held_bytes, process_tree
from tests.gpu.test_updates_gpu import train
from tests.helpers.tiny import tiny_tokenizer
from weightcast.comm.ports import quiet_port

START_S = float(os.environ.get("WEIGHTCAST_GPU_START_S", "400"))
PROMPTS = [[5, 6, 7, 8], [40, 30, 20, 10, 99], [200]]
TOKENS = 24
BUCKET_BYTES = 256 << 20
_KEPT_BYTES = 60_000
GROWTH_BYTES = 64 << 20  # over 20 updates; one bucket that is not let go is more
Record = Callable[[str, Any], None]


@dataclass(frozen=True, kw_only=True)
class Server:
    """A server that was started; ``wait_ready`` before anything else."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path
    gpus: tuple[int, ...]

    def wait_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while True:
            assert self.process.poll() is None, f"{self.log.name}: did not start; {_reason(self.log)}"
            assert time.monotonic() < deadline, f"{self.log.name}: not ready after {START_S:g} s"
            try:
                if self.get("/health", timeout_s=10).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.5)

    def get(self, path: str, *, timeout_s: float = 60.0) -> httpx.Response:
        return httpx.get(self.url + path, timeout=timeout_s, trust_env=False)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = httpx.post(self.url + path, json=body, timeout=120, trust_env=False)
        assert answer.status_code == 200, f"{path}: {answer.status_code} {answer.text}"
        return answer.json()

    def held_bytes(self) -> tuple[int, str]:
        """GPU memory of all its processes, and whose was counted."""
        return held_bytes(process_tree(self.process.pid), self.gpus)


@contextmanager
def started(
    command: Callable[[int], Sequence[str]], *, gpus: tuple[int, ...], log: Path, environment: dict[str, str]
) -> Iterator[Server]:
    """A server, not ready yet; ended with all its processes.

    Args:
        command: Arguments of this Python, for a port.
        gpus: On which it runs.
        log: Where its output goes; the end of it is printed if the test fails.
        environment: Beside this process's own.
    """
    port = quiet_port()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *command(port)],
            env=os.environ | environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield Server(url=f"http://127.0.0.1:{port}", process=process, log=log, gpus=gpus)
    except BaseException:
        print(f"--- {log}\n{log.read_text(errors='replace')[-9000:]}")
        raise
    finally:
        strays = process_tree(process.pid) if process.poll() is None else set()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pid in strays:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        _keep(log)


def _keep(log: Path) -> None:
    """Appends the end of a log to the file that ``WEIGHTCAST_GPU_LOGS`` names, if it does."""
    name = os.environ.get("WEIGHTCAST_GPU_LOGS")
    if name is None:
        return
    with Path(name).open("ab") as output:
        fcntl.flock(output, fcntl.LOCK_EX)
        output.write(f"\n======== {log.parent.name}/{log.name}\n".encode() + log.read_bytes()[-_KEPT_BYTES:])


def _reason(log: Path) -> str:
    """The last lines of a log that name an error, for a test's own message."""
    lines = log.read_text(errors="replace").splitlines()
    return " | ".join([line for line in lines if "rror" in line][-4:])[-1500:]


def pushed(server: Server, model: Path, version: int) -> dict[str, Any]:
    """The target's row after a proven update to a checkpoint in bfloat16, by a trainer on the first GPU."""
    result = train(
        ["cuda:0"],
        [server.url],
        transport="ipc",
        model=model,
        dtype="bfloat16",
        versions=str(version),
        bucket_bytes=BUCKET_BYTES,
        verify="resident",
        timeout=120.0,
    )
    assert result["ok"], result
    [row] = result["reports"][0]["targets"]
    assert (row["status"], row["version_after"], row["not_updated"]) == ("serving", version, []), row
    return row


class Engine(Protocol):
    """How a kind of engine is asked."""

    def answers(self, server: Server) -> list[list[int]]:
        """Returns greedy answers, one prompt at a time, so that batches are the same every time."""
        ...

    def checksum(self, server: Server) -> str:
        """Returns the server's own checksum of its weights; empty if it has no such route."""
        ...


def make_model(folder: Path, *, family: str, seed: int) -> None:
    """At least 1 GB in bfloat16, random, with a tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    common: dict[str, Any] = {"vocab_size": 32000, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    common |= {"max_position_embeddings": 2048, "initializer_range": 0.05, "num_key_value_heads": 8, "head_dim": 128}
    common |= {"tie_word_embeddings": False}
    if family == "llama":
        sizes = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 16, "num_attention_heads": 16}
    else:
        sizes = {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 8}
        sizes |= {"moe_intermediate_size": 768, "num_experts": 16, "num_experts_per_tok": 2, "decoder_sparse_step": 1}
        common |= {"norm_topk_prob": True, "mlp_only_layers": []}
    config = AutoConfig.for_model(family, **common, **sizes)
    with torch.device("cuda:0"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tiny_tokenizer(folder)
    del model
    torch.cuda.empty_cache()


def models(factory: pytest.TempPathFactory, family: str) -> tuple[Path, Path]:
    """Two checkpoints of a family, made once for all processes of a test run."""
    base = factory.getbasetemp()
    root = base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base
    found: list[Path] = []
    with (root / f"{family}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for seed in (1, 2):
            found.append(root / f"{family}-{seed}")
            if not (found[-1] / "config.json").exists():
                make_model(found[-1], family=family, seed=seed)
    return found[0], found[1]


def check_updates(
    engine: Engine,
    server: Server,
    other: Server,
    checkpoints: tuple[Path, Path],
    *,
    via: str,
    trainer: list[str],
    verify: str,
    record: Record,
    group_bytes: int = 0,
) -> None:
    """An engine that was updated answers, token for token, as one that was started on the weights.

    Three updates in a row to the second checkpoint, one back, and then, by a third trainer, one and twenty more, during
    which nothing may grow.

    Args:
        engine: How its kind is asked.
        server: Started on the first checkpoint; is updated.
        other: Started on the second one; says what is right.
        checkpoints: The two.
        via: Transport.
        trainer: Its devices.
        verify: Level of proof; what the report must say was reached.
        record: Keeps figures.
        group_bytes: What the engine keeps of the group of a trainer that is gone.
    """
    a, b = checkpoints
    server.wait_ready()
    other.wait_ready()
    before, after = engine.answers(server), engine.answers(other)
    assert all(old != new for old, new in zip(before, after, strict=True))
    sums = {a: engine.checksum(server), b: engine.checksum(other)}
    assert not sums[a] or sums[a] != sums[b]
    digests: dict[Path, set[str]] = {a: set(), b: set()}

    def update(model: Path, versions: Sequence[int]) -> tuple[list[dict[str, Any]], list[int]]:
        result = train(
            trainer,
            [server.url],
            transport=via,
            model=model,
            dtype="bfloat16",
            versions=",".join(map(str, versions)),
            bucket_bytes=BUCKET_BYTES,
            verify=verify,
            tolerance=1.0,  # bfloat16 in two implementations; of other weights they are several nats off
            timeout=120.0,
            watch=",".join(map(str, process_tree(server.process.pid))),
            watch_gpus=",".join(map(str, server.gpus)),
        )
        assert result["ok"], result
        for report, version in zip(result["reports"], versions, strict=True):
            [row] = report["targets"]
            assert (row["status"], row["version_after"], row["ranks"]) == ("serving", version, len(server.gpus)), row
            assert row["proof"] == verify, row
            digests[model].add(report["digest"])
        assert engine.checksum(server) == sums[model]
        assert engine.answers(server) == (after if model == b else before)
        return result["reports"], result["held_bytes"]

    reports = update(b, [1, 2, 3])[0] + update(a, [4])[0]
    before_bytes, whose = server.held_bytes()
    more, held = update(b, range(5, 26))
    reports += more
    growth, group_growth = held[-1] - held[0], server.held_bytes()[0] - before_bytes  # in its life, and after it
    assert [len(each) for each in digests.values()] == [1, 1]
    record("engine", reports[-1]["targets"][0]["engine"])
    record("case", {"via": via, "trainer": trainer, "engine_gpus": server.gpus, "verify": verify})
    record("bytes", reports[0]["bytes"])
    record("seconds", [round(report["seconds"], 4) for report in reports])
    record("stall_s", [round(report["targets"][0]["stall_s"], 4) for report in reports])
    record("phases", reports[-1]["phases"])
    record("peak_extra_bytes", reports[-1]["peak_extra_bytes"])
    record("growth_over_20_bytes", growth)
    record("growth_by_a_new_trainer_bytes", group_growth)
    record("held_by", whose)
    assert growth <= GROWTH_BYTES
    assert group_growth <= GROWTH_BYTES + group_bytes
