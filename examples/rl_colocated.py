"""GRPO with trainers and engines that take turns on the same devices.

    python examples/rl_colocated.py                                   # SmolLM2-135M, two cores, under ten minutes
    python examples/rl_colocated.py --resume                          # continues from the last checkpoint
    python examples/rl_colocated.py --model Qwen3-8B --gpus 8 --trainers 8 --engines 8 --engine vllm
    python examples/rl_colocated.py --help                            # every option with its default

In each step the engines answer arithmetic problems and a program rewards the answers.  Then the engines sleep while
FSDP2 trainers in the same Ray bundles take one training step.  The engines wake up and receive the new weights through
shared memory.  The update returns when every engine has proved that it serves exactly these weights.
"""

from __future__ import annotations

import time

from grpo.options import checked, parser
from grpo.run import Run, served


def main() -> None:
    made = parser((__doc__ or "").partition("\n")[0], out="rl-colocated", via="ipc", pause="abort")
    args = checked(made, sleeps=True)
    with Run(args, shared=True) as run:
        print("step  version  reward  right    loss  gap    rollout s  train s  update s  digest")
        for step in range(run.done + 1, args.steps + 1):
            started = time.monotonic()
            groups = run.sampler.step(step, run.engines.urls, version=step - 1)
            assert all(group.version == step - 1 for group in groups)  # no group was sampled with other weights
            sampled = time.monotonic()
            run.engines.sleep()
            numbers = run.trainers.call("step", groups)[0]
            run.engines.wake()
            trained = time.monotonic()
            report = run.trainers.update(run.engines, version=step)
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
