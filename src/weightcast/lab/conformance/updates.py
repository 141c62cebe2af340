"""Checks of updates that succeed: answers, digests, transports and the order of versions."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import msgspec
import torch

from weightcast.adapters.registry import adapter_for
from weightcast.adapters.requests import NO_ROUTE
from weightcast.comm.run_steps import converse
from weightcast.errors import ConfigError, TargetRejected, UpdateFailed, WeightcastError
from weightcast.exporters.checkpoint import CheckpointExporter
from weightcast.lab.conformance.engine import Baseline, CheckpointName, EngineUnderTest, loads_folders
from weightcast.lab.conformance.result import NotApplicable, joined, need
from weightcast.report import format_bytes
from weightcast.wire.layout import total_bytes

if TYPE_CHECKING:
    from torch import nn

_SCORED = tuple(range(5, 37))
_CLOSE = 1e-3  # nats between two scores of the same weights
_TOLERANCE = 0.1  # nats between the choices of two implementations
_MODEL_LIMIT_BYTES = 8 << 30  # larger models are not loaded to compare a forward pass


def describes_itself(engine: EngineUnderTest) -> str:
    """The engine says what it is, and is not in the middle of anything."""
    info = engine.settled()
    need(info.ranks, "it lists no ranks")
    need(info.transports, f"it takes no update: {info.message}")
    staging = f"staging {info.staging}" if engine.has_receiver else "no staging"
    return f"{info.sizes}, {staging}, {joined(sorted(info.transports))}"


def takes_an_update(engine: EngineUnderTest) -> str:
    """A full update is taken, and the engine's answers to it are kept for later checks."""
    report = engine.push("A")
    engine.baselines["A"] = Baseline(short=engine.answers())
    size = format_bytes(total_bytes(engine.specs))
    return f"{len(engine.specs)} tensors, {size} in {report.buckets} buckets over {report.transport}"


def repeats_its_answers(engine: EngineUnderTest) -> str:
    """Greedy answers are the same again, alone and among others; else later checks cannot compare them."""
    engine.to("A")
    engine.says("A")
    engine.baselines["A"].long = [stream.whole() for stream in engine.long_streams()]
    alone = [engine.stream(prompt, engine.long_count).whole() for prompt in engine.long_prompts]
    differing = sum(mine != theirs for mine, theirs in zip(alone, engine.baselines["A"].long, strict=True))
    if differing:
        engine.repeatable = f"{differing} of {len(alone)} answers differ when several requests run at once"
        raise NotApplicable(f"without any update, {engine.repeatable}")
    return f"{len(engine.prompts)} short and {len(alone)} of {engine.long_count} tokens"


def answers_with_other_weights(engine: EngineUnderTest) -> str:
    """After an update to other weights the answers are others."""
    engine.push("B")
    engine.baselines["B"] = Baseline(short=engine.answers())
    engine.baselines["B"].long = [stream.whole() for stream in engine.long_streams()]
    pairs = list(zip(engine.baselines["A"].short, engine.baselines["B"].short, strict=True))
    differ = sum(old != new for old, new in pairs)
    need(differ, "no answer has changed: it took none of the new weights, or both checkpoints are alike")
    return f"{differ} of {len(pairs)} answers have changed"


def answers_come_back(engine: EngineUnderTest) -> str:
    """After an update back to the first weights the first answers come back, token by token."""
    engine.to("B")
    engine.push("A")
    engine.says("A")
    return f"{len(engine.prompts)} answers, token by token"


def scores_follow(engine: EngineUnderTest) -> str:
    """Log-probabilities of given tokens change with the weights and come back with them."""
    found = {name: _scores(engine, name) for name in cast("tuple[CheckpointName, ...]", ("B", "A"))}
    again = _scores(engine, "B")
    apart = max(abs(one - other) for one, other in zip(found["A"], found["B"], strict=True))
    off = max(abs(one - other) for one, other in zip(again, found["B"], strict=True))
    need(apart > _CLOSE, "the scores of both checkpoints are the same")
    need(off <= _CLOSE, f"the scores of B come back {off:.4f} nats off")
    return f"A and B are up to {apart:.1f} nats apart, B and B again {off:.0e}"


def agrees_with_a_forward_pass(engine: EngineUnderTest) -> str:
    """The engine's greedy tokens are those that transformers would choose with the same weights."""
    if total_bytes(engine.specs) > _MODEL_LIMIT_BYTES:
        raise NotApplicable(f"the checkpoint is larger than {format_bytes(_MODEL_LIMIT_BYTES)}")
    worst = 0.0
    for name in cast("tuple[CheckpointName, ...]", ("B", "A")):
        model = _model_of(engine, name)
        engine.to(name)
        for prompt, tokens in zip(engine.prompts, engine.answers(), strict=True):
            off = _shortfall(model, prompt, tokens)
            need(off <= _TOLERANCE, f"with {name} it chose a token that is {off:.2f} nats less likely than the best")
            worst = max(worst, off)
    return f"{2 * len(engine.prompts)} answers; no token is more than {worst:.0e} nats below the best"


