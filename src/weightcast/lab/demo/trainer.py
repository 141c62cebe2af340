"""One trainer process: ``python -m weightcast.lab.demo.trainer JOB.json RANK``.

The process loads its model, then reads one line from stdin, a JSON list of the engines' URLs, so that trainers and
engines start at the same time.  In each step rank 0 samples completions and rewards them, all ranks train, and all
ranks update the engines.  Rank 0 reports each step as a line of JSON on stdout; all other output goes to stderr.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import IO, Any, Literal

import msgspec
import torch
import torch.distributed as dist

from weightcast import Target, WeightUpdater
from weightcast.errors import VerificationFailed
from weightcast.lab.demo.grpo import Group
from weightcast.lab.demo.learner import Learner
from weightcast.lab.demo.records import DemoEvent, GradedAnswer, Sample, StepRecord, TargetRecord
from weightcast.lab.demo.rollouts import Completion, Engines
from weightcast.lab.demo.settings import GrpoConfig
from weightcast.lab.demo.task import CAPITALS, SHOWN_COUNTRY, Question, questions, reward
from weightcast.report import UpdateReport

_SAMPLE_SEED = 1_000_003
_SAMPLES = 4


class TrainerJob(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of every trainer process of one mode, passed as a JSON file.

    Attributes:
        model: Hugging Face model folder to start from, the same as the engines'.
        transport: ``ipc`` or ``broadcast``.
        gpus: Index of each process's GPU; empty for the CPU.
        rendezvous: Path of a new file that serves as the trainers' rendezvous.
        wire_dtype: Dtype of the engines, to which weights are cast before they are sent.
        step_timeout_s: Deadline of each single wait within a step, in seconds.
    """

    model: str
    transport: Literal["ipc", "broadcast"]
    world_size: int
    gpus: list[int]
    rendezvous: str
    wire_dtype: str
    steps: int
    seed: int
    bucket_bytes: int
    step_timeout_s: float
    grpo: GrpoConfig


class Rollouts:
    """Sampling on rank 0: sends questions to the engines and turns their answers into rewarded groups."""

    def __init__(self, job: TrainerJob, urls: Sequence[str]) -> None:
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(job.model, local_files_only=True)
        self._engines = Engines(urls, timeout_s=job.step_timeout_s)
        self._stream = questions(seed=job.seed, per_step=job.grpo.prompts_per_step)
        self._job = job

    def next_groups(self, *, version: int) -> list[Group]:
        """Samples the groups of one step with ``version``, which every engine must serve; 0 is the initial weights.

        Raises:
            VerificationFailed: A completion came from another version.
        """
        asked = next(self._stream)
        grpo = self._job.grpo
        prompts = [self._prompt(question) for question in asked]
        answers = self._engines.sample(
            prompts,
            group_size=grpo.group_size,
            max_tokens=grpo.max_tokens,
            seed=(self._job.seed << 32) + version * len(prompts),
        )
        groups: list[Group] = []
        for question, prompt, completions in zip(asked, prompts, answers, strict=True):
            _check_version(completions, version)
            groups.append(
                Group(
                    prompt=prompt,
                    completions=[completion.token_ids for completion in completions],
                    logprobs=[completion.logprobs for completion in completions],
                    rewards=[_grade(question, completion) for completion in completions],
                )
            )
        return groups

    def sample(self, question: Question, *, version: int) -> Sample:
        """Samples a few answers to one question, with the same seed at every call."""
        [completions] = self._engines.sample(
            [self._prompt(question)],
            group_size=_SAMPLES,
            max_tokens=self._job.grpo.max_tokens,
            seed=_SAMPLE_SEED,
        )
        answers = [GradedAnswer(text=each.text.strip(), reward=_grade(question, each)) for each in completions]
        return Sample(version=version, question=question.text, answers=answers)

    def close(self) -> None:
        """Closes the connections."""
        self._engines.close()

    def _prompt(self, question: Question) -> list[int]:
        text: str = self._tokenizer.apply_chat_template(question.messages, tokenize=False, add_generation_prompt=True)
        return self._tokenizer(text, add_special_tokens=False).input_ids


def main(arguments: Sequence[str]) -> None:
    """Runs one trainer process; ``arguments`` are the path of the job file and the rank."""
    job = msgspec.json.decode(Path(arguments[0]).read_bytes(), type=TrainerJob)
    rank = int(arguments[1])
    with _events() as events:
        device = torch.device("cuda", job.gpus[rank]) if job.gpus else torch.device("cpu")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            init_method=f"file://{job.rendezvous}",
            rank=rank,
            world_size=job.world_size,
            timeout=timedelta(seconds=job.step_timeout_s),
        )
        try:
            _train(job, device=device, events=events)
        finally:
            dist.destroy_process_group()


