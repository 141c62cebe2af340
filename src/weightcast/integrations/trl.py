"""TRL's ``GRPOTrainer`` with rollouts from running engines.

::

    engines = GrpoEngines(["http://10.0.3.7:8000", "http://10.0.3.8:8000"], wire_dtype="bf16")
    trainer = GRPOTrainer(..., args=GRPOConfig(use_vllm=False, ...), rollout_func=engines.rollout, callbacks=[engines])
    trainer.train()

One object is the callback that updates the engines and the ``rollout_func`` that asks them.  So every completion is
checked against the version that was sent last.
"""

# pyright: reportMissingImports=false, reportUnknownParameterType=false

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Unpack

from weightcast.comm.http import Client
from weightcast.errors import ConfigError, TargetRejected
from weightcast.integrations.callback import EngineOptions, UpdateEngines
from weightcast.update.arguments import Targets, targets_of

if TYPE_CHECKING:
    from trl import GRPOTrainer


@dataclass(frozen=True, slots=True)
class _Completion:
    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]


class GrpoEngines(UpdateEngines):
    """Engines that answer the prompts of a ``GRPOTrainer`` and receive its weights.

    Args:
        engines: The engines, as ``WeightUpdater.connect`` takes them.
        parallel: Requests that wait for one engine at the same time, on each trainer rank.
        request_timeout_s: Deadline of one completion, in seconds.
        **options: As for ``UpdateEngines``.
    """

    def __init__(
        self,
        engines: Targets,
        *,
        parallel: int = 64,
        request_timeout_s: float = 600.0,
        **options: Unpack[EngineOptions],
    ) -> None:
        if parallel < 1:
            raise ConfigError(f"parallel={parallel}: at least one request must be allowed")
        super().__init__(engines, **options)
        self._targets = targets_of(engines)
        self._parallel = parallel
        self._request_timeout_s = request_timeout_s
        self._rollouts = 0

    def rollout(self, prompts: list[Any], trainer: GRPOTrainer) -> dict[str, list[Any]]:
        """Samples one completion for each prompt; ``GRPOTrainer`` calls it as ``rollout_func``.

        Each request has its own seed, so a run can be repeated on engines that honour ``seed``.  The log-probabilities
        are those that the engine reports; most engines report them before the temperature is applied.

        Args:
            prompts: Prompts of this rank, as text or as messages; each occurs once for every completion wanted.
            trainer: The trainer, whose tokenizer and sampling settings are used.

        Returns:
            ``prompt_ids``, ``completion_ids`` and ``logprobs``, each with one list for every prompt.

        Raises:
            TargetRejected: An engine refused a request, sampled with other weights than the last update sent, or
                returned no token ids.
            TargetUnreachable, TargetLost, DeadlineExceeded: An engine did not answer.
        """
        if self.version is None:
            raise ConfigError(
                "no weights were sent to the engines yet", hint="pass the same object in callbacks= and rollout_func="
            )
        self._rollouts += 1
        tokenized = [_tokens(trainer.processing_class, prompt) for prompt in prompts]
        settings = _sampling(trainer)
        first_seed = _first_seed(trainer, self._rollouts)
        with self._clients() as clients, ThreadPoolExecutor(self._parallel * len(clients)) as pool:
            models = list(pool.map(self._model, clients))

            def ask(number: int, prompt: list[int]) -> _Completion:
                turn = number % len(clients)
                body = {"model": models[turn], "prompt": prompt, "seed": first_seed + number, **settings}
                return self._ask(clients[turn], body)

            answers = list(pool.map(ask, range(len(tokenized)), tokenized))
        return {
            "prompt_ids": [answer.prompt for answer in answers],
            "completion_ids": [answer.tokens for answer in answers],
            "logprobs": [answer.logprobs for answer in answers],
        }

    @contextmanager
    def _clients(self) -> Generator[list[Client]]:
        clients = [Client(target, timeout_s=self._request_timeout_s) for target in self._targets]
        try:
            yield clients
        finally:
            for client in clients:
                client.close()

    def _model(self, client: Client) -> str:
        try:
            return str(json.loads(client.get_json("/v1/models"))["data"][0]["id"])
        except (ValueError, LookupError, TypeError) as error:
            raise TargetRejected(
                f"{client.target.url} names no model under /v1/models: {error}", url=client.target.url
            ) from error

    def _ask(self, client: Client, body: dict[str, Any]) -> _Completion:
        url = client.target.url
        reply = client.post_json("/v1/completions", json.dumps(body).encode())
        try:
            answer = json.loads(reply)
            [choice] = answer["choices"]
            tokens = choice["token_ids"]
            if tokens == [] and answer.get("weight_version") is None:  # vLLM has no version without a token
                raise TargetRejected(
                    f"{url} ended a completion before its first token, with finish_reason "
                    f"{choice.get('finish_reason')!r}",
                    url=url,
                    hint="an update or another client may have ended it; ask again",
                )
            logprobs = choice["logprobs"]["token_logprobs"]
        except (ValueError, LookupError, TypeError) as error:
            raise TargetRejected(
                f"{url} answered a completion without token ids or log-probabilities: {reply[:200]!r}",
                url=url,
                hint="the engine must honour return_token_ids and logprobs; vLLM and the reference engine do",
            ) from error
        self._check_on_policy(url, answer)
        return _Completion(prompt=body["prompt"], tokens=tokens, logprobs=logprobs)

    def _check_on_policy(self, url: str, answer: dict[str, Any]) -> None:
        """Every token must come from the weights that were sent last."""
        newest = answer.get("weight_version")
        if newest is None:
            raise TargetRejected(
                f"{url} answers without weight_version, so nobody knows which weights sampled",
                url=url,
                hint="use an engine that says it: vLLM with weightcast's receiver in it, or the reference engine",
            )
        spans = answer.get("weight_versions") or [{"version": newest}]
        served = dict.fromkeys(str(span["version"]) for span in spans)
        if list(served) != [str(self.version)]:
            raise TargetRejected(
                f"{url} sampled with version {' and then '.join(served)}, "
                f"and the trainer sent version {self.version} last",
                url=url,
                hint="somebody else updates this engine, or it restarted; these samples are off-policy",
            )


def _tokens(tokenizer: Any, prompt: Any) -> list[int]:
    text = prompt
    if not isinstance(prompt, str):
        text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def _sampling(trainer: Any) -> dict[str, Any]:
    """A setting that changes nothing is left out, for engines that do not know it."""
    args = trainer.args
    neutral: Sequence[tuple[str, Any, Any]] = (
        ("top_p", args.top_p, 1.0),
        ("top_k", args.top_k, 0),
        ("min_p", args.min_p, None),
        ("repetition_penalty", args.repetition_penalty, 1.0),
    )
    return {
        "max_tokens": args.max_completion_length,
        "temperature": args.temperature,
        "logprobs": 0,
        "return_token_ids": True,
        **{name: value for name, value, nothing in neutral if value is not None and value != nothing},
        **(args.generation_kwargs or {}),
    }


def _first_seed(trainer: Any, rollouts: int) -> int:
    """Seed of a rank's first request; no two requests of a run have the same."""
    accelerator = trainer.accelerator
    rollout = rollouts * accelerator.num_processes + accelerator.process_index
    return ((int(trainer.args.seed) << 44) + (rollout << 20)) % (1 << 62)
