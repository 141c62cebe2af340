"""Asynchronous GRPO: engines generate all the time, and no sample is more than a few versions behind.

    python examples/rl_disaggregated_async.py                         # SmolLM2-135M, two cores, under ten minutes
    python examples/rl_disaggregated_async.py --staleness 2           # up to two versions behind
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
import json
import os
import queue
import random
import re
import shlex
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
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

from weightcast.ray import RolloutEngines, TrainWorkers, disaggregated, reference_engine, vllm_engine

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
    version: int  # oldest weight version that sampled a token


class Rollouts:
    """Threads that sample all the time.  ``take`` returns their groups, none older than the bound."""

    def __init__(self, model: str, problems: list[Problem], engines: RolloutEngines, args: argparse.Namespace) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.engines = engines
        self.args = args
        self.version = 0  # weight version that the engines serve
        self.used: Counter[int] = Counter()  # groups trained on, by how many versions they were behind
        self.dropped = 0  # groups that were too old
        self.lost = 0  # requests that an engine did not answer
        # Shorter than servers keep idle connections: a request on a connection that the server closes is lost.
        limits = httpx.Limits(max_connections=None, keepalive_expiry=2.0)
        self.client = httpx.Client(timeout=300, trust_env=False, limits=limits)
        self.ready: queue.Queue[Group] = queue.Queue()
        # Groups may wait for ``staleness`` steps, and one more step is being trained on.
        self.room = threading.Semaphore(args.prompts * (args.staleness + 1))
        self.turns = zip(self.shuffled(problems), itertools.count(args.seed << 20), strict=False)
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
                group = self.ask(problem, urls[seed % len(urls)], seed, self.version)
            except (
                httpx.HTTPError,
                ZeroDivisionError,
            ):  # engines have died; the next update restarts them
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
            # An engine that reports no versions sampled with the served version or a later one.
            version=min((span["version"] for span in reply.get("weight_versions", [])), default=version),
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
    needed = args.trainers + args.engines * args.tp
    ray.init(**cluster(args, needed))
    trainer_bundles, engine_bundles = disaggregated(args.trainers, args.engines, tp=args.tp, resource=resource)
    with (
        TrainWorkers(
            Learner,
            trainer_bundles,
            {"model": args.model, "lr": args.lr, "seed": args.seed},
            update={"transport": "broadcast", "pause": "retract", "verify": "resident", "wire_dtype": args.dtype},
        ) as trainers,
        RolloutEngines(engine_kind(args), engine_bundles, log_folder=out) as engines,
    ):
        rollouts = Rollouts(args.model, read_problems(Path(args.problems)), engines, args)
        done = resume(trainers, engines, out) if args.resume else 0
        rollouts.start(version=done)
        print("step  version  reward  right    loss  gap       wait s  train s  update s  behind: groups  digest")
        for step in range(done + 1, args.steps + 1):
            started = time.monotonic()
            groups = rollouts.take(args.prompts)
            behind = [step - 1 - group.version for group in groups]
            assert max(behind) <= args.staleness  # no group is older than the bound
            sampled = time.monotonic()
            numbers = trainers.call("step", groups)[0]
            trained = time.monotonic()
            report = trainers.update(engines, version=step)  # the engines keep generating
            rollouts.version = step
            rewards = [reward for group in groups for reward in group.rewards]
            record = {
                "step": step,
                "version": report.version,
                "reward": sum(rewards) / len(rewards),
                "right": sum(reward >= 0.8 for reward in rewards) / len(rewards),
                **numbers,
                "wait_s": sampled - started,
                "behind": behind,
                "train_s": trained - sampled,
                "update_s": report.seconds,
                "digest": report.digest,
            }
            print(
                f"{step:4d}  {report.version:7d}  {record['reward']:6.3f}  {record['right']:5.2f}  "
                f"{record['loss']:6.3f}  {record['logprob_gap']:5.3f}  {record['wait_s']:9.1f}  "
                f"{record['train_s']:7.1f}  {record['update_s']:8.2f}  {counts(behind):14}  "
                f"{record['digest']} on {served(report)}",
                flush=True,
            )
            with (out / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(record) + "\n")
            if args.save_every and step % args.save_every == 0:
                trainers.call("save", str(out / f"step-{step}"))
                (out / "last").write_text(str(step))  # only now the checkpoint is complete
        rollouts.stop()
        print(f"groups trained on, by versions behind: {dict(sorted(rollouts.used.items()))}, bound {args.staleness}")
        print(f"groups thrown away for their age: {rollouts.dropped}; requests that were not answered: {rollouts.lost}")
        assert max(rollouts.used) <= args.staleness
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


def counts(behind: list[int]) -> str:
    return ", ".join(f"{age}: {number}" for age, number in sorted(Counter(behind).items()))


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
        return vllm_engine(args.model, "--dtype", args.dtype, *more)
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
    parser.add_argument("--staleness", type=int, default=1, help="number of versions that a sample may be behind")
    parser.add_argument("--inflight", type=int, default=4, help="concurrent requests")
    parser.add_argument("--patience", type=float, default=300, help="seconds to wait for a group")
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
    parser.add_argument("--out", default="rl-disaggregated-async", help="folder for metrics, checkpoints and logs")
    parser.add_argument("--save-every", type=int, default=7, help="steps between checkpoints; 0 saves none")
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    args.dtype = args.dtype or ("bfloat16" if args.gpus else "float32")
    if not (Path(args.model) / "config.json").is_file():
        sys.exit(f"{args.model} is no Hugging Face folder (`weightcast demo` makes the one of SmolLM2)")
    return args


if __name__ == "__main__":
    main()
