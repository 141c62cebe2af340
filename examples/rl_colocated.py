"""GRPO with trainers and engines that take turns on the same devices.

    python examples/rl_colocated.py                                   # SmolLM2-135M, two cores, under ten minutes
    python examples/rl_colocated.py --resume                          # continues from the last checkpoint
    python examples/rl_colocated.py --model Qwen3-8B --gpus 8 --trainers 8 --engines 8 --engine vllm

In each step the engines answer arithmetic problems and a program rewards the answers.  Then the engines sleep while
FSDP2 trainers in the same Ray bundles take one training step.  The engines wake up and receive the new weights through
shared memory.  The update returns when every engine has proved that it serves exactly these weights.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import shlex
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import ray
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer

from weightcast.ray import RolloutEngines, TrainWorkers, colocated, reference_engine, vllm_engine

HERE = Path(__file__).parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
SMOLLM2 = CACHE / "weightcast/SmolLM2-135M-Instruct"  # made by `weightcast demo`

# -- the task: a problem, its prompt and the reward of an answer

EXAMPLE = ("Zoe has 2 pens and buys 6 more. How many pens does Zoe have now?", "2 + 6 = 8\n#### 8")
ANSWER = re.compile(r"#### (-?\d+)\s*$")


@dataclass(frozen=True)
class Problem:
    question: str
    answer: int  # the number behind "####", as in GSM8K

    def prompt(self, tokenizer: Any) -> list[int]:
        chat = [
            {"role": "system", "content": "Calculate, then write #### and the answer."},
            {"role": "user", "content": EXAMPLE[0]},
            {"role": "assistant", "content": EXAMPLE[1]},
            {"role": "user", "content": self.question},
        ]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        return tokenizer(text, add_special_tokens=False).input_ids


def read_problems(file: Path) -> list[Problem]:
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return [Problem(row["question"], int(row["answer"].rpartition("####")[2].replace(",", ""))) for row in rows]


def judge(problem: Problem, text: str, *, finished: bool) -> float:
    """Rewards an answer: 0.6 if it is right, 0.2 for a calculation that gives it, 0.2 if it ends with ``#### N``."""
    said = ANSWER.search(text) if finished else None
    right = said is not None and int(said[1]) == problem.answer
    calculated = re.search(rf"= {problem.answer}\b", text) is not None
    return 0.6 * right + 0.2 * calculated + 0.2 * (said is not None)


# -- rollouts: completions from the engines


@dataclass(frozen=True)
class Group:
    """Completions of one prompt."""

    prompt: list[int]
    completions: list[list[int]]
    logprobs: list[list[float]]  # log-probability of each token under the engine's weights
    rewards: list[float]
    version: int  # weight version that sampled them


class Rollouts:
    def __init__(self, model: str, problems: list[Problem], args: argparse.Namespace) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.problems = problems
        self.args = args
        # Shorter than servers keep idle connections: a request on a connection that the server closes is lost.
        limits = httpx.Limits(max_connections=None, keepalive_expiry=2.0)
        self.client = httpx.Client(timeout=300, trust_env=False, limits=limits)
        self.pool = ThreadPoolExecutor(64)

    def step(self, number: int, urls: tuple[str, ...], version: int) -> list[Group]:
        """Samples the groups of one step.  A step number always gives the same problems, also in a resumed run."""
        order = random.Random(f"{self.args.seed} {number}")
        asked = order.sample(self.problems, self.args.prompts)
        turns = zip(asked, itertools.cycle(urls), itertools.count(order.randrange(1 << 30)), strict=False)
        return list(self.pool.map(lambda turn: self.ask(*turn, version), turns))

    def ask(self, problem: Problem, url: str, seed: int, version: int) -> Group:
        prompt = problem.prompt(self.tokenizer)
        body = {
            "model": self.model_name(url),
            "prompt": prompt,
            "n": self.args.group,
            "max_tokens": self.args.max_tokens,
            "temperature": 1.0,
            "seed": seed,
            "logprobs": 1,
            "return_token_ids": True,
        }
        reply = self.client.post(f"{url}/v1/completions", json=body).raise_for_status().json()
        choices = reply["choices"]
        rewards = [judge(problem, choice["text"], finished=choice["finish_reason"] == "stop") for choice in choices]
        return Group(
            prompt=prompt,
            completions=[choice["token_ids"] for choice in choices],
            logprobs=[choice["logprobs"]["token_logprobs"] for choice in choices],
            rewards=rewards,
            version=reply.get("weight_version", version),  # some engines do not report it
        )

    def model_name(self, url: str) -> str:
        return self.client.get(f"{url}/v1/models").raise_for_status().json()["data"][0]["id"]


