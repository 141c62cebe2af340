"""Plays one family on one real engine: a push by checkpoint, a push by live module, fresh servers beside them."""

from __future__ import annotations

import math
import os
import re
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch

from tests.engines.environment import engine_python
from tests.engines.overlays import overlay
from tests.engines.sglang_server import STANDINS, sglang
from tests.engines.vllm_server import vllm, vllm_command
from tests.helpers.engines import Engine
from tests.sweep.models import FAMILIES, build, save
from weightcast import Target, WeightUpdater
from weightcast.errors import WeightcastError

PROMPTS = [[5, 17, 200, 33], [7, 7, 90, 311, 12, 4], [2, 400, 22]]
COUNT = 8
MAX_OFF = 1e-3  # nats; the same kernels on the same weights, perhaps in batches of another size
MIN_CHANGE = 0.05  # nats; or the two sets of weights would not be told apart
# Loaders compute some tensors, and these cannot be read back; the comparison with a fresh server covers them.
OPTIONS: dict[str, Any] = {"bucket_bytes": 2 << 20, "timeout_s": 300.0}

Answers = list[tuple[list[int], list[float]]]

_IMAGE_CACHE = "SGLANG_VLM_CACHE_SIZE_MB"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Results of one family on one engine.

    Attributes:
        family: Key of ``FAMILIES``.
        engine: ``vllm`` or ``sglang``.
        tp: Number of ranks.
        checkpoint: Outcome of the push of a checkpoint.
        live: Outcome of the push of a live module.
    """

    family: str
    engine: str
    tp: int
    checkpoint: str
    live: str

    @property
    def wrong(self) -> bool:
        """True if an engine accepted weights and then answered otherwise than a fresh server."""
        return "WRONG" in self.checkpoint + self.live


def play(family: str, engine: str, tp: int) -> Result:
    """Starts an engine on weights A and pushes B as a checkpoint, then A as a live module.

    The answers after each push are compared with those of a server that was started on the pushed weights.
    """
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="weightcast-sweep-") as root:
        folders = {name: Path(root) / name for name in "AB"}
        try:
            models = {name: build(family, seed) for seed, name in enumerate("AB")}
            for name, model in models.items():
                save(model, folders[name])
        except Exception as error:  # noqa: BLE001  # this version of transformers does not take the settings
            words = f"transformers does not build it: {_words(error)}"
            return Result(family=family, engine=engine, tp=tp, checkpoint=words, live=words)
        options = (f"--dtype={str(FAMILIES[family].dtype).removeprefix('torch.')}",)
        pushed: dict[str, Answers | str] = {}
        not_updated: set[str] = set()
        try:
            with _served(engine, folders["A"], Path(root), tp, options) as server:
                first, again = _answers(engine, server), _answers(engine, server)
                for version, (name, source) in enumerate((("B", folders["B"]), ("A", models["A"])), 1):
                    pushed[name] = _push(engine, server, source, version, not_updated)
            with _served(engine, folders["B"], Path(root), tp, options) as server:
                fresh = {"A": first, "B": _answers(engine, server)}
        except (AssertionError, httpx.HTTPError) as error:
            logs = "".join(log.read_text(errors="replace") for log in Path(root).glob("*.log"))
            words = why_not_served(logs or str(error))
            return Result(family=family, engine=engine, tp=tp, checkpoint=words, live=words)
        if (unsure := _off(first, again)) > MAX_OFF:
            words = (
                f"no result: without any update, the engine's second answer is off by {unsure:.3g} nats from its first"
            )
            return Result(family=family, engine=engine, tp=tp, checkpoint=words, live=words)
        apart = _off(fresh["A"], fresh["B"])
        cells = {name: outcome(pushed[name], fresh[name], apart) for name in "AB"}
        if not_updated:  # parameters of the engine that no checkpoint has
            words = f"equal, and not in the checkpoint: {', '.join(sorted(not_updated))}"
            cells = {name: words if cell == "equal" else cell for name, cell in cells.items()}
        return Result(family=family, engine=engine, tp=tp, checkpoint=cells["B"], live=cells["A"])


@contextmanager
def _served(engine: str, folder: Path, logs: Path, tp: int, options: Sequence[str]) -> Generator[Engine]:
    if engine == "vllm":
        _, environment = vllm_command(folder, logs, 0)
        more = overlay(engine_python("vllm-0.32.0-cpu"), "torchvision==0.28.0")  # for processors of images
        path = os.pathsep.join((str(STANDINS), environment["PYTHONPATH"], str(more)))
        options = ("--no-enable-prefix-caching", "--mm-hasher-algorithm=sha256", *options)
        with vllm(folder, logs, *options, tp=tp, extra={"PYTHONPATH": path}) as server:
            yield server
    else:
        os.environ[_IMAGE_CACHE] = "0"  # says so to the adapter
        setting = (folder, tp, ("--disable-radix-cache", "--mm-attention-backend=sdpa", *options))
        with sglang(logs, setting, extra={_IMAGE_CACHE: "0"}) as [server]:
            yield server


def _push(engine: str, server: Engine, source: Any, version: int, not_updated: set[str]) -> Answers | str:
    """Pushes and asks; the words of the error if the push is refused.  Adds parameters that the push did not write."""
    try:
        with WeightUpdater.connect(source, [Target(server.url)], **OPTIONS) as updater:
            report = updater.update(version=version)
    except WeightcastError as error:
        return f"refused: {_words(error)}"
    [row] = report.targets
    not_updated.update(row.not_updated)
    return _answers(engine, server)


def _answers(engine: str, server: Engine) -> Answers:
    """Greedy tokens of each prompt, and the log-probabilities of the prompt and of these tokens.

    One request at a time: an engine would batch several as they arrive, and some models' answers depend on the batch.
    """
    return [_answer(engine, server, prompt) for prompt in PROMPTS]


def _answer(engine: str, server: Engine, prompt: list[int]) -> tuple[list[int], list[float]]:
    if engine == "vllm":
        body = {"model": "tiny", "prompt": prompt, "max_tokens": COUNT, "temperature": 0, "ignore_eos": True}
        body |= {"return_token_ids": True, "logprobs": 0, "prompt_logprobs": 0}
        [choice] = server.post("/v1/completions", **body)["choices"]
        known = zip(prompt[1:], choice["prompt_logprobs"][1:], strict=True)
        scores = [entry[str(token)]["logprob"] for token, entry in known]
        return choice["token_ids"], [*scores, *choice["logprobs"]["token_logprobs"]]
    sampling = {"temperature": 0, "max_new_tokens": COUNT, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
    found = server.post("/generate", **body)
    meta = found["meta_info"]
    return found["output_ids"], [
        score[0] for score in [*meta["input_token_logprobs"][1:], *meta["output_token_logprobs"]]
    ]


def _off(a: Answers, b: Answers) -> float:
    """The largest difference between two answers in nats; infinite if tokens differ."""
    worst = 0.0
    for (tokens_a, scores_a), (tokens_b, scores_b) in zip(a, b, strict=True):
        if tokens_a != tokens_b:
            return math.inf
        worst = max(worst, *(abs(x - y) for x, y in zip(scores_a, scores_b, strict=True)))
    return worst


def outcome(pushed: Answers | str, fresh: Answers, apart: float) -> str:
    if isinstance(pushed, str):
        return pushed
    if apart < MIN_CHANGE or not all(math.isfinite(score) for _, scores in fresh for score in scores):
        return "no result: the answers to two sets of weights cannot be told apart"
    off = _off(pushed, fresh)
    return "equal" if off <= MAX_OFF else f"WRONG: off by {off:.3g} nats from a fresh server"


def why_not_served(log: str) -> str:
    """The reason from the log of a server that did not start: our own refusal, or the engine's first error."""
    ours = re.findall(r"weightcast\.errors\.\w+: (.*)", log)
    if ours:
        return f"refused at the start: {_short(ours[0])}"
    errors = re.findall(r"(?:^|[ \]])((?:\w+\.)*\w*(?:Error|Exception)\b: .*)", log, re.MULTILINE)
    causes = [error for error in errors if not re.search("initialization failed|did not start|subprocess", error)]
    raised = re.findall(r"^\s*(\w*(?:Error|Exception))\s*$", log, re.MULTILINE)
    reason = next(iter(causes or errors or raised), "its process ended without an error in its log")
    return f"not served by the engine: {_short(reason)}"


def _words(error: BaseException) -> str:
    return _short(f"{type(error).__name__}: {error}")


def _short(text: str, limit: int = 180) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[: limit - 3]}..."
