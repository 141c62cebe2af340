"""Runs the conformance checks against every engine that serves on a CPU, and keeps their results.

``python -m tests.engines.conformance [NAME ...] [--write benchmarks/results/conformance]``
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.engines.lmdeploy_receiver_server import lmdeploy
from tests.engines.sglang_server import sglang
from tests.engines.vllm_server import vllm
from tests.helpers.engines import Engine, engines
from tests.helpers.tiny import tiny_model, tiny_tokenizer
from weightcast.config import Target
from weightcast.lab.conformance.engine import ConformanceSettings
from weightcast.lab.conformance.result import ConformanceResult, Row
from weightcast.lab.conformance.run import conform

CONTEXT = 1024
# vLLM's attention on CPUs wants heads of 32 or more, and SGLang multiples of 64 in places.
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 256,
    "max_position_embeddings": CONTEXT,
}
KEY = "conformance-key"
# LMDeploy keeps the row of a padding token in its embeddings at zero.
NO_PAD: dict[str, Any] = {"pad_token_id": None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One engine under test.

    Attributes:
        title: Its name among the results.
        server: ``reference``, ``vllm``, ``sglang`` or ``lmdeploy``.
        receiver: True if it has our receiver.
        tp: Tensor-parallel ranks.
        executor: LMDeploy's executor of several ranks.
        model: Changes of the model's configuration.
        key: Its API key.
        via: Transport of the updates that are not about one.
    """

    title: str
    server: str
    receiver: bool = True
    tp: int = 1
    executor: str = "ray"
    model: Mapping[str, Any] = field(default_factory=dict)
    key: str | None = None
    via: str = "auto"


KINDS: dict[str, Kind] = {
    "reference": Kind(title="The reference engine, two ranks", server="reference", tp=2, key=KEY),
    "vllm": Kind(title="vLLM 0.32 with our receiver, two ranks", server="vllm", tp=2, key=KEY),
    "sglang": Kind(title="SGLang 0.5.23 with our receiver", server="sglang"),
    "sglang-stock": Kind(title="SGLang 0.5.23 as it ships", server="sglang", receiver=False),
    "lmdeploy": Kind(title="LMDeploy 0.18 with our receiver", server="lmdeploy", model=NO_PAD, key=KEY),
    "lmdeploy-ray": Kind(
        title="LMDeploy 0.18 with our receiver, two ranks in Ray actors", server="lmdeploy", tp=2, model=NO_PAD, key=KEY
    ),
    "lmdeploy-mp": Kind(
        title="LMDeploy 0.18 with our receiver, two ranks of its executor mp",
        server="lmdeploy",
        tp=2,
        executor="mp",
        model=NO_PAD,
        key=KEY,
    ),
    "lmdeploy-stock": Kind(
        title="LMDeploy 0.18 as it ships", server="lmdeploy", receiver=False, model=NO_PAD, via="checkpoint-engine"
    ),
}


@contextmanager
def served(kind: Kind, folder: Path, logs: Path) -> Iterator[Engine]:
    """Starts an engine on a model; ended on the way out."""
    if kind.server == "reference":
        options = {"tp": kind.tp} | ({"api_key": kind.key} if kind.key else {})
        with engines(folder, logs, options) as (engine,):
            yield engine
    elif kind.server == "vllm":
        with vllm(folder, logs, f"--max-model-len={CONTEXT}", tp=kind.tp, key=kind.key) as engine:
            yield engine
    elif kind.server == "lmdeploy":
        options = (f"--api-keys={kind.key}",) if kind.key else ()
        log = logs / "lmdeploy.log"
        more: dict[str, Any] = {"receiver": kind.receiver, "tp": kind.tp, "executor": kind.executor}
        with lmdeploy(folder, log, *options, key=kind.key or "", **more) as engine:
            yield engine
    else:
        options = (f"--context-length={CONTEXT}", f"--max-total-tokens={8 * CONTEXT}")
        with sglang(logs, (folder, kind.tp, options), receiver=kind.receiver) as (engine,):
            yield engine


def run(kind: Kind, folder: Path) -> ConformanceResult:
    """Starts an engine and runs every check on it.

    Args:
        kind: The engine.
        folder: Folder for its models and logs.
    """
    checkpoints = [folder / name for name in "AB"]
    for seed, place in enumerate(checkpoints):
        tiny_model(place, seed=seed, **SIZES | dict(kind.model))
        tiny_tokenizer(place)
    logging.getLogger("weightcast").setLevel(logging.CRITICAL)  # failures are part of the run, and the rows name them
    with served(kind, checkpoints[0], folder) as engine:
        target = Target(engine.url, api_key=kind.key)
        return conform(
            target,
            checkpoints,
            ConformanceSettings(timeout_s=60.0, transport=kind.via),
            told=_tell,
        )


def _tell(row: Row) -> None:
    print(f"{row.seconds:6.1f} s  {row.outcome}: {row.check}: {row.words}", flush=True)


def write(folder: Path, name: str, result: ConformanceResult) -> None:
    """Keeps the result of one engine in a file, from which ``benchmarks/report.py`` makes a row."""
    rows = [{"check": row.check, "outcome": row.outcome, "words": row.words} for row in result.rows]
    text = json.dumps({"title": KINDS[name].title, "rows": rows}, indent=1)
    (folder / f"{name}.json").write_text(text + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.engines.conformance", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *KINDS], help="only these engines")
    parser.add_argument("--write", type=Path, help="keep the results in this folder")
    args = parser.parse_args()
    wrong = 0
    for name in args.names or KINDS:
        folder = Path(tempfile.mkdtemp(prefix=f"weightcast-{name}-"))
        result = run(KINDS[name], folder)
        print(f"\n{KINDS[name].title}\n{result.text()}\n", flush=True)
        if result.failed:
            wrong += 1
            print(f"its log is in {folder}", flush=True)
        else:
            shutil.rmtree(folder)
        if args.write:
            write(args.write, name, result)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
