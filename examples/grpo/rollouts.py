"""Rollouts: completions of running engines, with their tokens, log-probabilities and weight versions."""

from __future__ import annotations

import argparse
import itertools
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
from transformers import AutoTokenizer

from .task import Judge, Problem

# vLLM and LMDeploy take what a request leaves out from the model's generation settings, such as a top_k of 20, or from
# defaults of their own.  Samples would come from another distribution than the one that is trained.
WHOLE_DISTRIBUTION = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
PLAIN = WHOLE_DISTRIBUTION | {"repetition_penalty": 1.0}  # which the reference engine does not have


@dataclass(frozen=True)
class Completion:
    tokens: list[int]  # with the token that ended it, which is learned too
    logprobs: list[float]  # log-probability of each token under the engine's weights
    finished: bool  # False if the limit of tokens ended it
    version: int | None  # oldest weight version that sampled a token; None if the engine does not report it


@dataclass(frozen=True)
class Group:
    """Completions of one prompt."""

    prompt: list[int]
    completions: list[list[int]]
    logprobs: list[list[float]]
    rewards: list[float]
    version: int  # oldest weight version that sampled a token


class Sampler:
    """Asks engines of one kind."""

    def __init__(self, args: argparse.Namespace, problems: list[Problem], judge: Judge) -> None:
        self.args = args
        self.problems = problems
        self.judge = judge
        self.tokenizer = AutoTokenizer.from_pretrained(args.model)
        # Shorter than servers keep idle connections: a request on a connection that the server closes is lost.
        limits = httpx.Limits(max_connections=None, keepalive_expiry=2.0)
        self.client = httpx.Client(timeout=300, trust_env=False, limits=limits)
        self.pool = ThreadPoolExecutor(64)
        self.complete = completions_of if args.engine in ("reference", "vllm") else generate_of

    def step(self, number: int, urls: tuple[str, ...], version: int) -> list[Group]:
        """Samples the groups of one step.  A step number always gives the same problems, also in a resumed run."""
        order = random.Random(f"{self.args.seed} {number}")
        asked = order.sample(self.problems, self.args.prompts)
        turns = zip(asked, itertools.cycle(urls), itertools.count(order.randrange(1 << 30)), strict=False)
        return list(self.pool.map(lambda turn: self.ask(*turn, version), turns))

    def ask(self, problem: Problem, url: str, seed: int, version: int) -> Group:
        """Samples one group; ``version`` is the one that the engine serves, for engines that do not report it."""
        prompt = problem.prompt(self.tokenizer)
        found = self.complete(self.client, self.args, url, prompt, count=self.args.group, temperature=1.0, seed=seed)
        return Group(
            prompt=prompt,
            completions=[completion.tokens for completion in found],
            logprobs=[completion.logprobs for completion in found],
            rewards=[self.reward(problem, completion) for completion in found],
            version=min(version if completion.version is None else completion.version for completion in found),
        )

    def reward(self, problem: Problem, completion: Completion) -> float:
        # Engines differ in whether their text has the token that ended it.
        text = self.tokenizer.decode(completion.tokens, skip_special_tokens=True)
        return self.judge(problem, text, completion.finished)

    def evaluate(self, problems: list[Problem], urls: tuple[str, ...]) -> dict[str, float]:
        """Answers problems greedily; the mean reward and the share of right answers."""

        def answered(problem: Problem, url: str) -> float:
            [answer] = self.complete(
                self.client, self.args, url, problem.prompt(self.tokenizer), count=1, temperature=0.0, seed=0
            )
            return self.reward(problem, answer)

        rewards = list(self.pool.map(answered, problems, itertools.cycle(urls)))
        return {
            "eval_reward": sum(rewards) / len(rewards),
            "eval_right": sum(value >= 0.8 for value in rewards) / len(rewards),
        }


def completions_of(
    client: httpx.Client,
    args: argparse.Namespace,
    url: str,
    prompt: list[int],
    *,
    count: int,
    temperature: float,
    seed: int,
) -> list[Completion]:
    """OpenAI's completions with token ids, as the reference engine and vLLM have them."""
    model = client.get(f"{url}/v1/models").raise_for_status().json()["data"][0]["id"]
    body = {"model": model, "prompt": prompt, "n": count, "max_tokens": args.max_tokens, "temperature": temperature}
    body |= {"seed": seed, "logprobs": 1, "return_token_ids": True}
    body |= PLAIN if args.engine == "vllm" else WHOLE_DISTRIBUTION
    reply = client.post(f"{url}/v1/completions", json=body).raise_for_status().json()
    versions = [span["version"] for span in reply.get("weight_versions", [])]
    return [
        Completion(
            tokens=choice["token_ids"],
            logprobs=choice["logprobs"]["token_logprobs"],
            finished=choice["finish_reason"] == "stop",
            version=min(versions, default=reply.get("weight_version")),
        )
        for choice in reply["choices"]
    ]


def generate_of(
    client: httpx.Client,
    args: argparse.Namespace,
    url: str,
    prompt: list[int],
    *,
    count: int,
    temperature: float,
    seed: int,
) -> list[Completion]:
    """The route ``/generate`` of SGLang and LMDeploy, which takes and returns token ids.  It takes no seed."""
    if args.engine == "sglang":
        sampling = {"temperature": temperature, "max_new_tokens": args.max_tokens}
        body: dict[str, Any] = {"input_ids": [prompt] * count, "sampling_params": sampling, "return_logprob": True}
        found = client.post(f"{url}/generate", json=body).raise_for_status().json()
    else:
        body = {"input_ids": prompt, "temperature": temperature, "max_tokens": args.max_tokens, "return_logprob": True}
        body |= PLAIN | {"include_stop_str_in_output": True}  # or it leaves out the token that ended it
        with ThreadPoolExecutor(count) as pool:
            replies = list(pool.map(lambda _: client.post(f"{url}/generate", json=body), range(count)))
        found = [reply.raise_for_status().json() for reply in replies]
    completions: list[Completion] = []
    for answer in found:
        meta = answer["meta_info"]
        sampled = meta["output_token_logprobs"] or []  # LMDeploy says null of an abort before the first token
        said = str(meta.get("weight_version", ""))
        completions.append(
            Completion(
                tokens=[entry[1] for entry in sampled],
                logprobs=[entry[0] for entry in sampled],
                finished=meta["finish_reason"]["type"] == "stop",
                version=int(said) if said.isdigit() else None,  # SGLang says "default" before the first update
            )
        )
    return completions
