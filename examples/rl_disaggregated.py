"""GRPO with trainers and engines on devices of their own.

    python examples/rl_disaggregated.py                               # SmolLM2-135M, two cores, under ten minutes
    python examples/rl_disaggregated.py --resume                      # continues from the last checkpoint
    python examples/rl_disaggregated.py --model Qwen3-8B --gpus 8 --trainers 4 --engines 2 --tp 2 --engine sglang
    python examples/rl_disaggregated.py --help                        # every option with its default

In each step the engines answer arithmetic problems and a program rewards the answers.  Then the FSDP2 trainers take one
training step, and a broadcast sends the new weights to all engines.  Dead engines are restarted first.  The update
returns when every engine has proved that it serves exactly these weights.
"""

from __future__ import annotations

import argparse
import time

from grpo.options import checked, parser
from grpo.run import Run, served


def main() -> None:
    train(checked(parser((__doc__ or "").partition("\n")[0], out="rl-disaggregated", via="broadcast", pause="abort")))


def train(args: argparse.Namespace) -> None:
    with Run(args, shared=False) as run:
        print("step  version  reward  right    loss  gap    rollout s  train s  update s  digest")
        for step in range(run.done + 1, args.steps + 1):
            started = time.monotonic()
            groups = run.sampler.step(step, run.engines.urls, version=step - 1)
            assert all(group.version == step - 1 for group in groups)  # no group was sampled with other weights
            sampled = time.monotonic()
            numbers = run.trainers.call("step", groups)[0]
            trained = time.monotonic()
            report = run.trainers.update(run.engines, version=step)  # restarts dead engines before it sends weights
            times = {"rollout_s": sampled - started, "train_s": trained - sampled}
            record = run.record(step, groups, report, {**numbers, **times})
            print(
                f"{step:4d}  {report.version:7d}  {record['reward']:6.3f}  {record['right']:5.2f}  "
                f"{record['loss']:6.3f}  {record['logprob_gap']:5.3f}  {record['rollout_s']:9.1f}  "
                f"{record['train_s']:7.1f}  {record['update_s']:8.2f}  {record['digest']} on {served(report)}",
                flush=True,
            )
        run.finish()


if __name__ == "__main__":
    main()