def _train(job: TrainerJob, *, device: torch.device, events: IO[str]) -> None:
    learner = Learner(Path(job.model), device=device, grpo=job.grpo)
    urls = msgspec.json.decode(sys.stdin.readline(), type=list[str])
    rollouts = Rollouts(job, urls) if dist.get_rank() == 0 else None
    updater = WeightUpdater.connect(
        learner.model,
        targets=[Target(url) for url in urls],
        transport=job.transport,
        bucket_bytes=job.bucket_bytes,
        pause="retract",
        verify="resident",
        wire_dtype=job.wire_dtype,
        timeout_s=job.step_timeout_s,
    )
    shown = Question(country=SHOWN_COUNTRY, capital=CAPITALS[SHOWN_COUNTRY])
    try:
        if rollouts is not None:
            _emit(events, rollouts.sample(shown, version=0))
        for version in range(1, job.steps + 1):
            started_s = time.perf_counter()
            groups = _share(rollouts.next_groups(version=version - 1) if rollouts is not None else None, device)
            sampled_s = time.perf_counter()
            numbers = learner.step(groups)
            trained_s = time.perf_counter()
            report = updater.update(version=version)
            _check_report(report)
            record = _record(
                report,
                groups,
                generate_s=sampled_s - started_s,
                train_s=trained_s - sampled_s,
                logprob_gap=numbers.logprob_gap,
            )
            print(f"version {version}: loss {numbers.loss:.4f}, gradient norm {numbers.grad_norm:.2f}", file=sys.stderr)
            print(report, file=sys.stderr, flush=True)
            if rollouts is not None:
                _emit(events, record)
        if rollouts is not None:
            _emit(events, rollouts.sample(shown, version=job.steps))
    finally:
        updater.close()
        if rollouts is not None:
            rollouts.close()


def _share(groups: list[Group] | None, device: torch.device) -> list[Group]:
    """Sends rank 0's groups to every rank; collective."""
    payload = msgspec.msgpack.encode(groups) if groups is not None else b""
    length = torch.tensor([len(payload)], device=device)
    dist.broadcast(length, src=0)
    data = torch.empty(int(length), dtype=torch.uint8, device=device)
    if groups is not None:
        data.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
    dist.broadcast(data, src=0)
    return msgspec.msgpack.decode(data.cpu().numpy().tobytes(), type=list[Group])


def _record(
    report: UpdateReport, groups: Sequence[Group], *, generate_s: float, train_s: float, logprob_gap: float
) -> StepRecord:
    rewards = [reward for group in groups for reward in group.rewards]
    return StepRecord(
        version=report.version,
        reward=sum(rewards) / len(rewards),
        update_s=report.seconds,
        phases=report.phases,
        bytes=report.bytes,
        gb_per_s=report.bytes / report.seconds / 1e9,
        stall_s=max(row.stall_s for row in report.targets),
        digests_matched=sum(row.digests_matched for row in report.targets),
        ranks=sum(row.ranks for row in report.targets),
        digest=report.digest or "",
        generate_s=generate_s,
        train_s=train_s,
        logprob_gap=logprob_gap,
        completion_tokens=sum(len(completion) for group in groups for completion in group.completions),
        targets=[
            TargetRecord(url=row.url, status=row.status, version=row.version_after, stall_s=row.stall_s)
            for row in report.targets
        ],
    )


def _check_version(completions: Sequence[Completion], version: int) -> None:
    for completion in completions:
        if completion.version != version:
            raise VerificationFailed(
                f"an engine sampled with version {completion.version}, but the trainer sent {version}", url="", names=()
            )


def _check_report(report: UpdateReport) -> None:
    for row in report.targets:
        if row.status != "serving" or row.digests_matched != row.ranks:
            found = f"digests matched on {row.digests_matched} of {row.ranks} ranks"
            message = f"{row.url}: {row.status}, {found}; {row.message}"
            raise VerificationFailed(message, url=row.url, names=row.not_updated)


def _grade(question: Question, completion: Completion) -> float:
    return reward(question, completion.text, finished=completion.finished)


def _emit(events: IO[str], event: DemoEvent) -> None:
    events.write(msgspec.json.encode(event).decode() + "\n")
    events.flush()


@contextmanager
def _events() -> Generator[IO[str]]:
    """Yields this process's stdout for events, and redirects stdout to stderr.

    Libraries print to stdout, and such a line among the events would not decode.
    """
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as events:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        yield events


if __name__ == "__main__":
    main(sys.argv[1:])
