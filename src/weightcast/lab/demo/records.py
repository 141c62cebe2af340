"""Measurements of the demo as plain data; ``report.json`` has the JSON form of ``StepRecord`` and ``ModeRecord``."""

from __future__ import annotations

import msgspec

from weightcast.lab.demo.settings import Mode


class TargetRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One engine after an update; the fields are those of ``TargetReport``."""

    url: str
    status: str
    version: int | None
    stall_s: float


class StepRecord(msgspec.Struct, frozen=True, kw_only=True, tag="step", tag_field="event"):
    """One training step and the update that followed it.

    Attributes:
        version: Weight version that all engines serve after this step; 1 after the first step.
        reward: Mean reward, 0 to 1, of the completions sampled in this step (by version ``version - 1``).
        update_s: Wall time of the update.
        phases: Seconds by phase; phases overlap, so they do not add up to ``update_s``.
        bytes: Payload of one copy of the model.
        gb_per_s: ``bytes`` divided by ``update_s``, in 1e9 bytes per second.
        stall_s: Longest time in which an engine generated nothing.
        digests_matched: Number of engine ranks whose resident weights equal the sent ones.
        ranks: Number of ranks of all engines.
        generate_s: Time to sample all completions over HTTP.
        logprob_gap: Mean absolute difference of the sampled tokens' log-probabilities, engine against trainer.
    """

    version: int
    reward: float
    update_s: float
    phases: dict[str, float]
    bytes: int
    gb_per_s: float
    stall_s: float
    digests_matched: int
    ranks: int
    digest: str
    generate_s: float
    train_s: float
    logprob_gap: float
    completion_tokens: int
    targets: list[TargetRecord] = []


class GradedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One sampled completion and its reward."""

    text: str
    reward: float


class Sample(msgspec.Struct, frozen=True, kw_only=True, tag="sample", tag_field="event"):
    """Answers to one question by one version, which show what the model has learned."""

    version: int
    question: str
    answers: list[GradedAnswer]


DemoEvent = StepRecord | Sample


class ModeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One mode of the demo, all steps.

    Attributes:
        engines: One line for each engine: URL, degree and device.
        reward_gain: Mean reward of the last quarter of the steps minus that of the first quarter.
        seconds: Wall time of the mode, including the start of the processes.
        samples: Answers before and after training.
    """

    mode: Mode
    transport: str
    engines: list[str]
    trainers: int
    reward_gain: float
    seconds: float
    steps: list[StepRecord]
    samples: list[Sample]


def reward_gain(rewards: list[float]) -> float:
    """Subtracts the mean of the first quarter from that of the last; 0 for fewer than two steps."""
    if len(rewards) < 2:
        return 0.0
    quarter = max(1, len(rewards) // 4)
    return sum(rewards[-quarter:]) / quarter - sum(rewards[:quarter]) / quarter