def keeps_what_was_sent(engine: EngineUnderTest) -> str:
    """Digests of the live weights are those of the checkpoint that was sent; a stock engine's own checksum follows."""
    names: tuple[CheckpointName, ...] = ("B", "A")
    if engine.has_receiver:
        for name in names:
            engine.to(name)
            engine.keeps(name)
        return f"{len(engine.digests())} tensors of A and of B"
    found: list[str] = []
    for name in ("A", *names):
        engine.to(name)
        found.append(_own_checksum(engine))
    need(found[0] != found[1], "its own checksum is the same with both checkpoints")
    need(found[0] == found[2], "its own checksum of A does not come back")
    return f"its own checksum: {found[0][:8]} with A, {found[1][:8]} with B"


def moves_over(transport: str) -> Callable[[EngineUnderTest], str]:
    """Returns the check that updates over one transport arrive whole."""

    def check(engine: EngineUnderTest) -> str:
        offered = engine.first.transports
        if transport not in offered:
            raise NotApplicable(f"as it was started, it offers {joined(sorted(offered))}")
        if loads_folders(transport) and not engine.is_here:
            raise NotApplicable("the engine is on another host, which may not see this one's folders")
        count = 0
        for _ in range(2):
            name = engine.other
            try:
                count = engine.push(name, transport=transport).buckets
            except ConfigError as error:
                raise NotApplicable(str(error)) from None
            engine.says(name)
        return f"twice, in {count} buckets"

    return check


def counts_its_versions(engine: EngineUnderTest) -> str:
    """The engine reports each version, and an older one is refused unless it is asked for."""
    if not engine.first.tells_version:
        raise NotApplicable("it has no route that tells its version")
    engine.push("A")
    high = engine.info().version
    need(high is not None, "after an update it does not say its version")
    assert high is not None
    refused = _push_as(engine, "B", high - 1)
    need(refused, f"version {high - 1} was taken over {high}")
    engine.unchanged("A", high)
    words = _push_as(engine, "B", high - 1, allow_older=True)
    need(not words, f"version {high - 1} was refused although older ones are allowed: {words}")
    engine.serves = "B"
    engine.unchanged("B", high - 1)
    engine.push("A")
    return f"{high - 1} after {high} is refused, and taken with allow_older"


def _push_as(engine: EngineUnderTest, name: CheckpointName, version: int, **options: Any) -> str:
    """Updates the engine to a version; returns the words of the refusal, or nothing."""
    try:
        with (
            CheckpointExporter(engine.folders[name]) as exporter,
            engine.connect(exporter, **options) as updater,
        ):
            updater.update(version=version)
    except (ConfigError, TargetRejected, UpdateFailed) as error:
        return str(error)
    return ""


def _scores(engine: EngineUnderTest, name: CheckpointName) -> list[float]:
    engine.to(name)
    try:
        return converse(engine.client, adapter_for(engine.info()).score(_SCORED), timeout_s=engine.settings.timeout_s)
    except WeightcastError as error:
        raise NotApplicable(f"it does not score: {error}") from None


# Routes of SGLang and vLLM, and the field of the answer: one checksum, or one for each rank and parameter.
_CHECKSUMS = (("/weights_checker", "per_engine_checksum"), ("/weight_checker", "checksums"))


def _own_checksum(engine: EngineUnderTest) -> str:
    """Returns a stock engine's own checksum over all of its weights.

    Raises:
        NotApplicable: It has none.
    """
    for path, field in _CHECKSUMS:
        try:
            reply = engine.client.post_json(path, b'{"action": "checksum"}', timeout_s=engine.settings.timeout_s)
            found = msgspec.json.decode(reply, type=dict[str, Any]).get(field)
        except (TargetRejected, msgspec.MsgspecError) as error:
            if isinstance(error, TargetRejected) and error.status in NO_ROUTE:
                continue
            raise NotApplicable(f"it has no checksum of its own: {error}") from None
        if found:
            return found if isinstance(found, str) else hashlib.sha256(_sorted(found)).hexdigest()
    raise NotApplicable("it cannot read its weights back, and has no checksum of its own")


def _sorted(checksums: object) -> bytes:
    return msgspec.json.encode(checksums, order="sorted")


def _shortfall(model: Any, prompt: Sequence[int], tokens: Sequence[int]) -> float:
    """By how many nats, at most, a token is less likely than the best one after the same tokens."""
    ids = torch.tensor([[*prompt, *tokens]])
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    chosen = logits.gather(-1, ids[0, len(prompt) :, None])[:, 0]
    return float((logits.max(-1).values - chosen).max())


def _model_of(engine: EngineUnderTest, name: CheckpointName) -> nn.Module:
    """Loads a checkpoint with transformers.

    Raises:
        NotApplicable: transformers is not installed, or does not load it.
    """
    try:
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar
    except ImportError:
        raise NotApplicable("transformers is not installed here") from None
    disable_progress_bar()
    try:
        return cast(Any, AutoModelForCausalLM).from_pretrained(engine.folders[name], dtype="auto").eval()
    except (ImportError, OSError, ValueError, KeyError) as error:
        raise NotApplicable(f"transformers does not load {name}: {error}") from None