# -- training: one ``Learner`` on every rank


class Learner:
    """Trains with FSDP2, AdamW and GRPO.  weightcast sends the weights of ``model``."""

    def __init__(self, device: torch.device, *, model: str, lr: float, seed: int) -> None:
        torch.manual_seed(seed)
        torch.set_num_threads(1)
        transformers.logging.disable_progress_bar()
        self.device = device
        module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa").to(device)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if device.type == "cuda" else None)
        for layer in module.model.layers:
            fully_shard(layer, mp_policy=policy, reshard_after_forward=False)
        self.model = fully_shard(module, mp_policy=policy, reshard_after_forward=False).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)

    def step(self, groups: list[Group]) -> dict[str, float]:
        """Runs one optimiser step; every rank trains on its share of the groups."""
        rank, world = dist.get_rank(), dist.get_world_size()
        mine = groups[rank::world]
        tokens = sum(len(completion) for group in groups for completion in group.completions)
        totals = torch.zeros(2, device=self.device)
        for number, group in enumerate(mine):
            last = number == len(mine) - 1
            self.model.set_requires_gradient_sync(last)
            self.model.set_reshard_after_backward(last)
            loss, gap = self.loss(group)
            (loss * world / tokens).backward()  # FSDP2 averages over ranks; the factor gives a token mean
            totals += torch.stack([loss.detach(), gap])
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        dist.all_reduce(totals)
        loss, gap = (totals / tokens).tolist()
        return {"loss": loss, "grad_norm": float(norm.full_tensor()), "logprob_gap": gap}

    def loss(self, group: Group) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the clipped policy-gradient loss and the gap to the engine's log-probabilities, summed over tokens.

        The prompt comes once, then every completion; a mask keeps completions from attending to each other.
        """
        rewards = torch.tensor(group.rewards)
        advantage = (rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-4)
        ids, positions, owner = list(group.prompt), list(range(len(group.prompt))), [-1] * len(group.prompt)
        source: list[int] = []  # position that predicts each completion token
        for number, completion in enumerate(group.completions):
            source += [len(group.prompt) - 1, *range(len(ids), len(ids) + len(completion) - 1)]
            positions += range(len(group.prompt), len(group.prompt) + len(completion))
            owner += [number] * len(completion)
            ids += completion
        of = torch.tensor(owner)
        mask = ((of[:, None] == of[None, :]) | (of[None, :] == -1)) & torch.ones(len(ids), len(ids)).tril().bool()
        logits = self.model(
            input_ids=torch.tensor([ids], device=self.device),
            position_ids=torch.tensor([positions], device=self.device),
            attention_mask=mask[None, None].to(self.device),
            logits_to_keep=torch.tensor(source, device=self.device),
            use_cache=False,
        ).logits[0]
        target = torch.tensor(ids[len(group.prompt) :], device=self.device)
        logprobs = torch.log_softmax(logits.float(), -1).gather(-1, target[:, None])[:, 0]
        behaviour = torch.tensor([value for row in group.logprobs for value in row], device=self.device)
        weight = advantage[of[len(group.prompt) :]].to(self.device)
        # Clamped: an engine may report -9999 for a token that it sampled, and infinity times an advantage of 0 is NaN.
        ratio = torch.exp((logprobs - behaviour).clamp(-20, 20))
        loss = -torch.minimum(ratio * weight, ratio.clamp(0.8, 1.28) * weight).sum()
        return loss, (logprobs.detach() - behaviour).abs().sum()

    def save(self, folder: str) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)

    def load(self, folder: str) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state = {"model": model, "optimizer": optimizer}
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


# -- the loop


def main() -> None:
    args = arguments()
    out = Path(args.out).absolute()
    out.mkdir(parents=True, exist_ok=True)
    resource = "GPU" if args.gpus else "CPU"
    needed = max(args.trainers, args.engines * args.tp)
    ray.init(**cluster(args, needed))
    trainer_bundles, engine_bundles = colocated(args.trainers, args.engines, tp=args.tp, resource=resource)
    with (
        TrainWorkers(
            Learner,
            trainer_bundles,
            {"model": args.model, "lr": args.lr, "seed": args.seed},
            update={"transport": "ipc", "pause": "abort", "verify": "resident", "wire_dtype": args.dtype},
        ) as trainers,
        RolloutEngines(engine_kind(args), engine_bundles, log_folder=out) as engines,
    ):
        rollouts = Rollouts(args.model, read_problems(Path(args.problems)), args)
        done = resume(trainers, engines, out) if args.resume else 0
        print("step  version  reward  right    loss  gap    rollout s  train s  update s  digest")
        for step in range(done + 1, args.steps + 1):
            started = time.monotonic()
            groups = rollouts.step(step, engines.urls, version=step - 1)
            assert all(group.version == step - 1 for group in groups)  # no group was sampled with other weights
            sampled = time.monotonic()
            engines.sleep()
            numbers = trainers.call("step", groups)[0]
            engines.wake()
            trained = time.monotonic()
            report = trainers.update(engines, version=step)
            rewards = [reward for group in groups for reward in group.rewards]
            record = {
                "step": step,
                "version": report.version,
                "reward": sum(rewards) / len(rewards),
                "right": sum(reward >= 0.8 for reward in rewards) / len(rewards),
                **numbers,
                "rollout_s": sampled - started,
                "train_s": trained - sampled,
                "update_s": report.seconds,
                "digest": report.digest,
            }
            print(
                f"{step:4d}  {report.version:7d}  {record['reward']:6.3f}  {record['right']:5.2f}  "
                f"{record['loss']:6.3f}  {record['logprob_gap']:5.3f}  {record['rollout_s']:9.1f}  "
                f"{record['train_s']:7.1f}  {record['update_s']:8.2f}  {record['digest']} on {served(report)}",
                flush=True,
            )
            with (out / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(record) + "\n")
            if args.save_every and step % args.save_every == 0:
                trainers.call("save", str(out / f"step-{step}"))
                (out / "last").write_text(str(step))  # only now the checkpoint is complete
        summary(out)
    ray.shutdown()


def resume(trainers: TrainWorkers, engines: RolloutEngines, out: Path) -> int:
    """Loads the last checkpoint, if there is one, and sends it to the engines; returns its step."""
    if not (out / "last").exists():
        return 0
    step = int((out / "last").read_text())
    trainers.call("load", str(out / f"step-{step}"))
    report = trainers.update(engines, version=step)
    print(f"resumed after step {step}; engines serve version {report.version}, digest {report.digest}")
    return step


def served(report: Any) -> str:
    return f"{sum(row.digests_matched for row in report.targets)}/{sum(row.ranks for row in report.targets)} ranks"


def summary(out: Path) -> None:
    rewards = [json.loads(line)["reward"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    part = max(1, len(rewards) // 4)
    first, last = sum(rewards[:part]) / part, sum(rewards[-part:]) / part
    print(f"reward, mean of the first {part} and the last {part} of {len(rewards)} steps: {first:.3f} -> {last:.3f}")


def engine_kind(args: argparse.Namespace) -> Any:
    more = shlex.split(args.engine_args)
    if args.engine == "vllm":
        return vllm_engine(args.model, "--dtype", args.dtype, "--enable-sleep-mode", *more)
    return reference_engine(args.model, "--dtype", args.dtype, "--device", "cuda" if args.gpus else "cpu", *more)


def cluster(args: argparse.Namespace, needed: int) -> dict[str, Any]:
    """Returns the arguments of ``ray.init``: an existing cluster, or a new one on this machine."""
    if args.ray_address:
        return {"address": args.ray_address}
    own = {"num_gpus": args.gpus} if args.gpus else {}
    own |= {"num_cpus": max(needed, 2), "object_store_memory": 256 << 20}
    return {"address": "local", "include_dashboard": False, **own}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default=str(SMOLLM2), help="Hugging Face model folder")
    parser.add_argument("--problems", default=str(HERE / "arithmetic.jsonl"), help="problems in the format of GSM8K")
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--prompts", type=int, default=4, help="prompts in one step")
    parser.add_argument("--group", type=int, default=8, help="completions of each prompt")
    parser.add_argument("--max-tokens", type=int, default=18)
    parser.add_argument("--lr", type=float, default=2e-5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trainers", type=int, default=2)
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks of each engine")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs of this machine to use; 0 runs on CPUs")
    parser.add_argument("--engine", choices=("reference", "vllm"), default="reference")
    parser.add_argument("--engine-args", default="", help="further arguments of the engine's command line")
    parser.add_argument("--dtype", default="", help="dtype of the engines; default: bfloat16 on GPUs, float32 on CPUs")
    parser.add_argument("--ray-address", default="", help="address of a Ray cluster; by default one starts here")
    parser.add_argument("--out", default="rl-colocated", help="folder for metrics, checkpoints and logs")
    parser.add_argument("--save-every", type=int, default=7, help="steps between checkpoints; 0 saves none")
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    args.dtype = args.dtype or ("bfloat16" if args.gpus else "float32")
    if not (Path(args.model) / "config.json").is_file():
        sys.exit(f"{args.model} is no Hugging Face folder (`weightcast demo` makes the one of SmolLM2)")
    return args


if __name__ == "__main__":
    main()
