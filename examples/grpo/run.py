"""One run: cluster, trainers, engines, evaluation, trackers, checkpoints and the export at the end."""

from __future__ import annotations

import argparse
import importlib
import json
import shutil
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import ray

from weightcast.ray import RolloutEngines, TrainWorkers, colocated, disaggregated

from .learner import Learner
from .options import engine_kind
from .rollouts import Group, Sampler
from .task import JUDGES, read_problems, split

# Gets the number and the figures of every step: ``lambda step, record: wandb.log(record, step=step)``.
Tracker = Callable[[int, dict[str, Any]], object]


class Run:
    """A run whose loop is in the program that uses it; a context manager.

    Attributes:
        trainers: The training ranks.
        engines: The engines.
        sampler: Asks the engines.
        done: Steps of the checkpoint that the run continues from; 0 for a new run.
    """

    def __init__(self, args: argparse.Namespace, *, shared: bool) -> None:
        """Reads the problems; ``with`` starts the processes.

        Args:
            args: The command line.
            shared: Whether trainers and engines take turns on the same devices.
        """
        self.args = args
        self.shared = shared
        self.out = Path(args.out).absolute()
        training, self.held_out = split(
            read_problems(Path(args.problems)), args.eval_problems if args.eval_every else 0
        )
        self.sampler = Sampler(args, training, JUDGES[args.reward])
        self.trackers: list[Tracker] = [self.write, *map(load_tracker, args.tracker)]
        self.done = 0
        self._closing = ExitStack()

    def __enter__(self) -> Self:
        args = self.args
        self.out.mkdir(parents=True, exist_ok=True)
        needed = [args.trainers, args.engines * args.tp]
        ray.cloudpickle.register_pickle_by_value(sys.modules[__package__])  # nodes need no copy of this folder
        ray.init(**cluster(args, max(needed) if self.shared else sum(needed)))
        self._closing.callback(ray.shutdown)
        place = colocated if self.shared else disaggregated
        resource = "GPU" if args.gpus else "CPU"
        trainer_bundles, engine_bundles = place(args.trainers, args.engines, tp=args.tp, resource=resource)
        settings = {"model": args.model, "lr": args.lr, "seed": args.seed, "kl": args.kl}
        settings["clip"] = (args.clip, args.clip_high)
        update = {"transport": args.via, "pause": args.pause, "verify": args.verify, "wire_dtype": args.dtype}
        update["bucket_bytes"] = args.bucket_bytes
        with ExitStack() as starting:
            kind = engine_kind(args, sleeps=self.shared)
            self.trainers = starting.enter_context(
                TrainWorkers(Learner, trainer_bundles, settings, update=update, engines=kind)
            )
            self.engines = starting.enter_context(
                RolloutEngines(kind, engine_bundles, log_folder=self.out, start_timeout_s=args.start_timeout)
            )
            if args.resume:
                self.done = self.resume()
            self._closing.push(starting.pop_all())
        self._closing.callback(self.trainers.close)  # before the engines, from whose groups they take their leave
        return self

    def __exit__(self, *exception: Any) -> bool | None:
        return self._closing.__exit__(*exception)

    def resume(self) -> int:
        """Loads the last checkpoint, if there is one, and sends it to the engines; returns its step."""
        if not (self.out / "last").exists():
            return 0
        step = int((self.out / "last").read_text())
        self.trainers.call("load", str(self.out / f"step-{step}"))
        report = self.trainers.update(self.engines, version=step)
        print(f"resumed after step {step}; engines serve version {report.version}, digest {report.digest}")
        return step

    def record(self, step: int, groups: list[Group], report: Any, figures: dict[str, Any]) -> dict[str, Any]:
        """Evaluates and saves if it is time, and gives every tracker the figures of a step."""
        rewards = [reward for group in groups for reward in group.rewards]
        record = {
            "step": step,
            "version": report.version,
            "reward": sum(rewards) / len(rewards),
            "right": sum(reward >= 0.8 for reward in rewards) / len(rewards),
            **figures,
            "update_s": report.seconds,
            "digest": report.digest,
            "proof": sorted({row.proof for row in report.targets}),
        }
        if self.args.eval_every and step % self.args.eval_every == 0:
            record |= self.sampler.evaluate(self.held_out, self.engines.urls)
            print(f"      evaluation: reward {record['eval_reward']:.3f}, right {record['eval_right']:.2f}", flush=True)
        if self.args.save_every and step % self.args.save_every == 0:
            self.save(step)
        for track in self.trackers:
            track(step, record)
        return record

    def save(self, step: int) -> None:
        self.trainers.call("save", str(self.out / f"step-{step}"))
        (self.out / "last").write_text(str(step))  # only now the checkpoint is complete
        saved = sorted(int(path.name.removeprefix("step-")) for path in self.out.glob("step-*"))
        for old in saved[: -self.args.keep_last] if self.args.keep_last else []:
            shutil.rmtree(self.out / f"step-{old}")

    def write(self, step: int, record: dict[str, Any]) -> None:
        """The tracker that every run has: one line of JSON for each step."""
        with (self.out / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")

    def finish(self) -> None:
        """Exports the model, if that was asked for, and prints how the reward went."""
        if self.args.export:
            self.trainers.call("export", str(Path(self.args.export).absolute()), self.args.dtype)
            print(f"exported to {self.args.export}")
        lines = (self.out / "metrics.jsonl").read_text().splitlines()
        rewards = [json.loads(line)["reward"] for line in lines]
        part = max(1, len(rewards) // 4)
        first, last = sum(rewards[:part]) / part, sum(rewards[-part:]) / part
        print(
            f"reward, mean of the first {part} and the last {part} of {len(rewards)} steps: {first:.3f} -> {last:.3f}"
        )


def served(report: Any) -> str:
    """Number of engine ranks whose digests match, of all; engines without read-back count as 0."""
    return f"{sum(row.digests_matched for row in report.targets)}/{sum(row.ranks for row in report.targets)} ranks"


def load_tracker(name: str) -> Tracker:
    module, _, function = name.partition(":")
    if not function:
        raise SystemExit(f"--tracker {name}: write MODULE:FUNCTION")
    return getattr(importlib.import_module(module), function)


def cluster(args: argparse.Namespace, needed: int) -> dict[str, Any]:
    """Returns the arguments of ``ray.init``: an existing cluster, or a new one on this machine."""
    if args.ray_address:
        return {"address": args.ray_address}
    own = {"num_gpus": args.gpus} if args.gpus else {}
    own |= {"num_cpus": max(needed, 2), "object_store_memory": 256 << 20}
    return {"address": "local", "include_dashboard": False, **own}
