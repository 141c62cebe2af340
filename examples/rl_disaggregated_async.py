"""Asynchronous GRPO: engines generate all the time, and no sample is more than a few versions behind.

    python examples/rl_disaggregated_async.py                         # SmolLM2-135M, two cores, under ten minutes
    python examples/rl_disaggregated_async.py --staleness 2           # up to two versions behind
    python examples/rl_disaggregated_async.py --help                  # every option with its default
    python examples/rl_disaggregated_async.py --model Qwen3-8B --gpus 8 --trainers 4 --engines 4 --engine vllm

Threads send requests to the engines all the time.  FSDP2 trainers on other devices take a step as soon as a batch is
complete.  The new weights go to the engines while they generate: running requests pause during the switch and continue
with the new weights.  Engines report which versions sampled how many tokens of a completion, and the oldest one counts.
The number of waiting groups is limited, so that groups are used before they are too old.  Groups that are too old all
the same, such as those of an engine that was away, are dropped.
"""

from __future__ import annotations

import argparse
import itertools
import queue
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator

import httpx
from grpo.options import checked, parser
from grpo.rollouts import Group, Sampler
from grpo.run import Run, served
from grpo.task import Problem

from weightcast.ray import RolloutEngines


class Rollouts:
    """Threads that sample all the time.  ``take`` returns their groups, none older than the bound."""

    def __init__(self, sampler: Sampler, engines: RolloutEngines, args: argparse.Namespace) -> None:
        self.sampler = sampler
        self.engines = engines
        self.args = args
        self.version = 0  # weight version that the engines serve
        self.used: Counter[int] = Counter()  # groups trained on, by how many versions they were behind
        self.dropped = 0  # groups that were too old
        self.lost = 0  # requests that an engine did not answer
        self.ready: queue.Queue[Group] = queue.Queue()
        # Groups may wait for ``staleness`` steps, and one more step is being trained on.
        self.room = threading.Semaphore(args.prompts * (args.staleness + 1))
        self.turns = zip(self.shuffled(sampler.problems), itertools.count(args.seed << 20), strict=False)
        self.lock = threading.Lock()
        self.ending = threading.Event()
        self.threads = [threading.Thread(target=self.work, daemon=True) for _ in range(args.inflight)]

    def start(self, version: int) -> None:
        self.version = version
        for thread in self.threads:
            thread.start()

    def shuffled(self, problems: list[Problem]) -> Iterator[Problem]:
        order = random.Random(self.args.seed)
        while True:
            yield from order.sample(problems, len(problems))

    def work(self) -> None:
        while not self.ending.is_set():
            if not self.room.acquire(timeout=1.0):
                continue
            with self.lock:
                problem, seed = next(self.turns)
            urls = self.engines.urls
            try:
                group = self.sampler.ask(problem, urls[seed % len(urls)], seed, self.version)
            except (httpx.HTTPError, ZeroDivisionError):  # engines have died; the next update restarts them
                self.lost += 1
                self.room.release()
                self.ending.wait(1.0)
            else:
                self.ready.put(group)

    def take(self, count: int) -> list[Group]:
        """Returns ``count`` groups, each at most ``staleness`` versions behind."""
        groups: list[Group] = []
        while len(groups) < count:
            group = self.ready.get(timeout=self.args.patience)
            self.room.release()
            behind = self.version - group.version
            if behind > self.args.staleness:
                self.dropped += 1
                continue
            self.used[behind] += 1
            groups.append(group)
        return groups

    def stop(self) -> None:
        self.ending.set()
        for thread in self.threads:
            thread.join()


def main() -> None:
    made = parser((__doc__ or "").partition("\n")[0], out="rl-disaggregated-async", via="broadcast", pause="retract")
    asynchronous = made.add_argument_group("asynchrony")
    asynchronous.add_argument("--staleness", type=int, default=1, help="versions that a sample may be behind")
    asynchronous.add_argument("--inflight", type=int, default=4, help="concurrent requests")
    asynchronous.add_argument("--patience", type=float, default=300, help="seconds to wait for a group")
    args = checked(made)
    with Run(args, shared=False) as run:
        rollouts = Rollouts(run.sampler, run.engines, args)
        rollouts.start(version=run.done)
        print("step  version  reward  right    loss  gap       wait s  train s  update s  behind: groups  digest")
        for step in range(run.done + 1, args.steps + 1):
            started = time.monotonic()
            groups = rollouts.take(args.prompts)
            behind = [step - 1 - group.version for group in groups]
            assert max(behind) <= args.staleness  # no group is older than the bound
            sampled = time.monotonic()
            numbers = run.trainers.call("step", groups)[0]
            trained = time.monotonic()
            report = run.trainers.update(run.engines, version=step)  # the engines keep generating
            rollouts.version = step
            times = {"wait_s": sampled - started, "behind": behind, "train_s": trained - sampled}
            record = run.record(step, groups, report, {**numbers, **times})
            print(
                f"{step:4d}  {report.version:7d}  {record['reward']:6.3f}  {record['right']:5.2f}  "
                f"{record['loss']:6.3f}  {record['logprob_gap']:5.3f}  {record['wait_s']:9.1f}  "
                f"{record['train_s']:7.1f}  {record['update_s']:8.2f}  {counts(behind):14}  "
                f"{record['digest']} on {served(report)}",
                flush=True,
            )
        rollouts.stop()
        print(f"groups trained on, by versions behind: {dict(sorted(rollouts.used.items()))}, bound {args.staleness}")
        print(f"groups thrown away for their age: {rollouts.dropped}; requests that were not answered: {rollouts.lost}")
        assert max(rollouts.used) <= args.staleness
        run.finish()


def counts(behind: list[int]) -> str:
    return ", ".join(f"{age}: {number}" for age, number in sorted(Counter(behind).items()))


if __name__ == "__main__":
    main()
